"""Largest and smallest elements, and where they are. Indices are global, and ties go where torch lets them go.

The extreme of the ranks' extremes is one small all-reduce; an index is a second one. The gradient of a value goes to
the one element that was chosen (`max(dim)`) or is shared among all equals on all ranks (`amax`, `max()`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._compat import function_apply
from ..comm import moves, wire
from ..comm.moves import Groups
from ..dispatch import rule
from ..layout import Layout
from ..plan import Operand, Plan, groups
from .across import after_reduction, cutting, extreme_of, probe, reduced_dims, settled
from .align import align

NOWHERE = torch.iinfo(torch.int64).max


def least(dtype: torch.dtype, op: str) -> bool | int | float:
    """What an empty piece answers: no element is beyond it."""
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def local_extreme(input: Tensor, dims: Sequence[int], op: str) -> Tensor:
    """This piece's extreme along `dims`, which stay as 1."""
    if all(input.shape[d] for d in dims):
        return getattr(input.detach(), "a" + op)(dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(input.shape)]
    return input.new_full(shape, least(input.dtype, op))


class _Shared(torch.autograd.Function):
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
            count = wire.all_reduce(count, group)
        return moves.enter([grad], over)[0] * chosen / count, None, None, None, None


def shared_extreme(input: Tensor, dims: Sequence[int], over: Groups, op: str, nans: bool = False) -> Tensor:
    """The extreme along `dims` (kept as 1) over all ranks of `over`. `nans`: NaNs are equals too, as for `max()`."""
    value = extreme_of(local_extreme(input, dims, op), over, op)
    return _Shared.apply(input, value, tuple(dims), over, nans)


def global_index(layout: Layout, dims: Sequence[int], at: Tensor) -> Tensor:
    """Positions in this rank's (flattened) part of `dims` as positions in the whole."""
    found, stride = torch.zeros_like(at), 1
    for f in reversed([f for d in dims for f in layout.dims[d]]):
        length = layout.factor_length(f)
        start = sum(f.lengths[: layout.index(f.axes)]) if f.axes else 0
        found = found + (at % length + start) * stride
        at, stride = at // length, stride * f.size
    return found


def chosen_extreme(input: Tensor, dim: int, layout: Layout, dims: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """The extreme along `dim` (kept as 1), which is the dims `dims` of the layout, and the first place it is at."""
    over = groups(layout, cutting(layout, dims))
    if input.shape[dim]:
        value, at = getattr(torch, op)(input, dim, keepdim=True)
        index = global_index(layout, dims, at)
    else:
        value = input.sum(dim, keepdim=True).to(input.dtype) + least(input.dtype, op)  # in the graph, like the others'
        index = torch.full_like(value, NOWHERE, dtype=torch.int64)
    best = extreme_of(value, over, op)
    mine = (value == best) | ((value != value) & (best != best))
    first = extreme_of(torch.where(mine, index, NOWHERE), over, "min")
    part = torch.where(mine & (index == first), value, torch.zeros_like(value))
    return settled(part, best, over), first


def _pair(fn_name: str, pair: tuple[Tensor, Tensor]) -> tuple:
    return getattr(torch.return_types, fn_name)(pair)


@rule("max", "min", merged=True)
def extreme(input: Operand, dim=None, keepdim=False, *, other=None, fn):
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
    over = groups(layout, cutting(layout, dims))
    if dim is None:
        probe(fn, input)
        whole = lambda input: shared_extreme(input, dims, over, op, nans=True).reshape(())  # noqa: E731
        return Plan(local=whole if over else lambda input: fn(input), layout=after_reduction(layout, dims, False, None))
    probe(fn, input, dim=dim, keepdim=keepdim)

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        pair = chosen_extreme(input, dims[0], layout, dims, op)
        return _pair(op, pair if keepdim else tuple(t.squeeze(dims[0]) for t in pair))

    result = after_reduction(layout, dims, keepdim, None)
    return Plan(local=local, layout=(result, result))


@rule("amax", "amin", merged=True)
def amax(input: Operand, dim=(), keepdim=False, *, fn):
    """One all-reduce of the ranks' extremes."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = groups(layout, cutting(layout, dims))
    result = after_reduction(layout, dims, keepdim, None)

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        return shared_extreme(input, dims, over, fn.__name__[1:]).reshape(result.local_shape)

    return Plan(local=local, layout=result)


@rule("aminmax", merged=True)
def aminmax(input: Operand, *, dim=None, keepdim=False, fn):
    """Both in one message: the smallest is the largest in reverse order."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = groups(layout, cutting(layout, dims))
    result = after_reduction(layout, dims, keepdim, None)
    reverse = torch.neg if input.dtype.is_floating_point else torch.bitwise_not

    def local(input):
        if not over:
            return fn(input, dim=dim, keepdim=keepdim)
        parts = torch.stack([reverse(local_extreme(input, dims, "min")), local_extreme(input, dims, "max")])
        low, high = extreme_of(parts, over, "max").unbind()
        found = [_Shared.apply(input, value, dims, over, False) for value in (reverse(low), high)]
        return _pair("aminmax", tuple(t.reshape(result.local_shape) for t in found))

    return Plan(local=local, layout=(result, result))


@rule("argmax", "argmin", merged=True)
def argmax(input: Operand, dim=None, keepdim=False, *, fn):
    """The first place of the extreme; of all elements, its place in the flattened whole."""
    probe(fn, input, dim=dim, keepdim=keepdim)
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    cut = cutting(layout, dims)
    result = after_reduction(layout, dims, keepdim, None)

    def local(input):
        if not cut:
            return fn(input, dim=dim, keepdim=keepdim)
        flat, at = (input.reshape(-1), 0) if dim is None else (input, dims[0])
        return chosen_extreme(flat.detach(), at, layout, dims, fn.__name__[3:])[1].reshape(result.local_shape)

    return Plan(local=local, layout=result)
