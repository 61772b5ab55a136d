"""Convolutions: bytes of the halo, memory formats, autocast, placements with sharded channels."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardTensor, explain, runtime, strict
from shardfield.comm import route_messages
from shardfield.layout import DimSharding, Layout
from shardfield.ops.stencil import conv as conv_rule
from shardfield.ops.stencil.padded_conv import prefers_joining
from shardfield.redistribute import redistribute
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, to_full_tensor, world_mesh
from tests.harness.virtual import VirtualRanks
from tests.ops import case_tables
from tests.ops.test_case_tables import run_rows


def field(mesh_shape, placements, shape, lengths=None, dtype=torch.float64) -> tuple[torch.Tensor, ShardTensor]:
    """Return a global field and its ShardTensor."""
    mesh = world_mesh(mesh_shape)
    full = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    layout = Layout.of(mesh, placements, shape, lengths)
    return full, ShardTensor(redistribute(full, Layout.replicate(mesh, shape), layout).clone(), layout)


def sent(mesh_shape, placements, shape, lengths, weight_shape, kwargs, transposed=False) -> list[int]:
    """Return this rank's messages and bytes forward and backward; the parameters need no gradient."""
    _, x = field(mesh_shape, placements, shape, lengths)
    call = F.conv_transpose2d if transposed else F.conv2d
    with explain() as report, strict():
        out = call(x.requires_grad_(), torch.randn(weight_shape, dtype=torch.float64), **kwargs)
        out.backward(torch.ones(out.shape, dtype=torch.float64))
    (row,) = [r for r in report.rows if "conv" in r.op]
    return [row.messages, row.bytes, row.back_messages, row.back_bytes]


ROW = 3 * 10 * 8  # bytes of a row: three channels, ten columns, float64
COLUMN = 3 * 8


@pytest.mark.parametrize(
    ("mesh", "placements", "lengths", "weight", "kwargs", "expected"),
    [
        # one row to each neighbor, and its gradient back
        (
            (4,),
            [Shard(2)],
            [3, 5, 2, 2],
            (4, 3, 3, 3),
            {"padding": 1},
            [[1, ROW], [2, 2 * ROW], [2, 2 * ROW], [1, ROW]],
        ),
        # a kernel of 5 needs two rows; the thin shard has one, the other comes from the next rank
        ((3,), [Shard(2)], [6, 1, 5], (4, 3, 5, 5), {"padding": 2}, [[2, 3 * ROW], [2, 2 * ROW], [2, 3 * ROW]]),
        # a stride of 2 needs a halo on one side only
        ((2,), [Shard(2)], [6, 6], (4, 3, 3, 3), {"padding": 1, "stride": 2}, [[1, ROW], [0, 0]]),
        # windows within shards send nothing
        ((2,), [Shard(2)], [4, 8], (4, 3, 4, 4), {"stride": 4}, [[0, 0], [0, 0]]),
        ((2,), [Shard(0)], None, (4, 3, 3, 3), {"padding": 1}, [[0, 0], [0, 0]]),
        # rows first, then columns with their corners: one message per neighbor
        (
            (2, 2),
            [Shard(2), Shard(3)],
            None,
            (4, 3, 3, 3),
            {"padding": 1},
            [[2, ROW // 2 + 7 * COLUMN]] * 4,
        ),
    ],
)
def test_bytes_are_the_halo(mesh, placements, lengths, weight, kwargs, expected):
    sizes = None if lengths is None else {2: lengths}
    found = run_on_ranks(
        sent, len(expected), mesh, placements, (2 if placements == [Shard(0)] else 1, 3, 12, 10), sizes, weight, kwargs
    )
    assert [counts[:2] for counts in found] == expected
    # backward sends the same total of messages and bytes
    for i in (0, 1):
        assert sum(counts[i + 2] for counts in found) == sum(counts[i] for counts in found)


def test_upsampling_by_the_stride_sends_nothing():
    args = ((2,), [Shard(2)], (1, 3, 12, 10), {2: [5, 7]}, (3, 4, 2, 2), {"stride": 2}, True)
    assert run_on_ranks(sent, 2, *args) == [[0, 0, 0, 0]] * 2


def layouts_of_channels() -> list:
    """Return placements of results with input or weight sharded by channels, and whether the forward sent anything."""
    _, x = field((2,), [Shard(1)], (2, 4, 6, 5), {1: [1, 3]})
    _, full_value = field((2,), [Replicate()], (2, 4, 6, 5))
    _, by_output = field((2,), [Shard(0)], (6, 4, 3, 3), {0: [4, 2]})
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    found = []
    with explain() as report, strict():
        found.append(F.conv2d(x, weight, padding=1).placements)
        found.append(F.conv2d(x, weight[:4, :1], padding=1, groups=4).placements)
        found.append(F.conv2d(full_value, by_output, padding=1).placements)
        found.append(F.conv_transpose2d(x, weight[:4], padding=1).placements)
    return [*found, report.messages]


def test_sharded_channels_stay_sharded():
    expected = [(Partial(),), (Shard(1),), (Shard(1),), (Partial(),), 0]
    assert run_on_ranks(layouts_of_channels, 2) == [expected] * 2


def formats() -> list[bool]:
    """Return whether channels_last is kept in the result and the gradient, and the values are right."""
    full, x = field((2,), [Shard(2)], (2, 4, 9, 6), {2: [5, 4]}, torch.float32)
    weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    local = x.to_local().to(memory_format=torch.channels_last)
    y = ShardTensor(local, x._layout).requires_grad_()
    out = F.conv2d(y, weight.to(memory_format=torch.channels_last), padding=1)
    out.sum().backward()
    kept = [out.is_contiguous(memory_format=torch.channels_last)]
    kept.append(y.grad.to_local().is_contiguous(memory_format=torch.channels_last))
    return [*kept, torch.allclose(out.full_tensor(), F.conv2d(full, weight, padding=1), atol=1e-5)]


def test_channels_last_is_kept():
    assert run_on_ranks(formats, 2) == [[True] * 3] * 2


def cast() -> tuple[torch.dtype, float, int]:
    """Return, under autocast, the dtype of the result, its difference from one device in bf16, and the halo's bytes."""
    full, x = field((2,), [Shard(2)], (1, 3, 12, 10), None, torch.float32)
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(2)))
    with torch.autocast("cpu", torch.bfloat16), explain() as report:
        out = F.conv2d(x, weight, padding=1)
    out.float().sum().backward()
    expected = F.conv2d(full, weight, padding=1)
    return out.dtype, ((out.full_tensor() - expected).abs().max() / expected.abs().max()).item(), report.bytes


def test_autocast_sends_half_precision():
    for dtype, off, nbytes in run_on_ranks(cast, 2):
        assert dtype == torch.bfloat16 and off < 0.02
        assert nbytes == 3 * 10 * 2


def narrow_depth(depths, autocast):
    """Return the errors against fp64 of a conv3d of 16 channels in low precision: of the result and all gradients."""
    mesh = world_mesh((2,))
    shape = (1, 16, sum(depths), 5, 5)
    layout = Layout.of(mesh, [Shard(2)], shape, {2: depths})
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    full, weight, bias, seed = (
        torch.randn(s, generator=generator).to(dtype) for s in (shape, (16, 16, 3, 3, 3), (16,), shape)
    )
    x = ShardTensor(redistribute(full, Layout.replicate(mesh, shape), layout).clone().requires_grad_(), layout)
    params = [p.clone().requires_grad_() for p in (weight, bias)]
    exact = [t.double().requires_grad_() for t in (full, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = F.conv3d(x, *params, padding=1)
    out.backward(seed.to(out.dtype))
    expected = F.conv3d(*exact, padding=1)
    expected.backward(seed.double())
    got = [out.full_tensor().detach(), x.grad.full_tensor(), *(p.grad for p in params)]
    wanted = [expected.detach(), *(e.grad for e in exact)]
    return [((g.double() - w).abs().max() / w.abs().max()).item() for g, w in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("depths", [[6, 2], [2, 2], [1, 3]])
def test_narrow_shards_in_low_precision(depths, autocast):
    for errors in run_on_ranks(narrow_depth, 2, depths, autocast):
        assert max(errors) < 0.02, errors


def overlapping_rows(rows, mesh):
    """Return, on a rank, the failures of rows of the table of convolutions that overlap the exchange of their halos."""
    before = conv_rule.prefers_joining
    conv_rule.prefers_joining = lambda *sizes: False  # it prefers to join such small blocks with their halos
    try:
        with runtime.fresh():
            return run_rows("conv", rows, mesh)
    finally:
        conv_rule.prefers_joining = before


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_exchange_is_overlapped(mesh):
    rows = list(range(0, len(case_tables.table("conv")), 5))
    found = run_on_ranks(overlapping_rows, math.prod(mesh), rows, mesh, timeout=120)
    failures = [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]
    assert not failures, "\n".join(failures[:6])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["conv", "pool"])
def test_received_rows_are_added_in_place(name, mesh, monkeypatch):
    monkeypatch.setattr(route_messages, "CONCATENATING", frozenset())  # as on other devices, and in large blocks
    rows = list(range(0, len(case_tables.table(name)), 10))
    with VirtualRanks() as ranks:
        failures = ranks.check(math.prod(mesh), run_rows, name, rows, mesh)
    assert not failures, "\n".join(failures[:6])


def test_large_blocks_and_slow_links_overlap():
    assert prefers_joining("cuda", 200 << 20, 1 << 20, 1), "fewer kernels are worth a copy of the block"
    assert not prefers_joining("cuda", 2 << 30, 1 << 20, 1), "the copy takes longer than the kernels it saves"
    assert not prefers_joining("cuda", 1 << 20, 64 << 20, 1), "the messages take longer than the kernels it saves"
    assert prefers_joining("cpu", 1 << 16, 1 << 12, 2) and not prefers_joining("cpu", 1 << 24, 1 << 14, 1)


# ---------------------------------------------------------------------- second derivatives


def second_derivatives(fn, x, weight):
    """Return first derivatives, and those of a function of them, which involves every second derivative."""
    first = torch.autograd.grad(fn(x, weight).sin().sum(), [x, weight], create_graph=True)
    return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first), [x, weight])]


def compare_second_derivatives(mesh_shape):
    mesh = world_mesh(mesh_shape)
    columns = DimSharding(6) if len(mesh_shape) == 1 else DimSharding(6, (1,), (4, 2))
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(4, 4, 3, 3, dtype=torch.float64, generator=generator)
    for options in ({"padding": 1}, {"padding": 1, "stride": 2}):
        fn = partial(F.conv2d, **options)
        wanted = second_derivatives(fn, full.clone().requires_grad_(), weight.clone().requires_grad_())
        for rows in ((5, 3), (1, 7), (8, 0)):
            layout = Layout.make(
                mesh, [(DimSharding(2),), (DimSharding(4),), (DimSharding(8, (0,), rows),), (columns,)]
            )
            x = ShardTensor(local_shard(full, layout).requires_grad_(), layout)
            found = second_derivatives(fn, x, weight.clone().requires_grad_())
            for got, ref in zip(found, wanted, strict=True):
                torch.testing.assert_close(to_full_tensor(got), ref, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_second_derivatives(mesh):
    """Each rank adds its share to the second derivative of the weight, and a rank without rows takes part."""
    run_on_ranks(compare_second_derivatives, torch.Size(mesh).numel(), mesh)
