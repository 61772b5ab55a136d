"""Products beyond the case table: messages, placement of results, precision, errors."""

from __future__ import annotations

import opt_einsum
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardTensor, runtime
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, world_mesh


def sharded(shape, placement, mesh_shape=(2,), dtype=torch.float64, lengths=None):
    """Return a random ShardTensor and its global tensor."""
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    layout = Layout.of(world_mesh(mesh_shape), placement, shape, lengths)
    return ShardTensor(local_shard(full, layout), layout), full


def sent(call):
    """Return the result of a call and the bytes that this rank sends."""
    count = [0]
    runtime.active.meter = lambda kind, messages, nbytes: count.__setitem__(0, count[0] + nbytes)
    try:
        return call(), count[0]
    finally:
        runtime.active.meter = None


# (left shape, placement), (right shape, placement), bytes sent per rank of two, placement of the result
MATMULS = [
    (((64, 4), Shard(0)), ((4, 8), Replicate()), 0, Shard(0)),
    (((64, 4), Replicate()), ((4, 8), Shard(1)), 0, Shard(1)),
    (((64, 4), Shard(0)), ((4, 8), Shard(1)), 4 * 4 * 8, Shard(0)),  # half of the right operand
    (((8, 4), Shard(0)), ((4, 64), Shard(1)), 4 * 4 * 8, Shard(1)),  # half of the left operand
    (((64, 4), Shard(0)), ((4, 8), Shard(0)), 2 * 8 * 8, Shard(0)),
    (((8, 64), Shard(1)), ((64, 8), Shard(0)), 0, Partial()),
    (((8, 64), Shard(1)), ((64, 8), Replicate()), 0, Partial()),
    # the right operand is resharded along its rows to match the columns of the left: a quarter of it
    (((4, 64), Shard(1)), ((64, 4), Shard(1)), 32 * 2 * 8, Partial()),
    # gathering either is too expensive: the left operand is resharded along its columns
    (((8, 64), Shard(0)), ((64, 8), Shard(0)), 4 * 32 * 8, Partial()),
    # a Partial is kept where the result is not much larger, else reduce_scattered first
    (((8, 8), Partial()), ((8, 8), Replicate()), 0, Partial()),
    (((64, 2), Partial()), ((2, 64), Replicate()), 32 * 2 * 8, Shard(0)),
    # sharding two columns would give partial sums of 64: rows are sharded instead
    (((64, 2), Shard(1)), ((2, 64), Replicate()), 32 * 8, Shard(0)),
]


def matmuls():
    for (left, left_shard), (right, right_shard), nbytes, placed in MATMULS:
        a, full_a = sharded(left, [left_shard])
        b, full_b = sharded(right, [right_shard])
        out, count = sent(lambda a=a, b=b: a @ b)
        message = f"{left} {left_shard} @ {right} {right_shard}: {count} bytes, {out._layout}"
        assert count == nbytes, f"{message}; should be {nbytes}"
        assert out.placements == (placed,), message
        torch.testing.assert_close(out.full_tensor(), full_a @ full_b)


def test_the_larger_operand_stays():
    run_on_ranks(matmuls, 2)


def cdists():
    many, full_many = sharded((50, 3), [Shard(0)])
    few, full_few = sharded((4, 3), [Shard(0)])
    for a, b, x, y in [(many, few, full_many, full_few), (few, many, full_few, full_many)]:
        out, count = sent(lambda a=a, b=b: torch.cdist(a, b))
        assert count == 2 * 3 * 8 and not out._layout.is_replicated
        torch.testing.assert_close(out.full_tensor(), torch.cdist(x, y))
    wide, full_wide = sharded((3, 400), [Shard(1)])
    other, full_other = sharded((4, 400), [Shard(1)])
    out, count = sent(lambda: torch.cdist(wide, other))
    assert count == 3 * 4 * 8  # the sum over two ranks
    torch.testing.assert_close(out.full_tensor(), torch.cdist(full_wide, full_other))


def test_cdist_sends_the_smaller_point_set():
    run_on_ranks(cdists, 2)


def bias_once(ranks):
    placements = {3: [([Shard(1)], (3,)), ([Partial()], (3,))], 4: [([Shard(1), Partial()], (2, 2))]}
    for placement, mesh in placements[ranks]:
        x, _ = sharded((4, 6), placement, mesh)
        out = F.linear(x * 0, torch.zeros(5, 6, dtype=torch.float64), torch.ones(5, dtype=torch.float64))
        assert torch.equal(out.full_tensor(), torch.ones(4, 5, dtype=torch.float64)), out._layout


@pytest.mark.parametrize("ranks", [3, 4])
def test_bias_is_added_once(ranks):
    run_on_ranks(bias_once, ranks, ranks)


def autocast():
    weight, bias = torch.randn(5, 6, requires_grad=True), torch.randn(5, requires_grad=True)
    for dim in (0, 1):
        x, full = sharded((4, 6), [Shard(dim)], dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for call in (
                lambda x: F.linear(x, weight, bias),
                lambda x: x @ weight.t(),
                lambda x: torch.einsum("bi,oi->bo", x, weight),
                lambda x: torch.addmm(bias, x, weight.t()),
            ):
                got, ref = call(x), call(full)
                assert got.dtype == ref.dtype == torch.bfloat16
                torch.testing.assert_close(got.full_tensor(), ref, rtol=0.02, atol=0.02)
                got.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_autocast():
    run_on_ranks(autocast, 2)


def halves():
    x, full = sharded((4, 4096), [Shard(1)], mesh_shape=(4,), dtype=torch.bfloat16)
    w, full_w = sharded((3, 4096), [Replicate()], mesh_shape=(4,), dtype=torch.bfloat16)
    out = F.linear(x, w)
    assert out.placements == (Partial(),) and out.dtype == torch.bfloat16
    exact = full.double() @ full_w.double().t()
    # each rank rounds its partial sum once, and the total is rounded once
    worst = exact.abs().max().item() * 2**-8 + sum(
        (a.double() @ b.double().t()).abs().max().item() * 2**-9
        for a, b in zip(full.chunk(4, 1), full_w.chunk(4, 1), strict=True)
    )
    assert (out.full_tensor().double() - exact).abs().max().item() <= worst


def test_half_precision_partial_sums_are_reduced_in_fp32():
    run_on_ranks(halves, 4)


def singular(placement):
    full = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
    full[3] = 0
    layout = Layout.of(world_mesh((2,)), [placement], full.shape, {0: [3, 1]} if placement == Shard(0) else None)
    x = ShardTensor(local_shard(full, layout), layout)
    for call in (torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.solve(x, x)):
        with pytest.raises(torch.linalg.LinAlgError):
            call(x)
    torch.testing.assert_close(torch.linalg.det(x).full_tensor(), torch.linalg.det(full))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_singular_matrix_raises_on_every_rank(placement):
    run_on_ranks(singular, 2, placement)


def contractions():
    x, full_x = sharded((2, 3, 8, 5), [Shard(2)], lengths={2: [5, 3]})
    factors = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 8, 5)]
    core = torch.randn(4, 4, 4, dtype=torch.float64)
    equation = "bcxy,cr,xs,yt,rst->b"
    got, ref = (opt_einsum.contract(equation, v, *factors, core) for v in (x, full_x))
    assert isinstance(got, ShardTensor)
    torch.testing.assert_close(got.full_tensor(), ref)
    for equation in ("bcxy,cr->brxy", "bcxy,bcxy->b", "bcxy->yxcb"):
        operands = [factors[0]] if "r" in equation else [x] if "," in equation else []
        plain = [full_x if v is x else v for v in operands]
        got = opt_einsum.contract(equation, x, *operands)
        torch.testing.assert_close(got.full_tensor(), opt_einsum.contract(equation, full_x, *plain))


def test_opt_einsum_finds_its_backend():
    run_on_ranks(contractions, 2)


def same_plan_everywhere():
    """Check that ties between plans are broken identically on all ranks, whatever the iteration order of sets."""
    from shardfield.ops.matmul.contraction_strategy import Term, plan_contraction

    mesh = world_mesh((2, 2))
    layouts = [
        Layout.of(mesh, [Shard(0), Shard(1)], (4, 4, 4)),
        Layout.of(mesh, [Shard(1), Shard(0)], (4, 4, 4)),
        Layout.of(mesh, [Partial(), Shard(2)], (4, 4, 4)),
    ]
    work = plan_contraction([Term(x, r) for x, r in zip(layouts, ("abc", "cde", "efa"), strict=True)], "bdf")
    return [repr(x) for x in (*work.targets, work.result)]


def test_ranks_choose_the_same_plan():
    first, *others = run_on_ranks(same_plan_everywhere, 4)
    assert all(plan == first for plan in others)
