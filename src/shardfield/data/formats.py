"""Open arrays in zarr groups, HDF5 and NetCDF files, local or at a URL, and of xarray."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ShardingError


def is_url(source: Any) -> bool:
    """Return whether a source is a URL, which fsspec opens, and not a local path."""
    return isinstance(source, str) and "://" in source


def open_array(source: Any, name: str | None, decode: bool = True) -> tuple[Any, torch.dtype]:
    """Open an array that is read when it is indexed (numpy's basic indexing); return it and its torch dtype.

    `source` is a path, a URL, or an xarray object. decode: apply the conventions of NetCDF for packed values and for
    values that are missing.
    """
    try:
        if hasattr(source, "isel"):  # an xarray object, which decodes by itself
            array: Any = XarrayArray(_select_variable(source, name))
        elif is_url(source):
            array = _open_url(source, name)
        elif not source.exists():
            raise ShardingError(f"there is no {source}")
        else:
            array = _open_zarr(source, name) if source.is_dir() else _open_hdf5(source, name)
    except ShardingError:
        raise
    except Exception as error:  # the packages raise many types for broken files
        raise ShardingError(f"cannot open {source}: {type(error).__name__}: {error}") from error
    if decode and not hasattr(source, "isel"):
        array = DecodedArray.of(array)
    try:
        dtype = torch.from_numpy(np.empty(0, np.dtype(array.dtype).newbyteorder("="))).dtype
    except TypeError:
        raise ShardingError(f"{source}: arrays of {array.dtype} cannot be tensors") from None
    return array, dtype


class XarrayArray:
    """A variable of xarray, indexed as an array of numpy."""

    def __init__(self, variable: Any):
        self.variable, self.shape, self.dtype, self.name = variable, variable.shape, variable.dtype, variable.name
        chunks = variable.encoding.get("chunks") or variable.encoding.get("chunksizes")
        # Of the file that it was opened from; a part of it has no chunks of its own.
        whole = variable.encoding.get("original_shape", variable.shape) == variable.shape
        self.chunks = tuple(chunks) if chunks and len(chunks) == variable.ndim and whole else None

    def __getitem__(self, block: tuple[int | slice, ...]) -> np.ndarray:
        return self.variable[block].values


class DecodedArray:
    """An array of packed values (scale_factor, add_offset), or with missing ones (_FillValue, missing_value) as NaN."""

    def __init__(self, raw: Any, dtype: np.dtype, absent: Sequence[Any]):
        self.raw, self.shape, self.name, self.chunks = raw, raw.shape, raw.name, raw.chunks
        self.scale, self.offset = (_number(raw.attrs, key) for key in ("scale_factor", "add_offset"))
        self.packed, self.absent = dtype, absent
        small = dtype.itemsize <= 2 or (dtype.kind == "f" and dtype.itemsize == 4)
        self.dtype = np.dtype(np.float32 if small else np.float64)

    @classmethod
    def of(cls, array: Any) -> Any:
        """Return the array, decoded if its attributes ask for it."""
        if array.dtype.kind not in "iuf":
            return array
        dtype = _packed_dtype(array)
        absent = _absent_values(array, dtype)
        is_packed = any(key in array.attrs for key in ("scale_factor", "add_offset")) or dtype != array.dtype
        # A fill value of NaN is what its values are already.
        return cls(array, dtype, absent) if is_packed or any(value == value for value in absent) else array

    def __getitem__(self, block: Any) -> np.ndarray:
        packed = np.asarray(self.raw[block])
        if self.packed != self.raw.dtype:
            packed = packed.view(self.packed)
        values = packed.astype(self.dtype)
        if self.scale is not None:
            values *= self.dtype.type(self.scale)
        if self.offset is not None:
            values += self.dtype.type(self.offset)
        for value in self.absent:
            values[packed == value] = np.nan
        return values


def _number(attrs: Any, key: str) -> float | None:
    return None if attrs.get(key) is None else float(np.asarray(attrs[key]).reshape(-1)[0])


def _packed_dtype(array: Any) -> np.dtype:
    """Return the dtype of packed values: by the attribute _Unsigned, integers of the other signedness."""
    wanted = {"true": "u", "false": "i"}.get(str(array.attrs.get("_Unsigned")).lower())
    if array.dtype.kind == "f" or wanted is None:
        return array.dtype
    return np.dtype(f"{array.dtype.byteorder}{wanted}{array.dtype.itemsize}")


def _absent_values(array: Any, dtype: np.dtype) -> list[Any]:
    """Return the packed values that stand for missing ones, in the dtype of the packed values.

    A number of JSON or of another precision equals no packed value before it is rounded to their dtype.
    """
    found = []
    for key in ("_FillValue", "missing_value"):
        if key in array.attrs:
            values = np.asarray(array.attrs[key]).reshape(-1)
            # zarr stores the fill value of xarray as base64 text; the array then has it as its own.
            found += [array.fill_value] if values.dtype.kind in "US" else list(values)
    if "_ARRAY_DIMENSIONS" in array.attrs and "_FillValue" not in array.attrs:
        # xarray stores the _FillValue of an array of zarr format 2 as the array's own.
        found += [value for value in [getattr(array, "fill_value", None)] if value is not None]
    if dtype.kind != "f":
        found = [value for value in found if value == value and float(value).is_integer()]
    with np.errstate(over="ignore"):
        return [np.asarray(value).astype(array.dtype).view(dtype)[()] for value in found]


def file_chunks(array: Any) -> tuple[int, ...] | None:
    """Return the sizes of what is read at once: zarr's chunks (not its shards), HDF5's chunks; None for one piece."""
    array = getattr(array, "raw", array)
    return array.chunks


def list_arrays(path: Path) -> dict[str, Any]:
    """Return all arrays of a zarr folder or an HDF5 file by name; they are read when they are indexed."""
    try:
        if path.is_dir():
            items, kind = _zarr_group(path).members(max_depth=None), import_package("zarr").Array
        else:
            items, kind = _hdf5_items(_hdf5_file(path)), import_package("h5py").Dataset
    except ShardingError:
        raise
    except Exception as error:  # the packages raise many types for broken files
        raise ShardingError(f"cannot open {path}: {type(error).__name__}: {error}") from error
    return dict(sorted((name, item) for name, item in items if isinstance(item, kind)))


def missing_chunks(path: Path, array: Any, block: Sequence[int | slice]) -> list[tuple[int, ...]]:
    """Return the chunks of an array that overlap a block and are not stored: they are read as the fill value.

    A block has an int or a slice per dim. A zarr array that stores its chunks in shards is looked up by shards.
    """
    array = getattr(array, "raw", array)
    is_hdf5 = hasattr(array, "id")
    chunks = array.chunks if is_hdf5 else getattr(array, "shards", None) or array.chunks
    if chunks is None:  # a contiguous HDF5 dataset
        return [] if array.id.get_offset() is not None or array.size == 0 else [(0,) * array.ndim]
    spans = [
        range(at // size, at // size + 1) if isinstance(at, int) else range(at.start // size, -(-at.stop // size))
        for at, size in zip(block, chunks, strict=True)
    ]
    return [coords for coords in itertools.product(*spans) if not _is_stored(path, array, coords, chunks, is_hdf5)]


def _is_stored(path: Path, array: Any, coords: Sequence[int], chunks: Sequence[int], is_hdf5: bool) -> bool:
    if not is_hdf5:
        return (path / array.path / array.metadata.encode_chunk_key(tuple(coords))).exists()
    found = array.id.get_chunk_info_by_coord(tuple(c * n for c, n in zip(coords, chunks, strict=True)))
    return found.byte_offset is not None


def _open_zarr(path: Path, name: str | None) -> Any:
    return _select_zarr(path, name, _zarr_group(path))


def _zarr_group(path: Path) -> Any:
    if not any((path / file).exists() for file in ("zarr.json", ".zarray", ".zgroup")):
        raise ShardingError(f"{path} is a folder without zarr.json, .zarray or .zgroup: it is not a zarr store")
    return import_package("zarr").open(store=str(path), mode="r")


def _select_zarr(source: Any, name: str | None, found: Any) -> Any:
    zarr = import_package("zarr")
    if isinstance(found, zarr.Array):
        if name is not None:
            raise ShardingError(f"{source} is one array, and has none called {name!r} inside")
        return found
    return _select_array(source, name, found, zarr.Array, lambda: found.members(max_depth=None))


def _open_url(url: str, name: str | None) -> Any:
    """Open a zarr group, or an HDF5 or NetCDF file by its suffix, with fsspec: only what is indexed is transferred."""
    fsspec = import_package("fsspec")
    if url.rsplit("/", 1)[-1].endswith((".nc", ".nc4", ".h5", ".hdf5")):
        file = import_package("h5py").File(fsspec.open(url, "rb").open(), "r")
        return _select_hdf5(url, name, file)
    zarr = import_package("zarr")
    return _select_zarr(url, name, zarr.open(store=url, mode="r"))


def _select_variable(source: Any, name: str | None) -> Any:
    """Return a variable of an xarray dataset, or an xarray array itself."""
    if not hasattr(source, "data_vars"):
        if name not in (None, source.name):
            raise ShardingError(f"the xarray array is {source.name!r}, not {name!r}")
        return source
    if name is None and len(source.data_vars) == 1:
        return next(iter(source.data_vars.values()))
    if name not in source.variables:
        lacks = "has several variables, or none: name one" if name is None else f"has no variable {name!r}"
        raise ShardingError(f"the xarray dataset {lacks}; it has {', '.join(sorted(map(str, source.variables)))}")
    return source[name]


def _open_hdf5(path: Path, name: str | None) -> Any:
    return _select_hdf5(path, name, _hdf5_file(path))


def _hdf5_file(path: Path) -> Any:
    h5py = import_package("h5py")
    if not h5py.is_hdf5(path):
        raise ShardingError(f"{path} is neither an HDF5 file nor a zarr folder, or it is truncated")
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_sieve_buf_size(4096)  # by default 64 KB are read around each row of a block
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))


def _hdf5_items(file: Any) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    file.visititems(lambda *item: items.append(item))
    return items


def _select_hdf5(source: Any, name: str | None, file: Any) -> Any:
    return _select_array(source, name, file, import_package("h5py").Dataset, lambda: _hdf5_items(file))


def _select_array(source: Any, name: str | None, group: Any, kind: type, items: Callable[[], Iterable]) -> Any:
    """Return the array called `name`, or the only one. Lists `items` only if there is no name or no such array."""
    if name is not None:
        found = group.get(name.strip("/"))
        if isinstance(found, kind):
            return found
    arrays = {key: item for key, item in items() if isinstance(item, kind)}
    if name is None and len(arrays) == 1:
        return next(iter(arrays.values()))
    lacks = "holds several arrays, or none: name one" if name is None else f"has no array called {name!r}"
    raise ShardingError(f"{source} {lacks}; it has {', '.join(sorted(arrays)) or 'nothing'}")


def import_package(name: str, extra: str = "recipes") -> Any:
    """Import a package that only some files need, or raise an error that names it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ShardingError(f"this needs {name}: pip install 'shardfield[{extra}]'") from None
