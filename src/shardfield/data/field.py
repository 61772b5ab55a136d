"""Stored arrays as sharded fields: each rank reads only its block of a zarr, NetCDF, HDF5 or xarray array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..comm import collectives
from ..comm.consensus import check_arguments
from ..errors import ShardingError
from ..layout import DimSharding, Layout
from ..tensor import ShardTensor, wrap
from .coordinates import Coordinate, read_coordinate
from .error_sync import run_with_error_sync
from .formats import file_chunks, is_url, missing_chunks, open_array
from .sharding import aligned_shard_sizes, build_layout, local_slices


def open_field(
    path: Any,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    name: str | None = None,
    sizes: Mapping[Any, Sequence[int]] | str | None = None,
    missing: str = "fill",
    decode: bool = True,
) -> Field:
    """Open an array in a zarr folder, a NetCDF-4 or HDF5 file, or of xarray, sharded over a mesh by `placements`.

        field = open_field("era5.zarr", mesh, [Shard(2)], name="t2m")   # time, level, lat, lon
        field.shape, field.dtype
        x = field[7]               # one time: a ShardTensor (level, lat, lon), Shard(1); each rank reads its rows
        y = field[7:9, 0]          # two times, one level: (time, lat, lon), Shard(1)

    `path` may be a URL that fsspec opens (`https://...`, `s3://...`): zarr, or HDF5 by its suffix; or an xarray Dataset
    or DataArray. `name` is the path of the array inside the file; it is optional if there is only one. `sizes` maps a
    mesh axis to its shard sizes; the default is that of torch.chunk. A rank reads every file chunk that overlaps its
    block: `sizes="chunks"` puts shard boundaries at chunk boundaries, so that each chunk is read by one rank.

    All ranks of the mesh must open and index together; if one of them fails to read, all raise. Without a mesh,
    indexing returns plain tensors. A `ShardedLoader` accepts a field without a mesh as a dataset with samples along
    dim 0, and reads it in blocks. If such a field cannot be opened on one of several ranks, its first use raises: a
    loader then raises on all ranks.

    decode: values are unpacked (`scale_factor`, `add_offset`) and missing ones (`_FillValue`, `missing_value`) are NaN,
    by the attributes that the array has, as in xarray.

    `missing`: what a chunk that is not stored means. "fill": the array's fill value, since zarr and HDF5 do not store
    chunks that were never written, nor, by default, zarr those that equal the fill value. "error": the file is
    incomplete, and reading the chunk raises.
    """
    path = path if is_url(path) or hasattr(path, "isel") else Path(path).expanduser()
    if missing == "error" and not isinstance(path, Path):
        raise ValueError("open_field: missing='error' is for local files")
    if missing not in ("fill", "error"):
        raise ValueError(f"open_field: missing={missing!r} is neither 'fill' nor 'error'")
    if mesh is None:
        if placements is not None or sizes is not None:
            raise ValueError("open_field: placements and sizes are for a mesh: pass the mesh too")
        try:
            return Field(
                path, *run_with_error_sync("open_field", None, lambda: open_array(path, name, decode)), None, missing
            )
        except ShardingError as error:
            if not dist.is_initialized() or dist.get_world_size() == 1:
                raise
            return UnopenedField(path, error)
    array, dtype = run_with_error_sync("open_field", mesh, lambda: open_array(path, name, decode))
    found = {"shape": tuple(array.shape), "dtype": dtype}
    check_arguments("open_field", mesh, found, {"path": _title(path)}, always=True)
    if placements is None:
        raise ShardingError("open_field: a mesh needs placements, one for each of its axes")
    if isinstance(sizes, str):
        if sizes != "chunks":
            raise ValueError(f'open_field: sizes is a mapping or "chunks", not {sizes!r}')
        sizes = aligned_shard_sizes(mesh, placements, array.shape, file_chunks(array))
    return Field(path, array, dtype, build_layout(mesh, placements, array.shape, sizes), missing)


class Field:
    """An array on disk that is read when it is indexed; made by `open_field`."""

    def __init__(self, path: Any, array: Any, dtype: torch.dtype, layout: Layout | None, missing: str = "fill"):
        self.path, self.dtype, self.layout, self.missing = _title(path), dtype, layout, missing
        self.shape = torch.Size(array.shape)
        self._array = array

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Field({self.path}, {self.layout or tuple(self.shape)}, {self.dtype})"

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The chunks in which the array is stored; None if it is stored in one piece."""
        return file_chunks(self._array)

    @property
    def shapes(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.shape[1:])

    def coordinate(self, dim: int) -> Coordinate | None:
        """Return the coordinate of a dim that is stored with the array, read by this rank alone; None if there is none.

        In a zarr group it is the array that has the dim's name; in a NetCDF file, the dimension scale of the dim.
        """
        try:
            return read_coordinate(self._array, dim)
        except Exception as error:  # whatever the reader of this format raises on a broken file
            raise OSError(
                f"cannot read the coordinate of dim {dim} of {self.path}: {type(error).__name__}: {error}"
            ) from error

    def read(self, i: int, slices: Sequence[slice]) -> Tensor:
        """Return the block of sample i within `slices`, read by this rank alone."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.path}: sample {i} of {len(self)}")
        return self.read_block((i % len(self), *slices))

    def __getitem__(self, index: Any) -> Any:
        """Read the field at an index of ints and slices: a ShardTensor, or a plain tensor without a mesh.

        With a mesh it communicates (one integer per axis): all ranks must index together.
        """
        expanded = _expand_index(index, self.shape)
        if self.layout is None:
            return run_with_error_sync("field", None, lambda: self.read_block(expanded))
        block: list[int | slice] = []
        dims: list[tuple[DimSharding, ...]] = []
        for dim, (at, own) in enumerate(zip(expanded, local_slices(self.layout), strict=True)):
            full = at == slice(0, self.shape[dim], 1)
            if not full and self.layout.axes_of(dim):
                raise ShardingError(
                    f"{self!r}: dim {dim} is sharded and cannot be indexed on disk; index the tensor after reading, or "
                    "leave the dim unsharded"
                )
            block.append(own if full else at)
            if isinstance(at, slice):
                dims.append(self.layout.dims[dim] if full else (DimSharding(len(range(at.start, at.stop, at.step))),))
        layout = Layout.make(self.layout.mesh, dims)
        local = run_with_error_sync("field", layout.mesh, lambda: self.read_block(block))
        return _wrap_on_mesh(local, layout)

    def read_block(self, block: Sequence[int | slice]) -> Tensor:
        """Return the block within an int or a slice per dim, read by this rank alone."""
        spans = [range(*at.indices(n)) for at, n in zip(block, self.shape, strict=True) if isinstance(at, slice)]
        shape = tuple(len(span) for span in spans)
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=self.dtype)
        try:
            absent = missing_chunks(Path(self.path), self._array, block) if self.missing == "error" else []
            found = None if absent else np.asarray(self._array[tuple(block)])
        except Exception as error:  # whatever the reader of this format raises on a broken file
            raise OSError(f"cannot read {self.path}: {type(error).__name__}: {error}") from error
        if found is None:
            names = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
            raise ShardingError(
                f"{self.path}: {len(absent)} of the chunks of {self._array.name} are not stored: {names}. The file is "
                "incomplete; missing='fill' reads them as the fill value"
            )
        return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))


class UnopenedField(Field):
    """A field without a mesh that this rank could not open. Its first use raises, where other ranks can take part."""

    def __init__(self, path: Any, problem: ShardingError):
        self.path, self._problem = _title(path), problem

    def __getattr__(self, name: str) -> Any:  # of the attributes that an open field has
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._problem

    def __repr__(self) -> str:
        return f"Field({self.path}, not opened: {self._problem})"


def _title(source: Any) -> Any:
    """Return the path or URL of a source; of an xarray object, its name."""
    return f"xarray:{getattr(source, 'name', None) or 'dataset'}" if hasattr(source, "isel") else source


def _wrap_on_mesh(local: Tensor, layout: Layout) -> ShardTensor:
    return wrap(local.to(collectives.device_of(layout.mesh)), layout)


def _expand_index(index: Any, shape: Sequence[int]) -> list[int | slice]:
    """Expand an index to one int or slice (with start, stop and step) per dim."""
    items = list(index) if isinstance(index, tuple) else [index]
    if sum(at is Ellipsis for at in items) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    left, right = items[:at], items[at + 1 :]
    if len(left) + len(right) > len(shape):
        raise IndexError(f"{len(left) + len(right)} indices for a field of {len(shape)} dims")
    found: list[int | slice] = []
    for n, item in zip(shape, [*left, *[slice(None)] * (len(shape) - len(left) - len(right)), *right], strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(n)
            if step < 1:
                raise IndexError(f"{item}: the step of a slice of a field must be positive")
            found.append(slice(start, max(start, stop), step))
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            if not -n <= item < n:
                raise IndexError(f"index {item} is out of bounds for a dim of size {n}")
            found.append(int(item) % n)
        else:
            raise IndexError(f"a field is indexed by ints and slices, not {item!r}")
    return found
