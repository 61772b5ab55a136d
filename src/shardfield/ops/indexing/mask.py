"""Masks: nonzero, masked_select and x[mask]. How much is selected is known only when it is selected.

Each rank selects from its own part. The result lists what is selected in row-major order of the whole tensor. Where
the leading dim alone is cut, the ranks' parts follow each other in that order and nothing but counts is sent. Else
selected elements, and only those, travel: each to the rank that keeps the range of flat indices it falls into, which
sorts what it gets. The result is Shard(0) with pieces of any sizes.
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


class SelectionOrder:
    """The global order of what each rank has selected from a tensor laid out as `layout`.

    `flat` holds the global flat indices of this rank's selection, ascending. `sharding` is the dim that lists the whole
    selection in order; `exchange` takes rows to where they stand in it, `exchange_back` returns them.
    """

    def __init__(self, layout: Layout, flat: Tensor):
        leading, inner, rest = _leading_sharding(layout)
        start, length = 0, layout.numel
        if leading is not None:
            piece = layout.index(leading.axes)
            start, length = starts(leading.shard_sizes)[piece] * inner, leading.shard_sizes[piece] * inner
        self.exchanges: list[AxisExchange] = []
        self.permutation: Tensor | None = None
        if rest:
            sizes = [layout.mesh.size(a) for a in rest]
            ends = torch.tensor(balanced(length, math.prod(sizes)), device=flat.device).cumsum(0) + start
            for i, axis in enumerate(rest):
                keeper = torch.searchsorted(ends, flat, right=True).div(
                    math.prod(sizes[i + 1 :]), rounding_mode="floor"
                )
                hop = AxisExchange.to(keeper % sizes[i], axis, layout)
                self.exchanges.append(hop)
                flat = hop.exchange(flat)
            self.permutation = torch.argsort(flat)
            flat = flat[self.permutation]
        self.flat = flat
        self.layout = layout
        axes = (*(leading.axes if leading is not None else ()), *rest)
        counts = gather_counts(len(flat), layout, axes, flat.device)
        self.sharding = DimSharding(sum(counts), axes, counts if axes else ())

    def exchange(self, rows: Tensor) -> Tensor:
        for hop in self.exchanges:
            rows = hop.exchange(rows)
        return rows if self.permutation is None else rows.index_select(0, self.permutation)

    def exchange_back(self, rows: Tensor) -> Tensor:
        if self.permutation is not None:
            rows = rows.index_select(0, torch.argsort(self.permutation))
        for hop in reversed(self.exchanges):
            rows = hop.exchange_back(rows)
        return rows

    def global_positions(self) -> Tensor:
        """The place in the global order of each element that this rank has selected."""
        start = starts(self.sharding.shard_sizes)[self.layout.index(self.sharding.axes)] if self.sharding.axes else 0
        return self.exchange_back(torch.arange(start, start + len(self.flat), device=self.flat.device))


def _leading_sharding(layout: Layout) -> tuple[DimSharding | None, int, tuple[int, ...]]:
    """The first factor longer than 1, if it is cut; the size behind it; the axes that cut what is behind."""
    factors = [f for d in layout.dims for f in d if f.size != 1 or layout.nontrivial_axes(f.axes)]
    if not factors or not layout.nontrivial_axes(factors[0].axes):
        return None, 1, tuple(a for f in factors for a in layout.nontrivial_axes(f.axes))
    inner = math.prod(f.size for f in factors[1:])
    return factors[0], inner, tuple(a for f in factors[1:] for a in layout.nontrivial_axes(f.axes))


def selected_flat_indices(mask: Tensor, layout: Layout) -> Tensor:
    """The global flat indices of the true elements of a local mask, ascending."""
    owners = Owners(layout, range(layout.ndim))
    if not layout.ndim:
        return mask.reshape(1).nonzero().flatten()
    return owners.flat(owners.local_indices(mask.device)).expand(mask.shape)[mask]


def as_bool_mask(mask: Any) -> ShardTensor:
    """A mask as a whole value of truth values."""
    mask = mask._reduced_value()
    return mask if mask.dtype is torch.bool else wrap(mask._local_tensor != 0, mask._layout)


def align_mask_layouts(layout: Layout, at: int, mask: Layout) -> tuple[Layout, Layout]:
    """(operand, mask) laid out alike from dim `at` on: as the operand is cut; where it is not, as the mask."""
    dims = list(layout.dims)
    used = set(layout.shard_axes) | set(layout.partial_axes)
    for d in mask.sharded_dims:
        if not layout.is_sharded(at + d) and not used & set(mask.axes_of(d)):
            dims[at + d] = mask.dims[d]
            used |= set(mask.axes_of(d))
    return layout.with_dims(dims), Layout.make(layout.mesh, dims[at : at + mask.ndim])


def masked_rows(x: ShardTensor, at: int, mask: Tensor) -> ShardTensor:
    """x[mask] for a mask over the dims of `x` from `at` on."""
    mask = as_bool_mask(as_shard_tensor(mask, x._layout.mesh))
    layout, where = align_mask_layouts(x._layout, at, mask._layout)
    chosen = redistribute(mask._local_tensor, mask._layout, where).to(x.device)
    block = redistribute(x._local_tensor, x._layout, layout)
    n = where.ndim
    order = SelectionOrder(where, selected_flat_indices(chosen, where))
    rows = order.exchange(block.movedim(list(range(at, at + n)), list(range(n)))[chosen])
    dims = (*layout.dims[:at], (order.sharding,), *layout.dims[at + n :])
    return wrap(rows.movedim(0, at), layout.with_dims(dims))


def masked_put(y: ShardTensor, at: int, mask: Tensor, value: Tensor) -> None:
    """y[mask] = value, for a mask over the dims of `y` from `at` on.

    `value` has the dim of what is selected first, then the other dims of `y`; all of size 1 where it broadcasts.
    """
    mask = as_bool_mask(as_shard_tensor(mask, y._layout.mesh))
    layout, n = y._layout, mask.ndim
    where = Layout.make(layout.mesh, layout.dims[at : at + n])
    chosen = redistribute(mask._local_tensor, mask._layout, where).to(y.device)
    block = y._local_tensor.movedim(list(range(at, at + n)), list(range(n)))
    rest = [d for d in range(layout.ndim) if not at <= d < at + n]
    sizes = [layout.shape[d] for d in rest]
    kept = [
        layout.dims[d] if size == m else (DimSharding(m),)
        for d, size, m in zip(rest, sizes, value.shape[1:], strict=True)
    ]
    if value.shape[0] == 1:  # the same for all that is selected
        rows = as_shard_tensor(value, layout.mesh)
        target = Layout.make(layout.mesh, [(DimSharding(1),), *kept])
        local = redistribute_in(rows, target, layout)[0]
        if value.numel() == 1:
            block.masked_fill_(chosen[(..., *[None] * len(rest))], local.reshape(()))
        else:
            block[chosen] = local
        return
    order = SelectionOrder(where, selected_flat_indices(chosen, where))
    if value.shape[0] != order.sharding.size:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to indexing result of "
            f"shape {[order.sharding.size, *sizes]}"
        )
    axes = order.sharding.axes
    counts = gather_counts(int(chosen.sum()), where, axes, chosen.device)
    listed = DimSharding(
        order.sharding.size, axes, counts if axes else ()
    )  # what each rank has selected, rank after rank
    numbers = wrap(order.global_positions(), Layout.make(layout.mesh, [(listed,)]))
    rows = as_shard_tensor(value, layout.mesh)._redistribute_to(
        _value_layout(as_shard_tensor(value, layout.mesh)._layout, axes, kept)
    )
    picked = as_shard_tensor(index_with_tensors(rows, [numbers], [0]), layout.mesh)
    target = Layout.make(layout.mesh, [(listed,), *kept])
    block[chosen] = redistribute_in(picked, target, layout)[0]


def _value_layout(values: Layout, axes: tuple[int, ...], rest: list[tuple[DimSharding, ...]]) -> Layout:
    """Values whose other dims lie as `rest`, and whose first dim is cut as it is or, to free its axes, over `axes`."""
    first = values.dims[0]
    busy = {a for d in range(1, values.ndim) for a in values.axes_of(d)}
    if not set(values.axes_of(0)) <= set(axes) or len(first) > 1 or busy & set(axes):
        parts = [values.mesh.size(a) for a in axes]
        first = (DimSharding(values.shape[0], axes, nested_chunk(values.shape[0], parts) if axes else ()),)
    return Layout.make(values.mesh, [first, *rest])


def redistribute_in(value: ShardTensor, target: Layout, work: Layout) -> list[Tensor]:
    """The local tensor of `value` under `target`, for work that is divided as `work` is."""
    local = redistribute(value._local_tensor, value._layout, target)
    return autograd_collectives.replicate_in(
        [local], process_groups(work, [a for a in work.shard_axes if a not in target.shard_axes])
    )


@composed("masked_select")
def masked_select(input, mask):
    """The elements where the mask is true."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    mesh = (input if isinstance(input, ShardTensor) else mask)._layout.mesh
    x, chosen = (t if t.shape == shape else t.expand(shape) for t in (input, mask))
    if not shape:
        x, chosen = x.reshape(1), chosen.reshape(1)
    return masked_rows(as_shard_tensor(x, mesh), 0, chosen)


@composed("nonzero")
def nonzero(input, *, as_tuple=False):
    """Where elements are not zero, in row-major order."""
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
    lists = Layout.make(layout.mesh, [(order.sharding,)])
    if as_tuple:
        return tuple(wrap(c, lists) for c in reversed(columns))
    table = torch.stack(columns[::-1], 1) if columns else flat.new_empty(len(flat), 0)
    return wrap(table, lists.insert(1, len(columns)))


@composed("argwhere")
def argwhere(input):
    """`nonzero` by another name."""
    return nonzero(input)


@handler(torch.where)
def where(func, types, args, kwargs):
    """With a condition alone, `nonzero`; else a choice element by element."""
    if len(args) + len(kwargs) > 1:
        return pointwise(func, types, args, kwargs)
    return nonzero(*args, *kwargs.values(), as_tuple=True)


@composed("count_nonzero")
def count_nonzero(input, dim=None):
    """How many elements are not zero."""
    return (input != 0).sum() if dim is None else (input != 0).sum(dim)
