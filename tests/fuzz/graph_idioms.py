"""Idioms of users' models that work on the graph, and the ops that draw an idiom.

An idiom is a function of a value, two dims (they may be negative) and a small number. Those that one device cannot run
on a drawn shape are rejected by the generator, so that an idiom may assume a shape without checking it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .idioms import VIEWS, WRITES, at, put
from .math_idioms import INTEGERS, MATH
from .ops import op


def no_grad_write(x: Any, d: int) -> Any:
    """Write into a part of a copy of x without a graph; the gradient is that of the copy."""
    y = x * 1
    with torch.no_grad():
        y.narrow(d, 0, 1).mul_(3)
        y.select(d, -1).add_(x.select(d, 0))
    return y + x


def data_write(x: Any, d: int) -> Any:
    """Write into a copy of x through `data`."""
    y = x + 1
    y.data.select(d, 0).mul_(0.5)
    return y + 1


def retained(x: Any, d: int) -> Any:
    """Return x times a gradient that is computed twice on one graph."""
    y = (x * 1).requires_grad_() if not x.requires_grad else x * 1
    total = (y.softmax(d) * y).sum()
    (one,) = torch.autograd.grad(total, y, retain_graph=True)
    (two,) = torch.autograd.grad(total, y)
    return x * (one + two)


def twice(x: Any, d: int) -> Any:
    """Return the gradient of a norm of a gradient, as a penalty on gradients computes it."""
    y = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad((y.square().mean(d) + 1).log().sum(), y, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), y)
    return curve + x


def hessian_product(x: Any, d: int) -> Any:
    """Return the product of a second derivative with x; the result has a graph."""
    y = x * 1
    if not y.requires_grad:
        return y
    (slope,) = torch.autograd.grad(y.cumsum(d).sin().sum(), y, create_graph=True)
    (product,) = torch.autograd.grad((slope * x.detach()).sum(), y, create_graph=True)
    return product * x


def view_hook(x: Any, d: int) -> Any:
    """Return a copy of x; a hook on a view of it changes a part of the gradient."""
    y = x * 1
    part = y.narrow(d, 0, 1)
    if part.requires_grad:
        part.register_hook(lambda grad: grad * 3)
        y.retain_grad()
    return y.sin() * part


def late_leaf(x: Any, d: int) -> Any:
    """Return a gradient with respect to a leaf that is written before it requires one."""
    y = torch.zeros_like(x)
    y.narrow(d, 0, 1).add_(x.detach().narrow(d, 0, 1))
    y.requires_grad_()
    ((y.cos() * x.detach()).sum(d)).square().sum().backward()
    return y.grad + x


GRAPH: dict[str, Callable] = {
    "reentrant": lambda x, d, e, k: checkpoint(lambda t: t.cumsum(d).sin() * t.mean(), x * 1, use_reentrant=True),
    "checkpoint_write": lambda x, d, e, k: checkpoint(
        lambda t: put(t * 2, at(t, d, 0), t.sum(d)), x * 1, use_reentrant=False
    ),
    "toggle": lambda x, d, e, k: x.detach().requires_grad_(True).detach() * x,
    "no_grad_write": lambda x, d, e, k: no_grad_write(x, d),
    "retained": lambda x, d, e, k: retained(x, d),
    "twice": lambda x, d, e, k: twice(x, d),
    "hessian_product": lambda x, d, e, k: hessian_product(x, d),
    "view_hook": lambda x, d, e, k: view_hook(x, d),
    "data_write": lambda x, d, e, k: data_write(x, d),
    "late_leaf": lambda x, d, e, k: late_leaf(x, d),
}

TABLES = {"views": VIEWS, "writes": WRITES, "integers": INTEGERS, "math": MATH, "graph": GRAPH}


def call(x: Any, table: str, name: str, d: int, e: int, k: int) -> Any:
    """Run an idiom."""
    return TABLES[table][name](x, d, e, k)


def _drawn(g: Any, x: Any, table: str) -> Any:
    n = max(len(g.shape(x)), 1)
    name = g.pick(list(TABLES[table]))
    return "tests.fuzz.graph_idioms:call", (x, table, name, g.int(-n, n - 1), g.int(-n, n - 1), g.int(1, 3))


@op("idioms of views")
def view_idiom(g, x):
    return _drawn(g, x, "views")


@op("idioms of writes")
def write_idiom(g, x):
    return _drawn(g, x, "writes")


@op("idioms of integers")
def integer_idiom(g, x):
    return _drawn(g, x, "integers")


@op("idioms of math")
def math_idiom(g, x):
    return _drawn(g, x, "math")


@op("graph")
def graph_idiom(g, x):
    return _drawn(g, x, "graph")
