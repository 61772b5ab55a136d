"""Read meshes of STL, VTK, VTU, VTP and other files, of zarr folders and of HDF5 files, and check them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ShardingError
from .connectivity import CELL_CORNERS
from .formats import list_arrays, missing_chunks
from .legacy_vtk import VtkArrays, dataset_of, read_legacy_vtk
from .meshio_files import read_meshio
from .pyvista_files import read_grid, read_surface
from .stl import read_stl

CELLS, FACES = "cells/", "faces/"
CELL_DATA = "cell_data/"  # of zarr and HDF5: an array there has no arrays inside, so "cells/triangle/p" cannot exist
RESERVED = ("points", "order", "edges")  # names of fields that every mesh has


@dataclass
class RawMesh:
    """A mesh as a file has it: points (n, features), cells by type, data of points and cells by name, and own edges."""

    points: np.ndarray
    cells: dict[str, np.ndarray] = field(default_factory=dict)
    point_data: dict[str, np.ndarray] = field(default_factory=dict)
    cell_data: dict[str, np.ndarray] = field(default_factory=dict)  # "triangle/pressure"
    edges: np.ndarray | None = None  # (2, number) of a file that has them; otherwise those of its cells


def read_mesh(path: Path) -> RawMesh:
    """Read all of a mesh of any supported format, and check it."""
    if not path.exists():
        raise ShardingError(f"there is no {path}")
    try:
        raw = _reader_of(path)(path)
    except ShardingError:
        raise
    except Exception as error:  # the packages raise many types for broken files
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise ShardingError(f"cannot read {path}, which is truncated or not supported: {reason}") from error
    _check_points(path, raw)
    _check_cells(path, raw)
    _check_edges(path, raw)
    _check_data(path, raw)
    return raw


def _reader_of(path: Path) -> Callable[[Path], RawMesh]:
    suffix = path.suffix.lower()
    if is_array_file(path):
        return _read_arrays
    readers = {".stl": _read_stl, ".vtp": _read_vtp, ".vtk": _read_legacy_vtk, ".vtu": _read_vtu}
    return readers.get(suffix, _read_meshio)


def is_array_file(path: Path) -> bool:
    """Return whether a file has named arrays, which can be read in parts: a zarr folder or HDF5."""
    return path.is_dir() or path.suffix.lower() in (".h5", ".hdf5", ".nc")


def named_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a zarr folder or HDF5 file by the names of their fields; check names and shapes."""
    if not path.exists():
        raise ShardingError(f"there is no {path}")
    arrays = {
        CELLS + name.removeprefix(CELL_DATA) if name.startswith(CELL_DATA) else name: array
        for name, array in list_arrays(path).items()
    }
    if "points" not in arrays:
        raise ShardingError(f"{path} has no array called 'points'; it has {', '.join(sorted(arrays)) or 'nothing'}")
    _check_point_array(path, arrays["points"])
    n = arrays["points"].shape[0]
    if other := [f"{m} {a.shape}" for m, a in arrays.items() if _is_point_data(m) and a.shape[:1] != (n,)]:
        raise ShardingError(f"{path}: {', '.join(other)}: data of {n} points has as many rows")
    if "edges" in arrays:
        _check_edge_array(path, arrays["edges"])
    for name, array in arrays.items():
        kind, _, data = name.removeprefix(CELLS).partition("/")
        if name.startswith(CELLS) and not data:
            _check_cell_array(path, kind, array)
        elif name.startswith(CELLS):
            _check_cell_rows(path, f"{kind}/{data}", array.shape[:1], arrays.get(CELLS + kind))
        _check_dtype(path, name, array)
    return arrays


def _is_point_data(name: str) -> bool:
    return not name.startswith(CELLS) and name != "edges"


def read_stored(path: Path, name: str, array: Any, block: tuple[slice, ...]) -> np.ndarray:
    """Read a block of an array of a zarr folder or HDF5 file; raise if points or cells in it were never written.

    In other data, chunks that are not stored have the fill value: zarr does not store chunks of zeros.
    """
    geometry = name in ("points", "edges") or (name.startswith(CELLS) and name.count("/") == 1)
    if geometry and (absent := missing_chunks(path, array, block)):
        raise ShardingError(f"{path}: {name} has chunks that were never written, the first at {absent[0]}")
    try:
        return np.asarray(array[block])
    except Exception as error:  # whatever the reader of this format raises on a broken file
        raise ShardingError(f"cannot read {name} of {path}: {type(error).__name__}: {error}") from error


def _read_arrays(path: Path) -> RawMesh:
    arrays = {
        name: read_stored(path, name, array, tuple(slice(0, n) for n in array.shape))
        for name, array in named_arrays(path).items()
    }
    cells = {n.removeprefix(CELLS): a for n, a in arrays.items() if n.startswith(CELLS) and n.count("/") == 1}
    cell_data = {n.removeprefix(CELLS): a for n, a in arrays.items() if n.startswith(CELLS) and n.count("/") > 1}
    data = {n: a for n, a in arrays.items() if _is_point_data(n) and n != "points"}
    return RawMesh(arrays["points"], cells, data, cell_data, arrays.get("edges"))


def _read_stl(path: Path) -> RawMesh:
    points, triangles = read_stl(path)
    return RawMesh(points, {"triangle": triangles})


def _read_meshio(path: Path) -> RawMesh:
    found = read_meshio(path)
    cells: dict[str, list[np.ndarray]] = {}
    cell_data: dict[str, list[np.ndarray]] = {}
    for at, block in enumerate(found.cells):
        cells.setdefault(block.type, []).append(np.asarray(block.data))
        for name, values in found.cell_data.items():
            cell_data.setdefault(f"{block.type}/{name}", []).append(np.asarray(values[at]))
    return RawMesh(
        np.asarray(found.points),
        {kind: np.concatenate(parts) for kind, parts in cells.items()},
        {name: np.asarray(values) for name, values in found.point_data.items()},
        {name: np.concatenate(parts) for name, parts in cell_data.items()},
    )


def _read_vtu(path: Path) -> RawMesh:
    """Read a VTU file with meshio; what meshio does not read, with VTK where it is installed."""
    try:
        return _read_meshio(path)
    except Exception:
        if importlib.util.find_spec("pyvista") is None:
            raise
    return _of_grid(path, read_grid(path))


def _read_vtp(path: Path) -> RawMesh:
    return _of_surface(read_surface(path))


def _read_legacy_vtk(path: Path) -> RawMesh:
    dataset = dataset_of(path)
    if dataset == "UNSTRUCTURED_GRID":
        return _of_grid(path, read_legacy_vtk(path))
    if dataset == "POLYDATA":
        found = read_legacy_vtk(path)  # VTK would return what it can read of a truncated file
        return _of_surface(found if found.has_triangles_only() else read_surface(path))
    try:
        return _read_meshio(path)
    except Exception as error:
        raise ShardingError(
            f"{path} is truncated, no legacy VTK file, or one of a kind that meshio does not read: save "
            f"{dataset or 'it'} as UNSTRUCTURED_GRID"
        ) from error


def _of_grid(path: Path, found: VtkArrays) -> RawMesh:
    cells, cell_data = found.cells_by_type(path)
    return RawMesh(found.points, cells, found.data["POINT_DATA"], cell_data)


def _of_surface(found: VtkArrays) -> RawMesh:
    triangles, data = found.triangles()
    cells = {"triangle": triangles} if len(triangles) else {}
    cell_data = {f"triangle/{name}": values for name, values in data.items() if cells}
    return RawMesh(found.points, cells, found.data["POINT_DATA"], cell_data)


# ---------------------------------------------------------------------- checks


def _check_point_array(path: Path, points: Any) -> None:
    shape, dtype = tuple(points.shape), points.dtype
    if len(shape) != 2 or not shape[1] or dtype.kind not in "fiu":
        raise ShardingError(f"{path}: points are {dtype} of shape {shape}, not (number, coordinates)")
    if not shape[0]:
        raise ShardingError(f"{path} has no points")


def check_finite(path: Path, points: np.ndarray, first: int = 0) -> None:
    """Raise if coordinates are NaN or infinite. first: the number of the first point."""
    if len(bad := np.flatnonzero(~np.isfinite(points).all(1))):
        at = first + int(bad[0])
        raise ShardingError(f"{path}: {len(bad)} of {len(points)} points are not finite; the first is point {at}")


def _check_points(path: Path, raw: RawMesh) -> None:
    if not raw.points.size:
        raise ShardingError(f"{path} has no points")
    _check_point_array(path, raw.points)
    raw.points = raw.points if raw.points.dtype in (np.float32, np.float64) else raw.points.astype(np.float64)
    check_finite(path, raw.points)


def _check_cell_array(path: Path, kind: str, corners: Any) -> None:
    if kind not in CELL_CORNERS:
        raise ShardingError(f"{path}: cells of type {kind!r}; supported are {', '.join(CELL_CORNERS)}")
    if tuple(corners.shape)[1:] != (CELL_CORNERS[kind],) or corners.dtype.kind not in "iu":
        raise ShardingError(
            f"{path}: {kind} cells are {corners.dtype} of shape {tuple(corners.shape)}, not integers of shape (number, "
            f"{CELL_CORNERS[kind]})"
        )


def _check_edge_array(path: Path, edges: Any) -> None:
    shape, dtype = tuple(edges.shape), edges.dtype
    if len(shape) != 2 or shape[0] != 2 or dtype.kind not in "iu":
        raise ShardingError(f"{path}: edges are {dtype} of shape {shape}, not integers of shape (2, number)")


def _check_cell_rows(path: Path, name: str, rows: tuple[int, ...], corners: Any) -> None:
    if corners is None or rows != tuple(corners.shape[:1]):
        raise ShardingError(f"{path}: cell data {name!r} has {rows[0] if rows else 'no'} rows, not one per cell")


def _check_dtype(path: Path, name: str, array: Any) -> None:
    if array.dtype.kind not in "fiubc":
        raise ShardingError(f"{path}: {name!r} is an array of {array.dtype}, which cannot be a tensor")


def _check_cells(path: Path, raw: RawMesh) -> None:
    for kind, corners in raw.cells.items():
        _check_cell_array(path, kind, corners)
        if len(bad := np.flatnonzero(((corners < 0) | (corners >= len(raw.points))).any(1))):
            raise ShardingError(
                f"{path}: {len(bad)} of {len(corners)} {kind} cells name points that do not exist; the first is cell "
                f"{bad[0]} with points {corners[bad[0]].tolist()} of {len(raw.points)}"
            )
        raw.cells[kind] = corners.astype(np.int64)


def _check_edges(path: Path, raw: RawMesh) -> None:
    if raw.edges is None:
        return
    if len(bad := np.flatnonzero(((raw.edges < 0) | (raw.edges >= len(raw.points))).any(0))):
        raise ShardingError(
            f"{path}: {len(bad)} of {raw.edges.shape[1]} edges name points that do not exist; the first is edge "
            f"{bad[0]} with points {raw.edges[:, bad[0]].tolist()} of {len(raw.points)}"
        )
    raw.edges = raw.edges.astype(np.int64)


def _check_data(path: Path, raw: RawMesh) -> None:
    if taken := [n for n in raw.point_data if n in RESERVED or ".." in n or n.startswith(("/", CELLS, FACES))]:
        raise ShardingError(f"{path}: data of points cannot be called {', '.join(map(repr, taken))}")
    if other := [f"{m} {a.shape}" for m, a in raw.point_data.items() if a.shape[:1] != raw.points.shape[:1]]:
        raise ShardingError(f"{path}: {', '.join(other)}: data of {len(raw.points)} points has as many rows")
    for name, values in raw.cell_data.items():
        if ".." in name:
            raise ShardingError(f"{path}: data of cells cannot be called {name!r}")
        _check_cell_rows(path, name, values.shape[:1], raw.cells.get(name.partition("/")[0]))
    for name, values in (raw.point_data | raw.cell_data).items():
        _check_dtype(path, name, values)
