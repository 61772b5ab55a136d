"""Routes of one region for each peer along one dim, as one split and one concatenation or addition. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .route import Region, Route


class Parts(NamedTuple):
    """Arguments of `split_with_sizes` that divide a block into regions along one dim, and the part of each region."""

    dim: int
    sizes: list[int]
    chosen: list[int]

    @staticmethod
    def of(regions: Sequence[Region], sizes: Mapping[int, int]) -> Parts | None:
        """Return the parts for disjoint regions along one dim of a block of these sizes; None for others.

        >>> from shardfield.comm.route import Region
        >>> Parts.of([Region(((0, 4, 1),)), Region(((0, 0, 1),))], {0: 5})
        Parts(dim=0, sizes=[1, 3, 1], chosen=[2, 0])
        """
        if not regions or any(len(r.ranges) != 1 or r.flip for r in regions):
            return None
        dim = regions[0].ranges[0][0]
        if dim not in sizes or any(r.ranges[0][0] != dim for r in regions):
            return None
        lengths, chosen, at = [], [0] * len(regions), 0
        for start, length, i in sorted((*r.ranges[0][1:], i) for i, r in enumerate(regions)):
            if start < at:
                return None
            if start > at:
                lengths.append(start - at)
            chosen[i] = len(lengths)
            lengths.append(length)
            at = start + length
        if at < sizes[dim]:
            lengths.append(sizes[dim] - at)
        return Parts(dim, lengths, chosen)


class RouteSplit(NamedTuple):
    """A route of one region for each peer along one dim, as the fewest calls of torch: a split, then a concatenation.

    peers: the receivers of the first parts of `sources`. kept: dim, start and length of the part that this rank keeps,
    empty if it keeps the full block. order: the result as a concatenation along `dim` of received parts, by index; -1
    is the part that this rank keeps. added: regions of the result to which received parts are added, instead.
    """

    sources: Parts
    peers: tuple[int, ...]
    kept: tuple[int, ...]
    dim: int
    order: tuple[int, ...]
    added: Parts | None

    @staticmethod
    def of(route: Route) -> RouteSplit | None:
        """Return the split of a route; None for one that flips, fills, or has several regions for a peer."""
        pairs = (*route.send, *route.recv)
        if len(route.own) != 1 or not route.send or not route.recv or any(len(regions) != 1 for _, regions in pairs):
            return None
        source, target = route.own[0]
        if target.flip or any(region.flip for _, (region,) in pairs):
            return None
        sizes = dict(route.sizes_in)
        full = not source.flip and all(start == 0 and n == sizes.get(dim) for dim, start, n in source.ranges)
        regions = [region for _, (region,) in route.send]
        sources = Parts.of(regions if full else [*regions, source], sizes)
        if sources is None:
            return None
        peers, kept = tuple(peer for peer, _ in route.send), tuple[int, ...]()
        if not full:
            at = sources.chosen[len(regions)]
            kept = sources.dim, sum(sources.sizes[:at]), sources.sizes[at]
        if route.steps is not None:
            if any(kind == 2 or (kind == 1 and len(route.targets[i].ranges) != 1) for kind, i, _ in route.steps):
                return None
            order = tuple(i if kind else -1 for kind, i, _ in route.steps)
            return RouteSplit(sources, peers, kept, target.ranges[0][0], order, None)
        added = Parts.of(route.targets, dict(route.sizes_out)) if route.add and route.keeps_all else None
        return None if added is None else RouteSplit(sources, peers, kept, added.dim, (), added)
