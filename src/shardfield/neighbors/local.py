"""The points that one rank holds, ready to be searched: by a tree, by a kernel, or pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

from . import brute, kernel, tree
from .metric import NO_NEIGHBOR

TREE_FEATURES = 12  # a tree of more dims visits most of its leaves
TREE_PAIRS = 1 << 17  # below that many pairs a tree is not worth building


class LocalPoints:
    """Points (n, features) that are searched several times."""

    def __init__(self, points: Tensor):
        self.points = points.contiguous()
        self._tree: tree.KDTree | None = None
        self._tiles: kernel.PointTiles | None = None

    def nearest(self, queries: Tensor, k: int, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(squared distances, indices) (queries, k), nearest first, equal ones by index; where there are fewer than k
        points NOBODY, infinitely far. What is beyond `reach` need not be found."""
        here = min(k, len(self.points))
        if not here or not len(queries):
            squares, index = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.int64)
        elif self._uses_tree(queries):
            squares, index = self._get_tree().nearest(queries, here, reach)
        elif kernel.supports(self.points, queries, here):
            squares, index = self._get_tiles(len(queries)).nearest(queries, here)
        else:
            squares, index = brute.nearest(self.points, queries, here)
        pad = k - squares.shape[1]
        if pad:
            squares = torch.cat([squares, squares.new_full((len(queries), pad), torch.inf)], 1)
            index = torch.cat([index, index.new_full((len(queries), pad), NO_NEIGHBOR)], 1)
        return squares, index

    def count(self, queries: Tensor, reach: Tensor) -> Tensor:
        """At least as many as there are points within `reach` of each query."""
        if self._uses_tree(queries):
            return self._get_tree().count(queries, reach)
        return brute.count(self.points, queries, reach)

    def _uses_tree(self, queries: Tensor) -> bool:
        n, features = self.points.shape
        if self.points.device.type != "cpu" or features > TREE_FEATURES or not n:
            return False
        return self._tree is not None or (n * len(queries) > TREE_PAIRS and tree.kdtree_class() is not None)

    def _get_tiles(self, queries: int) -> kernel.PointTiles:
        """Tiles for so many queries: in order, if they are many, or were once."""
        if self._tiles is None or not self._tiles.ordered:
            ordered = len(self.points) * queries > kernel.MIN_PAIRS_TO_SORT
            if self._tiles is None or ordered:
                self._tiles = kernel.PointTiles(self.points, ordered)
        return self._tiles

    def _get_tree(self) -> tree.KDTree:
        if self._tree is None:
            self._tree = tree.KDTree(self.points)
        return self._tree
