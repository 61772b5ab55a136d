"""Faces of volume meshes: each between two cells, the others make a closed surface that is seen from outside."""

import numpy as np
import pytest

from shardfield import ShardingError
from shardfield.data.connectivity import is_closed, triangles_of
from shardfield.data.faces import CELL_FACES, boundary_faces, cell_faces

CUBE = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]], float)
# Two hexahedra side by side, a pyramid on top of the first, and a wedge on the far side of the second.
POINTS = np.concatenate([CUBE, CUBE[[1, 2, 5, 6]] + [1, 0, 0], [[0.5, 0.5, 2]], [[3, 0.5, 0], [3, 0.5, 1]]])
CELLS = {
    "hexahedron": np.array([[0, 1, 2, 3, 4, 5, 6, 7], [1, 8, 9, 2, 5, 10, 11, 6]]),
    "pyramid": np.array([[4, 5, 6, 7, 12]]),
    "wedge": np.array([[8, 13, 9, 10, 14, 11]]),
}


def volume(points, triangles):
    return np.linalg.det(points[triangles]).sum() / 6


@pytest.mark.parametrize("turned", [False, True])
def test_mixed_cells(turned):
    """A wedge may be given in either orientation: files differ."""
    cells = dict(CELLS)
    if turned:
        cells["wedge"] = cells["wedge"][:, [3, 4, 5, 0, 1, 2]]
    faces = cell_faces(POINTS, cells)
    assert {n: a.shape for n, a in faces.items()} == {
        "triangle": (6, 3), "triangle/cells": (6, 2), "quad": (13, 4), "quad/cells": (13, 2),
    }  # fmt: skip
    inner = faces["quad/cells"][faces["quad/cells"][:, 1] >= 0]
    # numbered through pyramid 0, wedge 1, hexahedra 2 and 3
    assert sorted(map(tuple, np.sort(inner, 1).tolist())) == [(0, 2), (1, 3), (2, 3)]
    assert bool((np.diff(faces["quad"].min(1)) >= 0).all()), "sorted by the lowest point"
    surface = triangles_of(boundary_faces(faces))
    assert is_closed(surface)
    assert volume(POINTS, surface) == pytest.approx(2 + 1 / 3 + 1 / 2), "normals point outwards"


def test_face_points_away_from_its_first_cell():
    faces = cell_faces(POINTS, {"hexahedron": CELLS["hexahedron"]})
    centers = POINTS[CELLS["hexahedron"]].mean(1)
    corners = POINTS[faces["quad"]]
    normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    assert bool(((normal * (corners.mean(1) - centers[faces["quad/cells"][:, 0]])).sum(1) > 0).all())


def test_collapsed_hexahedra():
    """Around an axis, four hexahedra have an edge of no length; the axis is no face, and their sides are triangles."""
    ring = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], float)
    points = np.concatenate([[[0, 0, z], *np.insert(ring, 2, z, axis=1)] for z in (0.0, 1.0)])
    cells = np.array([[0, 1 + i, 1 + (i + 1) % 4, 0, 5, 6 + i, 6 + (i + 1) % 4, 5] for i in range(4)])
    faces = cell_faces(points, {"hexahedron": cells})
    assert len(faces["triangle"]) == 8 and len(faces["quad"]) == 8  # lids; four inner and four outer sides
    surface = triangles_of(boundary_faces(faces))
    assert is_closed(surface) and volume(points, surface) == pytest.approx(2)


def test_cells_that_overlap():
    with pytest.raises(ShardingError, match=r"3 cells share the face of points \[1, 2, 5, 6\]"):
        cell_faces(POINTS, {"hexahedron": CELLS["hexahedron"][[0, 1, 1]]})


def test_every_edge_of_a_cell_is_in_two_faces():
    for faces in CELL_FACES.values():
        used = [frozenset(pair) for face in faces for pair in zip(face, (*face[1:], face[0]), strict=True)]
        assert all(used.count(edge) == 2 for edge in used)
