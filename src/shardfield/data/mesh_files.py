"""Write a mesh once, as arrays in an order that shards well, next to its file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..neighbors import partition_points
from .connectivity import cell_edges, is_closed, point_areas, sorted_edges, triangles_of
from .faces import boundary_faces, cell_faces
from .mesh_readers import CELLS, FACES, RawMesh, read_mesh
from .metis import metis_parts

VERSION = 4  # increase if the arrays of a prepared mesh change


def prepared_folder(path: Path, order: str, cache: Path | None) -> Path:
    """Return the folder of a mesh's arrays: next to the file, or in `cache`, where files of one name have their own."""
    if cache is None:
        return path.parent / f"{path.name}.{order}"
    return cache / f"{path.name}.{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:12]}.{order}"


def load_prepared(folder: Path, path: Path) -> dict[str, Any] | None:
    """Return the description of a prepared mesh, or None if there is none or the file has changed since."""
    try:
        description = json.loads((folder / "mesh.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return description if description.get("source") == _fingerprint(path) else None


def prepare_mesh(folder: Path, path: Path, order: str) -> dict[str, Any]:
    """Read a mesh, number its points in the given order, and write its arrays; return the description.

    Points near each other get near numbers, cells and faces follow the first of their points, edges their target. The
    folder appears with all its files at once.
    """
    source = _fingerprint(path)  # before it is read: a file that changes meanwhile is read again next time
    arrays, properties = ordered_arrays(read_mesh(path), order)
    fields = {name: {"shape": list(a.shape), "dtype": a.dtype.str} for name, a in arrays.items()}
    checksum = 0  # ranks with disks of their own compare it; areas and normals may round differently on their machines
    for name in sorted({*arrays} - {"areas", "normals"}):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), checksum)
    description = {"source": source, "fields": fields, "checksum": checksum} | properties
    part = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        for name, array in arrays.items():
            target = array_path(part, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            np.save(target, np.ascontiguousarray(array), allow_pickle=False)
        (part / "mesh.json").write_text(json.dumps(description))
        if (folder / "mesh.json").exists() and load_prepared(folder, path) is None:
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


def ordered_arrays(raw: RawMesh, order: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a mesh with its points renumbered, whether its surface is closed, and METIS's part sizes."""
    n = len(raw.points)
    rows, part_sizes = _point_order(raw, order)
    number = np.empty(n, np.int64)
    number[rows] = np.arange(n)
    cells, cell_rows = {}, {}
    for kind, corners in raw.cells.items():
        renumbered = number[corners]
        cell_rows[kind] = np.argsort(renumbered.min(1), kind="stable")
        cells[kind] = renumbered[cell_rows[kind]]
    points = raw.points[rows]
    edges = cell_edges(cells) if raw.edges is None else sorted_edges(number[raw.edges])
    arrays = {"points": points, "order": rows.astype(np.int64), "edges": edges}
    faces = cell_faces(points, cells)
    triangles = triangles_of(cells)
    if not len(triangles):
        triangles = triangles_of(boundary_faces(faces))
    if len(triangles) and points.shape[1] <= 3:
        normals, arrays["areas"] = point_areas(points, triangles)
        if points.shape[1] == 3:
            arrays["normals"] = normals
    arrays |= {name: values[rows] for name, values in raw.point_data.items()}
    arrays |= {f"{CELLS}{kind}": corners for kind, corners in cells.items()}
    arrays |= {f"{CELLS}{n}": v[cell_rows[n.partition("/")[0]]] for n, v in raw.cell_data.items()}
    arrays |= {f"{FACES}{name}": values for name, values in faces.items()}
    return arrays, {"closed": is_closed(triangles), "part_sizes": part_sizes}


def _point_order(raw: RawMesh, order: str) -> tuple[np.ndarray, list[int]]:
    """Return the file's number of each point in the new order, and the sizes of METIS's parts."""
    if order == "file":
        return np.arange(len(raw.points)), []
    rows = partition_points(torch.from_numpy(raw.points))[0].numpy()
    if order == "morton":
        return rows, []
    edges = raw.cells if raw.edges is None else {"line": raw.edges.T}  # METIS needs each edge in both directions
    parts = metis_parts(len(rows), cell_edges(edges))
    return rows[np.argsort(parts[rows], kind="stable")], np.bincount(parts).tolist()


def _fingerprint(path: Path) -> list[int]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    stats = [os.stat(file) for file in files]
    return [VERSION, len(stats), sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)]
