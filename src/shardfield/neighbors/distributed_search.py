"""Exact neighbor search among points that are sharded over ranks.

1. The ranks all-gather a few bounding boxes of each shard and the number of points in each box. From them each rank
   derives, for each of its queries, a distance within which there are at least k points.
2. Each rank searches its own shard, which lowers this upper bound.
3. A shard whose boxes are all beyond the bound cannot contain a neighbor. The ranks all-gather the number of remaining
   queries per pair of ranks.
4. For each pair either the queries are sent to the points and the candidates are sent back, or the shard of points is
   sent to the queries, whichever is fewer bytes. If more than MAX_INCOMING_BYTES of queries would arrive at one rank,
   the shards are visited one after the other, as in a ring; the neighbors of one round shrink the next rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..comm import collectives
from ..debug import explain
from ..ops._common.blockwise import Blocks
from ..ops.sorting.samplesort import plan_exchanges
from .local import LocalPoints
from .metric import NO_NEIGHBOR, bounding_boxes, max_distance_to_boxes, min_distance_to_boxes, select_nearest

MAX_BOX_DEPTH = 4  # a shard is described by at most 2 ** MAX_BOX_DEPTH boxes
POINTS_PER_BOX = 256  # at least, in the largest shard: the boxes of a small one cost more than they save
MAX_INCOMING_BYTES = 1 << 28  # bytes of queries that may arrive at one rank in one exchange


class DistributedPoints:
    """Points sharded over some mesh axes, and the bounding boxes of all shards."""

    def __init__(self, points: Tensor, blocks: Blocks):
        self.points, self.blocks, self.local_points = points, blocks, LocalPoints(points)
        if blocks.count == 1:  # no other rank has points
            return
        self.shard_sizes = torch.tensor(blocks.shard_sizes, device=points.device)
        depth = min(MAX_BOX_DEPTH, (max(blocks.shard_sizes) // (2 * POINTS_PER_BOX)).bit_length())
        boxes, counts = bounding_boxes(points, depth)
        # One message for boxes and counts. float32 is exact up to the clamp; a lower count only weakens the bound.
        row = torch.cat([boxes.flatten(1), counts.clamp_max(1 << 24)[:, None].to(points.dtype)], 1)
        gathered = blocks.all_gather_unit(row[None], 0).flatten(0, 1)
        self.boxes, self.counts = gathered[:, :-1].unflatten(1, (2, -1)), gathered[:, -1].to(torch.int64)

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (squared distances, global indices) of the k nearest of all points to this rank's queries.

        Every rank calls this with its own queries, possibly none. Entries beyond the radius `reach` are NO_NEIGHBOR.
        """
        if self.blocks.count == 1:
            return self.local_points.nearest(queries, k, reach)
        coord, max_shard = self.blocks.index, max(self.blocks.shard_sizes)
        min_squared = self._min_squared_distance(queries)
        if reach is not None:
            min_squared = min_squared.masked_fill(min_squared.sqrt() > reach, torch.inf)
        best = NearestSoFar(queries, k, self._upper_bound(queries, k))
        rows = (min_squared[:, coord] <= best.bound).nonzero().flatten()
        best.begin(rows, *self._to_global_index(self.local_points.nearest(queries[rows], k, reach), coord))

        def remaining() -> Tensor:
            return (min_squared <= best.bound[:, None]) & min_squared.isfinite()

        def answer(shard: LocalPoints, rows: Tensor) -> Tensor:
            return _pack(*shard.nearest(rows, min(k, max_shard), reach))

        for peer, rows, answers in self._search_remote(queries, remaining, answer, 2 * min(k, max_shard)):
            best.update(rows, *self._to_global_index(_unpack(answers, queries.dtype), peer))
        return best.squares, best.index

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """Return an upper bound of the number of points within the radius `reach` of each query."""
        total = self.local_points.count(queries, reach)
        if self.blocks.count == 1:
            return total
        near = self._min_squared_distance(queries).sqrt() <= reach
        visits = self._search_remote(queries, lambda: near, lambda shard, rows: shard.count(rows, reach)[:, None], 2)
        for _, rows, counts in visits:
            total[rows] += counts[:, 0]
        return total

    def _min_squared_distance(self, queries: Tensor) -> Tensor:
        """Return (queries, shards): a lower bound of the squared distance to the shard's points; inf if it is empty."""
        return min_distance_to_boxes(self.boxes, queries).unflatten(1, (self.blocks.count, -1)).amin(2)

    def _upper_bound(self, queries: Tensor, k: int) -> Tensor:
        """Return a squared distance within which each query has at least k points, from boxes fully within it."""
        far, order = max_distance_to_boxes(self.boxes, queries).sort(1)
        points = self.counts[order].cumsum(1)
        last = (points < k).sum(1, keepdim=True)
        return torch.where(last < len(self.boxes), far.gather(1, last.clamp_max(len(self.boxes) - 1)), torch.inf)[:, 0]

    def _to_global_index(self, neighbors: tuple[Tensor, Tensor], block: int) -> tuple[Tensor, Tensor]:
        squares, index = neighbors
        start = sum(self.blocks.shard_sizes[:block])
        return squares, torch.where(squares.isinf(), NO_NEIGHBOR, index + start)

    def _search_remote(
        self,
        queries: Tensor,
        remaining: Callable[[], Tensor],
        answer: Callable[[LocalPoints, Tensor], Tensor],
        width: int,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Search other shards; yield (shard, rows of the queries, their answers).

        remaining: returns a mask (queries, shards) of the searches still needed.
        answer: searches a shard for some queries and returns one row per query.
        width: size of an answer in units of one coordinate.
        All ranks take part in the same exchanges, also ranks without queries.
        """
        blocks, coord = self.blocks, self.blocks.index
        mask = remaining()
        mask[:, coord] = False
        table = blocks.all_gather_unit(mask.sum(0)[None], 0)  # [rank of the queries][shard] -> number of queries
        if not bool(table.any()):
            explain.record_outcome("rule: bounding boxes alone")
            return
        features = queries.shape[1]
        send_points = (self.shard_sizes * features)[None] < table * (features + width)  # pairs of ranks
        sent_queries = torch.where(send_points, 0, table)
        incoming = int(sent_queries.sum(0).max()) * (features + width) * queries.element_size()
        step = (torch.arange(blocks.count, device=table.device) - coord) % blocks.count
        strategies = {"points to queries": bool(send_points.any()), "queries to points": bool(sent_queries.any())}
        explain.record_outcome(f"rule: {' and '.join(name for name, used in strategies.items() if used)}")
        if bool(send_points.any()):
            yield from self._fetch_points(queries, mask, send_points, answer)
        if incoming <= MAX_INCOMING_BYTES:
            rounds = [step > 0] if bool(sent_queries.any()) else []
        else:
            every = torch.arange(blocks.count, device=table.device)
            rounds = [
                step == s for s in range(1, blocks.count) if bool(sent_queries[every, (every + s) % blocks.count].any())
            ]
        for shards in rounds:
            yield from self._send_queries(queries, mask & remaining() & shards & ~send_points[coord], answer)

    def _send_queries(self, queries: Tensor, mask: Tensor, answer: Callable[[LocalPoints, Tensor], Tensor]):
        """Send the queries that `mask` (queries, shards) selects to the shards; receive the answers."""
        row, peer = mask.nonzero().unbind(1)
        exchanges = plan_exchanges(peer, self.blocks)
        received = queries[row]
        for hop in exchanges:
            received = hop.exchange(received)
        answers = answer(self.local_points, received)
        for hop in reversed(exchanges):
            answers = hop.exchange_back(answers)
        for shard in peer.unique().tolist():
            selected = peer == shard
            yield shard, row[selected], answers[selected]

    def _fetch_points(
        self, queries: Tensor, mask: Tensor, send_points: Tensor, answer: Callable[[LocalPoints, Tensor], Tensor]
    ):
        """Send full shards of points to the ranks of the queries, which search them."""
        coord, n = self.blocks.index, len(self.points)
        sources = send_points[coord].nonzero().flatten().tolist()
        if len(self.blocks.groups) == 1:  # all ranks know who sends to whom
            shards = [self.points if goes else self.points[:0] for goes in send_points[:, coord].tolist()]
            sizes = [size if b in sources else 0 for b, size in enumerate(self.blocks.shard_sizes)]
            shapes = [(size, self.points.shape[1]) for size in sizes]
            arrived = collectives.exchange(shards, shapes, self.blocks.groups[0])
            blocks = [arrived[b] for b in sources]
        else:
            receivers = send_points[:, coord].nonzero().flatten()
            points = self.points.repeat(len(receivers), 1)
            for hop in plan_exchanges(receivers.repeat_interleave(n), self.blocks):
                points = hop.exchange(points)
            blocks = list(points.split([self.blocks.shard_sizes[b] for b in sources]))
        for shard, received in zip(sources, blocks, strict=True):
            rows = mask[:, shard].nonzero().flatten()
            yield shard, rows, answer(LocalPoints(received), queries[rows])


class NearestSoFar:
    """The nearest neighbors of each query so far, and a squared distance beyond which no point can be one of them."""

    def __init__(self, queries: Tensor, k: int, bound: Tensor):
        self.bound = bound
        self.squares = queries.new_full((len(queries), k), torch.inf)
        self.index = torch.full((len(queries), k), NO_NEIGHBOR, device=queries.device)

    def begin(self, rows: Tensor, squares: Tensor, index: Tensor) -> None:
        """Store the first candidates of the queries `rows`: k of each, nearest first."""
        self.squares[rows], self.index[rows] = squares, index
        self.bound[rows] = torch.minimum(self.bound[rows], squares[:, -1])

    def update(self, rows: Tensor, squares: Tensor, index: Tensor) -> None:
        """Merge candidates for the queries `rows`."""
        k = self.squares.shape[1]
        candidates = torch.cat([self.squares[rows], squares], 1), torch.cat([self.index[rows], index], 1)
        self.squares[rows], self.index[rows] = best = select_nearest(*candidates, k)
        self.bound[rows] = torch.minimum(self.bound[rows], best[0][:, -1])


def _pack(squares: Tensor, index: Tensor) -> Tensor:
    """Pack both into one message of integers as wide as the squares. The index in a shard fits into 32 bits."""
    ints = torch.int32 if squares.dtype is torch.float32 else torch.int64
    index = torch.where(squares.isinf(), -1, index)
    return torch.cat([squares.contiguous().view(ints), index.to(ints)], 1)


def _unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    bits, index = packed.chunk(2, 1)
    return bits.contiguous().view(dtype), index.to(torch.int64)
