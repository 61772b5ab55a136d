"""Basic indexing: slices, ints, None and Ellipsis. Each rank keeps its overlap; nothing is sent.

A slice of a cut dim is a view of this rank's part, with shorter (perhaps empty) pieces. An int on a cut dim is held by
one rank: there the result is a view of its row, and empty elsewhere, which is a cut of the next dim with one piece. A
result without dims is Partial: the owner adds the element, the others add nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.registry import as_operand, composed
from ...layout import DimSharding, Layout, starts
from ...redistribute import redistribute, unmerge_dims
from ...tensor import ShardTensor, wrap
from ..shape.permute import drop_dims
from ..shape.view import single_element
from .parse_index import IndexItem


class BasicIndexPlan(NamedTuple):
    """A basic index, planned: where the operand must lie, the local index, and where the result lies.

    `kept_dims` are dims that an int has made one long on the owner and empty elsewhere. `shape`: the local shape
    without them, where there are any to leave out; () leaves none, and they are summed away.
    """

    source: Layout
    local_index: tuple[Any, ...]
    shape: torch.Size | None
    result: Layout
    copied: bool
    kept_dims: tuple[int, ...]
    narrowed: bool

    def run(self, x: ShardTensor) -> ShardTensor:
        local = x._local_tensor
        if self.source is not x._layout:
            local = redistribute(local, x._layout, self.source)
        local = local[self.local_index]
        if self.shape:
            local = local.reshape(self.shape)
        elif self.shape is not None:
            local = single_element(local)
        out = wrap(local, self.result)
        if self.copied or x._copied_view:
            out._copied_view = self.copied or x._copied_view
        if self.narrowed or x._narrowed:
            out._narrowed = True
        return out


def slice_sharding(factor: DimSharding, start: int, stop: int, step: int) -> DimSharding:
    """The factor after a slice: every piece keeps what falls into it.

    >>> slice_sharding(DimSharding(7, (0,), (3, 4)), 1, 7, 2)
    DimSharding(size=3, axes=(0,), shard_sizes=(1, 2))
    """
    size = len(range(start, stop, step))
    if not factor.axes:
        return DimSharding(size)
    bounds = zip(starts(factor.shard_sizes), factor.shard_sizes, strict=True)
    return DimSharding(size, factor.axes, tuple(len(_slice_in_shard(lo, n, start, stop, step)) for lo, n in bounds))


def _slice_in_shard(lo: int, length: int, start: int, stop: int, step: int) -> range:
    """The slice inside a piece, as positions in the piece."""
    first = start if start >= lo else lo + (start - lo) % step
    return range(first - lo, max(first - lo, min(stop, lo + length) - lo), step)


@lru_cache(maxsize=8192)
def plan_basic_index(layout: Layout, items: tuple[IndexItem, ...], keepdim: bool = False) -> BasicIndexPlan:
    """Plan a basic index with one item for every dim, and None between them. Pure.

    keep: an int on a cut dim keeps its dim, one long.
    """
    source = layout
    for dim, cut_to in enumerate(i for i in items if i is not None):
        if isinstance(cut_to, tuple) and len(layout.dims[dim]) > 1 and _merged_inner_size(layout, dim, cut_to) is None:
            source = source.with_dim(dim, *unmerge_dims(layout).dims[dim])
    dims: list[tuple[DimSharding, ...]] = []
    part: list[Any] = []
    kept: list[int] = []
    dim = 0
    for item in items:
        if item is None:
            dims.append((DimSharding(1),))
            part.append(None)
            continue
        if not isinstance(item, int):
            here, factors = _local_slice(source, dim, item)
            part.append(slice(here.start, here.stop, here.step))
            dims.append(factors)
        elif source.is_sharded(dim):
            part.append(_local_row_slice(source, dim, item))
            kept.append(len(dims))
            dims.append(tuple(slice_sharding(f, i, i + 1, 1) for f, i in _unravel(source, dim, item)))
        else:
            part.append(item)
        dim += 1
    copied = bool(layout.partial) or source is not layout
    result = source.with_dims(dims)
    real = [i for i in items if i is not None]
    narrowed = any(
        source.is_sharded(d) and i != (0, n, 1) for d, (i, n) in enumerate(zip(real, layout.shape, strict=True))
    )
    if keepdim or not kept:
        return BasicIndexPlan(source, tuple(part), None, result, copied, tuple(kept), narrowed)
    left = drop_dims(result, kept)
    if left is not None:
        return BasicIndexPlan(source, tuple(part), left.local_shape, left, copied, tuple(kept), narrowed)
    if any(op != "sum" for _, op in source.partial):
        source = source.with_partial(())
    alone = Layout.make(
        layout.mesh, [], [*source.partial, *((a, "sum") for a in result.nontrivial_axes(result.shard_axes))]
    )
    return BasicIndexPlan(source, tuple(part), torch.Size(()), alone, True, tuple(kept), narrowed)


def _unravel(layout: Layout, dim: int, i: int) -> list[tuple[DimSharding, int]]:
    """An index of a dim as one for each of its factors."""
    found = []
    for factor in reversed(layout.dims[dim]):
        i, digit = divmod(i, factor.size)
        found.append((factor, digit))
    return found[::-1]


def _local_row_slice(layout: Layout, dim: int, i: int) -> slice:
    """Where this rank holds index `i` of a dim, as a slice that is empty on the ranks that do not."""
    at = 0
    for factor, digit in _unravel(layout, dim, i):
        length = layout.local_size_of(factor)
        digit -= starts(factor.shard_sizes)[layout.index(factor.axes)] if factor.axes else 0
        if not 0 <= digit < length:
            return slice(0, 0)
        at = at * length + digit
    return slice(at, at + 1)


def _merged_inner_size(layout: Layout, dim: int, item: tuple[int, int, int]) -> int | None:
    """The size behind the first factor of a merged dim, if the slice takes whole multiples of it; 0: all of the dim."""
    if item == (0, layout.shape[dim], 1) or not layout.is_sharded(dim):
        return 0
    first, *rest = layout.dims[dim]
    inner = layout.shape[dim] // max(first.size, 1)
    return inner if rest and inner and item[2] == 1 and item[0] % inner == 0 == item[1] % inner else None


def _local_slice(layout: Layout, dim: int, item: tuple[int, int, int]) -> tuple[Any, tuple[DimSharding, ...]]:
    """This rank's part of a slice, and the dim's factors after it."""
    start, stop, step = item
    first, *rest = layout.dims[dim]
    if rest:
        inner = _merged_inner_size(layout, dim, item)
        assert inner is not None
        if item == (0, layout.shape[dim], 1):
            return slice(None), layout.dims[dim]
        if inner == 0:
            return slice(start, stop, step), (DimSharding(len(range(start, stop, step))),)
        here, (after,) = _local_slice(layout.with_dim(dim, first), dim, (start // inner, stop // inner, 1))
        width = 1
        for factor in rest:
            width *= layout.local_size_of(factor)
        return slice(here.start * width, here.stop * width, 1), (after, *rest)
    lo = starts(first.shard_sizes)[layout.index(first.axes)] if first.axes else 0
    return _slice_in_shard(lo, layout.local_size_of(first), start, stop, step), (
        slice_sharding(first, start, stop, step),
    )


# ---------------------------------------------------------------------- the named forms


def index_one_dim(x: Any, dim: int, item: IndexItem, keepdim: bool = False) -> ShardTensor:
    """`x` with a basic index on one dim."""
    items: list[IndexItem] = [(0, n, 1) for n in x.shape]
    items[dim] = item
    return plan_basic_index(x._layout, tuple(items), keepdim).run(x)


def normalize_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front, or torch's error."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % max(ndim, 1)


def as_shard_tensor(value: Tensor, mesh: Any) -> ShardTensor:
    """Any tensor as a ShardTensor on `mesh`, as it lies."""
    if value.__class__ is ShardTensor:
        return value  # type: ignore[return-value]
    return wrap(*as_operand(value, mesh, partial=True, merged=True))


@composed("select")
def select(input, dim, index):
    """One row."""
    if not input.ndim:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    dim = normalize_dim(dim, input.ndim)
    size = input.shape[dim]
    if not -size <= index < size:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(input.shape)} at dimension {dim}"
        )
    return index_one_dim(input, dim, int(index) % size)


@composed("narrow")
def narrow(input, dim, start, length):
    """Consecutive rows."""
    if not input.ndim:
        raise RuntimeError("narrow() cannot be applied to a 0-dim tensor.")
    dim, start, length = normalize_dim(dim, input.ndim), int(start), int(length)
    size = input.shape[dim]
    if length < 0:
        raise RuntimeError("narrow(): length must be non-negative.")
    if not -size <= start <= size:
        raise IndexError(f"start out of range (expected to be in range of [{-size}, {size}], but got {start})")
    start += size if start < 0 else 0
    if start + length > size:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({size}).")
    return index_one_dim(input, dim, (start, start + length, 1))
