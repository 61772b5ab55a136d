"""The leaf functions in C++: the bits and the torch calls of their Python twins, and how they are built and found."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from shardfield import native, scatter_tensor
from shardfield._compat import DispatchMode, zero_all
from shardfield.comm.route_messages import add_split, join_split, pack_split
from shardfield.native import build
from shardfield.ops.normalization.small_norm import norm_grad_sums, norm_grads, norm_moments, normalize
from shardfield.ops.reduction.softmax import product_sum, shifted_exp
from shardfield.virtual import VirtualWorld

compiled = pytest.mark.skipif(native.extension() is None, reason=f"leaf functions run {native.state()}")


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def norm_calls(dtype, shape, dims, group_of):
    """Yield calls of the leaf functions of a norm, each with the results of the calls before."""
    view, param = shape, (shape[1], *[1] * (len(shape) - 2))
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype).mT.contiguous().mT
    weight, bias = torch.rand(shape[1]).to(dtype), torch.rand(shape[1]).to(dtype)
    share = number(1 / 7)
    wide, moments = yield norm_moments, (x, view, dims, share)
    if group_of is not None:
        moments = moments.new_zeros(2, shape[0], 2, *moments.shape[3:]).index_add(2, group_of, moments)
    for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
        *_, normalized, rstd, expanded = yield normalize, (wide, moments, number(1e-5), w, b, param, group_of, shape)
    g, sums = yield norm_grad_sums, (grad, normalized, view, dims)
    if group_of is not None:
        sums = sums.new_zeros(2, shape[0], 2, *sums.shape[3:]).index_add(2, group_of, sums)
    for batch in (False, True) if group_of is None else (False,):
        for stats in (sums, None):
            share = number(-1 / 7, torch.float32)
            yield norm_grads, (g, normalized, stats, sums, rstd, expanded, share, batch, group_of, shape)


def softmax_calls():
    x, grad = torch.randn(3, 4, 2), torch.randn(4, 3, 2).transpose(0, 1)
    _, powers, _ = yield shifted_exp, (x, x.amax(1, True), 1)
    yield product_sum, (grad, powers, 1)


def route_calls(dtype, strided):
    """Yield calls of the leaf functions of a route along dim 1: sends two parts, keeps the one between them."""
    block = torch.randn(2, 6, 3).to(dtype)
    block = block[:, :, :1].expand(2, 6, 3) if strided else block
    receives = [(0, (2, 1, 3)), (5, (2, 2, 3))]
    for stacked in (False, True):
        made = yield pack_split, (block, 1, [1, 4, 1], [0, 2, 1], (0, 5), receives, stacked)
    whole, _, _, buffers = made
    received = [torch.randn(buffer.shape).to(dtype) for buffer in buffers]
    for kept in ((1, 1, 4), ()):
        yield join_split, (whole, received, kept, 1, (0, -1, 1))
        for owned, joins in ((False, False), (True, False), (True, True)):
            yield add_split, (whole.clone(), [r.clone() for r in received], kept, 1, [1, 2, 1] if kept else [1, 2, 3],
                              [0, 1], owned, joins)  # fmt: skip


class Recorder(DispatchMode):
    """Records the names of the operators below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format) if 0 not in value.stride() else value
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype and one.shape == other.shape and one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def ran(function, args):
    """Return the result, the arguments and which of them were written, and the operators that were called."""
    given = copied(args)
    with Recorder() as seen:
        function(*given)
    given = copied(args)
    made = function(*given)
    if made is not None and function in (pack_split, pack_split.__self__):
        zero_all(made[3])  # of the receive buffers
    return made, given, [t._version > 0 for t in given if isinstance(t, torch.Tensor)], seen.names


GROUPS = torch.tensor([0, 0, 1, 1])
CALLS = {
    "norm": lambda: norm_calls(torch.float32, (2, 4, 3, 5), (1, 3, 4), None),
    "half": lambda: norm_calls(torch.bfloat16, (2, 4, 3, 5), (3, 4), None),
    "split groups": lambda: norm_calls(torch.float32, (2, 4, 3, 5), (3, 4), GROUPS),
    "no sum": lambda: norm_calls(torch.float32, (2, 4), (), None),
    "empty": lambda: norm_calls(torch.float32, (2, 4, 0, 5), (3, 4), None),
    "softmax": softmax_calls,
    "route": lambda: route_calls(torch.float32, False),
    "complex route": lambda: route_calls(torch.complex128, True),
    "half route": lambda: route_calls(torch.bfloat16, False),
}


@compiled
@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_each_function_has_the_bits_and_the_calls_of_its_twin(name):
    torch.manual_seed(0)
    calls, result = CALLS[name](), None
    with pytest.raises(StopIteration):
        while True:
            function, args = calls.send(result)
            (result, *ours), theirs = ran(function, args), ran(function.__self__, args)
            assert_same([result, *ours], list(theirs))


@compiled
def test_the_python_twin_runs_where_the_two_might_differ():
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return 2 * out if func is torch.cat else out

    class Subclass(torch.Tensor):
        pass

    x = torch.ones(2)
    with torch.no_grad():
        assert join_split(x, [x], (), 0, (0, -1)).sum() == 4
        with Doubled():
            assert join_split(x, [x], (), 0, (0, -1)).sum() == 8
        assert type(join_split(x.as_subclass(Subclass), [x], (), 0, (0, -1))) is Subclass
        with pytest.raises(RuntimeError, match="exceeds dimension size"):
            join_split(x, [x], (0, 1, 5), 0, (0, -1))
    assert join_split(x.requires_grad_(), [x], (), 0, (0, -1)).requires_grad


def train():
    """Return results and gradients of a small network: 5 rows on 4 ranks, one of them without rows."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    weight, scale = torch.randn(4, 4, 3, 3, requires_grad=True), torch.rand(4, requires_grad=True)
    x = scatter_tensor(torch.randn(2, 4, 5, 6), 0, mesh, (Shard(2),)).requires_grad_()
    y = F.group_norm(F.conv2d(x, weight, padding=1), 2, scale)
    y = F.batch_norm(F.max_pool2d(y, 3, 1, 1), None, None, scale, training=True)
    y = F.interpolate(y, scale_factor=2, mode="bilinear").roll(1, 2).softmax(2)
    y.square().mean().backward()
    return [y.to_local(), x.grad.to_local(), weight.grad, scale.grad]


@compiled
def test_a_network_has_the_same_bits_with_both():
    with VirtualWorld(4) as world:
        ours = world.run(train)
        with native.python_leaves():
            theirs = world.run(train)
    assert_same(ours, theirs)


def test_what_cannot_be_loaded_is_not_used(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SHARDFIELD_CACHE", str(tmp_path))
    assert native.load() is None  # not built
    monkeypatch.setenv("CXX", "false -x")
    assert build.command(["--if-possible"]) == 0 and "false fails" in capsys.readouterr().out
    with pytest.raises(build.BuildError, match="false fails"):
        build.command([])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="does not start"):
        build.command([])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.command([])
    path = native.library_path()
    assert path.is_relative_to(tmp_path) and not list(path.parent.iterdir())  # nothing partial is left
    path.write_bytes(b"no library")
    assert native.load() is None
    monkeypatch.setenv("CXX", f"{sys.executable} -c pass")  # compiles nothing
    with pytest.raises(OSError):
        build.command([])
    monkeypatch.setattr(native, "load", lambda: pytest.fail("SHARDFIELD_NATIVE=0"))
    monkeypatch.setenv("SHARDFIELD_NATIVE", "0")
    assert native.extension.__wrapped__() is None
