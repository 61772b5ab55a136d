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
from .formats import list_arrays
from .mesh_files import CELLS, array_path, is_array_file, load_prepared, prepare_mesh, prepared_folder
from .sharding import build_layout

ORDERS = ("morton", "file")


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
    Cells and edges name points by their new numbers. The arrays are written once, into a folder next to the file (or in
    `cache`), from which every rank reads its own rows. `order="file"` keeps the numbers of the file; zarr and HDF5 are
    then read in place, and nothing is written.

    A zarr or HDF5 file has an array "points" (number, coordinates), data of the points with as many rows, and cells in
    "cells/triangle" and so on. Surfaces of triangles and quadrilaterals get "normals" and "areas", shares of the
    surface by point; `closed` says whether the surface has no boundary and one orientation.

    `placements` are those of the points, Shard(0) or Replicate(); `sizes` maps a mesh axis to its shard sizes. A cell
    is on the rank that has its first point. All ranks of the device mesh must open and index together. Files that
    cannot be read, points that are not finite and cells of points that do not exist are one error on all ranks.
    """
    path = Path(path).expanduser()
    folder = None if cache is None else Path(cache).expanduser()
    if order not in ORDERS:
        raise ValueError(f"open_mesh: order={order!r} is none of {', '.join(ORDERS)}")
    if mesh is None and (placements is not None or sizes is not None):
        raise ValueError("open_mesh: placements and sizes are for a mesh: pass the mesh too")
    arrays, closed = _open_arrays(path, mesh, order, folder)
    layout = None
    if mesh is not None:
        found = {name: (tuple(a.shape), str(a.dtype)) for name, a in sorted(arrays.items())}
        check_arguments("open_mesh", mesh, {"fields": found, "closed": closed}, {"path": path}, always=True)
        placements = [Shard(0)] * mesh.ndim if placements is None else placements
        if any(p not in (Shard(0), Replicate()) for p in placements):
            raise ShardingError(f"open_mesh: points are placed Shard(0) or Replicate(), not {tuple(placements)}")
        layout = build_layout(mesh, placements, arrays["points"].shape, sizes)
    return Mesh(path, arrays, closed, layout)


def _open_arrays(path: Path, mesh: DeviceMesh | None, order: str, cache: Path | None) -> tuple[dict[str, Any], bool]:
    """Return the arrays of a mesh, which are read when they are indexed; the first rank prepares them if needed."""
    if order == "file" and is_array_file(path):
        return run_with_error_sync("open_mesh", mesh, lambda: _arrays_in_place(path)), False
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
        mapped = {n: np.lib.format.open_memmap(array_path(folder, n), mode="r") for n in description["fields"]}
        if wrong := [n for n, a in mapped.items() if list(a.shape) != description["fields"][n]["shape"]]:
            raise ShardingError(f"{folder} is damaged ({', '.join(wrong)}): delete it")
        return mapped

    return run_with_error_sync("open_mesh", mesh, open_mapped), description["closed"]


def _arrays_in_place(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ShardingError(f"there is no {path}")
    arrays = list_arrays(path)
    if "points" not in arrays:
        raise ShardingError(f"{path} has no array called 'points'; it has {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays


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
        array = self._array(name)
        if self.layout is None:
            return run_with_error_sync("mesh", None, lambda: _read_rows(array, 0, slice(0, array.shape[0])))
        dim, mesh, axes = _row_dim(name), self.layout.mesh, self.layout.axes_of(0)
        shard_sizes = run_with_error_sync("mesh", mesh, lambda: self._shard_sizes(name))
        dims = [(DimSharding(n),) for n in array.shape]
        if axes:
            dims[dim] = (DimSharding(array.shape[dim], axes, tuple(shard_sizes)),)
        layout = Layout.make(mesh, dims)
        local = run_with_error_sync("mesh", mesh, lambda: self._read_checked(name, slice(*layout.span(dim))))
        return wrap(local.to(collectives.device_of(mesh)), layout)

    def read(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a field (of edges: columns), read by this rank alone."""
        return _read_rows(self._array(name), _row_dim(name), rows)

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            raise KeyError(f"{self.path} has no field {name!r}; it has {', '.join(self._arrays)}")
        return self._arrays[name]

    def _owners(self, name: str, rows: slice) -> np.ndarray:
        """Return the point that owns each of some rows: the target of an edge, the first point of a cell."""
        if name == "edges":
            return np.asarray(self._arrays[name][1, rows])
        return np.asarray(self._arrays["/".join(name.split("/")[:2])][rows]).min(1)  # a cell, also for its data

    def _shard_sizes(self, name: str) -> list[int]:
        """Return the shard sizes of a field: those of the points, or of the cells or edges that they own.

        Rows are sorted by their owners, so a few of them are read to find where a shard ends.
        """
        assert self.layout is not None
        sizes = list(self.layout.shard_sizes(0))
        if name != "edges" and not name.startswith(CELLS):
            return sizes
        rows = range(self._arrays[name].shape[_row_dim(name)])
        ends = [
            bisect_left(rows, begin + n, key=lambda row: int(self._owners(name, slice(row, row + 1))[0]))
            for begin, n in zip(starts(sizes), sizes, strict=True)
        ]
        return np.diff(ends[:-1] + [len(rows)], prepend=0).tolist()

    def _read_checked(self, name: str, rows: slice) -> Tensor:
        """Read rows; raise if edges or cells name points that do not exist, or belong to another rank's points."""
        local = self.read(name, rows)
        if (name == "edges" or name.startswith(CELLS)) and rows.stop > rows.start:
            assert self.layout is not None
            begin, end = self.layout.span(0)
            owners = self._owners(name, rows)
            if owners.min() < begin or owners.max() >= end:
                raise ShardingError(
                    f"{self.path}: {name} are not sorted by their points, or name points that do not exist; open the "
                    "mesh with order='morton'"
                )
            if name.count("/") < 2 and int(local.max()) >= len(self._arrays["points"]):
                raise ShardingError(f"{self.path}: {name} name points that do not exist")
        return local


def _row_dim(name: str) -> int:
    """Return the dim of a field that is sharded: edges are (2, number)."""
    return 1 if name == "edges" else 0


def _read_rows(array: Any, dim: int, rows: slice) -> Tensor:
    try:
        found = np.asarray(array[rows] if dim == 0 else array[:, rows])
    except Exception as error:  # whatever the reader of this format raises on a broken file
        raise OSError(f"cannot read: {type(error).__name__}: {error}") from error
    return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))


class MeshDataset:
    """Meshes of different sizes as a dataset: sample i has the fields `names` of the i-th file.

        cars = MeshDataset(sorted(Path("cars").glob("*.vtu")), ("points", "normals", "pressure")).prepare(mesh)
        for batch in ShardedLoader(cars, 1, mesh, placements=[Shard(0)]):
            prediction = model(batch["points"])   # (1, n, 3), n of this mesh

    A batch has one sample on each data rank, since samples differ in size. `prepare(mesh)` orders all meshes, divided
    among the ranks.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        names: Sequence[str],
        *,
        order: str = "morton",
        cache: str | os.PathLike | None = None,
    ):
        self.paths, self.names, self.order, self.cache = [Path(p) for p in paths], tuple(names), order, cache
        self._meshes: dict[int, Mesh] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def prepare(self, mesh: DeviceMesh | None = None) -> MeshDataset:
        """Write the ordered arrays of meshes that have none yet. With a device mesh, the files are divided by rank."""
        ranks = [0] if mesh is None else mesh.mesh.flatten().tolist()
        first = 0 if mesh is None else ranks.index(mesh.get_rank())

        def open_all() -> None:
            for i in range(first, len(self), len(ranks)):
                self.open(i)

        run_with_error_sync("MeshDataset.prepare", mesh, open_all)
        return self

    def open(self, i: int) -> Mesh:
        """Return mesh i, without a device mesh."""
        if i not in self._meshes:
            found = open_mesh(self.paths[i], order=self.order, cache=self.cache)
            if missing := [name for name in self.names if name not in found.fields]:
                raise ShardingError(f"{self.paths[i]} has no {', '.join(missing)}; it has {', '.join(found.fields)}")
            self._meshes[i] = found
        return self._meshes[i]

    def shapes_of(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of sample i."""
        return {name: self.open(i).fields[name] for name in self.names}

    def read(self, i: int, slices: Mapping[str, Sequence[slice]]) -> dict[str, Tensor]:
        """Return the block of sample i within `slices`."""
        mesh, blocks = self.open(i), {}
        for name in self.names:
            dim = _row_dim(name)
            at = tuple(slices[name])
            kept = tuple(slice(None) if d == dim else part for d, part in enumerate(at))
            blocks[name] = mesh.read(name, at[dim])[kept]
        return blocks
