"""Read STL files, binary and ASCII: every byte is accounted for, so that a truncated file is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ShardingError

HEADER, FACET = 84, 50  # bytes: a title of 80 and the number of facets; a facet
FACET_WORDS = 21  # "facet normal x y z outer loop", three times "vertex x y z", "endloop endfacet"


def read_stl(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the points (n, 3) and triangles (m, 3) of an STL file. Corners with equal coordinates are one point.

    A file is binary if its size is that of the number of facets in its header, whatever its title says.
    """
    data = path.read_bytes()
    count = int.from_bytes(data[80:HEADER], "little") if len(data) >= HEADER else 0
    if len(data) >= HEADER and len(data) == HEADER + FACET * count:
        facets = np.frombuffer(data, [("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("", "u1", 2)], offset=HEADER)
        corners = facets["corners"].astype(np.float32)
    elif data[:5].lower() == b"solid" and _is_text(data[:1000]):
        corners = _read_ascii(path, data)
    elif len(data) < HEADER:
        raise ShardingError(f"{path} has {len(data)} bytes; a binary STL file has at least {HEADER}")
    else:
        raise ShardingError(
            f"{path} is not an STL file, or truncated: its header says {count} facets, which are "
            f"{HEADER + FACET * count} bytes, and it has {len(data)}"
        )
    # Adding zero turns -0.0 into 0.0, so that the two are one point.
    points, triangles = np.unique(corners.reshape(-1, 3) + corners.dtype.type(0), axis=0, return_inverse=True)
    return points, triangles.reshape(-1, 3)


def _is_text(data: bytes) -> bool:
    return all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in data.partition(b"\n")[2])


def _read_ascii(path: Path, data: bytes) -> np.ndarray:
    """Return the corners (m, 3, 3) of all solids of an ASCII file."""
    found, inside = [], False
    words: list[bytes] = []
    for number, line in enumerate(data.lower().splitlines(), 1):
        first = line.split(maxsplit=1)[:1]
        if first in ([b"solid"], [b"endsolid"]):
            inside = _check_solid(path, number, first == [b"solid"], inside, words)
            if not inside:
                found.append(_parse_facets(path, number, words))
                words = []
        else:
            words += line.split()
    if inside or words:
        raise ShardingError(f"{path} is truncated: its last solid has no 'endsolid'")
    return np.concatenate(found)


def _check_solid(path: Path, number: int, begins: bool, inside: bool, words: list[bytes]) -> bool:
    if begins == inside or (begins and words):
        raise ShardingError(
            f"{path}, line {number}: solids of an ASCII STL file begin with 'solid', end with 'endsolid'"
        )
    return begins


def _parse_facets(path: Path, number: int, words: list[bytes]) -> np.ndarray:
    if len(words) % FACET_WORDS:
        raise ShardingError(f"{path}: the solid that ends at line {number} has an incomplete facet")
    table = np.array(words, dtype=object).reshape(-1, FACET_WORDS)
    if len(table) and (not (table[:, [0, 1, 5, 6, 7, 11, 15, 19, 20]] == KEYWORDS).all()):
        raise ShardingError(f"{path}: the solid that ends at line {number} is not made of facets with three vertices")
    try:
        return table[:, COORDINATES].astype(np.float64).reshape(-1, 3, 3)
    except ValueError as error:
        raise ShardingError(f"{path}: a coordinate of the solid that ends at line {number}: {error}") from None


KEYWORDS = np.array(
    [b"facet", b"normal", b"outer", b"loop", b"vertex", b"vertex", b"vertex", b"endloop", b"endfacet"], dtype=object
)
COORDINATES = [8, 9, 10, 12, 13, 14, 16, 17, 18]
