"""einsum and tensordot: contractions of any equation, planned by `contraction_strategy`."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import handler, rule
from ...layout import Layout
from ...tensor import ShardTensor
from ...trace_state import is_plain
from .._common.probe import probe
from .contraction_strategy import Label, plan_contraction
from .matmul import make_term


def parse_equation(equation: str, ndims: Sequence[int]) -> tuple[list[list[Label]], list[Label]]:
    """Return the labels of every operand's dims and of the result's dims, as torch parses a valid equation.

    Dims under an ellipsis are numbered from the right: -1, -2, ... Without an arrow the result has the ellipsis and
    then every letter that occurs once, in alphabetical order.

    >>> parse_equation("...ij,jk", [3, 2])
    ([[-1, 'i', 'j'], ['j', 'k']], [-1, 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    rows: list[list[Label]] = []
    widest = 0
    for text, ndim in zip(left.split(","), ndims, strict=True):
        count = ndim - len(text.replace("...", ""))
        if "..." in text:
            widest = max(widest, count)
        rows.append(_parse_labels(text, count))
    if not arrow:
        letters = Counter(c for c in left if c in string.ascii_letters)
        right = "..." + "".join(sorted(c for c, n in letters.items() if n == 1))
    return rows, _parse_labels(right, widest)


def _parse_labels(text: str, ellipsis_dims: int) -> list[Label]:
    before, dots, after = text.partition("...")
    return [*before, *(range(-ellipsis_dims, 0) if dots else ()), *after]


@handler("einsum")
def einsum(func, types, args, kwargs):
    """Pass the positions of constant operands to the planner if an operand is Partial; layouts do not show them."""
    constants: tuple[int, ...] = ()
    # The form with lists of dims has no equation string.
    has_equation = isinstance(args[0], str) and all(isinstance(x, Tensor) for x in args[1:])
    if has_equation and any(x.__class__ is ShardTensor and x._layout.partial for x in args[1:]):
        constants = tuple(i for i, x in enumerate(args[1:]) if is_plain(x) and not x.requires_grad)
    return _run_einsum(func, types, args, {**kwargs, "constants": constants} if constants else kwargs)


def _plan_einsum(equation: str, *operands: Operand, constants: Sequence[int] = (), fn):
    """Shard one label per mesh axis in all operands and contract the local tensors."""
    if not all(isinstance(x, Operand) for x in operands):
        return None
    # Under autocast einsum multiplies in half precision only where a contracted dim has more than one element, which a
    # shard may not have: ranks would send different dtypes.
    dtype = probe(fn, equation, *operands).dtype
    rows, out = parse_equation(equation, [x.ndim for x in operands])
    terms = [make_term(x, row) for x, row in zip(operands, rows, strict=True)]
    plan = plan_contraction(terms, out, broadcast=True, constants=constants, replaces=True)
    slices = [_diagonal_slices(row, target) for row, target in zip(rows, plan.targets, strict=True)]

    def local(operands: Sequence[Tensor]) -> Tensor:
        if any(slices):
            operands = [_narrow_all(t, n) for t, n in zip(operands, slices, strict=True)]
        return fn(equation, *operands).to(dtype)

    return Plan(local=local, operands={"operands": plan.targets}, layout=plan.result, saves_views=True)


_run_einsum = make_handler(_plan_einsum, partial=True, merged=True)


def _diagonal_slices(row: Sequence[Label], target: Layout) -> list[tuple[int, int, int]]:
    """Return the slices (dim, start, length) that reduce an operand with a repeated label to a diagonal block."""
    slices = []
    for dim, label in enumerate(row):
        if row.count(label) > 1:
            sharded_dim = next((d for d, x in enumerate(row) if x == label and target.axes_of(d)), dim)
            if sharded_dim != dim:
                span = target.span(sharded_dim)
                slices.append((dim, span.start, span.stop - span.start))
    return slices


def _narrow_all(tensor: Tensor, slices: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, start, length in slices:
        tensor = tensor.narrow(dim, start, length)
    return tensor


@rule("tensordot", partial=True, merged=True)
def tensordot(a: Operand, b: Operand, dims: Any = 2, dims_other: Any = None, *, fn):
    """Plan torch.tensordot, or the C function, which takes two lists of dims."""
    if isinstance(dims, Operand):
        return None  # the values of a tensor decide the dims
    if dims_other is not None:
        dims = dims, dims_other
    probe(torch.tensordot, a, b, dims)
    contracted = dims if isinstance(dims, (list, tuple)) else (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    first = [d % a.ndim for d in ([contracted[0]] if isinstance(contracted[0], int) else contracted[0])]
    second = [d % b.ndim for d in ([contracted[1]] if isinstance(contracted[1], int) else contracted[1])]
    left: list[Label] = [f"a{d}" for d in range(a.ndim)]
    right: list[Label] = [f"b{d}" for d in range(b.ndim)]
    for i, (d, e) in enumerate(zip(first, second, strict=True)):
        left[d] = right[e] = i
    out = [label for label in (*left, *right) if isinstance(label, str)]
    plan = plan_contraction([make_term(a, left), make_term(b, right)], out)
    return Plan(
        saves_views=True,
        local=lambda a, b: torch.tensordot(a, b, (first, second)),
        operands=dict(zip(("a", "b"), plan.targets, strict=True)),
        layout=plan.result,
    )
