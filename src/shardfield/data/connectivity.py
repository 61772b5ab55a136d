"""Edges, areas and normals of unstructured meshes, from their cells: numpy arrays in one process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# The edges of a cell by its type, as in VTK. Points of higher order (midsides) are not corners and have no edges here.
CELL_EDGES: dict[str, list[tuple[int, int]]] = {
    "vertex": [],
    "line": [(0, 1)],
    "triangle": [(0, 1), (1, 2), (2, 0)],
    "quad": [(0, 1), (1, 2), (2, 3), (3, 0)],
    "tetra": [(0, 1), (1, 2), (2, 0), (0, 3), (1, 3), (2, 3)],
    "pyramid": [(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4), (2, 4), (3, 4)],
    "wedge": [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 4), (2, 5)],
    "hexahedron": [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7)],
}

CELL_CORNERS = {
    "vertex": 1, "line": 2, "triangle": 3, "quad": 4, "tetra": 4, "pyramid": 5, "wedge": 6, "hexahedron": 8,
}  # fmt: skip


def cell_edges(cells: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the edges (2, number) of all cells, each in both directions and once, sorted by their targets."""
    pairs = [cells[kind][:, list(edge)] for kind in cells for edge in CELL_EDGES[kind]]
    if not pairs:
        return np.empty((2, 0), np.int64)
    one_way = np.concatenate(pairs)
    both = np.concatenate([one_way, one_way[:, ::-1]])
    both = np.unique(both[both[:, 0] != both[:, 1]][:, ::-1], axis=0)  # by target, then by source
    return np.ascontiguousarray(both[:, ::-1].T)


def sorted_edges(edges: np.ndarray) -> np.ndarray:
    """Return edges (2, number) sorted by their targets, then by their sources."""
    return np.ascontiguousarray(edges[:, np.lexsort((edges[0], edges[1]))])


def triangles_of(cells: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the surface's triangles (number, 3); a quadrilateral is two of them."""
    parts = [cells[kind][:, list(corners)] for kind, *splits in TRIANGLES if kind in cells for corners in splits]
    return np.concatenate(parts) if parts else np.empty((0, 3), np.int64)


TRIANGLES = (("triangle", (0, 1, 2)), ("quad", (0, 1, 2), (0, 2, 3)))


def point_areas(points: np.ndarray, triangles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outward unit normal (n, 3) and the share of the surface (n, 1) of each point.

    A third of a triangle belongs to each of its corners. A normal is the mean of those of the triangles around a point,
    weighted by area; it is zero where there are none, or where they cancel.
    """
    flat = np.zeros((len(points), 3 - points.shape[1]))  # of a plane mesh
    corners = np.concatenate([points, flat], 1)[triangles].astype(np.float64)
    vectors = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]) / 6
    normals, areas = np.zeros((len(points), 3)), np.zeros((len(points), 1))
    for corner in range(3):
        np.add.at(normals, triangles[:, corner], vectors)
        np.add.at(areas, triangles[:, corner], np.linalg.norm(vectors, axis=1)[:, None])
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    return (normals / np.where(length > 0, length, 1)).astype(points.dtype), areas.astype(points.dtype)


def is_closed(triangles: np.ndarray) -> bool:
    """Return whether the surface has no boundary and one orientation: every edge is used once in each direction.

    Triangles with a repeated corner have no area and do not count.
    """
    triangles = triangles[(triangles != np.roll(triangles, 1, axis=1)).all(1)]
    directed = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    forward, counts = np.unique(directed, axis=0, return_counts=True)
    backward = np.unique(directed[:, ::-1], axis=0)
    return bool(len(triangles)) and bool((counts == 1).all()) and np.array_equal(forward, backward)
