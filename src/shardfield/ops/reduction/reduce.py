"""Sums, means, products, any and all. Each rank reduces its shard; sums stay Partial until their value is needed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..._compat.autocast import stack
from ...comm import autograd_collectives, collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...redistribute import without_partial
from .._common.autocast import HALF_DTYPES
from .._common.probe import probe
from .common import gather_stacked, reduced_dims, reduced_layout, sharding_axes


def _linear_layout(input: Operand, result: torch.dtype):
    """Return the operand's layout for a linear reduction, which can be applied to partial sums.

    Partial sums of integers are not: rounded to floating point they may cancel and lose all digits.
    """
    layout = input.layout
    exact = result.is_floating_point <= (input.dtype.is_floating_point or input.dtype.is_complex)
    return layout if exact and all(op == "sum" for _, op in layout.partial) else without_partial(layout)


@rule("sum", "nansum", partial=True, merged=True)
def sum_nansum(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """Sum the local shard; the result is Partial over the axes that shard a summed dim."""
    result = probe(fn, input, dim=dim, keepdim=keepdim if dim is not None else None, dtype=dtype).dtype
    layout = without_partial(input.layout) if fn.__name__ == "nansum" else _linear_layout(input, result)
    dims = reduced_dims(layout.ndim, dim)
    return Plan(
        local=local_reduction(fn, layout.ndim, dims, keepdim, dtype),
        operands={"input": layout},
        layout=reduced_layout(layout, dims, keepdim),
        unshared=True,
    )


def local_reduction(
    fn: Callable, ndim: int, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> Callable:
    """Return `fn` over `dims` with as few arguments as possible: torch parses each of them at every call."""
    if dtype is not None:
        return lambda input: fn(input, dim=dims, keepdim=keepdim, dtype=dtype) if ndim else fn(input, dtype=dtype)
    if not ndim or (len(dims) == ndim and not keepdim):
        return lambda input: fn(input)
    over = dims[0] if len(dims) == 1 else dims
    return (lambda input: fn(input, over, True)) if keepdim else lambda input: fn(input, over)


@rule("mean", partial=True, merged=True)
def mean(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """Sum the local shard and divide by the global count: exact for uneven and empty shards."""
    result = probe(fn, input, dim=dim, keepdim=keepdim if dim is not None else None, dtype=dtype).dtype
    layout = _linear_layout(input, result)
    dims = reduced_dims(layout.ndim, dim)
    count = math.prod(layout.shape[d] for d in dims)
    # Half precision is divided before it is rounded, as in torch's kernel.
    wide = torch.float32 if result in HALF_DTYPES else result

    def divided(input):
        return (input.sum(dim=dims, keepdim=keepdim, dtype=wide) / count).to(result)

    by_count = count and sharding_axes(layout, dims)  # the mean of no elements is NaN, and its derivatives are not
    return Plan(
        local=divided if by_count else local_reduction(fn, layout.ndim, dims, keepdim, dtype),
        operands={"input": layout},
        layout=reduced_layout(layout, dims, keepdim),
        unshared=True,
    )


@rule("nanmean", merged=True)
def nanmean(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """All-reduce the sum and the count of elements that are not NaN, in one message."""
    result = probe(fn, input, dim=dim, keepdim=keepdim, dtype=dtype).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    wide = torch.float32 if result in HALF_DTYPES else result

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim, dtype=dtype)
        total = input.nansum(dims, keepdim=keepdim, dtype=wide)
        count = input.isnan().logical_not().sum(dims, keepdim=keepdim)
        total, count = autograd_collectives.reduce(stack([total, count.to(wide)]), over).unbind()
        return (total / count).to(result)

    return Plan(local=local, layout=reduced_layout(layout, dims, keepdim, None))


@rule("prod", merged=True)
def prod(input: Operand, dim=None, keepdim=False, *, dtype=None, fn):
    """Gather every rank's product and multiply them: the gradient is right even if one of them is zero."""
    options = {} if dim is None else {"dim": dim, "keepdim": keepdim}
    result = probe(fn, input, **options, dtype=dtype).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    axes = sharding_axes(layout, dims)

    def local(input):
        if not axes:
            return fn(input, **options, dtype=dtype)
        part = fn(input, **options, dtype=torch.float32 if result in HALF_DTYPES else dtype)
        return gather_stacked(part, layout, axes).prod(0).to(result)

    return Plan(local=local, layout=reduced_layout(layout, dims, keepdim and dim is not None, None))


# What torch.distributions calls to validate arguments and samples.
_UNDERSCORED = {"_is_any_true": torch.any, "_is_all_true": torch.all}


@rule("any", "all", *_UNDERSCORED, merged=True)
def any_all(input: Operand, dim=None, keepdim=False, *, fn):
    """Reduce locally, then all-reduce the result."""
    probe(fn, input, dim=dim, keepdim=keepdim if dim is not None else None)
    fn = _UNDERSCORED.get(fn.__name__, fn)
    layout = input.layout
    if dim is not None and not isinstance(dim, int) and not len(dim):  # torch reduces no dim here
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
    """Count in the local shard; the result is Partial."""
    probe(fn, input, dim=dim)
    dims = reduced_dims(input.ndim, dim)
    return Plan(
        local=lambda input: fn(input, dim=dims) if dims else fn(input),
        layout=reduced_layout(input.layout, dims, False),
    )
