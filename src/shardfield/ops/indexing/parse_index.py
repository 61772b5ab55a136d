"""Parse an index as torch does: the meaning of each entry of x[...], and torch's errors."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

IndexItem = int | tuple[int, int, int] | None  # an int, a slice as (start, stop, step), a new dim


class ParsedIndex(NamedTuple):
    """A parsed index: its basic part, and the index tensors with the dim (after the basic part) each applies to."""

    items: tuple[IndexItem, ...]
    tensors: list[tuple[int, Tensor]]


def _lists_are_tuples() -> bool:
    """Return whether this torch parses x[[[0, 1], [1, 2]]] as x[[0, 1], [1, 2]]; a later torch will not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(2, 2)[[[0, 1], [0, 1]]].ndim == 1


LISTS_ARE_TUPLES = _lists_are_tuples()


def is_mask(tensor: Tensor) -> bool:
    """Return whether an index tensor is a mask."""
    return tensor.dtype in (torch.bool, torch.uint8)


_SLICE_FIELD_TYPES = (int, type(None))


def basic_index_key(index: Any) -> tuple | None:
    """Return a cache key for an index of ints, slices of ints, None and Ellipsis; None for any other index."""
    key: list[Any] = []
    for i in index if index.__class__ is tuple else (index,):
        if i.__class__ is slice:
            fields = (i.start, i.stop, i.step)
            if (
                fields[0].__class__ not in _SLICE_FIELD_TYPES
                or fields[1].__class__ not in _SLICE_FIELD_TYPES
                or fields[2].__class__ not in _SLICE_FIELD_TYPES
            ):
                return None
            key.append(fields)
        elif i.__class__ is int or i is None or i is Ellipsis:
            key.append(i)
        else:
            return None
    return tuple(key)


def _as_tuple(index: Any) -> tuple:
    if isinstance(index, tuple):
        return index
    if isinstance(index, list) and LISTS_ARE_TUPLES and len(index) < 32:
        if any(i is None or i is Ellipsis or isinstance(i, (Tensor, slice, list, tuple)) for i in index):
            return tuple(index)
    return (index,)


def _normalize_entry(index: Any, device: torch.device) -> Any:
    """Return one entry of an index as an int, bool, slice, None, Ellipsis or tensor."""
    if index is None or index is Ellipsis or isinstance(index, (bool, slice)):
        return index
    if isinstance(index, Tensor):
        if index.dtype not in (torch.int64, torch.int32, torch.uint8, torch.bool):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if index.ndim:
            return index
        return bool(index) if is_mask(index) else int(index)
    if hasattr(index, "__index__") and not hasattr(index, "__len__"):
        return operator.index(index)
    if not hasattr(index, "__len__"):
        raise IndexError(f"only integers, slices, ellipsis, None and long or byte tensors are indices, not {index!r}")
    tensor = torch.as_tensor(index, device=device) if len(index) else torch.empty(0, dtype=torch.int64, device=device)
    return _normalize_entry(tensor, device)


def parse_index(shape: Sequence[int], index: Any, device: torch.device) -> ParsedIndex:
    """Parse an index for a tensor of this shape; raise torch's errors."""
    entries = [_normalize_entry(i, device) for i in _as_tuple(index)]
    dims_taken = [_num_indexed_dims(i) for i in entries]
    free = len(shape) - sum(dims_taken)
    if free < 0:
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    if not any(e is Ellipsis for e in entries):
        entries.append(Ellipsis)
    items: list[IndexItem] = []
    tensors: list[tuple[int, Tensor]] = []
    dim = result_dim = 0  # the dim of the operand, and of the result of the basic part
    for entry in entries:
        if entry is Ellipsis:
            items += [(0, n, 1) for n in shape[dim : dim + free]]
            dim, result_dim, free = dim + free, result_dim + free, 0
        elif entry is None:
            items.append(None)
            result_dim += 1
        elif isinstance(entry, bool):  # a new dim of size 1 or 0
            items.append(None)
            tensors.append((result_dim, torch.zeros(int(entry), dtype=torch.int64, device=device)))
            result_dim += 1
        elif isinstance(entry, int):
            items.append(normalize_index(entry, shape, dim))
            dim += 1
        elif isinstance(entry, slice):
            items.append(slice_bounds(entry, shape[dim]))
            dim, result_dim = dim + 1, result_dim + 1
        else:
            n = _num_indexed_dims(entry)
            if is_mask(entry) and tuple(entry.shape) != tuple(shape[dim : dim + n]):
                raise IndexError(
                    f"The shape of the mask {list(entry.shape)} at index {dim} does not match the shape of the "
                    f"indexed tensor {list(shape)} at index {dim}"
                )
            tensors.append((result_dim, entry))
            items += [(0, m, 1) for m in shape[dim : dim + n]]
            dim, result_dim = dim + n, result_dim + n
    return ParsedIndex(tuple(items), tensors)


def _num_indexed_dims(entry: Any) -> int:
    """Return the number of dims that an entry of an index applies to."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and is_mask(entry) else 1


def normalize_index(i: int, shape: Sequence[int], dim: int) -> int:
    """Return an int index counted from the front, or raise torch's error."""
    size = shape[dim]
    if not -size <= i < size:
        raise IndexError(f"index {i} is out of bounds for dimension {dim} with size {size}")
    return i + size if i < 0 else i


def slice_bounds(s: slice, size: int) -> tuple[int, int, int]:
    """Return a slice as (start, stop, step) inside a dim, or raise torch's error."""
    if s.step is not None and operator.index(s.step) <= 0:
        raise ValueError("step must be greater than zero")
    if s.step is not None and operator.index(s.step) >= 1 << 62:
        raise ValueError(f"slice step {s.step} is too large: the index would overflow")  # torch returns an empty result
    start, stop, step = s.indices(size)
    return start, max(start, stop), step


def broadcast_index_shapes(shapes: Sequence[Sequence[int]]) -> torch.Size:
    """Return the common shape of several index tensors, or raise torch's IndexError if they do not broadcast."""
    if all(shape == shapes[0] for shape in shapes):
        return torch.Size(shapes[0])  # `broadcast_shapes` takes as long as the rest of a plan
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {listed}"
        ) from None


def index_result_dim(dims: Sequence[int]) -> int:
    """Return the dim where torch puts the dims of index tensors: in their place if `dims` are adjacent, else first."""
    return dims[0] if list(dims) == list(range(dims[0], dims[0] + len(dims))) else 0
