"""Array files that are written atomically and read by memory map. No pickles."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def open_mapped(path: Path, shape: Sequence[int], dtype: type) -> np.ndarray | None:
    """Map the array of a .npy file without reading it; return None if it is missing or has another shape or dtype."""
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # missing, truncated, no array file, or objects
        return None
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"cannot read {path}: {error.strerror or error}") from error
    return found if found.shape == tuple(shape) and found.dtype == dtype else None


def write_atomic(path: Path, array: np.ndarray) -> None:
    """Write a .npy file and rename it in one step, so that readers see complete files and writers do not interleave."""
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "xb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())  # else a power failure may keep the name and lose the bytes
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        why = f"cannot write {path}: {error.strerror or error}; choose another folder with cache= or SHARDFIELD_CACHE"
        raise OSError(error.errno or errno.EIO, why) from error
