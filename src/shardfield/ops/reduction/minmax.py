"""Largest and smallest elements, and where they are. Indices are global, and ties go where torch lets them go.

The extreme of the ranks' extremes is one small all-reduce; an index is a second one. The gradient of a value goes to
the one element that was chosen (`max(dim)`) or is shared among all equals on all ranks (`amax`, `max()`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._compat import function_apply
from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import Layout
from .._common.broadcast import align
from .._common.probe import probe
from .common import all_reduce_minmax, known_sum, reduced_dims, reduced_layout, sharding_axes

NO_INDEX = torch.iinfo(torch.int64).max


def reduction_identity(dtype: torch.dtype, op: str) -> bool | int | float:
    """What an empty piece answers: no element is beyond it."""
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def local_minmax(input: Tensor, dims: Sequence[int], op: str) -> Tensor:
    """This piece's extreme along `dims`, which stay as 1."""
    if all(input.shape[d] for d in dims):
        return getattr(input.detach(), "a" + op)(dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(input.shape)]
    return input.new_full(shape, reduction_identity(input.dtype, op))


class _GlobalMinMax(torch.autograd.Function):
    """A known extreme `value` of `input` along `dims`; its gradient is shared among the equals on all ranks."""

    apply = function_apply

    @staticmethod
    def forward(ctx, input, value, dims, over, nans):
        ctx.how = dims, over, nans
        ctx.save_for_backward(input, value)
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        dims, over, nans = ctx.how
        input, value = ctx.saved_tensors
        chosen = input == value
        if nans:
            chosen = chosen | (input.isnan() & value.isnan())
        count = chosen.sum(dims, keepdim=True)
        for group in over:
            count = collectives.all_reduce(count, group)
        return autograd_collectives.replicate_in([grad], over)[0] * chosen / count, None, None, None, None


def global_minmax(input: Tensor, dims: Sequence[int], over: Groups, op: str, match_nan: bool = False) -> Tensor:
    """The extreme along `dims` (kept as 1) over all ranks of `over`. `match_nan`: NaNs are equals too, as for
    `max()`."""
    value = all_reduce_minmax(local_minmax(input, dims, op), over, op)
    return _GlobalMinMax.apply(input, value, tuple(dims), over, match_nan)


def to_global_index(layout: Layout, dims: Sequence[int], at: Tensor) -> Tensor:
    """Positions in this rank's (flattened) part of `dims` as positions in the whole."""
    found, stride = torch.zeros_like(at), 1
    for f in reversed([f for d in dims for f in layout.dims[d]]):
        length = layout.local_size_of(f)
        start = sum(f.shard_sizes[: layout.index(f.axes)]) if f.axes else 0
        found = found + (at % length + start) * stride
        at, stride = at // length, stride * f.size
    return found


def minmax_with_index(input: Tensor, dim: int, layout: Layout, dims: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """The extreme along `dim` (kept as 1), which is the dims `dims` of the layout, and the first place it is at."""
    over = process_groups(layout, sharding_axes(layout, dims))
    if input.shape[dim]:
        value, at = getattr(torch, op)(input, dim, keepdim=True)
        index = to_global_index(layout, dims, at)
    else:
        value = input.sum(dim, keepdim=True).to(input.dtype) + reduction_identity(
            input.dtype, op
        )  # in the graph, like the others'
        index = torch.full_like(value, NO_INDEX, dtype=torch.int64)
    best = all_reduce_minmax(value, over, op)
    mine = (value == best) | ((value != value) & (best != best))
    first = all_reduce_minmax(torch.where(mine, index, NO_INDEX), over, "min")
    part = torch.where(mine & (index == first), value, torch.zeros_like(value))
    return known_sum(part, best, over), first


def _named_result(fn_name: str, pair: tuple[Tensor, Tensor]) -> tuple:
    return getattr(torch.return_types, fn_name)(pair)


@rule("max", "min", merged=True)
def max_min(input: Operand, dim=None, keepdim=False, *, other=None, fn):
    """The three meanings of max and min: of two tensors, along a dim, of all elements."""
    op = fn.__name__
    if isinstance(dim, Operand):
        other = dim
    if other is not None:
        how = align((input.layout, other.layout))
        name = "dim" if isinstance(dim, Operand) else "other"
        moved = dict(zip(("input", name), how.targets, strict=True))
        both = torch.maximum if op == "max" else torch.minimum
        probe(both, input, other)
        return Plan(local=lambda *pair: both(*pair), takes=("input", name), operands=moved, layout=how.result)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    if dim is None:
        probe(fn, input)
        whole = lambda input: global_minmax(input, dims, over, op, match_nan=True).reshape(())  # noqa: E731
        return Plan(local=whole if over else lambda input: fn(input), layout=reduced_layout(layout, dims, False, None))
    probe(fn, input, dim=dim, keepdim=keepdim)

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        pair = minmax_with_index(input, dims[0], layout, dims, op)
        return _named_result(op, pair if keepdim else tuple(t.squeeze(dims[0]) for t in pair))

    result = reduced_layout(layout, dims, keepdim, None)
    return Plan(local=local, layout=(result, result))


@rule("amax", "amin", merged=True)
def amax(input: Operand, dim=(), keepdim=False, *, fn):
    """One all-reduce of the ranks' extremes."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    result = reduced_layout(layout, dims, keepdim, None)

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        return global_minmax(input, dims, over, fn.__name__[1:]).reshape(result.local_shape)

    return Plan(local=local, layout=result)


@rule("aminmax", merged=True)
def aminmax(input: Operand, *, dim=None, keepdim=False, fn):
    """Both in one message: the smallest is the largest in reverse order."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    result = reduced_layout(layout, dims, keepdim, None)
    reverse = torch.neg if input.dtype.is_floating_point else torch.bitwise_not

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        parts = torch.stack([reverse(local_minmax(input, dims, "min")), local_minmax(input, dims, "max")])
        low, high = all_reduce_minmax(parts, over, "max").unbind()
        found = [_GlobalMinMax.apply(input, value, dims, over, False) for value in (reverse(low), high)]
        return _named_result("aminmax", tuple(t.reshape(result.local_shape) for t in found))

    return Plan(local=local, layout=(result, result))


@rule("argmax", "argmin", merged=True)
def argmax(input: Operand, dim=None, keepdim=False, *, fn):
    """The first place of the extreme; of all elements, its place in the flattened whole."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    cut = sharding_axes(layout, dims)
    result = reduced_layout(layout, dims, keepdim, None)

    def local(input):
        if not cut:
            return fn(input, dim=dim, keepdim=keepdim)
        flat, at = (input.reshape(-1), 0) if dim is None else (input, dims[0])
        return minmax_with_index(flat.detach(), at, layout, dims, fn.__name__[3:])[1].reshape(result.local_shape)

    return Plan(local=local, layout=result)
