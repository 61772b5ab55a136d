"""Checkpoints inside checkpoints, their inputs, and tensors that users' Functions save, on ShardTensors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardfield import ShardingError, ShardTensor
from shardfield.testing import run_on_ranks
from tests.harness.run import scatter_small_partials
from tests.harness.virtual import VirtualRanks

from .test_autograd_bridge import LAYOUTS, RECOMPUTED, close, full_input, on, weight

# (outer, inner): whether a checkpoint is reentrant. torch warns of two reentrant ones.
NESTED = [(False, False), (False, True), (True, False)]


@pytest.fixture(scope="module")
def ranks():
    with VirtualRanks() as found:
        yield found


def nested(mesh, placements, lengths, outer, inner, early_stop) -> list[str]:
    """Compare gradients of a checkpoint in a checkpoint, for each function with messages."""
    r, v, wrong = full_input().requires_grad_(), weight(), []
    for name, function in RECOMPUTED.items():
        x, w, grads = on(mesh, placements, lengths), weight(), []
        for a, b in ((x, w), (r, v)):
            with set_checkpoint_early_stop(early_stop):
                y = checkpoint(block, function, inner, a * 1, b, use_reentrant=outer)
                grads.append(backward(y, a, b))
        try:
            for got, ref in zip(*grads, strict=True):
                close(got, ref)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


def block(function, reentrant, p, q):
    """Pass a field through an inner checkpoint, between calls that save tensors."""
    p = checkpoint(function, (p * q).sin(), use_reentrant=reentrant)
    return (p * q.sum()).tanh()


def backward(y, *leaves):
    """Return the gradients of leaves by `backward`: a reentrant checkpoint refuses `autograd.grad`."""
    (y * y).sum().backward()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
def test_nested_checkpoints(ranks, mesh, placements, lengths):
    for outer, inner in NESTED:
        for early_stop in (True,) if outer else (True, False):
            args = mesh, placements, lengths, outer, inner, early_stop
            assert ranks.check(torch.Size(mesh).numel(), nested, *args) == [], args


class Exp(torch.autograd.Function):
    """Function that saves its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad


class Square(torch.autograd.Function):
    """Function that saves its operand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def offloaded(function, x):
    with save_on_cpu():
        return function(x)


HOOKS = {
    "none": lambda function, x: function(x),
    "offload": offloaded,
    "checkpoint": lambda function, x: checkpoint(function, x * 1, use_reentrant=False),
    "nested": lambda function, x: checkpoint(HOOKS["checkpoint"], function, x * 1, use_reentrant=False),
}


def second_derivatives(mesh, placements, lengths) -> list[str]:
    """Compare gradients, and gradients of gradients, of users' Functions under saved-tensor hooks."""
    wrong = []
    for hooks, call in HOOKS.items():
        for kind in (Exp, Square):
            found = []
            for a in (on(mesh, placements, lengths), full_input().requires_grad_()):
                y = call(lambda p, kind=kind: kind.apply(p / 2), a)
                (first,) = torch.autograd.grad((y * y).sum(), a, create_graph=True)
                found.append((first.detach(), *torch.autograd.grad(first.sin().sum(), a)))
            try:
                for got, ref in zip(*found, strict=True):
                    close(got, ref)
            except AssertionError as error:
                wrong.append(f"{kind.__name__} with hooks {hooks}: {error}")
    return wrong


@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
def test_second_derivatives_of_saved_tensors(ranks, mesh, placements, lengths):
    assert ranks.check(torch.Size(mesh).numel(), second_derivatives, mesh, placements, lengths) == []


def written(mesh, placements, lengths) -> list[str]:
    """Write into the input of a checkpoint before backward: all ranks raise, as one device does."""
    for a in (on(mesh, placements, lengths), full_input().requires_grad_()):
        x = a * 1
        y = checkpoint(lambda p: p.sin() * p, x, use_reentrant=False)
        with torch.no_grad():
            x.mul_(2)
        kind = ShardingError if isinstance(a, ShardTensor) else RuntimeError
        with pytest.raises(kind, match="modified by an inplace operation"):
            y.sum().backward()
    return []


@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
def test_written_input(ranks, mesh, placements, lengths):
    assert ranks.check(torch.Size(mesh).numel(), written, mesh, placements, lengths) == []


def recompute(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def periodic(x):
    return F.pad(x[None, None], (1, 1, 1, 0), mode="circular")


def smooth(p):
    return F.conv2d(p, torch.full((1, 1, 2, 2), 0.3, dtype=p.dtype)).sin()


def modes(s):
    return (s[..., :2] * s[..., :2]).abs()


# Functions of a field with a checkpoint that reads a value whose computation is deferred, or that is Partial.
DEFERRED = {
    "padded": lambda x: recompute(lambda p: (p * p).sin(), periodic(x)),
    "padded, in a closure": lambda x: (lambda h: recompute(lambda p: (h * p.sum()).sin(), x))(periodic(x)),
    "padded, convolved": lambda x: recompute(smooth, periodic(x)),
    "padded, convolved and read": lambda x: recompute(lambda p: smooth(p).sum() + p * p, periodic(x)),
    "padded, read later": lambda x: (lambda h: recompute(smooth, h).sum() * (h * h))(periodic(x)),
    "padded in a checkpoint": lambda x: recompute(lambda p: recompute(torch.sin, periodic(p * p)), x),
    "spectrum": lambda x: recompute(lambda s: (s * s).abs(), torch.fft.rfft2(x)),
    "modes": lambda x: recompute(modes, torch.fft.rfft2(x)),
    "modes, read later": lambda x: (lambda s: recompute(modes, s).sum() + (s * s).abs())(torch.fft.rfft2(x)),
    "spectrum in a checkpoint": lambda x: recompute(lambda p: torch.fft.irfft2(torch.fft.rfft2(p) ** 2), x * 1),
    "sum": lambda x: recompute(lambda p: (p * p).sin() + p.detach(), x.sum(0)),
    "sum, in a closure": lambda x: (lambda h: recompute(lambda p: (h.detach() * p).sin() + h.detach(), x))(x.sum(0)),
    "sum, sorted in a closure": lambda x: (lambda h: recompute(lambda p: h.sort()[0] * p.sin() + h.sort()[0], x))(
        x.sum(0)
    ),
    "single sum": lambda x: recompute(lambda p, q: (p * q).sin(), x.sum(), x),
}


def deferred_inputs(mesh, placements, lengths) -> list[str]:
    """Compare gradients of checkpoints of values that were not computed when the checkpoint began."""
    wrong = []
    for name, function in DEFERRED.items():
        found = []
        for a in (on(mesh, placements, lengths), full_input().requires_grad_()):
            with scatter_small_partials(1) if name.startswith("sum") else nullcontext():
                y = function(a)
                found.append((y.detach(), *backward(y, a)))
        try:
            for got, ref in zip(*found, strict=True):
                close(got, ref)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


@pytest.mark.parametrize(("mesh", "placements", "lengths"), LAYOUTS)
def test_deferred_inputs(ranks, mesh, placements, lengths):
    assert ranks.check(torch.Size(mesh).numel(), deferred_inputs, mesh, placements, lengths) == []


def on_processes(layouts) -> list[str]:
    """Run nested checkpoints on processes, where a rank that sends other messages than its peers would block."""
    wrong = []
    for layout in layouts:
        for outer, inner in NESTED:
            wrong += nested(*layout, outer, inner, True)
        wrong += second_derivatives(*layout)
        wrong += deferred_inputs(*layout)
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_on_processes(size):
    layouts = [layout for layout in LAYOUTS if torch.Size(layout[0]).numel() == size]
    assert sum(run_on_ranks(on_processes, size, layouts), []) == []
