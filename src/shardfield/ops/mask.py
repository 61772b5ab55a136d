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

from ..comm import moves
from ..dispatch import composed, handler
from ..layout import Factor, Layout, balanced, nested_chunk, starts
from ..plan import groups
from ..redistribute import redistribute
from ..tensor import ShardTensor, wrap
from .index import as_shard
from .owners import Hop, Owners, gather_counts
from .pointwise import pointwise
from .take import index_by


class Order:
    """The global order of what each rank has selected from a tensor laid out as `layout`.

    `flat` holds the global flat indices of this rank's selection, ascending. `factor` is the dim that lists the whole
    selection in order; `there` takes rows to where they stand in it, `back` returns them.
    """

    def __init__(self, layout: Layout, flat: Tensor):
        leading, inner, rest = _leading(layout)
        start, length = 0, layout.numel
        if leading is not None:
            piece = layout.index(leading.axes)
            start, length = starts(leading.lengths)[piece] * inner, leading.lengths[piece] * inner
        self.hops: list[Hop] = []
        self.sort: Tensor | None = None
        if rest:
            sizes = [layout.mesh.size(a) for a in rest]
            ends = torch.tensor(balanced(length, math.prod(sizes)), device=flat.device).cumsum(0) + start
            for i, axis in enumerate(rest):
                keeper = torch.searchsorted(ends, flat, right=True).div(
                    math.prod(sizes[i + 1 :]), rounding_mode="floor"
                )
                hop = Hop.to(keeper % sizes[i], axis, layout)
                self.hops.append(hop)
                flat = hop.there(flat)
            self.sort = torch.argsort(flat)
            flat = flat[self.sort]
        self.flat = flat
        self.layout = layout
        axes = (*(leading.axes if leading is not None else ()), *rest)
        counts = gather_counts(len(flat), layout, axes, flat.device)
        self.factor = Factor(sum(counts), axes, counts if axes else ())

    def there(self, rows: Tensor) -> Tensor:
        for hop in self.hops:
            rows = hop.there(rows)
        return rows if self.sort is None else rows.index_select(0, self.sort)

    def back(self, rows: Tensor) -> Tensor:
        if self.sort is not None:
            rows = rows.index_select(0, torch.argsort(self.sort))
        for hop in reversed(self.hops):
            rows = hop.back(rows)
        return rows

    def numbers(self) -> Tensor:
        """The place in the global order of each element that this rank has selected."""
        start = starts(self.factor.lengths)[self.layout.index(self.factor.axes)] if self.factor.axes else 0
        return self.back(torch.arange(start, start + len(self.flat), device=self.flat.device))


def _leading(layout: Layout) -> tuple[Factor | None, int, tuple[int, ...]]:
    """The first factor longer than 1, if it is cut; the size behind it; the axes that cut what is behind."""
    factors = [f for d in layout.dims for f in d if f.size != 1 or layout.wide(f.axes)]
    if not factors or not layout.wide(factors[0].axes):
        return None, 1, tuple(a for f in factors for a in layout.wide(f.axes))
    inner = math.prod(f.size for f in factors[1:])
    return factors[0], inner, tuple(a for f in factors[1:] for a in layout.wide(f.axes))


def selected(mask: Tensor, layout: Layout) -> Tensor:
    """The global flat indices of the true elements of a local mask, ascending."""
    owners = Owners(layout, range(layout.ndim))
    if not layout.ndim:
        return mask.reshape(1).nonzero().flatten()
    return owners.flat(owners.here(mask.device)).expand(mask.shape)[mask]


def truth(mask: Any) -> ShardTensor:
    """A mask as a whole value of truth values."""
    mask = mask._whole_value()
    return mask if mask.dtype is torch.bool else wrap(mask._local_tensor != 0, mask._layout)


def with_mask(layout: Layout, at: int, mask: Layout) -> tuple[Layout, Layout]:
    """(operand, mask) laid out alike from dim `at` on: as the operand is cut; where it is not, as the mask."""
    dims = list(layout.dims)
    used = set(layout.shard_axes) | set(layout.partial_axes)
    for d in mask.cut_dims:
        if not layout.is_cut(at + d) and not used & set(mask.axes_of(d)):
            dims[at + d] = mask.dims[d]
            used |= set(mask.axes_of(d))
    return layout.with_dims(dims), Layout.make(layout.mesh, dims[at : at + mask.ndim])


def rows_where(x: ShardTensor, at: int, mask: Tensor) -> ShardTensor:
    """x[mask] for a mask over the dims of `x` from `at` on."""
    mask = truth(as_shard(mask, x._layout.mesh))
    layout, where = with_mask(x._layout, at, mask._layout)
    chosen = redistribute(mask._local_tensor, mask._layout, where).to(x.device)
    block = redistribute(x._local_tensor, x._layout, layout)
    n = where.ndim
    order = Order(where, selected(chosen, where))
    rows = order.there(block.movedim(list(range(at, at + n)), list(range(n)))[chosen])
    dims = (*layout.dims[:at], (order.factor,), *layout.dims[at + n :])
    return wrap(rows.movedim(0, at), layout.with_dims(dims))


def put_where(y: ShardTensor, at: int, mask: Tensor, value: Tensor) -> None:
    """y[mask] = value, for a mask over the dims of `y` from `at` on.

    `value` has the dim of what is selected first, then the other dims of `y`; all of size 1 where it broadcasts.
    """
    mask = truth(as_shard(mask, y._layout.mesh))
    layout, n = y._layout, mask.ndim
    where = Layout.make(layout.mesh, layout.dims[at : at + n])
    chosen = redistribute(mask._local_tensor, mask._layout, where).to(y.device)
    block = y._local_tensor.movedim(list(range(at, at + n)), list(range(n)))
    rest = [d for d in range(layout.ndim) if not at <= d < at + n]
    sizes = [layout.shape[d] for d in rest]
    kept = [
        layout.dims[d] if size == m else (Factor(m),) for d, size, m in zip(rest, sizes, value.shape[1:], strict=True)
    ]
    if value.shape[0] == 1:  # the same for all that is selected
        rows = as_shard(value, layout.mesh)
        target = Layout.make(layout.mesh, [(Factor(1),), *kept])
        local = entered(rows, target, layout)[0]
        if value.numel() == 1:
            block.masked_fill_(chosen[(..., *[None] * len(rest))], local.reshape(()))
        else:
            block[chosen] = local
        return
    order = Order(where, selected(chosen, where))
    if value.shape[0] != order.factor.size:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to indexing result of "
            f"shape {[order.factor.size, *sizes]}"
        )
    axes = order.factor.axes
    counts = gather_counts(int(chosen.sum()), where, axes, chosen.device)
    listed = Factor(order.factor.size, axes, counts if axes else ())  # what each rank has selected, rank after rank
    numbers = wrap(order.numbers(), Layout.make(layout.mesh, [(listed,)]))
    rows = as_shard(value, layout.mesh)._placed(_beside(as_shard(value, layout.mesh)._layout, axes, kept))
    picked = as_shard(index_by(rows, [numbers], [0]), layout.mesh)
    target = Layout.make(layout.mesh, [(listed,), *kept])
    block[chosen] = entered(picked, target, layout)[0]


def _beside(values: Layout, axes: tuple[int, ...], rest: list[tuple[Factor, ...]]) -> Layout:
    """Values whose other dims lie as `rest`, and whose first dim is cut as it is or, to free its axes, over `axes`."""
    first = values.dims[0]
    busy = {a for d in range(1, values.ndim) for a in values.axes_of(d)}
    if not set(values.axes_of(0)) <= set(axes) or len(first) > 1 or busy & set(axes):
        parts = [values.mesh.size(a) for a in axes]
        first = (Factor(values.shape[0], axes, nested_chunk(values.shape[0], parts) if axes else ()),)
    return Layout.make(values.mesh, [first, *rest])


def entered(value: ShardTensor, target: Layout, work: Layout) -> list[Tensor]:
    """The local tensor of `value` under `target`, for work that is divided as `work` is."""
    local = redistribute(value._local_tensor, value._layout, target)
    return moves.enter([local], groups(work, [a for a in work.shard_axes if a not in target.shard_axes]))


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
    return rows_where(as_shard(x, mesh), 0, chosen)


@composed("nonzero")
def nonzero(input, *, as_tuple=False):
    """Where elements are not zero, in row-major order."""
    if not isinstance(input, ShardTensor):
        return torch.nonzero(input, as_tuple=as_tuple)
    mask = truth(input)
    if as_tuple and not mask.ndim:
        mask = mask.reshape(1)
    layout = mask._layout
    order = Order(layout, selected(mask._local_tensor, layout))
    columns = []
    flat = order.flat
    for size in reversed(layout.shape):
        columns.append(flat % max(size, 1))
        flat = flat.div(max(size, 1), rounding_mode="floor")
    lists = Layout.make(layout.mesh, [(order.factor,)])
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
