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

from .. import report
from ..ops.blocks import Blocks
from ..ops.samplesort import hops
from .local import Held
from .metric import NOBODY, boxes_of, farthest_in, first, nearest_in

DEPTH = 4  # a block is described by 2 ** DEPTH boxes
AT_ONCE = 1 << 28  # bytes of queries that may arrive on one rank together


class Cloud:
    """Points in blocks, one on each rank along some mesh axes, and the boxes around all of them."""

    def __init__(self, points: Tensor, blocks: Blocks):
        self.points, self.blocks, self.held = points, blocks, Held(points)
        if blocks.count == 1:  # nobody to tell
            return
        self.lengths = torch.tensor(blocks.lengths, device=points.device)
        boxes, counts = boxes_of(points, DEPTH)
        # One message for both. Floats count so far exactly; to count less is only to know less.
        row = torch.cat([boxes.flatten(1), counts.clamp_max(1 << 24)[:, None].to(points.dtype)], 1)
        told = blocks.each(row[None], 0).flatten(0, 1)
        self.boxes, self.counts = told[:, :-1].unflatten(1, (2, -1)), told[:, -1].to(torch.int64)

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(squared distances, global indices) of the k nearest of all points to this rank's queries.

        The ranks of the blocks have queries of their own, perhaps none. Beyond `reach` there is NOBODY.
        """
        if self.blocks.count == 1:
            return self.held.nearest(queries, k, reach)
        me, most = self.blocks.index, max(self.blocks.lengths)
        away = self._away(queries)
        if reach is not None:
            away = away.masked_fill(away.sqrt() > reach, torch.inf)
        best = Best(queries, k, self._certain(queries, k))
        rows = (away[:, me] <= best.bound).nonzero().flatten()
        best.take(rows, *self._global(self.held.nearest(queries[rows], k, reach), me))

        def wanted() -> Tensor:
            return (away <= best.bound[:, None]) & away.isfinite()

        def answer(held: Held, rows: Tensor) -> Tensor:
            return _packed(*held.nearest(rows, min(k, most), reach))

        for peer, rows, found in self._visits(queries, wanted, answer, 2 * min(k, most)):
            best.take(rows, *self._global(_unpacked(found, queries.dtype), peer))
        return best.squares, best.index

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """At least as many as there are points within `reach` of each query."""
        total = self.held.count(queries, reach)
        if self.blocks.count == 1:
            return total
        near = self._away(queries).sqrt() <= reach
        visits = self._visits(queries, lambda: near, lambda held, rows: held.count(rows, reach)[:, None], 2)
        for _, rows, found in visits:
            total[rows] += found[:, 0]
        return total

    def _away(self, queries: Tensor) -> Tensor:
        """(queries, blocks): no point of the block is closer than this, squared; infinitely far if it has none."""
        return nearest_in(self.boxes, queries).unflatten(1, (self.blocks.count, -1)).amin(2)

    def _certain(self, queries: Tensor, k: int) -> Tensor:
        """A squared distance within which each query has k points: those of the boxes that lie within it."""
        far, order = farthest_in(self.boxes, queries).sort(1)
        points = self.counts[order].cumsum(1)
        last = (points < k).sum(1, keepdim=True)
        return torch.where(last < len(self.boxes), far.gather(1, last.clamp_max(len(self.boxes) - 1)), torch.inf)[:, 0]

    def _global(self, found: tuple[Tensor, Tensor], block: int) -> tuple[Tensor, Tensor]:
        squares, index = found
        start = sum(self.blocks.lengths[:block])
        return squares, torch.where(squares.isinf(), NOBODY, index + start)

    def _visits(
        self, queries: Tensor, wanted: Callable[[], Tensor], answer: Callable[[Held, Tensor], Tensor], width: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Ask other blocks about the queries that `wanted()` (queries, blocks) names: (block, queries, answers).

        `width` is the length of an answer, counted in coordinates. Every rank makes the same visits.
        """
        blocks, me = self.blocks, self.blocks.index
        mine = wanted()
        mine[:, me] = False
        table = blocks.each(mine.sum(0)[None], 0)  # [asker][block] -> queries
        if not bool(table.any()):
            report.ending("rule: boxes alone")
            return
        features = queries.shape[1]
        carried = (self.lengths * features)[None] < table * (features + width)  # pairs whose points travel
        asked = torch.where(carried, 0, table)
        arriving = int(asked.sum(0).max()) * (features + width) * queries.element_size()
        step = (torch.arange(blocks.count, device=table.device) - me) % blocks.count
        ways = {"points to queries": bool(carried.any()), "queries to points": bool(asked.any())}
        report.ending(f"rule: {' and '.join(way for way, used in ways.items() if used)}")
        if bool(carried.any()):
            yield from self._fetched(queries, mine, carried, answer)
        if arriving <= AT_ONCE:
            rounds = [step > 0] if bool(asked.any()) else []
        else:
            every = torch.arange(blocks.count, device=table.device)
            rounds = [step == s for s in range(1, blocks.count) if bool(asked[every, (every + s) % blocks.count].any())]
        for now in rounds:
            yield from self._asked(queries, mine & wanted() & now & ~carried[me], answer)

    def _asked(self, queries: Tensor, chosen: Tensor, answer: Callable[[Held, Tensor], Tensor]):
        """Queries go to the blocks, answers come back."""
        row, peer = chosen.nonzero().unbind(1)
        ways = hops(peer, self.blocks)
        visiting = queries[row]
        for hop in ways:
            visiting = hop.there(visiting)
        found = answer(self.held, visiting)
        for hop in reversed(ways):
            found = hop.back(found)
        for block in peer.unique().tolist():
            here = peer == block
            yield block, row[here], found[here]

    def _fetched(self, queries: Tensor, mine: Tensor, carried: Tensor, answer: Callable[[Held, Tensor], Tensor]):
        """Whole blocks of points come to the queries."""
        me, n = self.blocks.index, len(self.points)
        askers = carried[:, me].nonzero().flatten()
        points = self.points.repeat(len(askers), 1)
        for hop in hops(askers.repeat_interleave(n), self.blocks):
            points = hop.there(points)
        sources = carried[me].nonzero().flatten().tolist()
        for block, part in zip(sources, points.split([self.blocks.lengths[b] for b in sources]), strict=True):
            rows = mine[:, block].nonzero().flatten()
            yield block, rows, answer(Held(part), queries[rows])


class Best:
    """The best neighbours so far of each query, and a squared distance beyond which none can be among them."""

    def __init__(self, queries: Tensor, k: int, bound: Tensor):
        self.bound = bound
        self.squares = queries.new_full((len(queries), k), torch.inf)
        self.index = torch.full((len(queries), k), NOBODY, device=queries.device)

    def take(self, rows: Tensor, squares: Tensor, index: Tensor) -> None:
        """Candidates for some of the queries."""
        k = self.squares.shape[1]
        pair = torch.cat([self.squares[rows], squares], 1), torch.cat([self.index[rows], index], 1)
        self.squares[rows], self.index[rows] = best = first(*pair, k)
        self.bound[rows] = torch.minimum(self.bound[rows], best[0][:, -1])


def _packed(squares: Tensor, index: Tensor) -> Tensor:
    """Both as integers as wide as the squares: one message. A block has fewer points than 32 bits count."""
    ints = torch.int32 if squares.dtype is torch.float32 else torch.int64
    index = torch.where(squares.isinf(), -1, index)
    return torch.cat([squares.contiguous().view(ints), index.to(ints)], 1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    bits, index = packed.chunk(2, 1)
    return bits.contiguous().view(dtype), index.to(torch.int64)
