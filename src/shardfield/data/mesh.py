"""Unstructured meshes and point clouds on disk: points, cells and edges as fields with shardings of their own."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ..comm import collectives
from ..comm.consensus import check_arguments
from ..errors import ShardingError
from ..layout import DimSharding, Layout, starts
from ..tensor import wrap
from .error_sync import run_with_error_sync
from .mesh_files import array_path, load_prepared, prepare_mesh, prepared_folder
from .mesh_readers import CELLS, FACES, check_finite, is_array_file, named_arrays, read_stored
from .metis import shard_sizes as metis_shard_sizes
from .sharding import build_layout

ORDERS = ("morton", "metis", "file")


def open_mesh(
    path: str | os.PathLike,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    order: str = "morton",
    sizes: Mapping[Any, Sequence[int]] | None = None,
    cache: str | os.PathLike | None = None,
) -> Mesh:
    """Open a mesh or a point cloud: VTK, VTU, VTP, STL and other files, zarr folders and HDF5 files.

        car = open_mesh("car.stl", mesh)       # points sharded over all axes of the device mesh
        car.fields                             # {"points": (n, 3), "normals": (n, 3), "cells/triangle": (m, 3), ...}
        x = car["points"]                      # a ShardTensor; each rank reads its rows
        source, target = car["edges"]          # an edge is on the rank that has its target

    Points are numbered along a Morton curve, so that shards are compact; `car["order"]` has their numbers in the file.
    `order="metis"` numbers them by a partition of the mesh with few edges between parts (pymetis), and shards are
    whole parts where the ranks divide their number. Cells, faces and edges name points by their new numbers. The
    arrays are written once, into a folder next to the file (or in `cache`), from which every rank reads its own rows.
    `order="file"` keeps the numbers of the file; zarr and HDF5 are then read in place, and nothing is written.

    A zarr or HDF5 file has an array "points" (number, coordinates), data of the points with as many rows, cells in
    "cells/triangle" and so on, and their data in "cell_data/triangle/NAME", which is the field "cells/triangle/NAME".
    "edges" (2, number), sources and targets, take the place of those of the cells.
    Surfaces of triangles and quadrilaterals get "normals" and "areas", shares of the surface by point, unless the file
    has its own; `closed` says whether the surface has no boundary and one orientation. Volume cells get their faces:
    "faces/triangle", and in "faces/triangle/cells" the cell that a face's normal points out of and the cell that it
    points into, or -1; the faces that point into no cell are the surface.

    `placements` are those of the points, Shard(0) or Replicate(); `sizes` maps a mesh axis to its shard sizes. A cell
    or face is on the rank that has its first point, an edge on the rank of its target. All ranks of the device mesh
    must open and index together. Files that cannot be read, points that are not finite and cells of points that do not
    exist are one error on all ranks.
    """
    path = Path(path).expanduser()
    folder = None if cache is None else Path(cache).expanduser()
    if mesh is not None:  # before the first message, which depends on them
        chosen = {"order": order, "placements": placements and tuple(placements), "sizes": sizes}
        check_arguments("open_mesh", mesh, chosen, {"path": path}, always=True)
    if order not in ORDERS:
        raise ValueError(f"open_mesh: order={order!r} is none of {', '.join(ORDERS)}")
    if mesh is None and (placements is not None or sizes is not None):
        raise ValueError("open_mesh: placements and sizes are for a mesh: pass the mesh too")
    arrays, properties = _open_arrays(path, mesh, order, folder)
    closed, part_sizes = properties["closed"], properties["part_sizes"]
    layout = None
    if mesh is not None:
        found = {name: (tuple(a.shape), str(a.dtype)) for name, a in sorted(arrays.items())}
        equal = {"fields": found, "properties": properties}
        check_arguments("open_mesh", mesh, equal, {"path": path}, always=True)
        placements = [Shard(0)] * mesh.ndim if placements is None else placements
        if any(p not in (Shard(0), Replicate()) for p in placements):
            raise ShardingError(f"open_mesh: points are placed Shard(0) or Replicate(), not {tuple(placements)}")
        sharded = [axis for axis, placement in enumerate(placements) if placement == Shard(0)]
        if sizes is None and len(sharded) == 1 and (whole := metis_shard_sizes(part_sizes, mesh.size(sharded[0]))):
            sizes = {sharded[0]: whole}
        layout = build_layout(mesh, placements, arrays["points"].shape, sizes)
    return Mesh(path, arrays, closed, layout)


def _open_arrays(
    path: Path, mesh: DeviceMesh | None, order: str, cache: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a mesh, which are read when they are indexed; the first rank prepares them if needed.

    Also returns whether the surface is closed, the sizes of METIS's parts, and a checksum.
    """
    if order == "file" and is_array_file(path):
        return run_with_error_sync("open_mesh", mesh, lambda: _arrays_in_place(path)), {
            "closed": False,
            "part_sizes": [],
        }
    folder = prepared_folder(path, order, cache)

    def prepare(rank: bool) -> dict[str, Any] | None:
        found = load_prepared(folder, path)
        return prepare_mesh(folder, path, order) if found is None and rank else found

    first = mesh is None or mesh.get_rank() == int(mesh.mesh.flatten()[0])
    run_with_error_sync("open_mesh", mesh, lambda: prepare(first))
    # Ranks without a disk in common with the first one prepare the mesh for themselves.
    description = run_with_error_sync("open_mesh", mesh, lambda: prepare(True))
    assert description is not None

    def open_mapped() -> dict[str, Any]:
        mapped = {}
        for name, field in description["fields"].items():
            try:
                mapped[name] = np.lib.format.open_memmap(array_path(folder, name), mode="r")
            except (OSError, ValueError) as error:
                raise ShardingError(f"{folder} is damaged ({name}: {error}): delete it") from error
            if list(mapped[name].shape) != field["shape"]:
                raise ShardingError(f"{folder} is damaged ({name} is {mapped[name].shape}): delete it")
        return mapped

    arrays = run_with_error_sync("open_mesh", mesh, open_mapped)
    return arrays, {name: description[name] for name in ("closed", "part_sizes", "checksum")}


def _arrays_in_place(path: Path) -> dict[str, Any]:
    return {name: StoredArray(path, name, array) for name, array in named_arrays(path).items()}


class StoredArray:
    """An array of a zarr folder or HDF5 file, read when it is indexed; points that were never written are an error."""

    def __init__(self, path: Path, name: str, array: Any):
        self.path, self.name, self.array, self.shape, self.dtype = path, name, array, tuple(array.shape), array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, block: Any) -> np.ndarray:
        given = block if isinstance(block, tuple) else (block,)
        full = [
            slice(*at.indices(n)) if isinstance(at, slice) else slice(at, at + 1)
            for at, n in zip((*given, *[slice(None)] * (len(self.shape) - len(given))), self.shape, strict=True)
        ]
        found = read_stored(self.path, self.name, self.array, tuple(full))
        return found[tuple(slice(None) if isinstance(at, slice) else 0 for at in given)]


class Mesh:
    """A mesh on disk, a mapping from the names of its fields to sharded tensors; made by `open_mesh`."""

    def __init__(self, path: Path, arrays: dict[str, Any], closed: bool, layout: Layout | None):
        self.path, self.closed, self.layout, self._arrays = path, closed, layout, arrays

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every field."""
        return {name: tuple(array.shape) for name, array in self._arrays.items()}

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {shape}" for name, shape in self.fields.items())
        return f"Mesh({self.path}, {names}{'' if self.layout is None else f', points {self.layout}'})"

    def __getitem__(self, name: str) -> Any:
        """Read a field: a ShardTensor, or a plain tensor without a device mesh. All ranks must read together."""
        if self.layout is not None:
            check_arguments("mesh", self.layout.mesh, {"field": name}, {"path": self.path})
        array = self._array(name)
        if self.layout is None:
            return run_with_error_sync("mesh", None, lambda: self._read_all(name))
        dim, mesh, axes = row_dim(name), self.layout.mesh, self.layout.axes_of(0)
        shard_sizes = run_with_error_sync("mesh", mesh, lambda: self._shard_sizes(name))
        dims = [(DimSharding(n),) for n in array.shape]
        if axes:
            dims[dim] = (DimSharding(array.shape[dim], axes, tuple(shard_sizes)),)
        layout = Layout.make(mesh, dims)
        local = run_with_error_sync("mesh", mesh, lambda: self._read_checked(name, slice(*layout.span(dim))))
        return wrap(local.to(collectives.device_of(mesh)), layout)

    def _read_all(self, name: str) -> Tensor:
        local = self.read(name, slice(None))
        if name == "points":
            check_finite(self.path, local.numpy())
        self._check_names(name, local)
        return local

    def _check_names(self, name: str, local: Tensor) -> None:
        """Raise if some of the cells, faces or edges name points that do not exist."""
        names_points = has_owners(name) and name.count("/") < 2
        if (
            names_points
            and local.numel()
            and not 0 <= int(local.min()) <= int(local.max()) < len(self._arrays["points"])
        ):
            raise ShardingError(f"{self.path}: {name} name points that do not exist")

    def read(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a field (of edges: columns), read by this rank alone."""
        local = _read_rows(self._array(name), row_dim(name), rows)
        # Tensors of unsigned integers cannot be indices.
        return local.long() if has_owners(name) and name.count("/") < 2 else local

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            raise KeyError(f"{self.path} has no field {name!r}; it has {', '.join(self._arrays)}")
        return self._arrays[name]

    def _owners(self, name: str, rows: slice) -> np.ndarray:
        """Return the point that owns each of some rows: the target of an edge, the first point of a cell or face."""
        if name == "edges":
            return np.asarray(self._arrays[name][1, rows])
        return np.asarray(self._arrays["/".join(name.split("/")[:2])][rows]).min(1)  # a cell, also for its data

    def _shard_sizes(self, name: str) -> list[int]:
        """Return the shard sizes of a field: those of the points, or of the cells or edges that they own.

        Rows are sorted by their owners, so a few of them are read to find where a shard ends.
        """
        assert self.layout is not None
        sizes = list(self.layout.shard_sizes(0))
        if not has_owners(name):
            return sizes
        rows = range(self._arrays[name].shape[row_dim(name)])
        ends = [
            bisect_left(rows, begin + n, key=lambda row: int(self._owners(name, slice(row, row + 1))[0]))
            for begin, n in zip(starts(sizes), sizes, strict=True)
        ]
        return np.diff(ends[:-1] + [len(rows)], prepend=0).tolist()

    def _read_checked(self, name: str, rows: slice) -> Tensor:
        """Read rows; raise if points are not finite, or cells, faces or edges name points of other ranks or of none."""
        local = self.read(name, rows)
        if name == "points":
            check_finite(self.path, local.numpy(), rows.start)
        if has_owners(name) and rows.stop > rows.start:
            assert self.layout is not None
            begin, end = self.layout.span(0)
            owners = self._owners(name, rows)
            if owners.min() < begin or owners.max() >= end:
                raise ShardingError(
                    f"{self.path}: {name} are not sorted by their points, or name points that do not exist; open the "
                    "mesh with order='morton'"
                )
            self._check_names(name, local)
        return local


def has_owners(name: str) -> bool:
    """Return whether the rows of a field belong to points: cells, faces, their data, and edges."""
    return name == "edges" or name.startswith((CELLS, FACES))


def row_dim(name: str) -> int:
    """Return the dim of a field that is sharded: edges are (2, number)."""
    return 1 if name == "edges" else 0


def _read_rows(array: Any, dim: int, rows: slice) -> Tensor:
    try:
        found = np.asarray(array[rows] if dim == 0 else array[:, rows])
    except ShardingError:
        raise
    except Exception as error:  # whatever the reader of this format raises on a broken file
        raise OSError(f"cannot read: {type(error).__name__}: {error}") from error
    tensor = torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))
    # numpy gives empty arrays strides of zero: both rows of no edges would be one view, and share their exchange lists.
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)
