"""flex_attention: the formula of its rows is torch's function, and a rank receives the keys of its block mask only."""

import warnings

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from shardfield import explain, scatter_tensor, strict
from shardfield._compat.patches import patches
from shardfield.ops.attention import flex
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh
from tests.ops.attention.flex_cases import alibi, causal, explicit, window

ROWS, FEATURES, BLOCK, RANKS = 64, 4, 4, 4
compiled = torch.compile(flex_attention, backend="eager")  # before any ShardTensor exists


def operands(rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, rows, FEATURES, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("mask_mod", [None, causal, window])
def test_the_formula_is_torchs_function(mask_mod):
    patches.install()  # plain tensors go to torch's own code
    q, k, v = operands(8)
    mask = None if mask_mod is None else create_block_mask(mask_mod(), None, None, 8, 8, "cpu", BLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, aux = flex_attention(q, k, v, score_mod=alibi(), block_mask=mask, return_aux=AuxRequest(lse=True))
    found = explicit(q, k, v, alibi(), None if mask_mod is None else mask_mod())
    torch.testing.assert_close((out, aux.lse), found[:2], rtol=1e-12, atol=1e-12)


def traffic():
    """Return (outcome, bytes, right) of forward with each mask, eager and compiled."""
    mesh, full = world_mesh((RANKS,)), operands()
    q, k, v = (scatter_tensor(t, 0, mesh, (Shard(2),)) for t in full)
    found = []
    for call in (flex_attention, compiled):
        for mask_mod in (window, causal, None):
            mod = None if mask_mod is None else mask_mod()
            mask = None if mod is None else create_block_mask(mod, None, None, ROWS, ROWS, "cpu", BLOCK)
            with strict(), explain() as report:
                out, aux = call(q, k, v, score_mod=alibi(), block_mask=mask, return_aux=AuxRequest(lse=True))
            expected = explicit(*full, alibi(), mod)
            right = torch.allclose(out.full_tensor(), expected[0]) and torch.allclose(
                aux.lse.full_tensor(), expected[1]
            )
            found.append((report.rows[-1].ending, report.bytes, right and aux.max_scores is None))
    # Blocks without a mask_mod, and blocks that hide more than the mask_mod: each row reads the first block of keys.
    first = torch.ones(1, 1, 16, dtype=torch.int32), torch.zeros(1, 1, 16, 16, dtype=torch.int32)
    for mod in (None, causal()):
        mask = BlockMask.from_kv_blocks(*first, BLOCK_SIZE=BLOCK, mask_mod=mod)
        expected = explicit(*full, None, lambda b, h, i, j, mod=mod: (j < BLOCK) & (mod is None or mod(b, h, i, j)))
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask).full_tensor(), expected[0])
        first[1].fill_(0)  # a write: the table of the mask is read again
    return found


def test_a_rank_receives_the_keys_of_its_block_mask():
    row = 2 * 2 * FEATURES * 8  # heads, keys and values, bytes of a number
    share = ROWS // RANKS
    for rank, found in enumerate(run_on_ranks(traffic, RANKS, timeout=100)):
        neighbors = (rank > 0) + (rank < RANKS - 1)
        # A window of one row reads one block of each neighbor; a causal mask sends a shard to all later ranks.
        sent = [neighbors * BLOCK * row, (RANKS - 1 - rank) * share * row, (RANKS - 1) * share * row]
        endings = ["rule: halo of keys", "rule: halo of keys", "rule: keys gathered"]
        assert found == [(ending, nbytes, True) for ending, nbytes in zip(endings, sent, strict=True)] * 2


def in_blocks(limit):
    """Return the result and the gradients with blocks of at most `limit` bytes of scores."""
    mesh, full = world_mesh((2,)), operands(12)
    table = torch.linspace(-1, 1, 23, dtype=torch.float64).requires_grad_()
    q, k, v = (scatter_tensor(t, 0, mesh, (Shard(2),), requires_grad=True) for t in full)
    before, flex.MAX_SCORE_BYTES = flex.MAX_SCORE_BYTES, limit
    try:
        out, lse = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i - j + 11], return_lse=True)
        (out.square().sum() + lse.sum()).backward()
    finally:
        flex.MAX_SCORE_BYTES = before
    return [t.full_tensor() for t in (out.detach(), lse.detach(), q.grad, k.grad, v.grad)] + [table.grad]


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_long_sequences_are_computed_in_blocks_of_rows():
    expected = run_on_ranks(in_blocks, 2, 1 << 20, timeout=60)
    for rank, found in enumerate(run_on_ranks(in_blocks, 2, 2 * 2 * 12 * 8, timeout=60)):
        torch.testing.assert_close(found, expected[rank], rtol=1e-12, atol=1e-12)
