"""Exact neighbors by scipy's k-d tree.

The tree computes in double precision and returns ties in any order. It is therefore queried for more than k candidates,
whose distances are computed again with `metric.py`. A query is done if the last candidate is farther than the k-th
neighbor by more than the rounding error, so that no better point can be missing. The other queries are repeated with
more candidates. After MAX_ROUNDS, brute force answers queries with too many ties.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import brute
from .metric import NO_NEIGHBOR, select_nearest, squared_distance

EXTRA_NEIGHBORS, GROWTH_FACTOR, MAX_ROUNDS = 4, 4, 3
CANDIDATES_PER_CHUNK = 1 << 20  # candidates processed at once


@lru_cache(maxsize=1)
def kdtree_class() -> Any:
    """Return scipy's cKDTree, or None without scipy. The import is lazy, as it takes long."""
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree


class KDTree:
    """A k-d tree of the points of one rank."""

    def __init__(self, points: Tensor):
        self.points = points
        self.tree: Any = kdtree_class()(points.double().numpy(), balanced_tree=False)
        finfo = torch.finfo(points.dtype)
        self.slack = (2 * points.shape[1] + 16) * finfo.eps
        self.floor = (points.shape[1] + 1) * finfo.tiny  # smaller squares may have lost all significant digits

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (squared distances, indices) of the k nearest; points beyond `reach` may be (inf, NO_NEIGHBOR)."""
        squares = queries.new_empty(len(queries), k)
        index = torch.empty(len(queries), k, dtype=torch.int64)
        remaining, candidates = torch.arange(len(queries)), k + EXTRA_NEIGHBORS
        for _ in range(MAX_ROUNDS):
            done = []
            for rows in remaining.split(max(1, CANDIDATES_PER_CHUNK // candidates)):
                squares[rows], index[rows], settled = self._query(queries[rows], k, candidates, reach)
                done.append(settled)
            remaining, candidates = remaining[~torch.cat(done)] if done else remaining, candidates * GROWTH_FACTOR
            if not len(remaining):
                return squares, index
        squares[remaining], index[remaining] = brute.nearest(self.points, queries[remaining], k)
        return squares, index

    def _query(self, queries: Tensor, k: int, number: int, reach: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n = len(self.points)
        number = min(number, n)
        bound = math.inf if reach is None else self._with_slack(reach)
        tree_distance, tree_index = self.tree.query(
            queries.double().numpy(), range(1, number + 1), distance_upper_bound=bound, workers=_workers()
        )
        distance, candidates = torch.from_numpy(tree_distance), torch.from_numpy(tree_index).to(torch.int64)
        missing = candidates == n  # the last ones of a row
        squares = squared_distance(queries[:, None], self.points[candidates.clamp_max(n - 1)]).masked_fill(
            missing, torch.inf
        )
        candidates.masked_fill_(missing, NO_NEIGHBOR)
        if bool(((squares[:, 1:] > squares[:, :-1]) | missing[:, 1:]).all()):  # most often: in order, and no ties
            squares, index = squares[:, :k], candidates[:, :k]
        else:
            squares, index = select_nearest(squares, candidates, k)
        farthest = distance[:, -1]
        lower_bound = farthest.square() * (1 - self.slack) - self.floor
        settled = (
            (lower_bound > squares[:, -1]) | farthest.isinf()
            if number < n
            else torch.ones_like(farthest, dtype=torch.bool)
        )
        return squares, index, settled

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """Return an upper bound of the number of points within the radius `reach` of each query."""
        if not len(queries):
            return torch.empty(0, dtype=torch.int64)
        counts = self.tree.query_ball_point(
            queries.double().numpy(), self._with_slack(reach), return_length=True, workers=_workers()
        )
        return torch.from_numpy(counts).to(torch.int64)

    def _with_slack(self, reach: Tensor) -> float:
        return float(reach) * (1 + self.slack) + math.sqrt(self.floor)


def _workers() -> int:
    return max(1, torch.get_num_threads())
