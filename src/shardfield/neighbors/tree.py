"""Neighbours by scipy's k-d tree, made exact.

The tree computes in double precision and orders equal distances as it likes. So it is asked for a few neighbours more
than are wanted, their distances are computed as everywhere else, and a query is done when the last one is so far
away that rounding cannot hide a better one behind it. The others are asked again for more, and at last brute force
settles what has too many ties.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import brute
from .metric import NO_NEIGHBOR, select_nearest, squared_distance

EXTRA_NEIGHBORS, GROWTH_FACTOR, MAX_ROUNDS = 4, 4, 3
CANDIDATES_PER_CHUNK = 1 << 20  # candidates that are looked at together


@cache
def kdtree_class() -> Any:
    """scipy's tree, or None where there is no scipy. Asked for when it is first needed: it takes long to import."""
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree


class KDTree:
    """The points of one block, in a tree."""

    def __init__(self, points: Tensor):
        self.points = points
        self.tree: Any = kdtree_class()(points.double().numpy(), balanced_tree=False)
        finfo = torch.finfo(points.dtype)
        self.slack = (2 * points.shape[1] + 16) * finfo.eps
        self.floor = (points.shape[1] + 1) * finfo.tiny  # squares below it may have lost all their digits

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None) -> tuple[Tensor, Tensor]:
        """(squared distances, indices) of the k nearest; beyond `reach` there may be NOBODY, infinitely far."""
        squares = queries.new_empty(len(queries), k)
        index = torch.empty(len(queries), k, dtype=torch.int64)
        left, take = torch.arange(len(queries)), k + EXTRA_NEIGHBORS
        for _ in range(MAX_ROUNDS):
            done = []
            for rows in left.split(max(1, CANDIDATES_PER_CHUNK // take)):
                squares[rows], index[rows], settled = self._query(queries[rows], k, take, reach)
                done.append(settled)
            left, take = left[~torch.cat(done)] if done else left, take * GROWTH_FACTOR
            if not len(left):
                return squares, index
        squares[left], index[left] = brute.nearest(self.points, queries[left], k)
        return squares, index

    def _query(self, queries: Tensor, k: int, take: int, reach: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n = len(self.points)
        take = min(take, n)
        bound = math.inf if reach is None else self._with_slack(reach)
        near, at = self.tree.query(
            queries.double().numpy(), range(1, take + 1), distance_upper_bound=bound, workers=_workers()
        )
        distance, candidates = torch.from_numpy(near), torch.from_numpy(at).to(torch.int64)
        missing = candidates == n
        squares = squared_distance(queries[:, None], self.points[candidates.clamp_max(n - 1)]).masked_fill(
            missing, torch.inf
        )
        squares, index = select_nearest(squares, candidates.masked_fill(missing, NO_NEIGHBOR), k)
        last = distance[:, -1]
        beyond = last.square() * (1 - self.slack) - self.floor
        settled = (beyond > squares[:, -1]) | last.isinf() if take < n else torch.ones_like(last, dtype=torch.bool)
        return squares, index, settled

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """At least as many as there are points within `reach` of each query; rounding may add some."""
        if not len(queries):
            return torch.empty(0, dtype=torch.int64)
        found = self.tree.query_ball_point(
            queries.double().numpy(), self._with_slack(reach), return_length=True, workers=_workers()
        )
        return torch.from_numpy(found).to(torch.int64)

    def _with_slack(self, reach: Tensor) -> float:
        return float(reach) * (1 + self.slack) + math.sqrt(self.floor)


def _workers() -> int:
    return max(1, torch.get_num_threads())
