"""A cut dim as a row of blocks, one per rank, in global order: what the blocks tell each other.

Scans, sorts and searches along a cut dim keep their data where it lies and exchange something small for each block: a
total, a count, a few candidates. Those that need a dim whole ask for a layout in which another carries its cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import process_groups
from ...layout import DimSharding, Layout, balanced, outer_shard_sizes, starts
from ...redistribute import unmerge_dims


def simplify_dim(layout: Layout, dim: int) -> tuple[Layout, int, bool]:
    """The layout with `dim` simple, `dim` counted from the front, and whether it lies on several ranks."""
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
    """The layout in which another dim carries the cut of `dim` and `dim` is whole; None if none has room.

    A dim that is whole now comes first, then the largest. `allow_empty`: it may leave ranks with nothing if need be.
    """
    axes = layout.axes_of(dim)[::-1]  # innermost first: that is the one a swap can take
    sizes = [layout.mesh.size(a) for a in axes]
    parts = math.prod(sizes)
    room = {d: min(layout.shard_sizes(d)) for d in range(layout.ndim) if d != dim and len(layout.dims[d]) == 1}
    other = max(room, key=lambda d: (room[d] >= parts, not layout.is_sharded(d), room[d]), default=None)
    if other is None or room[other] < (min(parts, 2) if allow_empty else parts):
        return None
    (factor,) = layout.dims[other]
    lengths = [n for piece in layout.shard_sizes(other) for n in nested_balanced(piece, sizes)]
    taken = DimSharding(factor.size, factor.axes + axes, tuple(lengths))
    return layout.unshard([dim]).with_dim(other, taken)


def nested_balanced(size: int, parts: list[int]) -> list[int]:
    """A size cut evenly by the first number of parts, each piece by the second, and so on; row-major."""
    return [n for piece in balanced(size, parts[0]) for n in nested_balanced(piece, parts[1:])] if parts else [size]


def as_rows(x: Tensor, dim: int) -> Tensor:
    """(everything else, dim), each row in one piece as searchsorted likes it."""
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """What `as_rows` undoes, for a tensor of `shape`."""
    moved = [n for d, n in enumerate(shape) if d != dim] + [shape[dim]]
    return rows.reshape(moved).movedim(-1, dim)


class Blocks:
    """The blocks that some mesh axes (outermost first) make, and this rank's place among them."""

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
        """The blocks of a simple dim."""
        return Blocks(layout, layout.axes_of(dim), layout.shard_sizes(dim))

    @staticmethod
    def over_all_shards(layout: Layout) -> Blocks:
        """All ranks that hold different elements, in an order of their own: elements count block after block."""
        axes = layout.shard_axes
        at = [dict(zip(axes, c, strict=True)) for c in product(*(range(layout.mesh.size(a)) for a in axes))]
        coords = [[here.get(a, c) for a, c in enumerate(layout.coords)] for here in at]
        return Blocks(layout, axes, [layout.local_shape_at(c).numel() for c in coords])

    @property
    def start(self) -> int:
        """The global index at which this rank's block begins."""
        return starts(self.shard_sizes)[self.index]

    def all_gather(
        self, tensor: Tensor, dim: int, lengths: Sequence[int], move: Callable = autograd_collectives.gather
    ) -> Tensor:
        """Every block's tensor, `lengths` long, joined along `dim` in block order; one message for each axis.

        With `moves.gather` the result is Replicate; use `moves.gather_enter` where ranks go on to do different work
        with it.
        """
        for depth in range(len(self.axes) - 1, -1, -1):
            size, axis = self.sizes[depth], self.axes[depth]
            at = self.layout.index(self.axes[:depth]) * size
            if size > 1:
                tensor = move(tensor, dim, lengths[at : at + size], self.layout.mesh.get_group(axis))
            lengths = outer_shard_sizes(lengths, size)
        return tensor

    def all_gather_unit(self, tensor: Tensor, dim: int, move: Callable = autograd_collectives.gather) -> Tensor:
        """The same for tensors of length 1 along `dim`."""
        return self.all_gather(tensor, dim, (1,) * self.count, move)
