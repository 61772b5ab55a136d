"""Autograd on ShardTensors: every entry point gives what one device gives."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from harness import mesh_of, shard
from shardfield import ShardTensor
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks

LAYOUTS = [
    ((2,), [Shard(0)], {0: [4, 1]}),
    ((2,), [Shard(1)], {1: [0, 6]}),
    ((2,), [Replicate()], {}),
    ((2,), [Partial()], {}),
    ((2, 2), [Shard(0), Shard(1)], {0: [2, 3], 1: [5, 1]}),
]


def whole_input() -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def on(mesh, placements, lengths, *, grad=True) -> ShardTensor:
    full = whole_input()
    layout = Layout.of(mesh_of(mesh), placements, full.shape, lengths)
    return ShardTensor(shard(full, layout).requires_grad_(grad), layout)


def close(got, ref) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, ShardTensor) else got, ref, rtol=1e-11, atol=1e-11)


class Cube(torch.autograd.Function):
    """A user's own Function: x**3 times a plain weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * x * x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * 3 * x * x * w, (grad * x * x * x).sum(0)


class Same(torch.autograd.Function):
    """A Function that returns its inputs, as FSDP2's hooks do."""

    @staticmethod
    def forward(ctx, x, y):
        return x, y

    @staticmethod
    def backward(ctx, gx, gy):
        return gx * 2, gy


def weight() -> torch.Tensor:
    return torch.linspace(1, 2, 6, dtype=torch.float64).requires_grad_()


def user_function(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), whole_input().requires_grad_(), weight()
    (Cube.apply(x, w) * 2).sum().backward()
    (Cube.apply(r, v) * 2).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def returned_inputs(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), whole_input().requires_grad_(), weight()
    for a, b in ((x, w), (r, v)):
        p, q = Same.apply(a, b)
        (p * p * q).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def double_backward(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), whole_input().requires_grad_(), weight()
    for a, b in ((x, w), (r, v)):
        y = (torch.tanh(a * b) ** 2).sum()
        (g,) = torch.autograd.grad(y, a, create_graph=True)
        assert g.shape == a.shape
        (g * g * b).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def mixed_grad(mesh, placements, lengths):
    x, w, r, v = on(mesh, placements, lengths), weight(), whole_input().requires_grad_(), weight()
    seed = whole_input().cos()
    got = torch.autograd.grad([torch.sin(x) * w], [x, w], [seed])
    ref = torch.autograd.grad([torch.sin(r) * v], [r, v], [seed])
    for g, f in zip(got, ref, strict=True):
        close(g, f)


def batched(mesh, placements, lengths):
    """Several gradients in one call: a Jacobian's rows."""
    x, r = on(mesh, placements, lengths), whole_input().requires_grad_()
    seeds = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = []
    for a in (x, r):
        (first,) = torch.autograd.grad(a**3, a, seeds, is_grads_batched=True, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), a)))
    for got, ref in zip(*found, strict=True):
        close(got, ref)
    with pytest.raises(RuntimeError, match="equally many rows"):
        torch.autograd.grad([x * 2, x * 3], x, [seeds, seeds[:2]], is_grads_batched=True)


def hooks(mesh, placements, lengths):
    x, r = on(mesh, placements, lengths), whole_input().requires_grad_()
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
    x, w, r, v = on(mesh, placements, lengths), weight(), whole_input().requires_grad_(), weight()
    for a, b in ((x, w), (r, v)):
        y = checkpoint(lambda p, q: torch.tanh(p * q) * p, a, b, use_reentrant=reentrant)
        (y * y).sum().backward()
    close(x.grad, r.grad)
    close(w.grad, v.grad)


def accumulation(mesh, placements, lengths):
    x, r = on(mesh, placements, lengths), whole_input().requires_grad_()
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
