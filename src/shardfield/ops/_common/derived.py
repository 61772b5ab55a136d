"""Values that are computed from the elements of a tensor and kept with it: plans that read a table, host copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ... import runtime
from ..._compat.storage import base_and_version

Value = TypeVar("Value")
MAX_KEPT = 8  # per owner: a layer sees few layouts


def kept_with_tensor(tensor: Tensor, key: tuple, make: Callable[[], Value]) -> Value:
    """Return `make()`, which is called once as long as the tensor is alive and not written."""
    found = base_and_version(tensor)
    if found is None:
        return make()
    view = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return kept_with(*found, (*key, view), make)


def kept_with(owner: Any, version: Any, key: tuple, make: Callable[[], Value]) -> Value:
    """Return `make()`, which is called once as long as the owner is alive and has this version."""
    table = runtime.active.exchange_lists
    entry = table.get(owner)
    if entry is None or entry[0] != version:
        entry = table[owner] = (version, {})
    kept = entry[1]
    if key not in kept:
        if len(kept) >= MAX_KEPT:
            del kept[next(iter(kept))]
        kept[key] = make()
    return kept[key]
