"""varlen_attn on sharded tokens: keys come from documents that ranks share, and invalid positions are refused."""

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.nn.attention.varlen import varlen_attn

from shardfield import ShardingError, explain, scatter_tensor, strict
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh
from tests.ops.attention.packed_cases import explicit

TOKENS, RANKS = 64, 4
DOCUMENTS = {
    "at the ends of shards": ((0, 16, 40, 48, 64), [0, 8, 16, 0]),  # ranks 1 and 2 share the second one
    "causal": ((0, 64), [0, 16, 32, 48]),
    "window": ((0, 64), [0, 3, 3, 3]),
}
WINDOWS = {"causal": (-1, 0), "window": (3, 0)}


def traffic():
    """Return the rows of keys that each rank receives, per set of documents; raise if a result is wrong."""
    mesh, found = world_mesh((RANKS,)), {}
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(TOKENS, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    q, k, v = (scatter_tensor(t, 0, mesh, (Shard(0),)) for t in full)
    for name, (positions, _) in DOCUMENTS.items():
        window = WINDOWS.get(name, (-1, -1))
        at = torch.tensor(positions, dtype=torch.int32)
        with strict(), explain() as report:
            out = varlen_attn(q, k, v, at, at, TOKENS, TOKENS, window_size=window)
        torch.testing.assert_close(out.full_tensor(), explicit(*full, positions, positions, *window)[0])
        found[name] = report.bytes
    at = torch.tensor([0, 40, 20, 64], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_q must increase from 0 to at most 64"):
        varlen_attn(q, k, v, at, at, TOKENS, TOKENS)
    with pytest.raises(ValueError, match="must agree"):
        varlen_attn(q, k, v, at[:1], at[[0, 3]], TOKENS, TOKENS)
    with pytest.raises(ShardingError, match="no rule for cu_seq_k=None"):
        varlen_attn(q, k, v, at[[0, 3]], None, TOKENS, TOKENS)
    return found


def test_a_rank_receives_keys_of_the_documents_that_it_shares():
    results = run_on_ranks(traffic, RANKS, timeout=60)
    row = 2 * 2 * 4 * 8  # heads, keys and values, features, bytes of a number
    for name, (_, received) in DOCUMENTS.items():
        assert sum(found[name] for found in results) == sum(received) * row, name
