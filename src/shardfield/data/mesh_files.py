"""Read meshes of VTK, VTU, VTP, STL and other files, and write them once as arrays in an order that shards well."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ShardingError
from ..neighbors import partition_points
from .connectivity import CELL_EDGES, cell_edges, is_closed, point_areas, triangles_of
from .formats import import_package, list_arrays

VERSION = 1  # increase if the arrays of a prepared mesh change
CELLS = "cells/"
RESERVED = ("points", "order", "edges")  # names of fields that every mesh has


@dataclass
class RawMesh:
    """A mesh as a file has it: points (n, features), cells by type, and data of points and cells by name."""

    points: np.ndarray
    cells: dict[str, np.ndarray] = field(default_factory=dict)
    point_data: dict[str, np.ndarray] = field(default_factory=dict)
    cell_data: dict[str, np.ndarray] = field(default_factory=dict)  # "triangle/pressure"


def read_mesh(path: Path) -> RawMesh:
    """Read all of a mesh of any supported format, and check it."""
    if not path.exists():
        raise ShardingError(f"there is no {path}")
    reader = _read_arrays if is_array_file(path) else _read_vtp if path.suffix == ".vtp" else _read_meshio
    try:
        raw = reader(path)
    except ShardingError:
        raise
    except (Exception, SystemExit) as error:  # the packages raise many types for broken files
        raise ShardingError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    _check(path, raw)
    return raw


def is_array_file(path: Path) -> bool:
    """Return whether a file has named arrays, which can be read in parts: a zarr folder or HDF5."""
    return path.is_dir() or path.suffix in (".h5", ".hdf5", ".nc")


def _read_arrays(path: Path) -> RawMesh:
    arrays = {name: np.asarray(array[...]) for name, array in list_arrays(path).items()}
    if "points" not in arrays:
        raise ShardingError(f"{path} has no array called 'points'; it has {', '.join(arrays) or 'nothing'}")
    points = arrays.pop("points")
    cells = {n.removeprefix(CELLS): a for n, a in arrays.items() if n.startswith(CELLS) and n.count("/") == 1}
    cell_data = {n.removeprefix(CELLS): a for n, a in arrays.items() if n.startswith(CELLS) and n.count("/") == 2}
    data = {n: a for n, a in arrays.items() if not n.startswith(CELLS)}
    if other := [f"{n} {a.shape}" for n, a in data.items() if a.ndim < 1 or len(a) != len(points)]:
        raise ShardingError(f"{path}: {', '.join(other)}: data of {len(points)} points has as many rows")
    return RawMesh(points, cells, data, cell_data)


def _read_meshio(path: Path) -> RawMesh:
    meshio = import_package("meshio", "meshes")
    if path.suffix.lower() not in meshio.extension_to_filetypes:
        raise ShardingError(f"{path}: meshio reads no {path.suffix or 'files without a suffix'}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the test whether an STL file is binary, which overflows
        found = meshio.read(path)
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


def _read_vtp(path: Path) -> RawMesh:
    pyvista = import_package("pyvista")
    found = pyvista.read(path).triangulate()
    cells = {"triangle": np.asarray(found.regular_faces)} if found.n_cells else {}
    return RawMesh(
        np.asarray(found.points),
        cells,
        {name: np.asarray(found.point_data[name]) for name in found.point_data},
        {f"triangle/{name}": np.asarray(found.cell_data[name]) for name in found.cell_data if cells},
    )


def _check(path: Path, raw: RawMesh) -> None:
    """Raise for an invalid mesh: no points, coordinates that are not finite, cells of points that do not exist."""
    points = raw.points
    if points.ndim != 2 or not points.shape[1] or points.dtype.kind not in "fiu":
        raise ShardingError(f"{path}: points are {points.dtype} of shape {points.shape}, not (number, coordinates)")
    if not len(points):
        raise ShardingError(f"{path} has no points")
    raw.points = points = points if points.dtype in (np.float32, np.float64) else points.astype(np.float64)
    if len(bad := np.flatnonzero(~np.isfinite(points).all(1))):
        raise ShardingError(f"{path}: {len(bad)} of {len(points)} points are not finite; the first is point {bad[0]}")
    for kind, corners in raw.cells.items():
        if kind not in CELL_EDGES:
            raise ShardingError(f"{path}: cells of type {kind!r}; supported are {', '.join(CELL_EDGES)}")
        if corners.ndim != 2 or corners.dtype.kind not in "iu":
            raise ShardingError(f"{path}: {kind} cells are {corners.dtype} of shape {corners.shape}, not integers")
        if len(bad := np.flatnonzero(((corners < 0) | (corners >= len(points))).any(1))):
            raise ShardingError(
                f"{path}: {len(bad)} of {len(corners)} {kind} cells name points that do not exist; the first is cell "
                f"{bad[0]} with points {corners[bad[0]].tolist()} of {len(points)}"
            )
    if taken := [n for n in raw.point_data if n in RESERVED or ".." in n or n.startswith(("/", CELLS))]:
        raise ShardingError(f"{path}: data of points cannot be called {', '.join(map(repr, taken))}")
    for name, values in raw.cell_data.items():
        if ".." in name:
            raise ShardingError(f"{path}: data of cells cannot be called {name!r}")
        kind = name.partition("/")[0]
        if kind not in raw.cells or len(values) != len(raw.cells[kind]):
            raise ShardingError(f"{path}: cell data {name!r} has {len(values)} rows, not one per {kind} cell")


# ---------------------------------------------------------------------- a prepared mesh


def prepared_folder(path: Path, order: str, cache: Path | None) -> Path:
    """Return the folder of a mesh's arrays: next to the file, or in `cache`."""
    folder = path.parent if cache is None else cache
    return folder / f"{path.name}.{order}"


def load_prepared(folder: Path, path: Path) -> dict[str, Any] | None:
    """Return the description of a prepared mesh, or None if there is none or the file has changed since."""
    try:
        description = json.loads((folder / "mesh.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return description if description.get("source") == _fingerprint(path) else None


def prepare_mesh(folder: Path, path: Path, order: str) -> dict[str, Any]:
    """Read a mesh, number its points along a curve, and write its arrays; return the description.

    Points near each other get near numbers, cells and edges follow the first of their points (edges their target). The
    folder appears with all its files at once.
    """
    raw = read_mesh(path)
    arrays, closed = ordered_arrays(raw, order)
    fields = {name: {"shape": list(a.shape), "dtype": a.dtype.str} for name, a in arrays.items()}
    description = {"source": _fingerprint(path), "closed": closed, "fields": fields}
    part = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        for name, array in arrays.items():
            target = array_path(part, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            np.save(target, np.ascontiguousarray(array), allow_pickle=False)
        (part / "mesh.json").write_text(json.dumps(description))
        if load_prepared(folder, path) is None:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier version of the file
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            if load_prepared(folder, path) is None:
                raise
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write {folder}: {error.strerror or error}; choose another folder with cache="
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return description


def array_path(folder: Path, name: str) -> Path:
    """Return the file of one array of a prepared mesh."""
    return folder / f"{name}.npy"


def ordered_arrays(raw: RawMesh, order: str) -> tuple[dict[str, np.ndarray], bool]:
    """Return the arrays of a mesh with its points renumbered, and whether its surface is closed."""
    n = len(raw.points)
    rows = np.arange(n) if order == "file" else partition_points(torch.from_numpy(raw.points))[0].numpy()
    number = np.empty(n, np.int64)
    number[rows] = np.arange(n)
    cells, cell_rows = {}, {}
    for kind, corners in raw.cells.items():
        renumbered = number[corners]
        cell_rows[kind] = np.argsort(renumbered.min(1), kind="stable") if renumbered.shape[1] else np.arange(0)
        cells[kind] = renumbered[cell_rows[kind]]
    arrays = {"points": raw.points[rows], "order": rows.astype(np.int64), "edges": cell_edges(cells)}
    triangles = triangles_of(cells)
    if len(triangles):
        arrays["normals"], arrays["areas"] = point_areas(arrays["points"], triangles)
    arrays |= {name: values[rows] for name, values in raw.point_data.items()}
    arrays |= {f"{CELLS}{kind}": corners for kind, corners in cells.items()}
    arrays |= {f"{CELLS}{n}": v[cell_rows[n.partition("/")[0]]] for n, v in raw.cell_data.items()}
    return arrays, is_closed(triangles)


def _fingerprint(path: Path) -> list[int]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    stats = [os.stat(file) for file in files]
    return [VERSION, len(stats), sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)]
