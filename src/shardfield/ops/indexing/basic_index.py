"""Basic indexing: slices, ints, None and Ellipsis. Each rank keeps its overlap; nothing is communicated.

A slice of a sharded dim is a view of this rank's shard; shards become smaller, or empty. An int on a sharded dim
selects a row of one rank: the result is a view of the row there and empty on other ranks, which is expressed as a
sharding of the next dim with one non-empty shard. A result without dims is Partial: the owner adds the element, the
other ranks add zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import runtime
from ...dispatch.copied_views import CopiedView
from ...dispatch.registry import as_operand, composed
from ...dispatch.write_tracking import set_copied_view
from ...layout import MOVED_SHARDING, DimSharding, Layout, starts
from ...redistribute import redistribute, unmerge_dims
from ...tensor import ShardTensor, wrap
from ..shape.permute import drop_dims
from ..shape.view import single_element
from .parse_index import IndexItem


class BasicIndexPlan(NamedTuple):
    """The plan of a basic index: the operand's layout, the local index, and the result's layout.

    `kept_dims` are dims that an int has reduced to size 1 on the owner and size 0 elsewhere. `shape` is the local shape
    without them, or None if there are none to drop; () means that the result is a scalar.
    """

    source: Layout
    local_index: tuple[Any, ...]
    shape: torch.Size | None
    result: Layout
    copied: bool
    kept_dims: tuple[int, ...]
    narrowed: bool

    def run(self, x: ShardTensor) -> ShardTensor:
        out = self.view(x)
        x._consumed = out._consumed = True
        return out

    def view(self, x: ShardTensor) -> ShardTensor:
        """Return the result as a view to write through; it is not returned to the user."""
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
            set_copied_view(out, self.copied or x._copied_view)
        if out._copied_view is True:
            CopiedView(out, x, self.run)
        if self.narrowed or x._narrowed:
            out._narrowed = True
        if not (self.narrowed or self.copied or x._layout.is_sharded_over_all_axes or local.requires_grad):
            # x may be a buffer that is sharded by what is written into this slice; a graph must not be kept alive
            out._slice_of = x if x._slice_of is None else x._slice_of
        return out


def slice_sharding(factor: DimSharding, start: int, stop: int, step: int) -> DimSharding:
    """Return the sharding after a slice: every shard keeps its overlap.

    >>> slice_sharding(DimSharding(7, (0,), (3, 4)), 1, 7, 2)
    DimSharding(size=3, axes=(0,), shard_sizes=(1, 2))
    """
    size = len(range(start, stop, step))
    if (size, step) == (factor.size, 1):
        return factor
    if not factor.axes:
        return DimSharding(size).with_origins(o for o in factor.origins if o.kind == MOVED_SHARDING)
    bounds = zip(starts(factor.shard_sizes), factor.shard_sizes, strict=True)
    return DimSharding(size, factor.axes, tuple(len(_slice_in_shard(lo, n, start, stop, step)) for lo, n in bounds))


def _slice_in_shard(lo: int, length: int, start: int, stop: int, step: int) -> range:
    """Return the positions of a slice within a shard."""
    first = start if start >= lo else lo + (start - lo) % step
    return range(first - lo, max(first - lo, min(stop, lo + length) - lo), step)


@runtime.memo
def plan_basic_index(layout: Layout, items: tuple[IndexItem, ...], keepdim: bool = False) -> BasicIndexPlan:
    """Plan a basic index with one item for every dim, and None between them. Pure.

    keepdim: an int on a sharded dim keeps its dim, with size 1.
    """
    source = layout
    for dim, entry in enumerate(i for i in items if i is not None):
        if isinstance(entry, tuple) and len(layout.dims[dim]) > 1 and _merged_inner_size(layout, dim, entry) is None:
            source = source.with_dim(dim, *unmerge_dims(layout).dims[dim])
    dims: list[tuple[DimSharding, ...]] = []
    local_index: list[Any] = []
    kept_dims: list[int] = []
    dim = 0
    for item in items:
        if item is None:
            dims.append((DimSharding(1),))
            local_index.append(None)
            continue
        if not isinstance(item, int):
            local, factors = _local_slice(source, dim, item)
            local_index.append(slice(local.start, local.stop, local.step))
            dims.append(factors)
        elif source.is_sharded(dim):
            local_index.append(_local_row_slice(source, dim, item))
            kept_dims.append(len(dims))
            dims.append(tuple(slice_sharding(f, i, i + 1, 1) for f, i in _unravel(source, dim, item)))
        else:
            local_index.append(item)
        dim += 1
    copied = bool(layout.partial) or source is not layout
    result = source.with_dims(dims)
    dim_items = [i for i in items if i is not None]
    narrowed = any(
        source.is_sharded(d) and i != (0, n, 1) for d, (i, n) in enumerate(zip(dim_items, layout.shape, strict=True))
    )
    if keepdim or not kept_dims:
        return BasicIndexPlan(source, tuple(local_index), None, result, copied, tuple(kept_dims), narrowed)
    dropped = drop_dims(result, kept_dims)
    if dropped is not None:
        return BasicIndexPlan(
            source, tuple(local_index), dropped.local_shape, dropped, copied, tuple(kept_dims), narrowed
        )
    if any(op != "sum" for _, op in source.partial):
        source = source.with_partial(())
    scalar = Layout.make(
        layout.mesh, [], [*source.partial, *((a, "sum") for a in result.nontrivial_axes(result.shard_axes))]
    )
    return BasicIndexPlan(source, tuple(local_index), torch.Size(()), scalar, True, tuple(kept_dims), narrowed)


def _unravel(layout: Layout, dim: int, i: int) -> list[tuple[DimSharding, int]]:
    """Return the index of a dim as one index for each of its factors."""
    digits = []
    for factor in reversed(layout.dims[dim]):
        i, digit = divmod(i, factor.size)
        digits.append((factor, digit))
    return digits[::-1]


def _local_row_slice(layout: Layout, dim: int, i: int) -> slice:
    """Return the local slice of index `i` of a dim, which is empty on ranks that do not hold it."""
    position = 0
    for factor, digit in _unravel(layout, dim, i):
        length = layout.local_size_of(factor)
        digit -= starts(factor.shard_sizes)[layout.index(factor.axes)] if factor.axes else 0
        if not 0 <= digit < length:
            return slice(0, 0)
        position = position * length + digit
    return slice(position, position + 1)


def _merged_inner_size(layout: Layout, dim: int, item: tuple[int, int, int]) -> int | None:
    """Return the size of a merged dim's inner factors if the slice takes multiples of it; 0 for a full slice."""
    if item == (0, layout.shape[dim], 1) or not layout.is_sharded(dim):
        return 0
    first, *rest = layout.dims[dim]
    inner = layout.shape[dim] // max(first.size, 1)
    return inner if rest and inner and item[2] == 1 and item[0] % inner == 0 == item[1] % inner else None


def _local_slice(layout: Layout, dim: int, item: tuple[int, int, int]) -> tuple[Any, tuple[DimSharding, ...]]:
    """Return this rank's slice, and the factors of the dim after the slice."""
    start, stop, step = item
    first, *rest = layout.dims[dim]
    if rest:
        inner = _merged_inner_size(layout, dim, item)
        assert inner is not None
        if item == (0, layout.shape[dim], 1):
            return slice(None), layout.dims[dim]
        if inner == 0:
            return slice(start, stop, step), (DimSharding(len(range(start, stop, step))),)
        outer, (after,) = _local_slice(layout.with_dim(dim, first), dim, (start // inner, stop // inner, 1))
        width = 1
        for factor in rest:
            width *= layout.local_size_of(factor)
        return slice(outer.start * width, outer.stop * width, 1), (after, *rest)
    lo = starts(first.shard_sizes)[layout.index(first.axes)] if first.axes else 0
    return _slice_in_shard(lo, layout.local_size_of(first), start, stop, step), (
        slice_sharding(first, start, stop, step),
    )


# ---------------------------------------------------------------------- select and narrow


def index_one_dim(x: Any, dim: int, item: IndexItem, keepdim: bool = False) -> ShardTensor:
    """Apply a basic index to one dim of `x`."""
    items: list[IndexItem] = [(0, n, 1) for n in x.shape]
    items[dim] = item
    return plan_basic_index(x._layout, tuple(items), keepdim).run(x)


def normalize_dim(dim: int, ndim: int) -> int:
    """Return a dim counted from the front, or raise torch's error."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % max(ndim, 1)


def as_shard_tensor(value: Tensor, mesh: Any) -> ShardTensor:
    """Return any tensor as a ShardTensor on `mesh`; a plain tensor is replicated."""
    if value.__class__ is ShardTensor:
        return value  # type: ignore[return-value]
    return wrap(*as_operand(value, mesh, partial=True, merged=True))


@composed("select")
def select(input, dim, index):
    """Return one row along `dim`."""
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
    """Return consecutive rows along `dim`."""
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
