"""Autograd on ShardTensors: every entry point equals one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.utils.checkpoint import checkpoint

from shardfield import ShardingError, ShardTensor, explain
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, world_mesh

LAYOUTS = [
    ((2,), [Shard(0)], {0: [4, 1]}),
    ((2,), [Shard(1)], {1: [0, 6]}),
    ((2,), [Replicate()], {}),
    ((2,), [Partial()], {}),
    ((2, 2), [Shard(0), Shard(1)], {0: [2, 3], 1: [5, 1]}),
]


def full_input() -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def on(mesh, placements, lengths, *, grad=True) -> ShardTensor:
    full = full_input()
    layout = Layout.of(world_mesh(mesh), placements, full.shape, lengths)
    return ShardTensor(local_shard(full, layout).requires_grad_(grad), layout)


def close(got, ref) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, ShardTensor) else got, ref, rtol=1e-11, atol=1e-11)


class Cube(torch.autograd.Function):
    """User-defined Function: x**3 times a plain weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * x * x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * 3 * x * x * w, (grad * x * x * x).sum(0)


class Same(torch.autograd.Function):
    """Function that returns its inputs, as FSDP2's hooks do."""

    @staticmethod
    def forward(ctx, x, y):
        return x, y

    @staticmethod
    def backward(ctx, gx, gy):
        return gx * 2, gy


def weight() -> torch.Tensor:
    return torch.linspace(1, 2, 6, dtype=torch.float64).requires_grad_()


def user_function(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), full_input().requires_grad_(), weight()
    (Cube.apply(x, w) * 2).sum().backward()
    (Cube.apply(r, v) * 2).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def returned_inputs(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), full_input().requires_grad_(), weight()
    for a, b in ((x, w), (r, v)):
        p, q = Same.apply(a, b)
        (p * p * q).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def double_backward(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), full_input().requires_grad_(), weight()
    for a, b in ((x, w), (r, v)):
        y = (torch.tanh(a * b) ** 2).sum()
        (g,) = torch.autograd.grad(y, a, create_graph=True)
        assert g.shape == a.shape
        (g * g * b).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def mixed_grad(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), full_input().requires_grad_(), weight()
    seed = full_input().cos()
    got = torch.autograd.grad([torch.sin(x) * w], [x, w], [seed])
    ref = torch.autograd.grad([torch.sin(r) * v], [r, v], [seed])
    for g, f in zip(got, ref, strict=True):
        close(g, f)


def batched(mesh, placements, lengths):
    """Check several gradients in one call: a Jacobian's rows."""
    x, r = on(mesh, placements, lengths), full_input().requires_grad_()
    seeds = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = []
    for a in (x, r):
        (first,) = torch.autograd.grad(a**3, a, seeds, is_grads_batched=True, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), a)))
    for got, ref in zip(*found, strict=True):
        close(got, ref)
    with pytest.raises(RuntimeError, match="equal numbers of rows"):
        torch.autograd.grad([x * 2, x * 3], x, [seeds, seeds[:2]], is_grads_batched=True)


def hooks(mesh, placements, lengths):
    x, r = on(mesh, placements, lengths), full_input().requires_grad_()
    seen = []
    for a in (x, r):
        b = a * 2
        b.retain_grad()
        b.register_hook(lambda g: g * 3)
        b.register_hook(lambda g: seen.append(g))
        (b * b).sum().backward()
        seen.append(b.grad)
    close(x.grad, r.grad)
    close(seen[0], seen[2])
    close(seen[1], seen[3])


def checkpointing(mesh, placements, lengths, reentrant):
    x, w, r, v = on(mesh, placements, lengths), weight(), full_input().requires_grad_(), weight()
    for a, b in ((x, w), (r, v)):
        y = checkpoint(lambda p, q: torch.tanh(p * q) * p, a, b, use_reentrant=reentrant)
        (y * y).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


# Functions with messages whose local part saves nothing where a shard is short, or after the last message.
RECOMPUTED = {
    "avg_pool": lambda p: F.avg_pool1d(p[None].square(), 2)[0] * 2,
    "max_pool": lambda p: F.max_pool2d(p[None, None].sin(), 3, 2)[0, 0] * 2,
    "conv": lambda p: F.conv2d(p[None, None], torch.ones(1, 1, 3, 3, dtype=p.dtype), padding=1)[0, 0],
    "roll": lambda p: p.roll((1, 1), (0, 1)) * p.sin(),
    "softmax": lambda p: p.softmax(0) * p.softmax(1),
    "norm": lambda p: F.layer_norm(p, (6,)) + F.group_norm(p[None, None], 1)[0, 0],
    "slice": lambda p: p[:2, 4:].exp().sum() * 2,
    "fft": lambda p: torch.fft.irfft2(torch.fft.rfft2(p)[:2, :2], s=p.shape),
}


def recomputing(mesh, placements, lengths):
    r = full_input().requires_grad_()
    for function in RECOMPUTED.values():
        x, grads = on(mesh, placements, lengths), []
        for a in (x, r):
            y = checkpoint(function, a * 1, use_reentrant=False)
            grads += torch.autograd.grad((y * y).sum(), a)
        close(*grads)


def accumulation(mesh, placements, lengths):
    x, r = on(mesh, placements, lengths), full_input().requires_grad_()
    for a in (x, r):
        (a * a).sum().backward(retain_graph=True)
        torch.autograd.backward([(a * 3).sum(), a.exp()], [None, torch.ones(5, 6, dtype=torch.float64)])
    close(x.grad, r.grad)
    x.grad = None
    assert x.grad is None


def leaf_rules(mesh, placements, lengths):
    x = on(mesh, placements, lengths)
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (x * 2).backward()
    with torch.no_grad():
        assert not (x * 2).requires_grad
    assert x.is_leaf and not (x * 2).is_leaf and (x * 2).requires_grad
    assert not x.detach().requires_grad


@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
@pytest.mark.parametrize(
    "what", [user_function, returned_inputs, double_backward, mixed_grad, batched, hooks, accumulation, leaf_rules]
)
def test_autograd(what, mesh, placements, lengths):
    run_on_ranks(what, torch.Size(mesh).numel(), mesh, placements, lengths)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
def test_checkpoint(mesh, placements, lengths, reentrant):
    run_on_ranks(checkpointing, torch.Size(mesh).numel(), mesh, placements, lengths, reentrant)


@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
def test_checkpointed_messages(mesh, placements, lengths):
    run_on_ranks(recomputing, torch.Size(mesh).numel(), mesh, placements, lengths)


# ---------------------------------------------------------------------- full backward hooks of modules

HOOKED = [
    ((2,), [Shard(0)], {0: [4, 1]}),
    ((3,), [Shard(1)], {1: [2, 3, 1]}),
    ((2,), [Partial()], {}),
    ((2, 2), [Shard(0), Shard(1)], {0: [2, 3], 1: [6, 0]}),
]


class Mix(nn.Module):
    """Module with several inputs, among them a number and a tensor without gradient, and several outputs."""

    def forward(self, x, factor, mask, w):
        return torch.where(mask, x, x * w) * factor, "text", x.sum(0)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(6, 4), Mix(), nn.Linear(4, 3)
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        h = torch.tanh(self.up(x))
        a, _, b = self.mix(h, 3.0, (h > 0).detach(), self.w)
        return self.down(a) + b[:3]


def hooked() -> Hooked:
    torch.manual_seed(0)
    return Hooked().double()


def record(log: list, change=None):
    """Return a full hook or pre-hook that logs its gradients and returns them changed by `change`."""

    def hook(module, *grads):
        for each in grads:
            assert isinstance(each, tuple)
            log.extend((type(module).__name__, g) for g in each)
        if change is not None:
            return tuple(change(g) if g is not None and g.is_floating_point() else g for g in grads[0])

    return hook


def same_logs(found: list, expected: list) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, got), (_, ref) in zip(found, expected, strict=True):
        assert (got is None) == (ref is None), name
        if got is not None:
            close(got, ref)


def nested_hooks(a, log):
    """Register nested hooks that change gradients; a global plain tensor may replace a ShardTensor."""
    model = hooked()
    model.mix.register_full_backward_hook(record(log, lambda g: g * 2))
    model.mix.register_full_backward_hook(record(log))  # receives the first hook's result
    model.mix.register_full_backward_pre_hook(record(log, lambda g: g + 1))
    model.up.register_full_backward_hook(
        record(log, lambda g: (g.full_tensor() if isinstance(g, ShardTensor) else g) - 1)
    )
    model.register_full_backward_pre_hook(record(log, torch.sin))
    handle = model.register_full_backward_hook(record(log))
    model(a).square().sum().backward()
    handle.remove()
    checkpoint(model, a, use_reentrant=False).square().sum().backward()
    log.extend(("parameter", p.grad) for p in model.parameters())


def global_hooks(a, log):
    model = hooked()
    handles = [register_module_full_backward_hook(record(log)), register_module_full_backward_pre_hook(record(log))]
    try:
        model(a).square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    log.extend(("parameter", p.grad) for p in model.parameters())


def twice(a, log):
    """Take a second derivative through hooks."""
    model = hooked()
    model.mix.register_full_backward_hook(record([], lambda g: g * g))
    (g,) = torch.autograd.grad(model(a).square().sum(), a, create_graph=True)
    (g * g).sum().backward()
    log.extend(("parameter", p.grad) for p in model.parameters())


def without_inputs(a, log):
    """Call a module whose inputs need no gradient: torch calls the hook with output gradients and warns."""
    up = hooked().up
    up.register_full_backward_hook(record(log))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        up(a.detach()).square().sum().backward()
    log.append(("parameter", up.weight.grad))


def module_hooks(mesh, placements, lengths):
    for what in (nested_hooks, global_hooks, twice, without_inputs):
        logs = []
        for a in (on(mesh, placements, lengths), full_input().requires_grad_()):
            log = []
            what(a, log)
            logs.append([*log, ("input", a.grad)])
        same_logs(*logs)
        assert what is twice or any(isinstance(g, ShardTensor) for _, g in logs[0][:-1])
    gradients_have_the_layout_of_values(on(mesh, placements, lengths))
    refused_hooks(on(mesh, placements, lengths))
    counted(on(mesh, placements, lengths))


def gradients_have_the_layout_of_values(x):
    model, log = hooked(), []
    model.up.register_full_backward_hook(record(log))
    out = model.up(x)
    (out * 2).sum().backward()
    (_, into), (_, back) = log
    assert into._layout == x._grad_layout and back._layout == out._grad_layout


def refused_hooks(x):
    model = hooked()
    handle = model.up.register_full_backward_hook(lambda module, into, back: (into[0], into[0]))
    with pytest.raises(RuntimeError, match="invalid number of grad_input"):
        model(x).sum().backward()
    handle.remove()
    handle = model.up.register_full_backward_hook(lambda module, into, back: (into[0][:2],))
    with pytest.raises(RuntimeError, match="gradient of shape"):
        model(x).sum().backward()
    handle.remove()
    model.down.register_backward_hook(lambda module, into, back: None)
    with pytest.raises(ShardingError, match="use register_full_backward_hook"):
        model(x)
    with torch.no_grad():
        model(x)


def counted(x):
    """Check that torch's CommDebugMode, which hooks every module, counts the same collectives."""
    model = hooked()
    model(x).square().sum().backward()  # fill the plan cache
    kinds = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "broadcast_": "broadcast"}
    with CommDebugMode() as theirs, explain() as ours:
        model(x).square().sum().backward()
    results = {kinds[op.__name__]: n for op, n in theirs.get_comm_counts().items()}
    own: dict[str, int] = {}
    for row in [*ours.rows, ours._unattributed]:
        for kind, n in row.kinds.items():
            own[kind] = own.get(kind, 0) + n
    own.pop("exchange", None)  # point-to-point messages, which it does not count
    assert own == results and results
    modules = theirs.comm_module_counts
    for way in ("forward", "backward"):
        assert sum(modules["Global"][way].values()) >= sum(modules["Hooked"][way].values())


@pytest.mark.parametrize(("mesh", "placements", "lengths"), HOOKED)
def test_module_hooks(mesh, placements, lengths):
    run_on_ranks(module_hooks, torch.Size(mesh).numel(), mesh, placements, lengths)
