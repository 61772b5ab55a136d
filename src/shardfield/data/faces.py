"""Faces of volume meshes: the polygons between two cells, or between a cell and the outside."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ShardingError

# The faces of a volume cell by its type, as corners in VTK's order.
CELL_FACES: dict[str, list[tuple[int, ...]]] = {
    "tetra": [(0, 1, 3), (1, 2, 3), (2, 0, 3), (0, 2, 1)],
    "pyramid": [(0, 3, 2, 1), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4)],
    "wedge": [(0, 1, 2), (3, 5, 4), (0, 3, 4, 1), (1, 4, 5, 2), (2, 5, 3, 0)],
    "hexahedron": [(0, 4, 7, 3), (1, 2, 6, 5), (0, 1, 5, 4), (3, 7, 6, 2), (0, 3, 2, 1), (4, 5, 6, 7)],
}
FACE_TYPES = {"triangle": 3, "quad": 4}


def cell_faces(points: np.ndarray, cells: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the faces of volume cells by type, each once, and beside "triangle" the cells of each as "triangle/cells".

    "cells" (number, 2) has the cell that a face's normal points out of, and the cell that it points into, or -1 where
    there is none. Cells are numbered through all volume types, in the order of `CELL_FACES`. Faces are sorted by their
    lowest point. A face of more than two cells is an error.
    """
    arrays: dict[str, np.ndarray] = {}
    volumes = [kind for kind in CELL_FACES if len(cells.get(kind, ()))]
    offsets = dict(zip(volumes, np.cumsum([0] + [len(cells[kind]) for kind in volumes]).tolist(), strict=False))
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {3: [], 4: []}
    for kind in volumes:
        number = offsets[kind] + np.arange(len(cells[kind]))
        for face in CELL_FACES[kind]:
            for corners, at in _without_repeats(_outward(points, cells[kind], face)):
                found[corners.shape[1]].append((corners, number[at]))
    for name, width in FACE_TYPES.items():
        every = [np.concatenate(parts) for parts in zip(*found[width], strict=True)]
        if every and len(every[0]):
            arrays[name], arrays[f"{name}/cells"] = _merge(*every)
    return arrays


def boundary_faces(faces: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the faces of one cell only, by type: the surface of the volume, seen from outside."""
    return {name: faces[name][faces[f"{name}/cells"][:, 1] < 0] for name in FACE_TYPES if name in faces}


def _outward(points: np.ndarray, cells: np.ndarray, face: tuple[int, ...]) -> np.ndarray:
    """Return one face of each cell with its corners turned so that its normal points out of the cell.

    Files differ in the order of a wedge's corners, so that the order alone does not tell.
    """
    corners = cells[:, list(face)]
    if points.shape[1] != 3:
        return corners
    at = points[corners].astype(np.float64)
    normal = np.cross(at[:, 1] - at[:, 0], at[:, 2] - at[:, 0])
    outward = at.mean(1) - points[cells].astype(np.float64).mean(1)
    inward = (normal * outward).sum(1) < 0
    corners[inward] = corners[inward][:, ::-1]
    return corners


def _without_repeats(corners: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return faces of distinct corners and their rows: a quadrilateral with a repeated corner is a triangle.

    Cells around an axis are often hexahedra with an edge of no length. Faces of fewer than three points are left out.
    """
    repeated = corners == np.roll(corners, -1, axis=1)
    counts = repeated.sum(1)
    parts = [(corners[counts == 0], np.flatnonzero(counts == 0))]
    if corners.shape[1] == 4:
        at = np.flatnonzero(counts == 1)
        parts.append((corners[at][~repeated[at]].reshape(-1, 3), at))
    return parts


def _merge(every: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each face once, as its first cell has it, and the two cells of each."""
    key = np.sort(every, axis=1)
    order = np.lexsort(tuple(key[:, c] for c in range(key.shape[1] - 1, -1, -1)))  # stable: by points, then by cell
    key, owner = key[order], owner[order]
    new = np.append(True, (key[1:] != key[:-1]).any(1))
    first = np.flatnonzero(new)
    counts = np.diff(np.append(first, len(key)))
    if counts.max() > 2:
        many = first[counts.argmax()]
        raise ShardingError(f"{counts.max()} cells share the face of points {key[many].tolist()}: cells overlap")
    both = np.full((len(first), 2), -1, np.int64)
    both[:, 0] = owner[first]
    both[counts == 2, 1] = owner[first[counts == 2] + 1]
    return every[order[first]], both
