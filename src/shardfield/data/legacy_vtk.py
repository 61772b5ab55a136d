"""Read legacy VTK files: every array is read to its declared end, so that a truncated file is an error.

VTK's own reader and meshio return what they could read of a truncated file, and meshio reads none of the attributes
that VTK writes for normals, texture coordinates, and integers other than `int`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from ..errors import ShardingError

DTYPES = {
    "char": "i1", "signed_char": "i1", "unsigned_char": "u1", "short": "i2", "unsigned_short": "u2", "int": "i4",
    "unsigned_int": "u4", "long": "i8", "unsigned_long": "u8", "float": "f4", "double": "f8",
    "vtkidtype": "i4",  # VTK writes its indices as 32 bits here
    **{f"vtktype{name}{bits}": f"{name[0]}{bits // 8}" for name in ("int", "uint") for bits in (8, 16, 32, 64)},
    "vtktypefloat32": "f4", "vtktypefloat64": "f8",
}  # fmt: skip
CELL_TYPES = {
    1: "vertex", 3: "line", 5: "triangle", 6: "triangle_strip", 7: "polygon", 8: "pixel", 9: "quad", 10: "tetra",
    11: "voxel", 12: "hexahedron", 13: "wedge", 14: "pyramid", 21: "line3", 22: "triangle6", 23: "quad8", 24: "tetra10",
    25: "hexahedron20", 26: "wedge15", 27: "pyramid13", 42: "polyhedron",
}  # fmt: skip
WORDS = 1 << 18  # of an ASCII file that are converted at a time: words take twenty times the memory of numbers
SURFACE_CELLS = ("VERTICES", "LINES", "POLYGONS", "TRIANGLE_STRIPS")  # of POLYDATA, in the order of its cell data
SHAPES = {
    "VECTORS": (3,), "NORMALS": (3,), "TENSORS": (3, 3), "TENSORS6": (6,), "GLOBAL_IDS": (), "PEDIGREE_IDS": ()
}  # fmt: skip


@dataclass
class VtkArrays:
    """The arrays of a mesh as VTK has them: cells by section, as where the corners of each begin, and all corners."""

    dataset: str
    points: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))
    cells: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    cell_types: np.ndarray | None = None
    data: dict[str, dict[str, np.ndarray]] = field(default_factory=lambda: {"POINT_DATA": {}, "CELL_DATA": {}})

    def cells_by_type(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the cells of an unstructured grid by type, (number, corners), and their data by "triangle/NAME"."""
        begins, corners = self.cells.get("CELLS", (np.zeros(1, np.int64), np.empty(0, np.int64)))
        types = np.empty(0, np.int32) if self.cell_types is None else self.cell_types
        if len(types) != len(begins) - 1:
            raise ShardingError(f"{path} is truncated: it has {len(begins) - 1} cells, and types of {len(types)}")
        cells: dict[str, np.ndarray] = {}
        cell_data: dict[str, np.ndarray] = {}
        for number in np.unique(types).tolist():
            at, kind = np.flatnonzero(types == number), CELL_TYPES.get(number, f"VTK's type {number}")
            widths = np.unique(np.diff(begins)[at])
            if len(widths) != 1:
                raise ShardingError(f"{path}: cells of type {kind!r} with different numbers of corners")
            cells[kind] = corners[begins[at][:, None] + np.arange(widths[0])]
            cell_data |= {f"{kind}/{name}": values[at] for name, values in self.data["CELL_DATA"].items()}
        return cells, cell_data

    def has_triangles_only(self) -> bool:
        """Return whether the cells of a surface are triangles and vertices."""
        if any(name in self.cells and len(self.cells[name][0]) > 1 for name in ("LINES", "TRIANGLE_STRIPS")):
            return False
        return bool((np.diff(self.cells["POLYGONS"][0]) == 3).all()) if "POLYGONS" in self.cells else True

    def triangles(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the triangles of a surface that has no other polygons, and their data."""
        corners = self.cells["POLYGONS"][1].reshape(-1, 3) if "POLYGONS" in self.cells else np.empty((0, 3), np.int64)
        vertices = len(self.cells["VERTICES"][0]) - 1 if "VERTICES" in self.cells else 0  # their data come first
        return corners, {name: values[vertices:] for name, values in self.data["CELL_DATA"].items()}


def dataset_of(path: Path) -> str:
    """Return the dataset of a legacy VTK file as it names it, for instance UNSTRUCTURED_GRID."""
    with path.open("rb") as file:
        words = file.read(1000).upper().partition(b"\nDATASET")[2].split()
    return words[0].decode(errors="replace") if words else ""


def read_legacy_vtk(path: Path) -> VtkArrays:
    """Read an unstructured grid or a surface (POLYDATA)."""
    try:
        return _parse(_Reader(path.read_bytes()))
    except ShardingError as error:
        raise ShardingError(f"{path} is truncated, or no legacy VTK file: {error}") from None


def _parse(reader: _Reader) -> VtkArrays:
    if not reader.line().startswith("# vtk DataFile Version"):
        raise ShardingError("its first line names no version")
    reader.end_line()  # the title, which may be empty
    reader.is_text = {"ASCII": True, "BINARY": False}.get(reader.line().strip().upper())
    found, rows, section, empty = VtkArrays(""), 0, "", False
    if reader.is_text is None:
        raise ShardingError("it is neither ASCII nor BINARY")
    while words := reader.line().split():
        keyword = words[0].upper()
        if keyword == "DATASET":
            found.dataset = words[1].upper()
        elif keyword == "POINTS":
            found.points = reader.array(words[2], int(words[1]), (3,))
        elif keyword in ("CELLS", *SURFACE_CELLS):
            found.cells[keyword] = reader.cells(int(words[1]), int(words[2]))
        elif keyword == "CELL_TYPES":
            found.cell_types = reader.array("int", int(words[1]))
        elif keyword in found.data:
            section, rows, empty = keyword, int(words[1]), True
        elif keyword == "METADATA":
            reader.skip_metadata()
        elif keyword == "LOOKUP_TABLE":
            reader.array("float" if reader.is_text else "unsigned_char", int(words[2]), (4,))
        else:
            arrays, empty = reader.attributes(keyword, words, rows), False
            if section:  # other fields are those of the file, such as its time
                _check_rows(arrays, rows)
                found.data[section] |= arrays
    if empty:
        raise ShardingError(f"{section} without data")
    return found


def _counts(flat: np.ndarray, cells: int) -> np.ndarray:
    """Return where each cell begins among numbers of corners and corners."""
    width = 1 + int(flat[0]) if len(flat) else 1
    if width > 0 and len(flat) == cells * width and (flat[::width] == width - 1).all():
        return np.arange(0, len(flat), width)
    at, end, numbers = [], 0, flat.tolist()
    while end < len(numbers) and numbers[end] >= 0:
        at.append(end)
        end += 1 + numbers[end]
    if end != len(flat) or len(at) != cells:
        raise ShardingError(f"{len(flat)} numbers are not those of {cells} cells")
    return np.array(at, np.int64)


def _check_rows(arrays: dict[str, np.ndarray], rows: int) -> None:
    if other := [f"{name} {values.shape}" for name, values in arrays.items() if len(values) != rows]:
        raise ShardingError(f"{', '.join(other)}: data of {rows} has as many rows")


class _Reader:
    """The bytes of a file, and the place of what is read next."""

    def __init__(self, data: bytes):
        self.data, self.at, self.is_text = data, 0, None

    is_text: bool | None

    def end_line(self) -> bytes:
        """Return the rest of this line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise ShardingError("its last line has no line end: its last number may be incomplete")
        line, self.at = self.data[self.at : end], end + 1
        return line

    def line(self) -> str:
        """Return the next line that is not empty; an empty text at the end of the file."""
        while self.at < len(self.data):
            rest = self.data[self.at : self.at + 1000]
            if not rest.strip():
                self.at += len(rest)
            elif line := self.end_line().strip():
                return line.decode(errors="replace")
        return ""

    def array(self, name: str, rows: int, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Return (rows, *shape) numbers of a type of VTK."""
        count, name = rows * int(np.prod(shape)), name.lower()
        if rows < 0 or count < 0:
            raise ShardingError(f"an array of {rows} rows")
        if name in ("string", "utf8_string"):
            return np.array([self._text() for _ in range(count)], dtype=object).reshape(rows, *shape)
        if name == "bit":
            packed = self._numbers(np.dtype("u1"), count if self.is_text else -(-count // 8))
            return (packed if self.is_text else np.unpackbits(packed)[:count]).astype(bool).reshape(rows, *shape)
        if name not in DTYPES:
            raise ShardingError(f"numbers of type {name!r}")
        return self._numbers(np.dtype(DTYPES[name]), count).reshape(rows, *shape)

    def _numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        if not self.is_text:
            end = self.at + count * dtype.itemsize
            if end > len(self.data):
                raise ShardingError(f"{len(self.data) - self.at} bytes of an array of {end - self.at}")
            found, self.at = np.frombuffer(self.data, dtype.newbyteorder(">"), count, self.at), end
            return found.astype(dtype)
        found, begin = np.empty(min(count, len(self.data)), dtype), 0  # two numbers are at least two bytes apart
        while begin < count:
            words: list[bytes] = []
            while len(words) < min(count - begin, WORDS):
                if self.at == len(self.data):
                    raise ShardingError(f"{begin + len(words)} numbers of an array of {count}")
                words += self.end_line().split()
            if begin + len(words) > count:
                raise ShardingError(f"an array of {count} numbers ends inside a line")
            try:
                found[begin : begin + len(words)] = np.array(words, dtype=bytes).astype(dtype)
            except ValueError as error:
                raise ShardingError(str(error)) from None
            begin += len(words)
        return found

    def _text(self) -> str:
        """Return a string: in a binary file the first two bits tell how many bytes its length has."""
        if self.is_text:
            return unquote(self.end_line().decode(errors="replace"))
        width = (8, 4, 2, 1)[int(self._numbers(np.dtype("u1"), 1)[0]) >> 6]
        self.at -= 1
        length = int(self._numbers(np.dtype(f"u{width}"), 1)[0]) & (1 << 8 * width - 2) - 1
        return self._numbers(np.dtype("u1"), length).tobytes().decode(errors="replace")

    def cells(self, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the corners of each cell begin, and the corners of all cells.

        Since version 5 a file has both; before, the number of corners stands in front of those of each cell.
        """
        if self.data.startswith(b"OFFSETS", self.at):
            begins = self.array(self.line().split()[1], count).astype(np.int64)
            words = self.line().split()
            if words[:1] != ["CONNECTIVITY"]:
                raise ShardingError("OFFSETS without CONNECTIVITY")
            corners = self.array(words[1], size)
        else:
            flat = self.array("int", size)
            at = _counts(flat, count)
            begins, corners = np.append(at, size) - np.arange(count + 1), np.delete(flat, at)
        if len(begins) and (begins[0] != 0 or begins[-1] != len(corners) or (np.diff(begins) < 0).any()):
            raise ShardingError(f"offsets of {len(corners)} corners that do not fit")
        return (begins if len(begins) else np.zeros(1, np.int64)), corners.astype(np.int64)

    def attributes(self, keyword: str, words: list[str], rows: int) -> dict[str, np.ndarray]:
        """Return the arrays of an attribute by name."""
        if keyword == "FIELD":
            return dict(self._field_array() for _ in range(int(words[2])))
        name = unquote(words[1])
        if keyword in SHAPES:
            return {name: self.array(words[2], rows, SHAPES[keyword])}
        if keyword == "TEXTURE_COORDINATES":
            return {name: self.array(words[3], rows, (int(words[2]),))}
        if keyword == "COLOR_SCALARS":
            values = self.array("float" if self.is_text else "unsigned_char", rows, (int(words[2]),))
            colors = (values * 255).round().astype(np.uint8) if self.is_text else values
            return {name: colors[:, 0] if colors.shape[1] == 1 else colors}
        if keyword != "SCALARS":
            raise ShardingError(f"a section {keyword[:40]!r}")
        components = int(words[3]) if len(words) > 3 else 1
        if self.data[self.at : self.at + 12].upper() == b"LOOKUP_TABLE":  # its name; an own one is a section
            self.end_line()
        return {name: self.array(words[2], rows, (components,) if components > 1 else ())}

    def _field_array(self) -> tuple[str, np.ndarray]:
        words = self.line().split()
        if words[:1] == ["METADATA"]:  # of the array before
            self.skip_metadata()
            words = self.line().split()
        if len(words) < 4:
            raise ShardingError("a FIELD with fewer arrays than it declares")
        components = int(words[1])
        return unquote(words[0]), self.array(words[3], int(words[2]), (components,) if components != 1 else ())

    def skip_metadata(self) -> None:
        """Skip names of components and other information, which an empty line ends."""
        while self.at < len(self.data) and self.end_line().strip():
            pass
