"""Arrays on disk as sharded fields: each rank reads its block of a zarr or HDF5 array, and nothing else."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..comm import collectives
from ..comm.consensus import check_arguments
from ..errors import ShardingError
from ..layout import DimSharding, Layout
from ..tensor import ShardTensor, wrap
from .error_sync import run_with_error_sync
from .formats import open_array
from .sharding import build_layout, local_slices


def open_field(
    path: str | os.PathLike,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    name: str | None = None,
    sizes: Mapping[Any, Sequence[int]] | None = None,
) -> Field:
    """An array in a zarr folder or an HDF5 file, cut over a mesh as `placements` say of its dims.

        field = open_field("era5.zarr", mesh, [Shard(2)], name="t2m")   # time, level, lat, lon
        field.shape, field.dtype
        x = field[7]               # one time: a ShardTensor (level, lat, lon), Shard(1), each rank has read its rows
        y = field[7:9, 0]          # two times, one level: (time, lat, lon), Shard(1)

    `name` is the path of the array inside the file; it may be left out where there is only one. `sizes` maps a mesh
    axis to the lengths of its pieces, else dims are cut as torch.chunk does. Chunks of the file that a rank's block
    touches are read whole: a cut that follows them reads each once. Opening and indexing are calls that all ranks of
    the mesh make together; if one of them fails to read, every one raises. Without a mesh the array is read whole, or
    in the blocks that a `ShardedLoader` asks for: it takes a field as a dataset, whose samples lie along dim 0.
    """
    path = Path(path).expanduser()
    array, dtype = run_with_error_sync("open_field", mesh, lambda: open_array(path, name))
    if mesh is None:
        if placements is not None or sizes is not None:
            raise ValueError("open_field: placements and sizes say how a mesh cuts the array: pass the mesh too")
        return Field(path, array, dtype, None)
    found = {"shape": tuple(array.shape), "dtype": dtype}
    check_arguments("open_field", mesh, found, {"path": path}, always=True)
    if placements is None:
        raise ShardingError("open_field: placements say how the mesh cuts the array, one for each of its axes")
    return Field(path, array, dtype, build_layout(mesh, placements, array.shape, sizes))


class Field:
    """What `open_field` gives: an array on disk that is read where it is indexed."""

    def __init__(self, path: Path, array: Any, dtype: torch.dtype, layout: Layout | None):
        self.path, self.dtype, self.layout = path, dtype, layout
        self.shape = torch.Size(array.shape)
        self._array = array

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Field({self.path}, {self.layout or tuple(self.shape)}, {self.dtype})"

    @property
    def shapes(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.shape[1:])

    def read(self, i: int, slices: Sequence[slice]) -> Tensor:
        """The block of sample i within `slices`, read by this rank alone."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.path}: sample {i} of {len(self)}")
        return self._read_block((i % len(self), *slices))

    def __getitem__(self, index: Any) -> Any:
        """The field at an index of ints and slices: a ShardTensor; a plain tensor where there is no mesh."""
        asked = _expand_index(index, self.shape)
        if self.layout is None:
            return run_with_error_sync("field", None, lambda: self._read_block(asked))
        block: list[int | slice] = []
        dims: list[tuple[DimSharding, ...]] = []
        for dim, (at, own) in enumerate(zip(asked, local_slices(self.layout), strict=True)):
            whole = at == slice(0, self.shape[dim], 1)
            if not whole and self.layout.axes_of(dim):
                raise ShardingError(
                    f"{self!r}: dim {dim} is cut over the mesh and is read whole; index what is read, or leave it uncut"
                )
            block.append(own if whole else at)
            if isinstance(at, slice):
                dims.append(self.layout.dims[dim] if whole else (DimSharding(len(range(at.start, at.stop, at.step))),))
        layout = Layout.make(self.layout.mesh, dims)
        local = run_with_error_sync("field", layout.mesh, lambda: self._read_block(block))
        return _wrap_on_mesh(local, layout)

    def _read_block(self, block: Sequence[int | slice]) -> Tensor:
        spans = [range(*at.indices(n)) for at, n in zip(block, self.shape, strict=True) if isinstance(at, slice)]
        shape = tuple(len(span) for span in spans)
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=self.dtype)
        try:
            found = np.asarray(self._array[tuple(block)])
        except Exception as error:  # whatever the reader of this format raises on a broken file
            raise OSError(f"cannot read {self.path}: {type(error).__name__}: {error}") from error
        return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))


def _wrap_on_mesh(local: Tensor, layout: Layout) -> ShardTensor:
    return wrap(local.to(collectives.device_of(layout.mesh)), layout)


def _expand_index(index: Any, shape: Sequence[int]) -> list[int | slice]:
    """One int or slice (start, stop and step all stated) for each dim."""
    given = list(index) if isinstance(index, tuple) else [index]
    if sum(at is Ellipsis for at in given) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = next((i for i, item in enumerate(given) if item is Ellipsis), len(given))
    left, right = given[:at], given[at + 1 :]
    if len(left) + len(right) > len(shape):
        raise IndexError(f"{len(left) + len(right)} indices for a field of {len(shape)} dims")
    found: list[int | slice] = []
    for n, item in zip(shape, [*left, *[slice(None)] * (len(shape) - len(left) - len(right)), *right], strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(n)
            if step < 1:
                raise IndexError(f"{item}: fields are read forwards")
            found.append(slice(start, max(start, stop), step))
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            if not -n <= item < n:
                raise IndexError(f"index {item} is out of bounds for a dim of size {n}")
            found.append(int(item) % n)
        else:
            raise IndexError(f"a field is indexed by ints and slices, not {item!r}")
    return found
