"""Routes: which region of this rank's block is sent to which peer, and its position in the peer's result. Pure.

Every exchange that only rearranges elements along one mesh axis is a route: a halo, other shard sizes, Shard(i) ->
Shard(j), a roll, a flip. Its adjoint is the transposed route, which adds where regions overlap.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..caches import cached_property
from ..layout import Span, starts
from .route_split import RouteSplit


class Region(NamedTuple):
    """A box inside a block: `(dim, start, length)` for each dim it does not span; `flip` lists reversed dims."""

    ranges: tuple[tuple[int, int, int], ...]
    flip: tuple[int, ...] = ()

    def view(self, block: Tensor) -> Tensor:
        """Return the region as a view of `block`, in the order of the block (not flipped)."""
        for dim, start, length in self.ranges:
            if length != block.shape[dim]:
                block = block.narrow(dim, start, length)
        return block

    def shape(self, block: Sequence[int]) -> list[int]:
        """Return the shape of the region inside a block of shape `block`."""
        shape = list(block)
        for dim, _, length in self.ranges:
            shape[dim] = length
        return shape


PeerRegions = tuple[tuple[int, tuple[Region, ...]], ...]  # (coord of a peer, regions), for those that have any


class Route:
    """Regions of this rank's block sent to each peer, and regions of the result received from each peer.

    Only coords that exchange a region are listed, so that running a route does not depend on the size of the group.
    `own` pairs the regions that this rank keeps: in its block, in its result. `sizes_in` and `sizes_out` are the
    `(dim, length)` of the dims that the route changes. With `add`, received regions are added to zeros and may overlap.
    Without, they are disjoint, and elements that none covers get the fill value.
    """

    def __init__(
        self,
        coord: int,
        send: PeerRegions,
        recv: PeerRegions,
        sizes_in: tuple[tuple[int, int], ...],
        sizes_out: tuple[tuple[int, int], ...],
        add: bool = False,
    ):
        self.coord, self.sizes_in, self.sizes_out, self.add = coord, sizes_in, sizes_out, add
        self.send = tuple(pair for pair in send if pair[0] != coord)
        self.recv = tuple(pair for pair in recv if pair[0] != coord)
        kept = [regions for pairs in (send, recv) for peer, regions in pairs if peer == coord]
        self.own = tuple(zip(*kept, strict=True)) if len(kept) == 2 else ()  # an empty shard keeps nothing
        self.targets = [region for _, regions in self.recv for region in regions]
        sent = [[(r.flip, *((dim, n) for dim, _, n in r.ranges)) for r in regions] for _, regions in self.send]
        self.equal_sends = len(sent) > 1 and all(len(of) == 1 and of == sent[0] for of in sent)
        exchanged = [region for pairs in (self.send, self.recv) for _, regions in pairs for region in regions]
        self._has_cells = all(n for region in exchanged for _, _, n in region.ranges)
        sizes = dict(sizes_out)
        self.keeps_all = (
            len(self.own) == 1
            and not self.own[0][1].flip
            and all(start == 0 and length == sizes.get(dim) for dim, start, length in self.own[0][1].ranges)
        )  # this rank's own region is the full result
        self.steps = self._concatenation()
        self.split = RouteSplit.of(self)
        self.shapes: dict[tuple[int, ...], Shapes] = {}  # shape of the block -> shapes of the messages

    @staticmethod
    def from_lists(
        coord: int,
        send: Sequence[Sequence[Region]],
        recv: Sequence[Sequence[Region]],
        sizes_in: tuple[tuple[int, int], ...],
        sizes_out: tuple[tuple[int, int], ...],
    ) -> Route:
        """Return the route with regions `send[c]` to coord c and `recv[c]` from it. Empty regions are dropped."""
        return Route(coord, _nonempty(send), _nonempty(recv), sizes_in, sizes_out)

    @cached_property
    def transposed(self) -> Route:
        """The adjoint: the same messages in the other direction, added where regions overlap."""
        back = self._turned(not self.add)
        back.__dict__["transposed"] = self
        return back

    @property
    def reversed(self) -> Route:
        """The same messages in the other direction."""
        return self._turned(self.add)

    def restricted(self, dim: int, start: int, length: int) -> Route:
        """Return the route that exchanges `length` cells from `start` along another dim, and fills the others."""

        def narrowed(pairs: PeerRegions) -> PeerRegions:
            return tuple(
                (p, tuple(r._replace(ranges=(*r.ranges, (dim, start, length))) for r in of)) for p, of in pairs
            )

        own = ((self.coord, tuple(r for r, _ in self.own)), (self.coord, tuple(r for _, r in self.own)))
        send, recv = (*narrowed(self.send), own[0]), (*narrowed(self.recv), own[1])
        return Route(self.coord, send, recv, self.sizes_in, self.sizes_out, self.add)

    def _turned(self, add: bool) -> Route:
        sent_back, kept = tuple(r for _, r in self.own), tuple(r for r, _ in self.own)
        send, recv = (*self.recv, (self.coord, sent_back)), (*self.send, (self.coord, kept))
        return Route(self.coord, send, recv, self.sizes_out, self.sizes_in, add)

    def _concatenation(self) -> list[tuple[int, int, int]] | None:
        """Return the result as a concatenation along one dim: (kind, index, length) of each part.

        Kind 0 is the part `own[index]`, kind 1 is region `targets[index]`, kind 2 is the fill value. None if the result
        is not a concatenation. A received region that does not span the other dims is surrounded by the fill value. The
        adjoint of a permutation is one too: regions that cover the result without overlaps need no addition.
        """
        parts = [(region, 0, i) for i, (_, region) in enumerate(self.own)]
        parts += [(region, 1, i) for i, region in enumerate(self.targets)]
        dims = {region.ranges[0][0] for region, _, _ in parts}
        if len(dims) != 1 or any(len(r.ranges) != 1 for r, kind, _ in parts if self.add or not kind):
            return None
        sizes = dict(self.sizes_out)
        steps, at = [], 0
        for start, length, kind, index in sorted((*r.ranges[0][1:], kind, i) for r, kind, i in parts):
            if start < at:
                return None
            if start > at:
                steps.append((2, 0, start - at))
            steps.append((kind, index, length))
            at = start + length
        rest = sizes.get(next(iter(dims)), at) - at
        steps += [(2, 0, rest)] if rest else []
        return None if self.add and any(kind == 2 for kind, _, _ in steps) else steps

    def shapes_for(self, block: tuple[int, ...]) -> Shapes:
        """Return the shapes of result and messages for a block of this shape."""
        found = self.shapes.get(block)
        if found is None:
            shape = list(block)
            for dim, size in self.sizes_out:
                shape[dim] = size
            regions = [[tuple(r.shape(shape)) for r in regions] for _, regions in self.recv]
            receives = [
                (peer, of[0] if len(of) == 1 else (sum(map(math.prod, of)),))
                for (peer, _), of in zip(self.recv, regions, strict=True)
            ]
            if len(self.shapes) > 64:
                self.shapes.clear()
            single = all(len(of) == 1 for of in regions)
            found = self.shapes[block] = Shapes(
                tuple(shape), receives, regions, single, self._has_cells and 0 not in (*block, *shape)
            )
        return found


class Shapes(NamedTuple):
    """Shapes of a route's result, of its receive buffers by peer, and of the regions in each buffer.

    `single`: every buffer is one region, in its shape. `filled`: no message is empty.
    """

    result: tuple[int, ...]
    receives: list[tuple[int, tuple[int, ...]]]
    regions: list[list[tuple[int, ...]]]
    single: bool
    filled: bool


def _nonempty(by_coord: Sequence[Sequence[Region]]) -> PeerRegions:
    found = []
    for coord, regions in enumerate(by_coord):
        kept = tuple(r for r in regions if all(n for _, _, n in r.ranges))
        if kept:
            found.append((coord, kept))
    return tuple(found)


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
    ((1, (Region(ranges=((0, 2, 1),), flip=()),)),)
    """
    return range_route(dim, lengths, coord, enumerate(requests), requests[coord], sizes[coord])


def range_route(
    dim: int,
    lengths: Sequence[int],
    coord: int,
    readers: Iterable[tuple[int, Sequence[RowRequest]]],
    wanted: Sequence[RowRequest],
    size: int,
) -> Route:
    """Return the route on which this rank receives `wanted`; its result has `size` elements along the dim.

    `readers` are the coords that may read rows of this rank, with their requests: enough neighbors, or all coords.
    """
    begins = starts(lengths)
    recv: dict[int, list[Region]] = {}
    for source, length, target, flip in wanted:
        owner, stop = max(bisect_right(begins, source) - 1, 0), source + length
        while owner < len(begins) and begins[owner] < stop:
            first, last = max(begins[owner], source), min(begins[owner] + lengths[owner], stop)
            if first < last:
                skip = stop - last if flip else first - source
                recv.setdefault(owner, []).append(Region(((dim, target + skip, last - first),)))
            owner += 1
    send: list[tuple[int, tuple[Region, ...]]] = []
    lo, hi, reverse = begins[coord], begins[coord] + lengths[coord], (dim,)
    for reader, runs in readers:
        found = []
        for source, length, _, flip in runs:
            if source < hi and lo < source + length:
                first, last = max(lo, source), min(hi, source + length)
                if first < last:
                    found.append(Region(((dim, first - lo, last - first),), reverse if flip else ()))
        if found:
            send.append((reader, tuple(found)))
    return Route(
        coord,
        tuple(send),
        tuple((owner, tuple(regions)) for owner, regions in sorted(recv.items())),
        sizes_in=((dim, lengths[coord]),),
        sizes_out=((dim, size),),
    )


def readers_of(held: Span, range_of: Callable[[int], Span], coord: int, count: int) -> list[int]:
    """Return the coords whose range overlaps `held`, the shard of `coord`.

    Ranges increase with the coord, or are empty. The search ends at the first range on each side that is out of reach,
    so that it visits neighbors only.

    >>> readers_of(Span(4, 6), lambda c: Span(2 * c - 1, 2 * c + 3), 2, 4096)
    [1, 2, 3]
    """
    found = [coord]
    for step in (-1, 1):
        peer = coord + step
        while 0 <= peer < count:
            start, stop = range_of(peer)
            if start < stop:
                if start >= held.stop if step > 0 else stop <= held.start:
                    break
                found.append(peer)
            peer += step
    return sorted(found)


def reshard_route(dim: int, lengths: Sequence[int], target: Sequence[int], coord: int) -> Route:
    """Return the route from shard sizes `lengths` to `target` on one axis: only rows that change owner are sent."""
    requests = [[RowRequest(start, length)] for start, length in zip(starts(target), target, strict=True)]
    return fetch_route(dim, lengths, coord, requests, target)


def tile_route(dim: int, have: Sequence[Sequence[Span]], want: Sequence[Sequence[Span]], coord: int) -> Route:
    """Return the route from the index ranges `have[c]` of a dim, concatenated on coord c, to `want[c]`.

    >>> tile_route(0, [[Span(0, 2)], [Span(2, 4)]], [[Span(0, 1), Span(2, 3)], [Span(1, 2), Span(3, 4)]], 0).send
    ((1, (Region(ranges=((0, 1, 1),), flip=()),)),)
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
    return Route.from_lists(
        coord,
        send=tuple(tuple(a for a, _ in overlaps(coord, peer)) for peer in parts),
        recv=tuple(tuple(b for _, b in overlaps(peer, coord)) for peer in parts),
        sizes_in=((dim, sum(hi - lo for lo, hi in have[coord])),),
        sizes_out=((dim, sum(hi - lo for lo, hi in want[coord])),),
    )


def swap_route(source: int, lengths: Sequence[int], target: int, new_lengths: Sequence[int], coord: int) -> Route:
    """Return the route of Shard(source) -> Shard(target) on one axis: an all-to-all of ranges of `target`."""
    new, old = starts(new_lengths), starts(lengths)
    parts = range(len(lengths))
    return Route.from_lists(
        coord,
        send=tuple((Region(((target, new[p], new_lengths[p]),)),) for p in parts),
        recv=tuple((Region(((source, old[p], lengths[p]),)),) for p in parts),
        sizes_in=((source, lengths[coord]), (target, sum(new_lengths))),
        sizes_out=((source, sum(lengths)), (target, new_lengths[coord])),
    )
