"""Masks: nonzero, masked_select and x[mask]. The size of the result depends on the data.

Each rank selects from its own shard. The result lists the selected elements in row-major order of the global tensor. If
only the leading dim is sharded, the ranks' selections follow each other in that order, and only counts are
communicated. Otherwise the selected elements are sent: each to the rank that is assigned its range of flat indices,
which sorts what it receives. The result is Shard(0) with uneven shard sizes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import process_groups
from ...dispatch.registry import composed, handler
from ...layout import DimSharding, Layout, balanced, nested_chunk, starts
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from ..elementwise.pointwise import pointwise
from .basic_index import as_shard_tensor
from .gather_rows import index_with_tensors
from .owners import AxisExchange, Owners, gather_counts

MIN_BALANCED = 128  # integers on a rank; fewer are not worth a message


class SelectionOrder:
    """The global order of the elements that each rank selected from a tensor with layout `layout`.

    `flat` holds the global flat indices of this rank's selection, ascending. `sharding` is the sharding of the dim that
    lists the global selection in order. `exchange` sends rows to their position in it, and `exchange_back` returns
    them.
    """

    def __init__(self, layout: Layout, flat: Tensor):
        leading, inner, inner_axes = _leading_sharding(layout)
        start, length = 0, layout.numel
        if leading is not None:
            shard = layout.index(leading.axes)
            start, length = starts(leading.shard_sizes)[shard] * inner, leading.shard_sizes[shard] * inner
        self.exchanges: list[AxisExchange] = []
        self.permutation: Tensor | None = None
        if inner_axes:
            sizes = [layout.mesh.size(a) for a in inner_axes]
            ends = torch.tensor(balanced(length, math.prod(sizes)), device=flat.device).cumsum(0) + start
            for i, axis in enumerate(inner_axes):
                range_owner = torch.searchsorted(ends, flat, right=True).div(
                    math.prod(sizes[i + 1 :]), rounding_mode="floor"
                )
                axis_exchange = AxisExchange.to(range_owner % sizes[i], axis, layout)
                self.exchanges.append(axis_exchange)
                flat = axis_exchange.exchange(flat)
            self.permutation = torch.argsort(flat)
            flat = flat[self.permutation]
        self.flat = flat
        self.layout = layout
        axes = (*(leading.axes if leading is not None else ()), *inner_axes)
        counts = gather_counts(len(flat), layout, axes, flat.device)
        self.sharding = DimSharding(sum(counts), axes, counts if axes else ())

    def exchange(self, rows: Tensor) -> Tensor:
        for axis_exchange in self.exchanges:
            rows = axis_exchange.exchange(rows)
        return rows if self.permutation is None else rows.index_select(0, self.permutation)

    def exchange_back(self, rows: Tensor) -> Tensor:
        if self.permutation is not None:
            rows = rows.index_select(0, torch.argsort(self.permutation))
        for axis_exchange in reversed(self.exchanges):
            rows = axis_exchange.exchange_back(rows)
        return rows

    def global_positions(self) -> Tensor:
        """Return the position in the global order of each element that this rank selected."""
        start = starts(self.sharding.shard_sizes)[self.layout.index(self.sharding.axes)] if self.sharding.axes else 0
        return self.exchange_back(torch.arange(start, start + len(self.flat), device=self.flat.device))


def _leading_sharding(layout: Layout) -> tuple[DimSharding | None, int, tuple[int, ...]]:
    """Return the first factor of size > 1 if it is sharded, the size of later factors, and the axes that shard them."""
    factors = [f for d in layout.dims for f in d if f.size != 1 or layout.nontrivial_axes(f.axes)]
    if not factors or not layout.nontrivial_axes(factors[0].axes):
        return None, 1, tuple(a for f in factors for a in layout.nontrivial_axes(f.axes))
    inner = math.prod(f.size for f in factors[1:])
    return factors[0], inner, tuple(a for f in factors[1:] for a in layout.nontrivial_axes(f.axes))


def selected_flat_indices(mask: Tensor, layout: Layout) -> Tensor:
    """Return the global flat indices of the true elements of a local mask, ascending."""
    owners = Owners(layout, range(layout.ndim))
    if not layout.ndim:
        return mask.reshape(1).nonzero().flatten()
    return owners.flat(owners.local_indices(mask.device)).expand(mask.shape)[mask]


def as_bool_mask(mask: Any) -> ShardTensor:
    """Return a mask as a reduced ShardTensor of bools."""
    mask = mask._reduced_value()
    return mask if mask.dtype is torch.bool else wrap(mask._local_tensor != 0, mask._layout)


def align_mask_layouts(layout: Layout, at: int, mask: Layout) -> tuple[Layout, Layout]:
    """Return layouts of operand and mask that agree from dim `at` on; the mask shards dims the operand does not."""
    dims = list(layout.dims)
    used = set(layout.shard_axes) | set(layout.partial_axes)
    for d in mask.sharded_dims:
        if not layout.is_sharded(at + d) and not used & set(mask.axes_of(d)):
            dims[at + d] = mask.dims[d]
            used |= set(mask.axes_of(d))
    return layout.with_dims(dims), Layout.make(layout.mesh, dims[at : at + mask.ndim])


def masked_rows(x: ShardTensor, at: int, mask: Tensor) -> ShardTensor:
    """Return x[mask] for a mask over the dims of `x` from `at` on."""
    mask = as_bool_mask(as_shard_tensor(mask, x._layout.mesh))
    layout, mask_layout = align_mask_layouts(x._layout, at, mask._layout)
    selected = redistribute(mask._local_tensor, mask._layout, mask_layout).to(x.device)
    block = redistribute(x._local_tensor, x._layout, layout)
    x._consumed = True
    n = mask_layout.ndim
    order = SelectionOrder(mask_layout, selected_flat_indices(selected, mask_layout))
    rows = order.exchange(block.movedim(list(range(at, at + n)), list(range(n)))[selected])
    dims = (*layout.dims[:at], (order.sharding,), *layout.dims[at + n :])
    found = wrap(rows.movedim(0, at), layout.with_dims(dims))
    return found if x.dtype not in (torch.int64, torch.int32) else balance_index(found, at, mask_layout)


def balance_index(found: ShardTensor, at: int, mask: Layout) -> ShardTensor:
    """Return selected integers in shards of one size if most of them are on few ranks.

    Integers that a mask selects from an order (the best nodes of a pooled graph) are mostly an index: its sharding is
    that of the rows it selects next, and of all work on them. Other values stay where they are selected: a loss on a
    part of the field is not worth their transfer.
    """
    (factor,) = found._layout.dims[at]
    leading, _, _ = _leading_sharding(mask)
    before = (
        leading.shard_sizes if leading is not None and leading.axes == factor.axes else (1,) * len(factor.shard_sizes)
    )
    largest, share = max(factor.shard_sizes, default=0), max(before, default=0) / max(sum(before), 1)
    if factor.size < MIN_BALANCED * len(before) or largest <= 1.5 * share * factor.size:
        return found
    sizes = balanced(factor.size, len(factor.shard_sizes))
    return found._redistribute_to(found._layout.with_dim(at, DimSharding(factor.size, factor.axes, sizes)))


def masked_put(y: ShardTensor, at: int, mask: Tensor, value: Tensor) -> None:
    """Write y[mask] = value, for a mask over the dims of `y` from `at` on.

    The first dim of `value` is that of the selection, then come the other dims of `y`. A dim of size 1 broadcasts.
    """
    mask = as_bool_mask(as_shard_tensor(mask, y._layout.mesh))
    layout, n = y._layout, mask.ndim
    mask_layout = Layout.make(layout.mesh, layout.dims[at : at + n])
    selected = redistribute(mask._local_tensor, mask._layout, mask_layout).to(y.device)
    block = y._local_tensor.movedim(list(range(at, at + n)), list(range(n)))
    other_dims = [d for d in range(layout.ndim) if not at <= d < at + n]
    sizes = [layout.shape[d] for d in other_dims]
    value_dims = [
        layout.dims[d] if size == m > 1 else (DimSharding(m),)  # one element is written on every rank
        for d, size, m in zip(other_dims, sizes, value.shape[1:], strict=True)
    ]
    if value.shape[0] == 1:  # one row for all selected elements
        rows = as_shard_tensor(value, layout.mesh)
        target = Layout.make(layout.mesh, [(DimSharding(1),), *value_dims])
        local = redistribute_in(rows, target, layout)[0]
        if value.numel() == 1:
            block.masked_fill_(selected[(..., *[None] * len(other_dims))], local.reshape(()))
        else:
            block[selected] = local
        return
    order = SelectionOrder(mask_layout, selected_flat_indices(selected, mask_layout))
    if value.shape[0] != order.sharding.size:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to indexing result of "
            f"shape {[order.sharding.size, *sizes]}"
        )
    axes = order.sharding.axes
    counts = gather_counts(int(selected.sum()), mask_layout, axes, selected.device)
    # the selection of each rank, concatenated in rank order
    local_order = DimSharding(order.sharding.size, axes, counts if axes else ())
    positions = wrap(order.global_positions(), Layout.make(layout.mesh, [(local_order,)]))
    rows = as_shard_tensor(value, layout.mesh)._redistribute_to(
        _value_layout(as_shard_tensor(value, layout.mesh)._layout, axes, value_dims)
    )
    local_rows = as_shard_tensor(index_with_tensors(rows, [positions], [0]), layout.mesh)
    target = Layout.make(layout.mesh, [(local_order,), *value_dims])
    block[selected] = redistribute_in(local_rows, target, layout)[0]


def _value_layout(values: Layout, axes: tuple[int, ...], rest: list[tuple[DimSharding, ...]]) -> Layout:
    """Return a layout of values: the first dim sharded by axes in `axes` only, the other dims as `rest`."""
    first = values.dims[0]
    other_axes = {a for d in range(1, values.ndim) for a in values.axes_of(d)}
    if not set(values.axes_of(0)) <= set(axes) or len(first) > 1 or other_axes & set(axes):
        parts = [values.mesh.size(a) for a in axes]
        first = (DimSharding(values.shape[0], axes, nested_chunk(values.shape[0], parts) if axes else ()),)
    return Layout.make(values.mesh, [first, *rest])


def redistribute_in(value: ShardTensor, target: Layout, work: Layout) -> list[Tensor]:
    """Return the local tensor of `value` under `target`; its gradient is summed over other axes that shard `work`."""
    local = redistribute(value._local_tensor, value._layout, target)
    return autograd_collectives.replicate_in(
        [local], process_groups(work, [a for a in work.shard_axes if a not in target.shard_axes])
    )


@composed("masked_select")
def masked_select(input, mask):
    """Return the elements where the mask is true."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    mesh = (input if isinstance(input, ShardTensor) else mask)._layout.mesh
    x, selected = (t if t.shape == shape else t.expand(shape) for t in (input, mask))
    if not shape:
        x, selected = x.reshape(1), selected.reshape(1)
    return masked_rows(as_shard_tensor(x, mesh), 0, selected)


@composed("nonzero")
def nonzero(input, *, as_tuple=False):
    """Return the indices of nonzero elements, in row-major order."""
    if not isinstance(input, ShardTensor):
        return torch.nonzero(input, as_tuple=as_tuple)
    mask = as_bool_mask(input)
    if as_tuple and not mask.ndim:
        mask = mask.reshape(1)
    layout = mask._layout
    order = SelectionOrder(layout, selected_flat_indices(mask._local_tensor, layout))
    columns = []
    flat = order.flat
    for size in reversed(layout.shape):
        columns.append(flat % max(size, 1))
        flat = flat.div(max(size, 1), rounding_mode="floor")
    list_layout = Layout.make(layout.mesh, [(order.sharding,)])
    if as_tuple:
        return tuple(wrap(c, list_layout) for c in reversed(columns))
    table = torch.stack(columns[::-1], 1) if columns else flat.new_empty(len(flat), 0)
    return wrap(table, list_layout.insert(1, len(columns)))


@composed("argwhere")
def argwhere(input):
    """Return `nonzero(input)`."""
    return nonzero(input)


@handler(torch.where)
def where(func, types, args, kwargs):
    """Return `nonzero` for a condition alone, else choose element by element."""
    if len(args) + len(kwargs) > 1:
        return pointwise(func, types, args, kwargs)
    return nonzero(*args, *kwargs.values(), as_tuple=True)


@composed("count_nonzero")
def count_nonzero(input, dim=None):
    """Return the number of nonzero elements."""
    return (input != 0).sum() if dim is None else (input != 0).sum(dim)
