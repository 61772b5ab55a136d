"""Maxima and minima with their global indices. Ties are resolved as torch resolves them.

The extreme over all ranks takes one small all_reduce of the local extremes, and its index takes a second. The gradient
flows to the selected element (`max(dim)`), or is divided among all equal elements on all ranks (`amax`, `max()`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._compat import function_apply
from ..._compat.autocast import stack
from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import Layout
from .._common.broadcast import align
from .._common.probe import probe
from .common import (
    all_reduce_minmax,
    keep_result_sharded,
    known_sum,
    reduced_dims,
    reduced_layout,
    sharding_axes,
)

NO_INDEX = torch.iinfo(torch.int64).max


def reduction_identity(dtype: torch.dtype, op: str) -> bool | int | float:
    """Return the identity of max or min, the local extreme of an empty shard."""
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def local_minmax(input: Tensor, dims: Sequence[int], op: str) -> Tensor:
    """Return the extreme of the local tensor along `dims`, which are kept as 1."""
    if all(input.shape[d] for d in dims):
        return getattr(input.detach(), "a" + op)(dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(input.shape)]
    return input.new_full(shape, reduction_identity(input.dtype, op))


class _GlobalMinMax(torch.autograd.Function):
    """Attach `value`, the global extreme of `input` along `dims`, to the graph: equal elements share its gradient."""

    apply = function_apply

    @staticmethod
    def forward(ctx, input, value, dims, over, nans):
        ctx.options = dims, over, nans
        ctx.save_for_backward(input, value)
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        dims, over, nans = ctx.options
        input, value = ctx.saved_tensors
        chosen = input == value
        if nans:
            chosen = chosen | (input.isnan() & value.isnan())
        count = chosen.sum(dims, keepdim=True)
        for group in over:
            count = collectives.all_reduce(count, group)
        return autograd_collectives.replicate_in([grad], over)[0] * chosen / count, None, None, None, None


def global_minmax(input: Tensor, dims: Sequence[int], over: Groups, op: str, match_nan: bool = False) -> Tensor:
    """Return the extreme along `dims` (kept as 1) over all ranks of `over`.

    match_nan: NaNs count as equal, so that they share the gradient, as for `max()`.
    """
    value = all_reduce_minmax(local_minmax(input, dims, op), over, op)
    return _GlobalMinMax.apply(input, value, tuple(dims), over, match_nan)


def to_global_index(layout: Layout, dims: Sequence[int], at: Tensor) -> Tensor:
    """Convert indices into the local tensor's (flattened) `dims` to global indices."""
    found, stride = torch.zeros_like(at), 1
    for f in reversed([f for d in dims for f in layout.dims[d]]):
        length = layout.local_size_of(f)
        start = sum(f.shard_sizes[: layout.index(f.axes)]) if f.axes else 0
        found = found + (at % length + start) * stride
        at, stride = at // length, stride * f.size
    return found


def minmax_with_index(input: Tensor, dim: int, layout: Layout, dims: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """Return the global extreme along `dim` (kept as 1), which is `dims` of the layout, and its first global index."""
    over = process_groups(layout, sharding_axes(layout, dims))
    if input.shape[dim]:
        value, at = getattr(torch, op)(input, dim, keepdim=True)
        index = to_global_index(layout, dims, at)
    else:
        # The sum keeps the input in the graph: all ranks must send the messages of backward.
        value = input.sum(dim, keepdim=True).to(input.dtype) + reduction_identity(input.dtype, op)
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
    """Plan max or min of two tensors, along a dim, or of all elements."""
    op = fn.__name__
    if isinstance(dim, Operand):
        other = dim
    if other is not None:
        aligned = align((input.layout, other.layout))
        name = "dim" if isinstance(dim, Operand) else "other"
        targets = dict(zip(("input", name), aligned.targets, strict=True))
        both = torch.maximum if op == "max" else torch.minimum
        probe(both, input, other)
        return Plan(local=lambda *pair: both(*pair), takes=("input", name), operands=targets, layout=aligned.result)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    if dim is None:
        probe(fn, input)
        reduced = lambda input: global_minmax(input, dims, over, op, match_nan=True).reshape(())  # noqa: E731
        result = reduced_layout(layout, dims, False, None)
        return Plan(local=reduced if over else lambda input: fn(input), layout=result)
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = keep_result_sharded(layout, dims)
    over = process_groups(layout, sharding_axes(layout, dims))

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        pair = minmax_with_index(input, dims[0], layout, dims, op)
        return _named_result(op, pair if keepdim else tuple(t.squeeze(dims[0]) for t in pair))

    result = reduced_layout(layout, dims, keepdim, None)
    return Plan(local=local, layout=(result, result), operands={"input": layout})


@rule("amax", "amin", merged=True)
def amax(input: Operand, dim=(), keepdim=False, *, fn):
    """All-reduce the local extremes."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    dims = reduced_dims(input.ndim, dim)
    layout = keep_result_sharded(input.layout, dims)
    over = process_groups(layout, sharding_axes(layout, dims))
    result = reduced_layout(layout, dims, keepdim, None)

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        return global_minmax(input, dims, over, fn.__name__[1:]).reshape(result.local_shape)

    return Plan(local=local, layout=result, operands={"input": layout})


@rule("aminmax", merged=True)
def aminmax(input: Operand, *, dim=None, keepdim=False, fn):
    """All-reduce both in one message: the minimum is the maximum of the reversed order."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    result = reduced_layout(layout, dims, keepdim, None)
    reverse = torch.neg if input.dtype.is_floating_point else torch.bitwise_not

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        parts = stack([reverse(local_minmax(input, dims, "min")), local_minmax(input, dims, "max")])
        low, high = all_reduce_minmax(parts, over, "max").unbind()
        found = [_GlobalMinMax.apply(input, value, dims, over, False) for value in (reverse(low), high)]
        return _named_result("aminmax", tuple(t.reshape(result.local_shape) for t in found))

    return Plan(local=local, layout=(result, result))


@rule("argmax", "argmin", merged=True)
def argmax(input: Operand, dim=None, keepdim=False, *, fn):
    """Return the first index of the extreme; without `dim`, its index in the flattened global tensor."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    sharded = sharding_axes(layout, dims)
    result = reduced_layout(layout, dims, keepdim, None)

    def local(input):
        if not sharded:
            return fn(input, dim=dim, keepdim=keepdim)
        flat, at = (input.reshape(-1), 0) if dim is None else (input, dims[0])
        return minmax_with_index(flat.detach(), at, layout, dims, fn.__name__[3:])[1].reshape(result.local_shape)

    return Plan(local=local, layout=result)
