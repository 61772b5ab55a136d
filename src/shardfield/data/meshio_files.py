"""Read meshes with meshio: formats whose truncated files are recognized."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from ..errors import ShardingError
from .formats import import_package

# The formats that are read, by suffix. meshio reads half of a truncated file in most others, or does not return.
FORMATS = {
    ".vtu": "vtu", ".vtk": "vtk", ".ply": "ply", ".off": "off", ".obj": "obj", ".msh": "gmsh", ".mesh": "medit",
    ".xdmf": "xdmf", ".xmf": "xdmf", ".med": "med", ".h5m": "h5m", ".vol": "netgen",
}  # fmt: skip
PIECE = re.compile(rb"<Piece\b[^>]*>")
TEXT = (".vtk", ".ply", ".obj", ".off")  # their last line may be cut inside a number


def read_meshio(path: Path) -> Any:
    """Return the mesh of a file as meshio has it; raise if the file is truncated."""
    import_package("meshio", "meshes")
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ShardingError(
            f"{path}: open_mesh reads no {suffix or 'files without a suffix'}; convert it (`meshio convert`) to one of "
            f"{', '.join(FORMATS)}"
        )
    if problem := _find_missing_header(path):
        raise ShardingError(f"{path} is truncated, or no {suffix} file: {problem}")
    found = _read_format(path, FORMATS[suffix])
    _check_end(path, sum(len(block.data) for block in found.cells))
    return found


def _find_missing_header(path: Path) -> str | None:
    """Return what a file lacks that meshio would search for beyond its end, forever, or would do without."""
    suffix, data = path.suffix.lower(), path.read_bytes() if path.suffix.lower() in (".ply", ".off", ".msh") else b""
    if suffix == ".ply" and not re.search(rb"\nend_header\r?\n", data):
        return "it has no end_header"
    lines = data.splitlines() if suffix == ".off" else []
    if suffix == ".off" and not any(line.strip() and not line.strip().startswith(b"#") for line in lines[1:]):
        return "it has no numbers of points and faces"
    if suffix == ".msh":
        opened, ended = (re.findall(rb"^\$%s(\w+)" % name, data, re.MULTILINE) for name in (b"(?!End)", b"End"))
        if b"MeshFormat" not in opened:
            return "it has no $MeshFormat (of .msh files, those of Gmsh are supported)"
        if lacks := [name.decode() for name in {*opened, b"Nodes", b"Elements"} if name not in ended]:
            return f"it has no {', '.join(f'$End{name}' for name in sorted(lacks))}"
    return None


def _read_format(path: Path, name: str) -> Any:
    """Read a file by meshio's module of a format. (`meshio.read` ends the process on errors.)"""
    try:
        return importlib.import_module(f"meshio.{name}").read(path)
    except (Exception, SystemExit) as error:
        failed = error
    if problem := _find_missing_parts(path):
        raise ShardingError(problem)
    raise OSError(f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__)


def _check_end(path: Path, cells: int) -> None:
    """Raise if a file is truncated, or has cells of unknown types, where meshio returns what it could read."""
    suffix, data = path.suffix.lower(), path.read_bytes() if path.suffix.lower() in (*TEXT, ".vtu") else b""
    if suffix == ".vtu":
        if cells != (declared := sum(_piece_numbers(data, b"NumberOfCells"))):
            raise ShardingError(
                f"{path} declares {declared} cells, and {cells} can be read: it is truncated, has several pieces, or "
                "types of cells that meshio leaves out (voxels, pixels, triangle strips, polyhedra)"
            )
        return
    start = data[:1000].upper()
    is_text = b"ASCII" in start.splitlines() if suffix == ".vtk" else suffix != ".ply" or b"\nFORMAT ASCII" in start
    if data and is_text and not data[-1:].isspace():
        raise ShardingError(f"{path} is truncated, or its last line has no line end: its last number may be incomplete")


def _find_missing_parts(path: Path) -> str | None:
    """Return why meshio fails on a VTU file without saying so: no pieces, points, or cells, or another compressor."""
    if path.suffix.lower() != ".vtu":
        return None
    with path.open("rb") as file:
        text = file.read(1 << 20)  # one piece, the usual case, is declared at the beginning
    points, cells = (_piece_numbers(text, name) for name in (b"NumberOfPoints", b"NumberOfCells"))
    if b"<UnstructuredGrid" in text and not any(points) and len(points) == len(PIECE.findall(text)):
        return f"{path} has no points"
    if b"vtkLZ4DataCompressor" in text:
        return f"{path} is compressed by LZ4, which meshio does not read: write it with ZLib or LZMA"
    if cells and not any(cells):
        return f"{path} has no cells, and meshio reads no such VTU file: write its points as zarr or HDF5"
    return None


def _piece_numbers(text: bytes, name: bytes) -> list[int]:
    """Return an attribute of the pieces of a VTU file, of those that have it."""
    return [int(n) for piece in PIECE.findall(text) for n in re.findall(rb'\b%s\s*=\s*"\s*(\d+)\s*"' % name, piece)]
