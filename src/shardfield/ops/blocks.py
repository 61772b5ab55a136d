"""A cut dim as a row of blocks, one per rank, in global order: what the blocks tell each other.

Scans, sorts and searches along a cut dim keep their data where it lies and exchange something small for each block: a
total, a count, a few candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from torch import Tensor

from ..comm import moves
from ..layout import Layout, outer_lengths, starts
from ..plan import groups
from ..redistribute import simplified


def simple_along(layout: Layout, dim: int) -> tuple[Layout, int, bool]:
    """The layout with `dim` simple, `dim` counted from the front, and whether it lies on several ranks."""
    ndim = layout.ndim
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        last = max(ndim, 1) - 1
        raise IndexError(f"Dimension out of range (expected to be in range of [{-last - 1}, {last}], but got {dim})")
    if not ndim:
        return layout, 0, False
    dim %= ndim
    if len(layout.dims[dim]) > 1:
        layout = layout.with_dim(dim, *simplified(layout).dims[dim])
    return layout, dim, layout.is_cut(dim)


class Blocks:
    """The blocks that some mesh axes (outermost first) make, and this rank's place among them."""

    def __init__(self, layout: Layout, axes: Sequence[int], lengths: Sequence[int]):
        self.layout, self.axes, self.lengths = layout, tuple(axes), tuple(lengths)
        self.index = layout.index(axes)
        self.sizes = [layout.mesh.size(a) for a in axes]
        self.count = 1
        for size in self.sizes:
            self.count *= size
        self.groups = groups(layout, axes)

    @staticmethod
    def along(layout: Layout, dim: int) -> Blocks:
        """The blocks of a simple dim."""
        return Blocks(layout, layout.axes_of(dim), layout.lengths(dim))

    @staticmethod
    def all_of(layout: Layout) -> Blocks:
        """All ranks that hold different elements, in an order of their own: elements count block after block."""
        axes = layout.shard_axes
        at = [dict(zip(axes, c, strict=True)) for c in product(*(range(layout.mesh.size(a)) for a in axes))]
        coords = [[here.get(a, c) for a, c in enumerate(layout.coords)] for here in at]
        return Blocks(layout, axes, [layout.local_shape_at(c).numel() for c in coords])

    @property
    def start(self) -> int:
        """The global index at which this rank's block begins."""
        return starts(self.lengths)[self.index]

    def assembled(self, tensor: Tensor, dim: int, lengths: Sequence[int], move: Callable = moves.gather) -> Tensor:
        """Every block's tensor, `lengths` long, joined along `dim` in block order; one message for each axis.

        With `moves.gather` the result is Replicate; use `moves.gather_enter` where ranks go on to do different work
        with it.
        """
        for depth in range(len(self.axes) - 1, -1, -1):
            size, axis = self.sizes[depth], self.axes[depth]
            at = self.layout.index(self.axes[:depth]) * size
            if size > 1:
                tensor = move(tensor, dim, lengths[at : at + size], self.layout.mesh.get_group(axis))
            lengths = outer_lengths(lengths, size)
        return tensor

    def each(self, tensor: Tensor, dim: int, move: Callable = moves.gather) -> Tensor:
        """The same for tensors of length 1 along `dim`."""
        return self.assembled(tensor, dim, (1,) * self.count, move)
