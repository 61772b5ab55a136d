"""Routes: which region of this rank's block is sent to which peer, and its position in the peer's result. Pure.

Every exchange that only rearranges elements along one mesh axis is a route: a halo, other shard sizes, Shard(i) ->
Shard(j), a roll, a flip. Its adjoint is the transposed route, which adds where regions overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..layout import Span, starts


class Region(NamedTuple):
    """A box inside a block: `(dim, start, length)` for each dim it does not span; `flip` lists reversed dims."""

    ranges: tuple[tuple[int, int, int], ...]
    flip: tuple[int, ...] = ()

    def view(self, block: Tensor) -> Tensor:
        """Return the region as a view of `block`, in the order of the block (not flipped)."""
        for dim, start, length in self.ranges:
            block = block.narrow(dim, start, length)
        return block

    def shape(self, block: Sequence[int]) -> list[int]:
        """Return the shape of the region inside a block of shape `block`."""
        shape = list(block)
        for dim, _, length in self.ranges:
            shape[dim] = length
        return shape


class Route(NamedTuple):
    """Regions of this rank's block sent to each coord, and regions of the result received from each coord.

    `sizes_in` and `sizes_out` are the `(dim, length)` of the dims that the route changes. With `add`, received regions
    are added to zeros and may overlap. Without, they are disjoint, and elements that none covers get the fill value.
    """

    send: tuple[tuple[Region, ...], ...]
    recv: tuple[tuple[Region, ...], ...]
    sizes_in: tuple[tuple[int, int], ...]
    sizes_out: tuple[tuple[int, int], ...]
    add: bool = False

    @property
    def transposed(self) -> Route:
        return Route(self.recv, self.send, self.sizes_out, self.sizes_in, not self.add)


class RowRequest(NamedTuple):
    """A request for `length` consecutive global indices from `source`, stored at `target` of the result.

    With `flip` they are stored in reverse order: the index `source + length - 1` at `target`.
    """

    source: int
    length: int
    target: int = 0
    flip: bool = False


def fetch_route(
    dim: int, lengths: Sequence[int], coord: int, requests: Sequence[Sequence[RowRequest]], sizes: Sequence[int]
) -> Route:
    """Return the route on which coord c receives `requests[c]` of a dim with shard sizes `lengths`.

    The result of coord c has `sizes[c]` elements along the dim.

    >>> fetch_route(0, [2, 2], 0, [[RowRequest(0, 3)], [RowRequest(1, 3)]], [3, 3]).recv
    ((Region(ranges=((0, 0, 2),), flip=()),), (Region(ranges=((0, 2, 1),), flip=()),))
    """
    begins = starts(lengths)
    flip = (dim,)

    def overlaps(owner: int, reader: int) -> list[tuple[Region, Region]]:
        found = []
        lo, hi = begins[owner], begins[owner] + lengths[owner]
        for run in requests[reader]:
            first, last = max(lo, run.source), min(hi, run.source + run.length)
            if first >= last:
                continue
            n = last - first
            skip = run.source + run.length - last if run.flip else first - run.source
            here = Region(((dim, first - lo, n),), flip if run.flip else ())
            there = Region(((dim, run.target + skip, n),))
            found.append((here, there))
        return found

    parts = range(len(lengths))
    return Route(
        send=tuple(tuple(a for a, _ in overlaps(coord, peer)) for peer in parts),
        recv=tuple(tuple(b for _, b in overlaps(peer, coord)) for peer in parts),
        sizes_in=((dim, lengths[coord]),),
        sizes_out=((dim, sizes[coord]),),
    )


def reshard_route(dim: int, lengths: Sequence[int], target: Sequence[int], coord: int) -> Route:
    """Return the route from shard sizes `lengths` to `target` on one axis: only rows that change owner are sent."""
    requests = [[RowRequest(start, length)] for start, length in zip(starts(target), target, strict=True)]
    return fetch_route(dim, lengths, coord, requests, target)


def tile_route(dim: int, have: Sequence[Sequence[Span]], want: Sequence[Sequence[Span]], coord: int) -> Route:
    """Return the route from the index ranges `have[c]` of a dim, concatenated on coord c, to `want[c]`.

    >>> tile_route(0, [[Span(0, 2)], [Span(2, 4)]], [[Span(0, 1), Span(2, 3)], [Span(1, 2), Span(3, 4)]], 0).send
    ((Region(ranges=((0, 0, 1),), flip=()),), (Region(ranges=((0, 1, 1),), flip=()),))
    """

    def overlaps(owner: int, reader: int) -> list[tuple[Region, Region]]:
        found = []
        at = 0
        for lo, hi in have[owner]:
            to = 0
            for begin, end in want[reader]:
                first, last = max(lo, begin), min(hi, end)
                if first < last:
                    here = Region(((dim, at + first - lo, last - first),))
                    found.append((here, Region(((dim, to + first - begin, last - first),))))
                to += end - begin
            at += hi - lo
        return found

    parts = range(len(have))
    return Route(
        send=tuple(tuple(a for a, _ in overlaps(coord, peer)) for peer in parts),
        recv=tuple(tuple(b for _, b in overlaps(peer, coord)) for peer in parts),
        sizes_in=((dim, sum(hi - lo for lo, hi in have[coord])),),
        sizes_out=((dim, sum(hi - lo for lo, hi in want[coord])),),
    )


def swap_route(source: int, lengths: Sequence[int], target: int, new_lengths: Sequence[int], coord: int) -> Route:
    """Return the route of Shard(source) -> Shard(target) on one axis: an all-to-all of ranges of `target`."""
    new, old = starts(new_lengths), starts(lengths)
    parts = range(len(lengths))
    return Route(
        send=tuple((Region(((target, new[p], new_lengths[p]),)),) for p in parts),
        recv=tuple((Region(((source, old[p], lengths[p]),)),) for p in parts),
        sizes_in=((source, lengths[coord]), (target, sum(new_lengths))),
        sizes_out=((source, sum(lengths)), (target, new_lengths[coord])),
    )
