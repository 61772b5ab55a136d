"""Rewrite a forecast as a NetCDF-4 file, one file of the forecast at a time: no process holds a full field."""

from __future__ import annotations

import itertools
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ShardfieldError
from .store import ForecastStore, _import_zarr


def export_netcdf(forecast: str | os.PathLike, path: str | os.PathLike) -> Path:
    """Write a complete forecast as NetCDF-4, and return its path. Runs in one process, and needs h5py.

    A NetCDF-4 file is an HDF5 file with dimension scales, which xarray reads with h5netcdf or netCDF4. Blocks are read
    and written one after another, in the chunks of the forecast. The file has its name when it is complete.
    """
    try:
        import h5py
    except ImportError:
        raise ShardfieldError("NetCDF files are written with h5py: pip install 'shardfield[recipes]'") from None
    store, path = ForecastStore(forecast), Path(path)
    complete = store.attrs["complete"]
    if complete < store.times:
        raise ShardfieldError(f"{store.path}: has {complete} of {store.times} lead times; finish the forecast first")
    group = _import_zarr().open_group(str(store.path), mode="r")
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with h5py.File(part, "w", track_order=True) as file:
            for name, value in store.attrs.items():
                if isinstance(value, (str, int, float)):
                    file.attrs[name] = value
            dims = group[store.variables[0]].metadata.dimension_names
            for name in dims:
                scale = file.create_dataset(name, data=group[name][:])
                scale.make_scale(name)
                _copy_attrs(group[name], scale)
            for name in store.variables:
                _copy_array(group[name], file, name, dims)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _copy_array(array: Any, file: Any, name: str, dims: tuple[str, ...]) -> None:
    made = file.create_dataset(
        name, shape=array.shape, dtype=array.dtype, chunks=array.chunks, fillvalue=np.nan, compression="gzip",
        compression_opts=1, shuffle=True,
    )  # fmt: skip
    _copy_attrs(array, made)
    for i, dim in enumerate(dims):
        made.dims[i].attach_scale(file[dim])
    starts = (range(0, n, size) for n, size in zip(array.shape, array.shards, strict=True))
    for corner in itertools.product(*starts):
        block = tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, array.shards, array.shape, strict=True))
        made[block] = array[block]


def _copy_attrs(source: Any, target: Any) -> None:
    for name, value in source.attrs.items():
        target.attrs[name] = value
