"""Work along a sharded dim block by block: one block per rank, in global order.

Scans, sorts and searches along a sharded dim leave the data in place and exchange little per block: a total, a count, a
few candidates. Ops that need the dim unsharded move the sharding to another dim (`move_shard_off`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import process_groups
from ...layout import MOVED_SHARDING, DimSharding, Layout, Origin, nested_balanced, outer_shard_sizes, starts
from ...redistribute import unmerge_dims


def simplify_dim(layout: Layout, dim: int) -> tuple[Layout, int, bool]:
    """Return the layout with `dim` unmerged, `dim` as a non-negative number, and whether `dim` is sharded."""
    ndim = layout.ndim
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        last = max(ndim, 1) - 1
        raise IndexError(f"Dimension out of range (expected to be in range of [{-last - 1}, {last}], but got {dim})")
    if not ndim:
        return layout, 0, False
    dim %= ndim
    if len(layout.dims[dim]) > 1:
        layout = layout.with_dim(dim, *unmerge_dims(layout).dims[dim])
    return layout, dim, layout.is_sharded(dim)


def move_shard_off(layout: Layout, dim: int, allow_empty: bool = False) -> Layout | None:
    """Return a layout with `dim` unsharded and its axes sharding another dim; None if no other dim is large enough.

    The dim that these axes sharded before is preferred, then an unsharded dim, then the largest. allow_empty: some
    ranks may get empty shards if there is no better dim.
    """
    former = layout.former_shardings.get(frozenset(layout.axes_of(dim)))
    if former is not None and former[0] != dim:
        return _mark_moved(layout, dim).with_dim(*former)
    axes = layout.axes_of(dim)[::-1]  # innermost first: redistribute can swap only the innermost axis
    sizes = [layout.mesh.size(a) for a in axes]
    parts = math.prod(sizes)
    room = {d: min(layout.shard_sizes(d)) for d in range(layout.ndim) if d != dim and len(layout.dims[d]) == 1}
    other = max(room, key=lambda d: (room[d] >= parts, not layout.is_sharded(d), room[d]), default=None)
    if other is None or room[other] < (min(parts, 2) if allow_empty else parts):
        return None
    (factor,) = layout.dims[other]
    shard_sizes = [n for size in layout.shard_sizes(other) for n in nested_balanced(size, sizes)]
    sharding = DimSharding(factor.size, factor.axes + axes, tuple(shard_sizes))
    return _mark_moved(layout, dim).with_dim(other, sharding)


def _mark_moved(layout: Layout, dim: int) -> Layout:
    """Return the layout with `dim` unsharded; the dim carries its sharding as its origin."""
    former = [Origin(MOVED_SHARDING, *factor) for factor in layout.dims[dim]] if len(layout.dims[dim]) == 1 else []
    return layout.with_dim(dim, DimSharding(layout.shape[dim]).with_origins(layout.origins(dim), former))


def moved_origins(layout: Layout, dim: int) -> list[Origin]:
    """Return the shardings that a dim had before they were moved, for a dim that takes its place."""
    return [origin for origin in layout.origins(dim) if origin.kind == MOVED_SHARDING]


def as_rows(x: Tensor, dim: int) -> Tensor:
    """Return the tensor as (all other dims, dim), with contiguous rows as searchsorted needs them."""
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Undo `as_rows` for a tensor of `shape`."""
    moved = [n for d, n in enumerate(shape) if d != dim] + [shape[dim]]
    return rows.reshape(moved).movedim(-1, dim)


class Blocks:
    """The blocks of a dim that is sharded over some mesh axes (outermost first), and this rank's index among them."""

    def __init__(self, layout: Layout, axes: Sequence[int], lengths: Sequence[int]):
        self.layout, self.axes, self.shard_sizes = layout, tuple(axes), tuple(lengths)
        self.index = layout.index(axes)
        self.sizes = [layout.mesh.size(a) for a in axes]
        self.count = 1
        for size in self.sizes:
            self.count *= size
        self.groups = process_groups(layout, axes)

    @staticmethod
    def along(layout: Layout, dim: int) -> Blocks:
        """Return the blocks of a dim that is not merged."""
        return Blocks(layout, layout.axes_of(dim), layout.shard_sizes(dim))

    @staticmethod
    def over_all_shards(layout: Layout) -> Blocks:
        """Return one block per shard of the tensor; elements are numbered block after block, not in memory order."""
        axes = layout.shard_axes
        at = [dict(zip(axes, c, strict=True)) for c in product(*(range(layout.mesh.size(a)) for a in axes))]
        coords = [[here.get(a, c) for a, c in enumerate(layout.coords)] for here in at]
        return Blocks(layout, axes, [layout.local_shape_at(c).numel() for c in coords])

    @property
    def start(self) -> int:
        """The global index of the first element of this rank's block."""
        return starts(self.shard_sizes)[self.index]

    def all_gather(
        self, tensor: Tensor, dim: int, lengths: Sequence[int], move: Callable = autograd_collectives.gather
    ) -> Tensor:
        """Concatenate every block's tensor, of `lengths` along `dim`, in block order; one message per axis.

        With `autograd_collectives.gather` the result is Replicate. Pass `gather_replicate_in` as `move` if ranks do
        different work with the result, so that its gradients are summed.
        """
        for depth in range(len(self.axes) - 1, -1, -1):
            size, axis = self.sizes[depth], self.axes[depth]
            at = self.layout.index(self.axes[:depth]) * size
            if size > 1:
                tensor = move(tensor, dim, lengths[at : at + size], self.layout.mesh.get_group(axis))
            lengths = outer_shard_sizes(lengths, size)
        return tensor

    def all_gather_unit(self, tensor: Tensor, dim: int, move: Callable = autograd_collectives.gather) -> Tensor:
        """Concatenate every block's tensor, of size 1 along `dim`."""
        return self.all_gather(tensor, dim, (1,) * self.count, move)


def pick_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Return `rows.gather(1, columns)`; its backward needs the columns alone, so that `rows` may be written before."""
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], columns]
