"""Reductions. What is cut along a reduced dim is reduced locally and stays Partial until someone needs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dispatch import rule
from ..layout import Factor, Layout
from ..plan import Operand, Plan


def reduced_dims(ndim: int, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The dims a reduction runs over, as torch reads its `dim` argument (None and () mean all)."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {d})")
    return tuple(d % ndim for d in dims) if ndim else ()


def after_reduction(layout: Layout, dims: Sequence[int], keepdim: bool, op: str | None = "sum") -> Layout:
    """The result's layout: reduced dims gone (or 1 long), Partial(op) over the axes that cut them (op None: reduced)."""
    axes = [a for d in dims for a in layout.axes_of(d)]
    partial = [*layout.partial, *((a, op) for a in axes)] if op else layout.partial
    whole = [(Factor(1),) if d in dims else f for d, f in enumerate(layout.dims) if keepdim or d not in dims]
    return Layout.make(layout.mesh, whole, partial)


@rule("sum", "nansum", partial=True, merged=True)
def total(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """Each rank sums what it has; the addends are Partial over the axes that cut a summed dim."""
    layout = input.layout
    if layout.partial and (fn.__name__ == "nansum" or any(op != "sum" for _, op in layout.partial)):
        layout = layout.with_partial(())
    dims = reduced_dims(layout.ndim, dim)
    out = after_reduction(layout, dims, keepdim)
    return Plan(
        local=lambda input: fn(input, dim=dims, keepdim=keepdim, dtype=dtype) if dims else fn(input, dtype=dtype),
        operands={"input": layout},
        layout=out,
    )


@rule("mean", partial=True, merged=True)
def mean(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """A sum over what each rank has, divided by the global count: exact for uneven and empty pieces."""
    layout = input.layout if all(op == "sum" for _, op in input.layout.partial) else input.layout.with_partial(())
    dims = reduced_dims(layout.ndim, dim)
    if not any(layout.is_cut(d) for d in dims):
        local = lambda input: fn(input, dim=dims, keepdim=keepdim, dtype=dtype) if dims else fn(input, dtype=dtype)  # noqa: E731
    else:
        if not (dtype or input.dtype).is_floating_point and not (dtype or input.dtype).is_complex:
            return None  # torch's own error
        count = 1
        for d in dims:
            count *= layout.shape[d]

        def local(input):
            # half precision: the quotient is taken before rounding, as torch does inside its kernel
            wide = torch.float32 if (dtype or input.dtype) in (torch.float16, torch.bfloat16) else dtype
            return (input.sum(dim=dims, keepdim=keepdim, dtype=wide) / count).to(dtype or input.dtype)

    return Plan(local=local, operands={"input": layout}, layout=after_reduction(layout, dims, keepdim))
