"""einsum and tensordot: any contraction, by any equation; and the functions opt_einsum asks a tensor's package for."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import handler, rule
from ..execute import planned
from ..layout import Layout
from ..plan import Operand, Plan
from ..tensor import ShardTensor
from .contract import Label, contract
from .product import checked, term


def labelled(equation: str, ndims: Sequence[int]) -> tuple[list[list[Label]], list[Label]]:
    """The labels of every operand's dims and of the result's, as torch reads a valid equation.

    Dims under an ellipsis are numbered from the right: -1, -2, ... Without an arrow the result has the ellipsis and
    then every letter that occurs once, in the order of the alphabet.

    >>> labelled("...ij,jk", [3, 2])
    ([[-1, 'i', 'j'], ['j', 'k']], [-1, 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    rows: list[list[Label]] = []
    widest = 0
    for text, ndim in zip(left.split(","), ndims, strict=True):
        count = ndim - len(text.replace("...", ""))
        if "..." in text:
            widest = max(widest, count)
        rows.append(_row(text, count))
    if not arrow:
        letters = Counter(c for c in left if c in string.ascii_letters)
        right = "..." + "".join(sorted(c for c, n in letters.items() if n == 1))
    return rows, _row(right, widest)


def _row(text: str, hidden: int) -> list[Label]:
    before, dots, after = text.partition("...")
    return [*before, *(range(-hidden, 0) if dots else ()), *after]


@handler("einsum")
def einsum(func, types, args, kwargs):
    """A Partial that meets a table: what is constant and what is learned, layouts do not tell."""
    tables: tuple[int, ...] = ()
    written = isinstance(args[0], str) and all(isinstance(x, Tensor) for x in args[1:])  # not as lists of dims
    if written and any(x.__class__ is ShardTensor and x._layout.partial for x in args[1:]):
        tables = tuple(i for i, x in enumerate(args[1:]) if x.__class__ is Tensor and not x.requires_grad)
    return _run_einsum(func, types, args, {**kwargs, "tables": tables} if tables else kwargs)


def _einsum(equation: str, *operands: Operand, tables: Sequence[int] = (), fn):
    """One label is divided by each mesh axis in all operands at once; each rank contracts what it has."""
    if not all(isinstance(x, Operand) for x in operands):
        return None
    checked(fn, equation, *operands)
    rows, out = labelled(equation, [x.ndim for x in operands])
    terms = [term(x, row) for x, row in zip(operands, rows, strict=True)]
    work = contract(terms, out, broadcast=True, tables=tables)
    narrows = [_diagonal(row, target) for row, target in zip(rows, work.targets, strict=True)]

    def local(operands: Sequence[Tensor]) -> Tensor:
        if any(narrows):
            operands = [_narrowed(t, n) for t, n in zip(operands, narrows, strict=True)]
        return fn(equation, *operands)

    return Plan(local=local, operands={"operands": work.targets}, layout=work.result)


_run_einsum = planned(_einsum, partial=True, merged=True)


def _diagonal(row: Sequence[Label], target: Layout) -> list[tuple[int, int, int]]:
    """A label twice on one operand is its diagonal: a rank that has some rows needs those columns only."""
    found = []
    for dim, label in enumerate(row):
        if row.count(label) > 1:
            holder = next((d for d, x in enumerate(row) if x == label and target.axes_of(d)), dim)
            if holder != dim:
                span = target.span(holder)
                found.append((dim, span.start, span.stop - span.start))
    return found


def _narrowed(tensor: Tensor, pieces: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, start, length in pieces:
        tensor = tensor.narrow(dim, start, length)
    return tensor


@rule("tensordot", partial=True, merged=True)
def tensordot(a: Operand, b: Operand, dims: Any = 2, dims_other: Any = None, *, fn):
    """Called as torch.tensordot is, or with two lists of dims as the function below it is."""
    if isinstance(dims, Operand):
        return None  # the dims are data
    if dims_other is not None:
        dims = dims, dims_other
    checked(torch.tensordot, a, b, dims)
    over = dims if isinstance(dims, (list, tuple)) else (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    first = [d % a.ndim for d in ([over[0]] if isinstance(over[0], int) else over[0])]
    second = [d % b.ndim for d in ([over[1]] if isinstance(over[1], int) else over[1])]
    left: list[Label] = [f"a{d}" for d in range(a.ndim)]
    right: list[Label] = [f"b{d}" for d in range(b.ndim)]
    for i, (d, e) in enumerate(zip(first, second, strict=True)):
        left[d] = right[e] = i
    out = [label for label in (*left, *right) if isinstance(label, str)]
    work = contract([term(a, left), term(b, right)], out)
    return Plan(
        local=lambda a, b: torch.tensordot(a, b, (first, second)),
        operands=dict(zip(("a", "b"), work.targets, strict=True)),
        layout=work.result,
    )
