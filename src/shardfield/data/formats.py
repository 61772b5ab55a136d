"""Open arrays in zarr folders and HDF5 files."""

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


def open_array(path: Path, name: str | None) -> tuple[Any, torch.dtype]:
    """Open an array that is read when it is indexed (numpy's basic indexing); return it and its torch dtype."""
    if not path.exists():
        raise ShardingError(f"there is no {path}")
    try:
        array = _open_zarr(path, name) if path.is_dir() else _open_hdf5(path, name)
    except ShardingError:
        raise
    except Exception as error:  # the packages raise many types for broken files
        raise ShardingError(f"cannot open {path}: {type(error).__name__}: {error}") from error
    try:
        dtype = torch.from_numpy(np.empty(0, np.dtype(array.dtype).newbyteorder("="))).dtype
    except TypeError:
        raise ShardingError(f"{path}: arrays of {array.dtype} cannot be tensors") from None
    return array, dtype


def missing_chunks(path: Path, array: Any, block: Sequence[int | slice]) -> list[tuple[int, ...]]:
    """Return the chunks of an array that overlap a block and are not stored: they are read as the fill value.

    A block has an int or a slice per dim. A zarr array that stores its chunks in shards is looked up by shards.
    """
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
    zarr = _import_package("zarr")
    if not any((path / file).exists() for file in ("zarr.json", ".zarray", ".zgroup")):
        raise ShardingError(f"{path} is a folder without zarr.json, .zarray or .zgroup: it is not a zarr store")
    found = zarr.open(store=str(path), mode="r")
    if isinstance(found, zarr.Array):
        if name is not None:
            raise ShardingError(f"{path} is one array, and has none called {name!r} inside")
        return found
    return _select_array(path, name, found, zarr.Array, lambda: found.members(max_depth=None))


def _open_hdf5(path: Path, name: str | None) -> Any:
    h5py = _import_package("h5py")
    if not h5py.is_hdf5(path):
        raise ShardingError(f"{path} is neither an HDF5 file nor a zarr folder, or it is truncated")
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_sieve_buf_size(4096)  # by default 64 KB are read around each row of a block
    file = h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))
    items: list[tuple[str, Any]] = []
    return _select_array(
        path, name, file, h5py.Dataset, lambda: file.visititems(lambda *item: items.append(item)) or items
    )


def _select_array(path: Path, name: str | None, group: Any, kind: type, items: Callable[[], Iterable]) -> Any:
    """Return the array called `name`, or the only one. Lists `items` only if there is no name or no such array."""
    if name is not None:
        found = group.get(name.strip("/"))
        if isinstance(found, kind):
            return found
    arrays = {key: item for key, item in items() if isinstance(item, kind)}
    if name is None and len(arrays) == 1:
        return next(iter(arrays.values()))
    lacks = "holds several arrays, or none: name one" if name is None else f"has no array called {name!r}"
    raise ShardingError(f"{path} {lacks}; it has {', '.join(sorted(arrays)) or 'nothing'}")


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ShardingError(f"reading this needs {name}: pip install 'shardfield[recipes]'") from None
