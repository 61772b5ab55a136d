"""Ops of random programs that work on the graph: hooks, checkpoints, derivatives of derivatives, writes into views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .ops import op

SMOOTH: dict[str, Callable] = {
    "sin": torch.sin,
    "softmax": lambda x: F.softmax(x, 0),
    "cumsum": lambda x: torch.cumsum(x, -1).square(),
    "var": lambda x: torch.var(x, -1, correction=0),
    "norm": lambda x: (x.square().sum(0) + 1).sqrt(),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "product": lambda x: x @ x.mT if x.ndim > 1 else x * x,
    "sort": lambda x: torch.sort(x, 0)[0].pow(3),
    "pool": lambda x: F.avg_pool1d(x.square(), 2) if x.ndim == 3 else x.square(),
    "roll": lambda x: torch.roll(x, 1, -1) * x,
}
VIEWS: dict[str, Callable] = {
    "transpose": lambda x: x.transpose(0, -1),
    "rows": lambda x: x[::2],
    "last": lambda x: x[-1:],
    "columns": lambda x: x[..., : x.shape[-1] // 2 + 1],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand_dims": lambda x: x[None, ..., None],
    "flatten": lambda x: x.view(-1),
    "split": lambda x: x.split(1, -1)[0],
}


def hooked(x: Any, factor: float, times: int) -> Any:
    """Return a copy of x whose gradient hooks scale."""
    y = x * 1
    for _ in range(times):
        if y.requires_grad:
            y.register_hook(lambda grad: grad * factor)
    return y


def checkpointed(x: Any, name: str) -> Any:
    """Return a smooth function of x that backward computes again."""
    return checkpoint(lambda t: SMOOTH[name](t) * 2, x * 1, use_reentrant=False)


def slope(x: Any, name: str, order: int) -> Any:
    """Return the derivative of a smooth function, of first or second order, as a part of the graph."""
    y = x * 1
    if not y.requires_grad:
        return y
    total = SMOOTH[name](y).square().sum()
    for _ in range(order):
        (grad,) = torch.autograd.grad(total, y, create_graph=True)
        total = (grad * y).sum()
    return grad


def write_chain(x: Any, views: list[str], how: str) -> Any:
    """Write into a view of views of a copy of x, and return the copy."""
    y = x * 1
    view = y
    for name in views:
        view = VIEWS[name](view)
    {"mul": lambda: view.mul_(0.5), "sin": view.sin_, "fill": lambda: view.fill_(0.25), "add": lambda: view.add_(view)}[
        how
    ]()
    return y * 1


def partly_detached(x: Any) -> Any:
    """Return a sum of which one term has no graph."""
    y = x * 1
    with torch.no_grad():
        z = torch.tanh(y)
        z += 1
    return y + z + y.detach() * 0.5


@op("graph")
def hook(g, x):
    return "tests.fuzz.graph_ops:hooked", (x, g.pick([0.5, -2.0]), g.int(1, 2))


@op("graph")
def recompute(g, x):
    return "tests.fuzz.graph_ops:checkpointed", (x, g.pick(list(SMOOTH)))


@op("graph")
def derivative(g, x):
    name = g.pick(list(SMOOTH))
    # torch's third derivative of layer_norm, which backward through the second one computes, is wrong on one device
    return "tests.fuzz.graph_ops:slope", (x, name, 1 if name == "layer_norm" else g.int(1, 2))


@op("graph")
def write_through(g, x):
    views = [g.pick(list(VIEWS)) for _ in range(g.int(1, 3))]
    return "tests.fuzz.graph_ops:write_chain", (x, views, g.pick(["mul", "sin", "fill", "add"]))


@op("graph")
def detach(g, x):
    return "tests.fuzz.graph_ops:partly_detached", (x,)
