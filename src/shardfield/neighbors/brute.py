"""Neighbours by looking at every pair, a bounded block of them at a time. Works everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .metric import squared_distance

PAIRS_PER_CHUNK = 1 << 22  # pairs that are looked at together
POINTS_PER_CHUNK = 1 << 15


def nearest(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(squared distances, indices) of the k points nearest to each query, nearest first, equal ones by index."""
    found = [_nearest_of(points, rows, k) for rows in _query_chunks(points, queries)]
    if not found:
        return queries.new_empty(0, k), queries.new_empty(0, k, dtype=torch.int64)
    squares, index = zip(*found, strict=True)
    return torch.cat(squares), torch.cat(index)


def count(points: Tensor, queries: Tensor, reach: Tensor) -> Tensor:
    """How many points each query has within `reach`."""
    found = []
    for rows in _query_chunks(points, queries):
        total = rows.new_zeros(len(rows), dtype=torch.int64)
        for block in points.split(POINTS_PER_CHUNK):
            total += (squared_distance(rows[:, None], block).sqrt() <= reach).sum(1)
        found.append(total)
    return torch.cat(found) if found else queries.new_empty(0, dtype=torch.int64)


def _query_chunks(points: Tensor, queries: Tensor) -> Iterator[Tensor]:
    """Queries, as many as make up a block with the columns of points that are looked at together."""
    return (
        iter(queries.split(max(1, PAIRS_PER_CHUNK // max(1, min(len(points), POINTS_PER_CHUNK)))))
        if len(queries)
        else iter(())
    )


def _nearest_of(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    squares = queries.new_empty(len(queries), 0)
    index = queries.new_empty(len(queries), 0, dtype=torch.int64)
    for start, block in zip(range(0, len(points), POINTS_PER_CHUNK), points.split(POINTS_PER_CHUNK), strict=True):
        near, at = stable_smallest(squared_distance(queries[:, None], block), min(k, len(block)))
        # what was found before has lower indices and stands in front, where a stable sort keeps it
        squares, order = torch.cat([squares, near], 1).sort(dim=1, stable=True)
        squares, index = squares[:, :k], torch.cat([index, at + start], 1).gather(1, order[:, :k])
    return squares, index


def stable_smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row, in order; of equal ones, those of lower index. topk promises nothing of the kind."""
    if not k:
        return values[:, :0], values.new_empty(len(values), 0, dtype=torch.int64)
    near, index = values.topk(k, 1, largest=False)
    last = near.amax(1, keepdim=True)
    if bool(((values <= last).sum(1) > k).any()):
        below, equal = values < last, values == last
        chosen = below | (equal & (equal.cumsum(1) <= k - below.sum(1, keepdim=True)))
        index = chosen.nonzero()[:, 1].view(-1, k)
    else:
        index = index.sort(1)[0]
    near, order = values.gather(1, index).sort(dim=1, stable=True)
    return near, index.gather(1, order)
