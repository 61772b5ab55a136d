"""A result as large as a rank's share that loses its sharding is counted, listed, warned of once and refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardingError, ShardTensor, explain, runtime, scatter_tensor, strict
from shardfield.dispatch.lost_sharding import imbalances, lost_axes, shares_of
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh
from tests.harness.draw import Operands, draw_values
from tests.harness.run import scatter_small_partials
from tests.ops import case_tables

ROWS, COLUMNS = 96, 128


def field(mesh, *placements):
    values = torch.arange(ROWS * COLUMNS, dtype=torch.float64).view(ROWS, COLUMNS)
    return scatter_tensor(values, 0, mesh, placements)


def summed(x):
    """Return a Partial as large as the field, as a matrix product over a sharded dim does."""
    local = x.to_local()
    return ShardTensor.from_local(local.sum(1, keepdim=True).expand(-1, COLUMNS).clone(), x.device_mesh, [Partial()])


def write(x):
    """Write into a buffer that cannot be sharded, because its memory is used by another tensor."""
    held = torch.zeros(ROWS, COLUMNS).double()
    buffer = ShardTensor.from_local(held, x.device_mesh)
    buffer[:, 1:] = x[:, 1:]
    return buffer


def add_into(x):
    held = torch.zeros(x.shape).double()
    return ShardTensor.from_local(held, x.device_mesh).add_(x)


def write_numbers(x):
    """Write a number at sharded places into a plain tensor whose memory another tensor uses."""
    held = torch.zeros(ROWS, COLUMNS).double()
    view = held[:]
    held.scatter_(0, (x > 5).long(), 1)
    return view


def write_out(x):
    """Write a result into a plain tensor that is passed as `out=`."""
    return torch.add(x, 1, out=torch.zeros(ROWS, COLUMNS).double())


def write_outs(x):
    """Write two results into a plain and a replicated tensor."""
    largest, place = torch.zeros(ROWS, COLUMNS).double(), torch.zeros(ROWS, COLUMNS).long()
    return torch.sort(x, out=(largest, ShardTensor.from_local(place, x.device_mesh)))


class Handled:
    """A function whose handler returns a replicated result, as a user's may."""

    @staticmethod
    def replicated(x):
        return torch.overrides.handle_torch_function(Handled.replicated, (x,), x)


def replicate(func, types, args, kwargs):
    return args[0].redistribute(placements=[Replicate()])


# name -> (call on a field sharded along columns, the function that loses, bytes that each rank has then)
LOSES = {
    "a handler": (Handled.replicated, "replicated", ROWS * COLUMNS * 8),
    "a write into a replicated buffer": (write, "__setitem__", ROWS * COLUMNS * 8),
    "numbers written into a plain tensor": (write_numbers, "scatter_", ROWS * COLUMNS * 8),
    "a result written into a plain tensor": (write_out, "add", ROWS * COLUMNS * 8),
    "results written into two tensors": (write_outs, "sort", 2 * ROWS * COLUMNS * 8),
    "an in-place sum into a replicated buffer": (add_into, "add_", ROWS * COLUMNS * 8),
}
# Calls on a field that lose nothing, though their results are Replicate or Partial.
KEEPS = {
    "pointwise": lambda x: x * 2 + 1,
    "small sums": lambda x: (x.sum(1), x.mean(), x.amax(1)),
    "a small sum that is used": lambda x: x / x.sum(1, keepdim=True).exp(),
    "requested": lambda x: (x.redistribute(placements=[Replicate()]), x.full_tensor(), x.sum(1).full_tensor()),
    "a shape": lambda x: (x.new_zeros(x.shape), torch.zeros(ROWS, 1).double().expand_as(x)),
    "a Partial": lambda x: F.linear(x, torch.ones(2 * COLUMNS, COLUMNS).double()),
    "few elements": lambda x: add_into(x[:2]),
}


def observe(name):
    """Return, on a rank, what `explain` lists, what `strict` says and the warnings of a call that loses."""
    mesh = world_mesh((2,))
    call, _, _ = LOSES[name]
    with warnings.catch_warnings(record=True) as caught, runtime.fresh(registry=runtime.active.registry.copy()):
        warnings.simplefilter("always")
        ShardTensor.register_function_handler(Handled.replicated, replicate)
        call(field(mesh, Shard(1)))
        call(field(mesh, Shard(1)))
        with explain() as report:
            call(field(mesh, Shard(1)))
        with pytest.raises(ShardingError) as refused, strict():
            call(field(mesh, Shard(1)))
    return [(r.op, r.lost) for r in report.lost], str(report), str(refused.value), [str(w.message) for w in caught]


@pytest.mark.parametrize("name", LOSES)
def test_losses(name):
    _, op, nbytes = LOSES[name]
    for lost, text, refused, warned in run_on_ranks(observe, 2, name):
        assert lost == [(op, {"h": nbytes})]
        assert f"lost sharding over axis 'h' ({nbytes} bytes)" in text and "0 gathered, 1 lost sharding" in text
        assert "strict() refuses it: lost sharding over axis 'h'" in refused
        assert len(warned) == 1 and "lost sharding over axis 'h'" in warned[0], warned


def keep_sharding():
    mesh = world_mesh((2,))
    for name, call in KEEPS.items():
        with strict(), explain() as report:
            call(field(mesh, Shard(1)))
        assert not report.lost, (name, report.lost)


def test_calls_that_lose_nothing():
    run_on_ranks(keep_sharding, 2)


def pending_shares():
    """A large Partial loses its sharding in the call that makes it Replicate, through views and linear ops."""
    mesh = world_mesh((2,))
    x = field(mesh, Shard(1))[:6]
    weight = torch.ones(4 * COLUMNS, COLUMNS).double()
    hidden = F.linear(x, weight)
    if not hidden._layout.partial:
        pytest.fail(f"the product was to be Partial, for this test: {hidden._layout}")
    passed = ShardTensor.from_local(hidden.to_local(), mesh, [Partial()])
    assert passed._pending_shares is None and hidden._pending_shares == {0: 6 * COLUMNS // 2}
    with explain() as report:
        doubled = (F.linear(x, weight) * 2).reshape(2, 3, -1)
        assert doubled._pending_shares == {0: 6 * COLUMNS // 2}
    assert not report.lost
    small = F.linear(x, weight[:2])
    assert small._layout.partial and small._pending_shares is None


def test_pending_shares():
    run_on_ranks(pending_shares, 2)


def grown_partial():
    """A Partial of few elements whose transform has many is reduce-scattered before it: half the bytes, no loss."""
    mesh = world_mesh((2,))
    half = runtime.MIN_SCATTERED // 32 - 1  # 32 x half complex numbers are few, 32 x 2 x (half - 1) real ones are many
    x = ShardTensor.from_local(torch.randn(32, half, dtype=torch.complex128), mesh, [Partial()]).requires_grad_()
    with strict(), explain() as report:
        made = torch.fft.irfft(x)
        made.square().sum().backward()
    full = x.detach().full_tensor().requires_grad_()
    expected = torch.fft.irfft(full)
    expected.square().sum().backward()
    torch.testing.assert_close(made.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    sent = next(r for r in report.rows if r.op == "fft_irfft").bytes
    assert made.placements == (Shard(0),) and sent <= 32 * half * 16 // 2, (made._layout, sent)


def test_grown_partial():
    run_on_ranks(grown_partial, 2)


# Calls on a field sharded along columns -> the functions with an unbalanced result.
SKEWS = {
    "half of the columns": (lambda x: torch.relu(x[:, : COLUMNS // 2]), {"__getitem__": 2.0}),
    "two halves": (lambda x: x.chunk(2, 1), {"chunk": 2.0}),
    "every second column": (lambda x: x[:, ::2], {}),
    "most columns": (lambda x: x[:, : 3 * COLUMNS // 4], {}),
    "a small crop": (lambda x: x[:, : COLUMNS // 4], {}),
    "rows": (lambda x: x[: ROWS // 2], {}),
    "few elements": (lambda x: x[:8, : COLUMNS // 2], {}),
    "an unbalanced operand": (lambda x: x.redistribute(sharding_shapes=[(COLUMNS, 0)]).relu(), {}),
}


def skewed():
    """What `explain` lists, with a warning for each function; `strict` refuses none."""
    x = field(world_mesh((2,)), Shard(1)).repeat(4, 1)
    for name, (call, found) in SKEWS.items():
        with warnings.catch_warnings(record=True) as caught, strict(), explain() as report:
            warnings.simplefilter("always")
            runtime.active.warned.clear()
            call(x)
            call(x)
        times = [(r.op, r.unbalanced) for r in report.unbalanced]
        assert times == 2 * [(op, {"h": n}) for op, n in found.items()], (name, times)
        assert [str(w.message).split(":")[:2] for w in caught] == [
            ["shardfield", f" {op} unbalanced over axis 'h'"] for op in found
        ], (name, caught)
        events = f"0 lost sharding, {2 * len(found)} unbalanced"
        assert events in str(report) and bool(found) == ("(2 even shares on one rank)" in str(report)), str(report)


def test_unbalanced():
    run_on_ranks(skewed, 2)


class Of:
    """A tensor of a layout alone."""

    _deferred = _pending_shares = None

    def __init__(self, mesh, placements, shape, sizes=None):
        self._layout = Layout.of(mesh, placements, shape, sizes)


def decide():
    """The decision from layouts alone, over two axes."""
    mesh = world_mesh((2, 2))
    tiles = Of(mesh, [Shard(0), Shard(1)], (8, 12))
    shares = shares_of([tiles])
    assert shares == {0: 24, 1: 24}
    for placements, shape, lost in (
        ([Shard(0), Shard(1)], (8, 12), []),
        ([Shard(0), Shard(0)], (8, 12), []),
        ([Shard(0), Replicate()], (8, 12), [1]),
        ([Replicate(), Replicate()], (8, 12), [0, 1]),
        ([Replicate(), Replicate()], (4, 6), [0, 1]),  # as large as a share
        ([Replicate(), Replicate()], (4, 5), []),  # smaller
        ([Shard(0), Partial()], (8, 12), []),
    ):
        with runtime.observing(min_scattered=1):
            assert lost_axes(shares, Of(mesh, placements, shape))[0] == lost, (placements, shape)
        assert lost_axes(shares, Of(mesh, placements, shape))[0] == [], "few elements"
    assert lost_axes(shares, Of(mesh, [Shard(0), Partial()], (8, 12)))[1] == {1: 24}
    # an operand that is sharded over one axis alone, and one with fewer rows than ranks
    assert shares_of([tiles, Of(mesh, [Shard(0), Replicate()], (8, 12))]) == {0: 48, 1: 24}
    assert shares_of([Of(mesh, [Shard(0), Shard(0)], (3, 99)), Of(mesh, [Shard(1), Replicate()], (9, 1))]) == {}
    for one, other in (
        ([Shard(1), Replicate()], [Shard(0), Shard(1)]),
        ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
        ([Shard(0), Replicate()], [Replicate(), Shard(1)]),
    ):
        parts = [scatter_tensor(torch.randn(n, 12), 0, mesh, p) for n, p in ((9, one), (8, other))]
        joined = torch.cat(parts)
        assert set(joined._layout.shard_axes) == {0, 1}, joined._layout
        assert joined.full_tensor().equal(torch.cat([p.full_tensor() for p in parts]))
    # of two axes that shard one dim, the inner one has what the outer one does not explain
    for sizes, times in (
        ((4, 4, 0, 0), {0: 2.0}),
        ((4, 0, 0, 4), {1: 2.0}),
        ((8, 0, 0, 0), {0: 2.0, 1: 2.0}),
        ((3, 2, 2, 1), {}),
    ):
        assert imbalances(Of(mesh, [Shard(0), Shard(0)], (8, 2), {0: sizes})._layout) == times
    one = Of(mesh, [Shard(0), Replicate()], (2,))
    assert lost_axes(shares_of([one]), Of(mesh, [Replicate()] * 2, (1,)))[0] == []


def test_decision():
    run_on_ranks(decide, 4)


class Loses(nn.Module):
    def forward(self, x):
        return torch.relu(write(x))


def module_path():
    with explain() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Loses()(field(world_mesh((2,)), Shard(1)))
    return [(r.module, r.op) for r in report.lost]


def test_the_module_is_named():
    assert run_on_ranks(module_path, 2) == [[("Loses", "__setitem__")]] * 2


# ---------------------------------------------------------------------- the case tables

# Functions of rows that lose a sharding when their first tensor is sharded evenly along one dim over two ranks, where
# 16 elements count as many: no others may. affine_grid of matrices of 3 x 4 that are sharded, and the few modes that
# are written into an empty spectrum.
KNOWN_LOSSES = set("affine_grid __setitem__".split())


def lost_in_tables(part: int, parts: int) -> list[tuple[str, str, str, str]]:
    """Return, on a rank, function, table, row and layouts of each loss in a part of the rows of all tables."""
    mesh = world_mesh((2,))
    found = []
    rows = [(name, case) for name in case_tables.TABLES for case in case_tables.table(name)]
    for number, (name, case) in enumerate(rows):
        if number % parts != part and not case.name.startswith("affine_grid"):  # of which some lose a sharding
            continue
        tensors = case.tensors
        if not case.runs or case.may_gather or not tensors:
            continue
        t = tensors[0]
        for dim in range(len(t.shape)) if t.shard_dims is None else t.shard_dims:
            if t.shape[dim] < 4:
                continue
            layouts = [Layout.of(mesh, [Shard(dim)], t.shape), *[None] * (len(tensors) - 1)]
            given = Operands(case, draw_values(case), layouts, case.name).sharded()
            with warnings.catch_warnings(), explain() as report, scatter_small_partials():
                warnings.simplefilter("ignore")
                try:
                    case.call(given, device="cpu")
                except ShardingError:  # a row that may be refused
                    continue
            found += [(r.op, name, case.name, f"{r.inputs} -> {r.output}: {r.lost}") for r in report.lost]
    return found


def test_case_tables_lose_nothing_else():
    found = run_on_ranks(lost_in_tables, 2, 0, 3)[0]
    assert found, "no loss at all: empty KNOWN_LOSSES"
    unknown = [loss for loss in found if loss[0] not in KNOWN_LOSSES]
    assert not unknown, "\n".join(map(str, unknown))
