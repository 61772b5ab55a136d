"""Reductions. What is cut along a reduced dim is reduced locally; sums stay Partial until someone needs them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...comm import autograd_collectives, collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from .._common.autocast import HALF_DTYPES
from .._common.probe import probe
from .common import gather_stacked, reduced_dims, reduced_layout, sharding_axes


def _linear_layout(input: Operand):
    """The operand's layout for a linear reduction: addends may stay addends."""
    layout = input.layout
    return layout if all(op == "sum" for _, op in layout.partial) else layout.with_partial(())


@rule("sum", "nansum", partial=True, merged=True)
def sum_nansum(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """Each rank sums what it has; the addends are Partial over the axes that cut a summed dim."""
    probe(fn, input, dim=dim, keepdim=keepdim if dim is not None else None, dtype=dtype)
    layout = input.layout.with_partial(()) if fn.__name__ == "nansum" else _linear_layout(input)
    dims = reduced_dims(layout.ndim, dim)
    return Plan(
        local=local_reduction(fn, layout.ndim, dims, keepdim, dtype),
        operands={"input": layout},
        layout=reduced_layout(layout, dims, keepdim),
    )


def local_reduction(
    fn: Callable, ndim: int, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> Callable:
    """`fn` over `dims`, with no more arguments than it needs: torch reads each anew at every call."""
    if dtype is not None:
        return lambda input: fn(input, dim=dims, keepdim=keepdim, dtype=dtype) if ndim else fn(input, dtype=dtype)
    if not ndim or (len(dims) == ndim and not keepdim):
        return lambda input: fn(input)
    over = dims[0] if len(dims) == 1 else dims
    return (lambda input: fn(input, over, True)) if keepdim else lambda input: fn(input, over)


@rule("mean", partial=True, merged=True)
def mean(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """A sum over what each rank has, divided by the global count: exact for uneven and empty pieces."""
    result = probe(fn, input, dim=dim, keepdim=keepdim if dim is not None else None, dtype=dtype).dtype
    layout = _linear_layout(input)
    dims = reduced_dims(layout.ndim, dim)
    count = math.prod(layout.shape[d] for d in dims)
    # half precision: the quotient is taken before rounding, as torch does inside its kernel
    wide = torch.float32 if result in HALF_DTYPES else result

    def divided(input):
        return (input.sum(dim=dims, keepdim=keepdim, dtype=wide) / count).to(result)

    return Plan(
        local=divided if sharding_axes(layout, dims) else local_reduction(fn, layout.ndim, dims, keepdim, dtype),
        operands={"input": layout},
        layout=reduced_layout(layout, dims, keepdim),
    )


@rule("nanmean", merged=True)
def nanmean(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """Sum and count of what is a number, in one message."""
    result = probe(fn, input, dim=dim, keepdim=keepdim, dtype=dtype).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    wide = torch.float32 if result in HALF_DTYPES else result

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim, dtype=dtype)
        added = input.nansum(dims, keepdim=keepdim, dtype=wide)
        count = input.isnan().logical_not().sum(dims, keepdim=keepdim)
        added, counted = autograd_collectives.reduce(torch.stack([added, count.to(wide)]), over).unbind()
        return (added / counted).to(result)

    return Plan(local=local, layout=reduced_layout(layout, dims, keepdim, None))


@rule("prod", merged=True)
def prod(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """The product of every rank's product: taken from all of them, so that its gradient is right where one is zero."""
    how = {} if dim is None else {"dim": dim, "keepdim": keepdim}
    result = probe(fn, input, **how, dtype=dtype).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    axes = sharding_axes(layout, dims)

    def local(input):
        if not axes:
            return fn(input, **how, dtype=dtype)
        part = fn(input, **how, dtype=torch.float32 if result in HALF_DTYPES else dtype)
        return gather_stacked(part, layout, axes).prod(0).to(result)

    return Plan(local=local, layout=reduced_layout(layout, dims, keepdim and dim is not None, None))


@rule("any", "all", merged=True)
def any_all(input: Operand, dim=None, keepdim=False, *, fn):
    """True where any rank, or every rank, says so."""
    probe(fn, input, dim=dim, keepdim=keepdim if dim is not None else None)
    layout = input.layout
    if dim is not None and not isinstance(dim, int) and not len(dim):  # here torch reduces nothing
        return Plan(local=lambda input: fn(input, dim=dim, keepdim=keepdim), layout=layout)
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    op = "max" if fn.__name__ == "any" else "min"

    def local(input):
        found = fn(input, dim=dims, keepdim=keepdim) if dims else fn(input)
        for group in over:
            found = collectives.all_reduce(found, group, op)
        return found

    return Plan(local=local, layout=reduced_layout(layout, dims, keepdim, None))


@rule("count_nonzero", merged=True)
def count_nonzero(input: Operand, dim=None, *, fn):
    """Each rank counts what it has."""
    probe(fn, input, dim=dim)
    dims = reduced_dims(input.ndim, dim)
    return Plan(
        local=lambda input: fn(input, dim=dims) if dims else fn(input),
        layout=reduced_layout(input.layout, dims, False),
    )
