"""Neighbor search among the points of one rank: by a k-d tree, a Triton kernel, or brute force."""

from __future__ import annotations

import torch
from torch import Tensor

from . import brute, kernel, tree
from .metric import NO_NEIGHBOR

TREE_FEATURES = 12  # with more features a search visits most leaves of a tree
TREE_PAIRS = 1 << 17  # with fewer pairs, building a tree takes longer than brute force


class LocalPoints:
    """Points (n, features) with the search structures built for them so far, which later searches reuse."""

    def __init__(self, points: Tensor):
        self.points = points.contiguous()
        self._tree: tree.KDTree | None = None
        self._tiles: kernel.PointTiles | None = None

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (squared distances, indices), each (queries, k): nearest first, ties by index.

        Missing entries are (inf, NO_NEIGHBOR). Points beyond the radius `reach` may be missing.
        """
        local_k = min(k, len(self.points))
        if not local_k or not len(queries):
            squares, index = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.int64)
        elif self._uses_tree(queries):
            squares, index = self._get_tree().nearest(queries, local_k, reach)
        elif kernel.supports(self.points, queries, local_k):
            squares, index = self._get_tiles(len(queries)).nearest(queries, local_k)
        else:
            squares, index = brute.nearest(self.points, queries, local_k)
        pad = k - squares.shape[1]
        if pad:
            squares = torch.cat([squares, squares.new_full((len(queries), pad), torch.inf)], 1)
            index = torch.cat([index, index.new_full((len(queries), pad), NO_NEIGHBOR)], 1)
        return squares, index

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """Return an upper bound of the number of points within the radius `reach` of each query."""
        if self._uses_tree(queries):
            return self._get_tree().count(queries, reach)
        return brute.count(self.points, queries, reach)

    def _uses_tree(self, queries: Tensor) -> bool:
        n, features = self.points.shape
        if self.points.device.type != "cpu" or features > TREE_FEATURES or not n:
            return False
        return self._tree is not None or (n * len(queries) > TREE_PAIRS and tree.kdtree_class() is not None)

    def _get_tiles(self, queries: int) -> kernel.PointTiles:
        """Return the tiles, sorted if this or an earlier search has enough queries to pay for sorting."""
        if self._tiles is None or not self._tiles.ordered:
            ordered = len(self.points) * queries > kernel.MIN_PAIRS_TO_SORT
            if self._tiles is None or ordered:
                self._tiles = kernel.PointTiles(self.points, ordered)
        return self._tiles

    def _get_tree(self) -> tree.KDTree:
        if self._tree is None:
            self._tree = tree.KDTree(self.points)
        return self._tree
