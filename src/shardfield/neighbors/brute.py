"""Neighbors by brute force, over chunks of pairs that bound the memory. Works on every device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .metric import squared_distance

PAIRS_PER_CHUNK = 1 << 22  # distances computed at once
POINTS_PER_CHUNK = 1 << 15


def nearest(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (squared distances, indices) of the k points nearest to each query: nearest first, ties by index."""
    chunks = [_nearest_of(points, rows, k) for rows in _query_chunks(points, queries)]
    if not chunks:
        return queries.new_empty(0, k), queries.new_empty(0, k, dtype=torch.int64)
    squares, index = zip(*chunks, strict=True)
    return torch.cat(squares), torch.cat(index)


def count(points: Tensor, queries: Tensor, reach: Tensor) -> Tensor:
    """Return the number of points within the radius `reach` of each query."""
    counts = []
    for rows in _query_chunks(points, queries):
        total = rows.new_zeros(len(rows), dtype=torch.int64)
        for block in points.split(POINTS_PER_CHUNK):
            total += (squared_distance(rows[:, None], block).sqrt() <= reach).sum(1)
        counts.append(total)
    return torch.cat(counts) if counts else queries.new_empty(0, dtype=torch.int64)


def _query_chunks(points: Tensor, queries: Tensor) -> Iterator[Tensor]:
    """Split queries into chunks of at most PAIRS_PER_CHUNK pairs with one chunk of points."""
    return (
        iter(queries.split(max(1, PAIRS_PER_CHUNK // max(1, min(len(points), POINTS_PER_CHUNK)))))
        if len(queries)
        else iter(())
    )


def _nearest_of(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    squares = queries.new_empty(len(queries), 0)
    index = queries.new_empty(len(queries), 0, dtype=torch.int64)
    for start, block in zip(range(0, len(points), POINTS_PER_CHUNK), points.split(POINTS_PER_CHUNK), strict=True):
        block_squares, block_index = stable_smallest(squared_distance(queries[:, None], block), min(k, len(block)))
        if not start:
            squares, index = block_squares, block_index
            continue
        # Earlier candidates have lower indices and come first, so a stable sort breaks ties by index.
        squares, order = torch.cat([squares, block_squares], 1).sort(dim=1, stable=True)
        squares, index = squares[:, :k], torch.cat([index, block_index + start], 1).gather(1, order[:, :k])
    return squares, index


def stable_smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k smallest values of each row in order, and their indices; unlike topk, ties are ordered by index."""
    if not k:
        return values[:, :0], values.new_empty(len(values), 0, dtype=torch.int64)
    smallest, index = values.topk(k, 1, largest=False)
    kth = smallest.amax(1, keepdim=True)
    if bool(((values <= kth).sum(1) > k).any()):
        below, equal = values < kth, values == kth
        chosen = below | (equal & (equal.cumsum(1) <= k - below.sum(1, keepdim=True)))
        index = chosen.nonzero()[:, 1].view(-1, k)
    else:
        index = index.sort(1)[0]
    smallest, order = values.gather(1, index).sort(dim=1, stable=True)
    return smallest, index.gather(1, order)
