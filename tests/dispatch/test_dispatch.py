"""Dispatch: methods call their handlers directly, plans are cached, cache hits are cheap."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from shardfield import ShardingError, ShardTensor, explain, runtime
from shardfield._compat import no_torch_function
from shardfield.dispatch import executor
from shardfield.layout import Layout
from shardfield.ops.elementwise import pointwise
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh

ROWS = (Shard(0),)


def field(mesh=(1,), placements=ROWS, shape=(4, 6), lengths=None) -> ShardTensor:
    full_value = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) - 3
    x = ShardTensor.from_local(full_value, world_mesh(mesh), [Replicate()] * len(mesh))
    layout = Layout.of(world_mesh(mesh), placements, shape, lengths)
    return ShardTensor(x._redistribute_to(layout)._local_tensor.clone(), layout)


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Loud(ShardTensor):
    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def methods():
    x = field()
    plain = torch.ones(4, 6, dtype=torch.float64)
    full_value = x.full_tensor()
    assert "sum" in vars(ShardTensor) and "__sub__" in vars(ShardTensor) and "__rsub__" not in vars(ShardTensor)
    for call in (
        lambda t: t - plain,
        lambda t: plain - t,
        lambda t: 2 - t,
        lambda t: plain / t,
        lambda t: t**2,
        lambda t: 2**t,
        lambda t: plain.T @ t,
        lambda t: t @ plain.T,
        lambda t: -t[1:, ::2],
        lambda t: t.sum(dim=1, keepdim=True),
        lambda t: t.add(other=plain, alpha=2),
    ):
        assert torch.equal(call(x).full_tensor(), call(full_value))
    with pytest.raises(TypeError, match="unsupported operand"):
        x + object()
    with Seen() as mode:
        x.sum()
        x * 2
        x[0]
    assert [n.strip("_") for n in mode.names if n not in ("__get__", "size", "dim")][:1] == ["sum"]
    assert {"mul", "getitem"} <= {n.strip("_") for n in mode.names}
    loud = Loud(x._local_tensor, x._spec)
    assert type(loud) is Loud and type(loud * 2) is ShardTensor and type(loud.detach()) is ShardTensor
    assert torch.equal(loud.sum().full_tensor(), full_value.sum()) and "sum" in Loud.seen
    marked = Loud(x.detach()._local_tensor.clone(), x._spec, requires_grad=True)
    (marked * full_value).sum().backward()
    assert torch.equal(marked.grad.full_tensor(), full_value)
    with no_torch_function(), pytest.raises(ShardingError, match="reached torch's dispatcher"):
        x.requires_grad_().sum()
    other = field()
    other.data = field().float()
    assert other.dtype == other._local_tensor.dtype == torch.float32
    with explain() as report:
        x.detach().mul(2).sum()
    assert [r.op for r in report.rows] == ["detach", "mul", "sum"]


def test_methods():
    run_on_ranks(methods, 1)


def written():
    """Check that `inplace=True` writes for every layout."""
    for placement in (Shard(0), Shard(1), Replicate()):
        x = field((2,), (placement,))
        kept = x.full_tensor().clone()
        assert F.relu(x, inplace=True) is x and torch.equal(x.full_tensor(), kept.relu())
    partial = ShardTensor.from_local(torch.tensor([-1.0, 2.0]), world_mesh((2,)), [Partial()])
    assert F.leaky_relu(partial, 0.5, inplace=True) is partial
    assert torch.equal(partial.full_tensor(), torch.tensor([-1.0, 4.0]))
    leaf = field((2,)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        F.relu(leaf, inplace=True)
    x = field((2,), shape=(6,), lengths={0: (2, 4)})
    copied = x.view(2, 3)  # a row spans two ranks: data is sent
    for view in (copied.t(), torch.transpose(dim0=0, dim1=1, input=copied)):
        expected = x.full_tensor() * 2
        view.mul_(2)  # the data is sent back
        assert torch.equal(x.full_tensor(), expected) and torch.equal(view.full_tensor(), expected.view(2, 3).t())
    for view in (copied.view(3, 2), copied.view(-1)):
        with pytest.raises(ShardingError, match="would be lost"):
            view.mul_(2)
        with pytest.raises(ShardingError, match="would be lost"):
            F.relu(view, inplace=True)
    expected = x.full_tensor() * 2
    copied.mul_(2)  # the rows that were sent are sent back
    assert torch.equal(x.full_tensor(), expected) and torch.equal(copied.full_tensor(), expected.view(2, 3))


def test_inplace():
    run_on_ranks(written, 2)


@torch.library.custom_op("shardfield_test::scale_", mutates_args=("target", "others"))
def scale_(target: Tensor, others: list[Tensor], factor: Tensor) -> Tensor:
    for t in (target, *others):
        t.mul_(factor)
    return factor + 1


def written_by_a_fallback():
    """Check that a function without a rule writes into its arguments as on one device: each of a list, and `out=`."""
    kept = field((2,)).full_tensor()
    warnings.simplefilter("ignore")  # both are gathered
    for placement in (Shard(0), Shard(1), Replicate()):
        x, other, factor = field((2,), (placement,)), field((2,), (placement,)), field((2,), (placement,))
        more = scale_(x, [other], factor)
        for written in (x, other):
            assert torch.equal(written.full_tensor(), kept * kept) and written.placements == (placement,)
        assert torch.equal(factor.full_tensor(), kept) and torch.equal(more.full_tensor(), kept + 1)
        with torch.inference_mode():
            y = factor * 1
            scale_(y, [], factor)
            assert torch.equal(y.full_tensor(), kept * kept)
        assert torch.nn.init.eye_(other) is other and torch.equal(
            other.full_tensor(), torch.eye(4, 6, dtype=kept.dtype)
        )
        assert torch.nn.init.constant_(other, 0.5) is other and (other.full_tensor() == 0.5).all()
        torch.special.bessel_j1(factor, out=x)
        assert torch.equal(x.full_tensor(), torch.special.bessel_j1(kept)) and x.placements == (placement,)


def test_writes_of_a_fallback():
    run_on_ranks(written_by_a_fallback, 2)


def entered():
    """Check that a cached broadcast plan sums gradients of replicated operands and redistributes the others."""
    plain = torch.linspace(0, 1, 6, dtype=torch.float64)
    for _ in range(2):  # a cache miss, then a hit
        x, bias = field((2,)).requires_grad_(), plain.clone().requires_grad_()
        other = field((2,), (Shard(1),)).requires_grad_()
        torch.where(x > 2, x * bias, 0.5 * other + 1.0).sum().backward()
        a, b, c = (t.detach().clone().requires_grad_() for t in (x.full_tensor(), plain, other.full_tensor()))
        torch.where(a > 2, a * b, 0.5 * c + 1.0).sum().backward()
        for mine, theirs in ((x.grad.full_tensor(), a.grad), (bias.grad, b.grad), (other.grad.full_tensor(), c.grad)):
            torch.testing.assert_close(mine, theirs)
    assert torch.where(x > 2, 1.0, other).full_tensor().equal(torch.where(a > 2, 1.0, c))
    assert torch.where(x > 2, other, 1.0).full_tensor().equal(torch.where(a > 2, c, 1.0))


def test_cached_broadcast_plans():
    run_on_ranks(entered, 2)


def bounded():
    ones = torch.ones(2, dtype=torch.float64)
    with runtime.fresh(plans=runtime.Cache(16)) as rt:
        for n in range(1, 40):
            x = field(shape=(n, 2))
            assert torch.equal((x + ones).sum(0).full_tensor(), x.full_tensor().sum(0) + n)
            x += ones
        return [len(rt.plans), len(rt.plans.old)]


def test_caches_are_bounded():
    (sizes,) = run_on_ranks(bounded, 1)
    assert all(0 < n <= 16 for n in sizes), sizes


def twins():
    """Check calls on two mesh objects that are equal, as in a program that builds its mesh twice."""
    first = world_mesh((2,))
    second = DeviceMesh("cpu", [0, 1], mesh_dim_names=first.mesh_dim_names)
    assert first == second
    plain = torch.ones(19, dtype=torch.float64)
    with runtime.fresh() as rt:
        for rows, mesh in ((5, first), (6, second)):  # the plain tensor's layout is cached for the first mesh
            layout = Layout.of(mesh, [Shard(0)], (rows, 19))
            x = ShardTensor(torch.ones(layout.local_shape, dtype=torch.float64), layout)
            assert torch.equal((x + plain).full_tensor(), torch.full(layout.shape, 2.0, dtype=torch.float64))
        assert sum(key[0] == pointwise.BROADCAST for key in rt.plans) == 2 and len(rt.mesh_states) == 1


def test_cache_hits_on_an_equal_mesh():
    run_on_ranks(twins, 2)


def hit():
    """Return the microseconds from a call with a cached plan to its local function."""
    x = field()
    func = torch.Tensor.transpose
    handler, run, times = runtime.active.registry.handlers[func], executor.BoundPlan.run, []
    x.transpose(0, 1)
    executor.BoundPlan.run = lambda self, locals_, source: None
    try:
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(50):
                handler(func, (), (x, 0, 1), {})
            times.append((time.perf_counter() - start) / 50 * 1e6)
    finally:
        executor.BoundPlan.run = run
    return min(times)


def test_a_cache_hit_takes_5_us():
    (us,) = run_on_ranks(hit, 1)
    assert us < 5
