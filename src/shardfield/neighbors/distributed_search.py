"""Neighbours among points that lie in blocks on several ranks.

Boxes tell first: every rank knows a few boxes that cover each block and how many points they hold, and so, for each
of its queries, within which distance there are k points for certain. The search of its own block narrows that. A
block whose boxes lie beyond has nothing to say. What is left is told to all in a small table, and for each pair of
ranks either the queries go to the points and the neighbours found come back, or the block of points goes to the
queries, whichever is fewer bytes. Where that would be too much at once for a rank, blocks are visited one after the
other, as in a ring, and what one round finds spares messages in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..debug import explain
from ..ops._common.blockwise import Blocks
from ..ops.sorting.samplesort import plan_exchanges
from .local import LocalPoints
from .metric import NO_NEIGHBOR, bounding_boxes, max_distance_to_boxes, min_distance_to_boxes, select_nearest

BOX_DEPTH = 4  # a block is described by 2 ** DEPTH boxes
MAX_INCOMING_BYTES = 1 << 28  # bytes of queries that may arrive on one rank together


class DistributedPoints:
    """Points in blocks, one on each rank along some mesh axes, and the boxes around all of them."""

    def __init__(self, points: Tensor, blocks: Blocks):
        self.points, self.blocks, self.local_points = points, blocks, LocalPoints(points)
        if blocks.count == 1:  # nobody to tell
            return
        self.lengths = torch.tensor(blocks.shard_sizes, device=points.device)
        boxes, counts = bounding_boxes(points, BOX_DEPTH)
        # One message for both. Floats count so far exactly; to count less is only to know less.
        row = torch.cat([boxes.flatten(1), counts.clamp_max(1 << 24)[:, None].to(points.dtype)], 1)
        told = blocks.all_gather_unit(row[None], 0).flatten(0, 1)
        self.boxes, self.counts = told[:, :-1].unflatten(1, (2, -1)), told[:, -1].to(torch.int64)

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(squared distances, global indices) of the k nearest of all points to this rank's queries.

        The ranks of the blocks have queries of their own, perhaps none. Beyond `reach` there is NOBODY.
        """
        if self.blocks.count == 1:
            return self.local_points.nearest(queries, k, reach)
        me, most = self.blocks.index, max(self.blocks.shard_sizes)
        away = self._min_squared_distance(queries)
        if reach is not None:
            away = away.masked_fill(away.sqrt() > reach, torch.inf)
        best = NearestSoFar(queries, k, self._upper_bound(queries, k))
        rows = (away[:, me] <= best.bound).nonzero().flatten()
        best.update(rows, *self._to_global_index(self.local_points.nearest(queries[rows], k, reach), me))

        def wanted() -> Tensor:
            return (away <= best.bound[:, None]) & away.isfinite()

        def answer(held: LocalPoints, rows: Tensor) -> Tensor:
            return _pack(*held.nearest(rows, min(k, most), reach))

        for peer, rows, found in self._search_remote(queries, wanted, answer, 2 * min(k, most)):
            best.update(rows, *self._to_global_index(_unpack(found, queries.dtype), peer))
        return best.squares, best.index

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """At least as many as there are points within `reach` of each query."""
        total = self.local_points.count(queries, reach)
        if self.blocks.count == 1:
            return total
        near = self._min_squared_distance(queries).sqrt() <= reach
        visits = self._search_remote(queries, lambda: near, lambda held, rows: held.count(rows, reach)[:, None], 2)
        for _, rows, found in visits:
            total[rows] += found[:, 0]
        return total

    def _min_squared_distance(self, queries: Tensor) -> Tensor:
        """(queries, blocks): no point of the block is closer than this, squared; infinitely far if it has none."""
        return min_distance_to_boxes(self.boxes, queries).unflatten(1, (self.blocks.count, -1)).amin(2)

    def _upper_bound(self, queries: Tensor, k: int) -> Tensor:
        """A squared distance within which each query has k points: those of the boxes that lie within it."""
        far, order = max_distance_to_boxes(self.boxes, queries).sort(1)
        points = self.counts[order].cumsum(1)
        last = (points < k).sum(1, keepdim=True)
        return torch.where(last < len(self.boxes), far.gather(1, last.clamp_max(len(self.boxes) - 1)), torch.inf)[:, 0]

    def _to_global_index(self, found: tuple[Tensor, Tensor], block: int) -> tuple[Tensor, Tensor]:
        squares, index = found
        start = sum(self.blocks.shard_sizes[:block])
        return squares, torch.where(squares.isinf(), NO_NEIGHBOR, index + start)

    def _search_remote(
        self, queries: Tensor, wanted: Callable[[], Tensor], answer: Callable[[LocalPoints, Tensor], Tensor], width: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Ask other blocks about the queries that `wanted()` (queries, blocks) names: (block, queries, answers).

        `width` is the length of an answer, counted in coordinates. Every rank makes the same visits.
        """
        blocks, me = self.blocks, self.blocks.index
        mine = wanted()
        mine[:, me] = False
        table = blocks.all_gather_unit(mine.sum(0)[None], 0)  # [asker][block] -> queries
        if not bool(table.any()):
            explain.record_outcome("rule: boxes alone")
            return
        features = queries.shape[1]
        carried = (self.lengths * features)[None] < table * (features + width)  # pairs whose points travel
        asked = torch.where(carried, 0, table)
        arriving = int(asked.sum(0).max()) * (features + width) * queries.element_size()
        step = (torch.arange(blocks.count, device=table.device) - me) % blocks.count
        ways = {"points to queries": bool(carried.any()), "queries to points": bool(asked.any())}
        explain.record_outcome(f"rule: {' and '.join(way for way, used in ways.items() if used)}")
        if bool(carried.any()):
            yield from self._fetch_points(queries, mine, carried, answer)
        if arriving <= MAX_INCOMING_BYTES:
            rounds = [step > 0] if bool(asked.any()) else []
        else:
            every = torch.arange(blocks.count, device=table.device)
            rounds = [step == s for s in range(1, blocks.count) if bool(asked[every, (every + s) % blocks.count].any())]
        for now in rounds:
            yield from self._send_queries(queries, mine & wanted() & now & ~carried[me], answer)

    def _send_queries(self, queries: Tensor, chosen: Tensor, answer: Callable[[LocalPoints, Tensor], Tensor]):
        """Queries go to the blocks, answers come back."""
        row, peer = chosen.nonzero().unbind(1)
        ways = plan_exchanges(peer, self.blocks)
        visiting = queries[row]
        for hop in ways:
            visiting = hop.exchange(visiting)
        found = answer(self.local_points, visiting)
        for hop in reversed(ways):
            found = hop.exchange_back(found)
        for block in peer.unique().tolist():
            here = peer == block
            yield block, row[here], found[here]

    def _fetch_points(
        self, queries: Tensor, mine: Tensor, carried: Tensor, answer: Callable[[LocalPoints, Tensor], Tensor]
    ):
        """Whole blocks of points come to the queries."""
        me, n = self.blocks.index, len(self.points)
        askers = carried[:, me].nonzero().flatten()
        points = self.points.repeat(len(askers), 1)
        for hop in plan_exchanges(askers.repeat_interleave(n), self.blocks):
            points = hop.exchange(points)
        sources = carried[me].nonzero().flatten().tolist()
        for block, part in zip(sources, points.split([self.blocks.shard_sizes[b] for b in sources]), strict=True):
            rows = mine[:, block].nonzero().flatten()
            yield block, rows, answer(LocalPoints(part), queries[rows])


class NearestSoFar:
    """The best neighbours so far of each query, and a squared distance beyond which none can be among them."""

    def __init__(self, queries: Tensor, k: int, bound: Tensor):
        self.bound = bound
        self.squares = queries.new_full((len(queries), k), torch.inf)
        self.index = torch.full((len(queries), k), NO_NEIGHBOR, device=queries.device)

    def update(self, rows: Tensor, squares: Tensor, index: Tensor) -> None:
        """Candidates for some of the queries."""
        k = self.squares.shape[1]
        pair = torch.cat([self.squares[rows], squares], 1), torch.cat([self.index[rows], index], 1)
        self.squares[rows], self.index[rows] = best = select_nearest(*pair, k)
        self.bound[rows] = torch.minimum(self.bound[rows], best[0][:, -1])


def _pack(squares: Tensor, index: Tensor) -> Tensor:
    """Both as integers as wide as the squares: one message. A block has fewer points than 32 bits count."""
    ints = torch.int32 if squares.dtype is torch.float32 else torch.int64
    index = torch.where(squares.isinf(), -1, index)
    return torch.cat([squares.contiguous().view(ints), index.to(ints)], 1)


def _unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    bits, index = packed.chunk(2, 1)
    return bits.contiguous().view(dtype), index.to(torch.int64)
