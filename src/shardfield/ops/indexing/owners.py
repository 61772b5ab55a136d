"""Find the owners of the elements that an index names, and exchange entries with them.

An entry of an index is one flat global index over the indexed dims. `Owners` computes its mesh coordinate and its
position in this rank's shard, without communication. Entries that are sharded over the axis that shards the indexed dim
are sent to the owners along that axis (`AxisExchange`; `exchange_lists` chains axes). Bytes are proportional to the
number of entries, not to the size of the indexed tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm import autograd_collectives, collectives
from ...comm.route import Region, Route
from ...layout import DimSharding, Layout, starts
from ...trace_state import concrete_for
from .._common.value_checks import raise_if


class Owners:
    """The ownership of some dims of a layout: coordinate and local position of a flat global index over them.

    `axes` are the mesh axes along which other ranks may own entries: by default all that shard the dims.
    """

    def __init__(self, layout: Layout, dims: Sequence[int], axes: Sequence[int] | None = None):
        self.layout, self.dims = layout, tuple(dims)
        self.sizes = tuple(layout.shape[d] for d in self.dims)
        self.axes = (
            layout.nontrivial_axes(a for d in self.dims for a in layout.axes_of(d)) if axes is None else tuple(axes)
        )

    def _unravel(self, flat: Tensor) -> list[list[tuple[DimSharding, Tensor]]]:
        """Return the index along each factor of each dim."""
        factors = [self.layout.dims[d] for d in self.dims]
        if len(factors) == 1 and len(factors[0]) == 1:
            return [[(factors[0][0], flat)]]
        found = []
        for dim in reversed(factors):
            row = []
            for factor in reversed(dim):
                row.append((factor, flat % max(factor.size, 1)))
                flat = flat.div(max(factor.size, 1), rounding_mode="floor")
            found.append(row[::-1])
        return found[::-1]

    def coord(self, flat: Tensor, axis: int) -> Tensor:
        """Return the coordinate on `axis` of the owner of each entry."""
        for row in self._unravel(flat):
            for factor, digit in row:
                if axis in factor.axes:
                    ends = torch.tensor(factor.shard_sizes, device=flat.device).cumsum(0)
                    shard = torch.searchsorted(ends, digit.contiguous(), right=True)
                    inner = factor.axes[factor.axes.index(axis) + 1 :]
                    shard = shard.div(math.prod(self.layout.mesh.size(a) for a in inner), rounding_mode="floor")
                    return shard % self.layout.mesh.size(axis)
        raise AssertionError(f"axis {axis} does not shard dims {self.dims} of {self.layout}")

    def local_mask(self, flat: Tensor, axes: Iterable[int]) -> Tensor:
        """Return which entries ranks with this rank's coordinates on `axes` own."""
        held = torch.ones_like(flat, dtype=torch.bool)
        for axis in axes:
            held &= self.coord(flat, axis) == self.layout.coords[axis]
        return held

    def positions(self, flat: Tensor) -> list[Tensor]:
        """Return the local positions of entries that this rank owns, dim by dim."""
        found = []
        for row in self._unravel(flat):
            here: Any = 0
            for factor, digit in row:
                start = starts(factor.shard_sizes)[self.layout.index(factor.axes)] if factor.axes else 0
                here = here * self.layout.local_size_of(factor) + digit - start
            found.append(here)
        return found

    def flat(self, indices: Sequence[Tensor]) -> Tensor:
        """Return the flat index of global indices, which are passed dim by dim."""
        total = indices[0]
        for index, size in zip(indices[1:], self.sizes[1:], strict=True):
            total = total * size + index
        return total

    def local_indices(self, device: torch.device) -> list[Tensor]:
        """Return the global indices of this rank's shard, dim by dim, in shapes that broadcast with each other."""
        found = []
        for i, d in enumerate(self.dims):
            along = torch.zeros(1, dtype=torch.int64, device=device)
            for factor in self.layout.dims[d]:
                start = starts(factor.shard_sizes)[self.layout.index(factor.axes)] if factor.axes else 0
                digit = torch.arange(start, start + self.layout.local_size_of(factor), device=device)
                along = (along[:, None] * factor.size + digit).flatten()
            found.append(along.view([-1] + [1] * (len(self.dims) - 1 - i)))
        return found


class AxisExchange(NamedTuple):
    """One exchange along one axis: the order of this rank's entries by destination, and the route to the owners."""

    order: Tensor
    inverse: Tensor
    route: Route
    group: ProcessGroup
    is_noop: bool  # no rank of the group sends; equal on all ranks, since each has the counts of all

    @staticmethod
    def to(peers: Tensor, axis: int, layout: Layout) -> AxisExchange:
        """Build the exchange that sends entry i to coordinate `peers[i]`. One small message exchanges the counts."""
        group, size, me = layout.group(axis), layout.axis_sizes[axis], layout.coords[axis]
        counts = torch.bincount(peers, minlength=size).tolist()
        table = collectives.gather_ints(counts, group, peers.device)
        order = torch.argsort(peers, stable=True)
        arriving = [row[me] for row in table]
        send = tuple((Region(((0, at, n),)),) for at, n in zip(starts(counts), counts, strict=True))
        recv = tuple((Region(((0, at, n),)),) for at, n in zip(starts(arriving), arriving, strict=True))
        route = Route.from_lists(me, send, recv, ((0, sum(counts)),), ((0, sum(arriving)),))
        is_noop = not any(n for c, row in enumerate(table) for peer, n in enumerate(row) if peer != c)
        return AxisExchange(order, torch.argsort(order), route, group, is_noop)

    def exchange(self, rows: Tensor) -> Tensor:
        """Send rows to their peers. Adjoint: `exchange_back`."""
        return autograd_collectives.exchange(rows.index_select(0, self.order), self.route, self.group)

    def exchange_back(self, rows: Tensor) -> Tensor:
        """Send rows back to the ranks they came from. Adjoint: `exchange`."""
        return autograd_collectives.exchange(rows, self.reverse_route, self.group).index_select(0, self.inverse)

    @property
    def reverse_route(self) -> Route:
        return self.route.reversed


def select_rows(block: Tensor, dims: Sequence[int], positions: Sequence[Tensor]) -> Tensor:
    """Return the elements of a shard at positions along `dims`: (entries, other dims)."""
    if len(dims) == 1:
        return block.index_select(dims[0], positions[0]).movedim(dims[0], 0)
    return block.movedim(list(dims), list(range(len(dims))))[tuple(positions)]


def gather_counts(count: int, layout: Layout, axes: Sequence[int], device: torch.device) -> tuple[int, ...]:
    """Return every rank's count over `axes`, row-major. One small message per axis."""
    counts = [count]
    for axis in reversed(axes):
        counts = [n for row in collectives.gather_ints(counts, layout.mesh.get_group(axis), device) for n in row]
    return tuple(counts)


def validate_index(
    index: Tensor, size: int, layout: Layout, negative: bool = True, error: type[Exception] = IndexError
) -> Tensor:
    """Return an index of layout `layout` without negative values, or raise on all ranks if one is out of bounds.

    Ranks with different shards of the index agree with one small all_reduce per axis.
    """
    with concrete_for(index):
        wrong = any_out_of_bounds(index, size, negative)
        for axis in layout.nontrivial_axes(layout.shard_axes):
            wrong = collectives.all_reduce(wrong, layout.mesh.get_group(axis))
        raise_if(wrong, error, str(out_of_bounds_error(size, error)))
        return wrap_negative(index, size, negative)


def any_out_of_bounds(index: Tensor, size: int, negative: bool) -> Tensor:
    """Return whether any entry is out of bounds. One pass over the entries."""
    if not index.numel():
        return torch.zeros((), dtype=torch.bool, device=index.device)
    low, high = index.aminmax()
    return (low < (-size if negative else 0)) | (high >= size)


def out_of_bounds_error(size: int, error: type[Exception]) -> Exception:
    return error(f"index out of bounds for dimension with size {size}")


def wrap_negative(index: Tensor, size: int, negative: bool) -> Tensor:
    """Return an index as int64, with negative values counted from the end if `negative`."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index) if negative else index
