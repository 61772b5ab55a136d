"""Partition the points of a mesh by METIS: few edges between the parts."""

from __future__ import annotations

import numpy as np

from ..errors import ShardingError
from .formats import import_package

MAX_PARTS = 256
POINTS_OF_A_PART = 64  # at least, on average


def metis_parts(n: int, edges: np.ndarray) -> np.ndarray:
    """Return the part of each of n points; the parts are halves of halves, numbered so that halves are contiguous.

    `edges` (2, number) has both directions, sorted by target. The number of parts is a power of two, up to 256.
    Merging consecutive parts gives the partition for any smaller power of two, so that one partition serves all
    numbers of ranks.
    """
    if not edges.shape[1]:
        raise ShardingError("order='metis' partitions the edges of a mesh, and this file has no cells with edges")
    pymetis = import_package("pymetis", "metis")
    parts = 1
    while 2 * parts <= MAX_PARTS and 2 * parts * POINTS_OF_A_PART <= n:
        parts *= 2
    if parts == 1:
        return np.zeros(n, np.int64)
    begins = np.searchsorted(edges[1], np.arange(n + 1))
    _, found = pymetis.part_graph(parts, pymetis.CSRAdjacency(begins, edges[0]), recursive=True)
    return np.asarray(found, np.int64)


def shard_sizes(part_sizes: list[int], ranks: int) -> list[int] | None:
    """Return the points of each rank if the parts can be divided among the ranks, else None."""
    if len(part_sizes) < ranks or len(part_sizes) % ranks:
        return None
    return np.asarray(part_sizes).reshape(ranks, -1).sum(1).tolist()
