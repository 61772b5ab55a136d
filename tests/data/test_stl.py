"""STL files: binary and ASCII give the same body, and a file that lacks a byte is an error."""

import struct

import numpy as np
import pytest

from shardfield import ShardingError
from shardfield.data.stl import read_stl

OCTAHEDRON = np.array([[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], float)
FACES = np.array([[0, 2, 4], [2, 1, 4], [1, 3, 4], [3, 0, 4], [2, 0, 5], [1, 2, 5], [3, 1, 5], [0, 3, 5]])


def binary(corners, title=b"made by hand", count=None):
    facets = b"".join(struct.pack("<12f2x", 0, 0, 0, *facet.ravel()) for facet in corners)
    return title.ljust(80) + struct.pack("<I", len(corners) if count is None else count) + facets


def ascii_solid(corners, name="body"):
    lines = [f"solid {name}"]
    for facet in corners:
        lines += ["facet normal 0 0 0", "outer loop"]
        lines += ["vertex " + " ".join(f"{x:e}" for x in corner) for corner in facet]
        lines += ["endloop", "endfacet"]
    return "\n".join([*lines, f"endsolid {name}", ""])


BODY = OCTAHEDRON[FACES]
GOOD = {
    "binary": binary(BODY),
    "binary titled solid": binary(BODY, b"solid octahedron"),
    "ascii": ascii_solid(BODY).encode(),
    "capitals and CRLF": ascii_solid(BODY).upper().replace("\n", "\r\n").encode(),
    "two solids": (ascii_solid(BODY[:5]) + ascii_solid(BODY[5:], "facet 2")).encode(),
    "negative zeros": binary(np.where(BODY == 0, -0.0, BODY)),
}


@pytest.mark.parametrize("name", GOOD)
def test_formats(name, tmp_path):
    path = tmp_path / "body.stl"
    path.write_bytes(GOOD[name])
    points, triangles = read_stl(path)
    assert points.shape == (6, 3) and triangles.shape == (8, 3)
    np.testing.assert_array_equal(points[triangles], BODY)


whole = ascii_solid(BODY)
BAD = {
    "cut inside a facet": (binary(BODY)[:-20], "header says 8 facets, which are 484 bytes, and it has 464"),
    "cut between facets": (binary(BODY)[:-100], "header says 8 facets"),
    "more facets than there are": (binary(BODY, count=2**32 - 1), "header says 4294967295 facets"),
    "fewer facets than there are": (binary(BODY, count=3), "header says 3 facets"),
    "no header": (b"binary", "has 6 bytes"),
    "ascii cut between facets": ("\n".join(whole.splitlines()[:29]).encode(), "has no 'endsolid'"),
    "ascii cut inside a facet": ("\n".join([*whole.splitlines()[:27], "endsolid"]).encode(), "incomplete facet"),
    "a number that is none": (whole.replace("1.000000e+00", "one", 1).encode(), "could not convert"),
    "other words": (b"solid a\n" + b" ".join([b"hello"] * 21) + b"\nendsolid a\n", "not made of facets"),
    "solid in a solid": (b"solid a\nsolid b\nendsolid", "line 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_broken_files(name, tmp_path):
    data, said = BAD[name]
    path = tmp_path / "body.stl"
    path.write_bytes(data)
    with pytest.raises(ShardingError, match=said):
        read_stl(path)
