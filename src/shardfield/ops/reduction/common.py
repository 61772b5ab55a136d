"""Dims, layouts and messages that reductions share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import runtime
from ..._compat import function_apply
from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import process_groups
from ...layout import DimSharding, Layout
from .._common.blockwise import move_shard_off


def reduced_dims(ndim: int, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the reduced dims, sorted, for torch's `dim` argument (None and () mean all dims)."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {d})")
    return tuple(sorted(d % ndim for d in dims)) if ndim else ()


def reduced_layout(layout: Layout, dims: Sequence[int], keepdim: bool, op: str | None = "sum") -> Layout:
    """Return the result layout: the reduced dims are gone (keepdim: of size 1), and their mesh axes become Partial(op).

    op None: the result is reduced already, so these axes become Replicate.
    """
    axes = [a for d in dims for a in layout.axes_of(d)]
    partial = [*layout.partial, *((a, op) for a in axes)] if op else layout.partial
    kept = [(DimSharding(1),) if d in dims else f for d, f in enumerate(layout.dims) if keepdim or d not in dims]
    return Layout.make(layout.mesh, kept, partial)


def sharding_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh axes, of more than one rank, that shard any of `dims`."""
    return layout.nontrivial_axes(a for d in dims for a in layout.axes_of(d))


def keep_result_sharded(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return the layout in which to reduce `dims`: if the result is as large as a rank's share, their sharding moves.

    The result of a few long rows would otherwise be whole on every rank.
    """
    sharded = [d for d in dims if layout.is_sharded(d)]
    if len(sharded) != 1 or layout.partial:
        return layout
    ranks = [math.prod(map(layout.mesh.size, axes)) for axes in (layout.shard_axes, layout.axes_of(sharded[0]))]
    elements = layout.numel // math.prod(max(layout.shape[d], 1) for d in dims) // (ranks[0] // ranks[1])
    if elements < max(runtime.active.min_scattered, layout.numel // ranks[0]):
        return layout
    moved = move_shard_off(layout, sharded[0])
    return layout if moved is None or any(moved.is_sharded(d) for d in dims) else moved


def shard_groups(layout: Layout) -> Groups:
    """Return the process groups of all axes that shard the tensor."""
    return process_groups(layout, layout.shard_axes)


def gather_stacked(part: Tensor, layout: Layout, axes: Sequence[int]) -> Tensor:
    """Gather every rank's `part` along a new first dim, the last axis outermost.

    One small message per axis. Adjoint: each rank takes its slice of the summed gradient.
    """
    parts = part.unsqueeze(0)
    for axis in axes:
        size = layout.mesh.size(axis)
        parts = autograd_collectives.gather(parts, 0, [parts.shape[0]] * size, layout.mesh.get_group(axis))
    return parts


def all_reduce_minmax(part: Tensor, over: Groups, op: str) -> Tensor:
    """Return the max or min of every rank's `part`. Not differentiable: see `known_sum`."""
    part = part.detach()
    for group in over:
        part = collectives.all_reduce(part, group, op)
    return part


def known_sum(part: Tensor, value: Tensor, over: Groups) -> Tensor:
    """Return `value`, which is already the sum of every rank's `part`, without a message.

    Adjoint: the identity, as for `reduce`.
    """
    return _KnownSum.apply(part, value, over) if part.requires_grad and torch.is_grad_enabled() else value


class _KnownSum(torch.autograd.Function):
    apply = function_apply

    @staticmethod
    def forward(ctx, part, value, over):
        ctx.over = over
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return autograd_collectives.replicate_in([grad], ctx.over)[0], None, None


def safe_sqrt(square: Tensor) -> Tensor:
    """Return the square root with gradient 0 at 0, as in torch's std and norms."""
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())
