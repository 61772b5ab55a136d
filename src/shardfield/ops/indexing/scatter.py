"""Write one element per entry of an index: scatter, scatter_add, scatter_reduce, put, masked_scatter.

As with rows (`index_put`), each entry is written by the rank that owns its place. If the indexed dim is unsharded, the
work is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, handler, mesh_of
from ...layout import DimSharding, Layout, Origin
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.probe import meta_tensor
from .basic_index import as_shard_tensor, normalize_dim, slice_sharding
from .exchange_lists import ExchangeLists, IndexRequest, as_row_index
from .gather_rows import (
    align_gather_layouts,
    extend_sharding,
    flat_element_indices,
    has_no_empty_shards,
    plan_replicated,
)
from .index_put import reduce_partial, register_with_inplace
from .mask import align_mask_layouts, masked_put
from .owners import Owners, validate_index
from .result_placement import choose_result_layout, find_row_origin, report_placement
from .scatter_reduce import can_prereduce, scatter_index, scatter_reduce_rows


def _entry_layout(index: Layout, src: Layout | None) -> Layout:
    """Return the layout of the entries: sharded as the source, then as the index."""
    if src is None:
        return index
    dims = list(index.dims)
    for d, (factor,) in enumerate(src.dims):
        used_axes = {a for e, (f,) in enumerate(dims) if e != d for a in f.axes}
        if factor.axes and not used_axes & set(factor.axes):
            dims[d] = (slice_sharding(factor, 0, index.shape[d], 1),)
    return Layout.make(index.mesh, dims)


def _align_scatter_layouts(
    x: Layout, dim: int, entries: Layout, accumulate: bool, keep_operand: bool, item: int, origin: Origin | None
) -> tuple[Layout, Layout]:
    """Return the layouts of target and entries.

    Entries sharded over axes that the target does not use are summed into a Partial target, shard the target, or are
    unsharded.
    """
    x, entries = align_gather_layouts(x, dim, entries, keep_operand)
    # ranks along an axis over which x is replicated must all write the same entries
    entries = entries.unshard(
        [d for d in range(x.ndim) if d != dim and not set(entries.axes_of(d)) <= set(x.shard_axes)]
    )
    along = x.axes_of(dim)
    free = tuple(a for a in entries.axes_of(dim) if a not in along)
    if not free:
        return x, entries
    if accumulate and along:
        return Layout.make(x.mesh, x.dims, [*x.partial, *((a, "sum") for a in free)]), entries
    if along or (not accumulate and x.shape[dim] < 2):
        return x, entries.unshard([dim])
    return choose_result_layout(x, dim, free, entries.shape[dim], item, accumulate, origin), entries


def _plan_element_write(
    input: Operand,
    dim: int,
    index: Operand,
    src: Any,
    accumulate: bool,
    reshard: bool,
    fn: Callable,
    fn_kwargs: dict,
):
    """Plan `fn(input, dim, index, src, **fn_kwargs)`; `src` is a tensor or a number."""
    of_tensor = isinstance(src, Operand)
    fn(meta_tensor(input), dim, meta_tensor(index), meta_tensor(src) if of_tensor else src, **fn_kwargs)
    if not input.ndim or not index.numel() or index.ndim != input.ndim:
        if input.ndim and index.numel():
            return None  # the fallback raises torch's error
        others = {"index": index, "src": src} if of_tensor else {"index": index}
        return plan_replicated(
            lambda input, index, src: fn(input, dim, index, src, **fn_kwargs), input.layout, **others
        )
    dim, in_place = normalize_dim(dim, input.ndim), fn.__name__.endswith("_")
    keep_target = in_place and not reshard and index.numel() <= input.numel()
    entries = _entry_layout(index.layout, src.layout if of_tensor else None)
    held = [t.layout.origins(dim) for t in (src, index) if isinstance(t, Operand)]
    origin = find_row_origin(input.shape[dim], *held)
    layout, where = _align_scatter_layouts(
        input.layout, dim, entries, accumulate, keep_target, input.dtype.itemsize, origin
    )
    owners = Owners(layout, range(layout.ndim), layout.nontrivial_axes(layout.axes_of(dim)))
    exchange_axes = tuple(a for a in owners.axes if a in where.shard_axes)
    may_name_rows = where.drop_dims([dim]).dims == layout.drop_dims([dim]).dims
    reduce = fn_kwargs.get("reduce", "sum" if accumulate else None)
    sums = of_tensor and reduce in ("sum", "add") and input.dtype is not torch.bool
    prereduces = of_tensor and "include_self" in fn_kwargs and can_prereduce(reduce, input.dtype)
    rows_of = Owners(layout, [dim])
    request = IndexRequest(rows_of, exchange_axes, where, layout.shape[dim], False, sums or prereduces, RuntimeError)
    torch_checks = has_no_empty_shards(layout) and not owners.axes and not where.nontrivial_axes(where.shard_axes)
    before, keeps_layout = input.layout, layout.bare is input.layout.bare
    shape = layout.local_shape

    def local(input, index, src):
        report_placement(before, layout)
        target = input.clone() if in_place and not keeps_layout else input
        here = tuple(slice(n) for n in index.shape)
        if exchange_axes and may_name_rows:
            lists = request.find_or_build(as_row_index(index, dim), index)
            if lists is not None:
                return write_rows(target, lists, src[here].movedim(dim, 0) if of_tensor else None, src)
            index = index.to(torch.int64)
        elif not torch_checks:
            index = validate_index(index, layout.shape[dim], where, negative=False, error=RuntimeError)
        if of_tensor:  # torch has no gradient for a source larger than the index
            src = src[here]
        if not owners.axes:
            return fn(target, dim, index, src, **fn_kwargs)
        lists = ExchangeLists(owners, flat_element_indices(index, dim, owners, where), exchange_axes, sums)
        place = lists.positions[0]
        for position, size in zip(lists.positions[1:], shape[1:], strict=True):
            place = place * size + position
        flat = target.reshape(-1)
        out = fn(flat, 0, place, lists.deliver(src.reshape(-1)) if of_tensor else src, **fn_kwargs)
        if not in_place:
            return out.reshape(shape)
        return target if target.is_contiguous() else target.copy_(out.reshape(shape))

    def write_rows(target: Tensor, lists: ExchangeLists, rows: Tensor | None, number: Any) -> Tensor:
        """Write full rows."""
        if prereduces:
            assert rows is not None
            if not in_place:
                return scatter_reduce_rows(target, dim, lists, rows, fn_kwargs["reduce"], fn_kwargs["include_self"])
            out = scatter_reduce_rows(target.clone(), dim, lists, rows, fn_kwargs["reduce"], fn_kwargs["include_self"])
            return target.copy_(out)
        place = scatter_index(lists, target, dim)
        return fn(target, dim, place, number if rows is None else lists.deliver(rows).movedim(0, dim), **fn_kwargs)

    operands = {"input": layout, "index": where}
    if of_tensor:
        shardings = [
            extend_sharding(f, n) if f.axes else DimSharding(n) for (f,), n in zip(where.dims, src.shape, strict=True)
        ]
        operands["src"] = Layout.make(layout.mesh, [(f,) for f in shardings])
    return Plan(local, layout, operands)


def _scatter(input, dim, index, src=None, *, value=None, reduce=None, reshard=False, fn):
    more = {} if reduce is None else {"reduce": reduce}
    src = value if src is None else src
    if src is None:
        return None
    plan = _plan_element_write(input, dim, index, src, False, reshard, fn, more)
    if plan is None or isinstance(src, Operand):
        return plan
    # a number may be passed as `src` or as `value`; the plan has bound it
    local = lambda input, index: plan.local(input, index, src)  # noqa: E731
    return Plan(local, plan.layout, plan.operands)


def _scatter_add(input, dim, index, src, *, reshard=False, fn):
    return _plan_element_write(input, dim, index, src, True, reshard, fn, {})


def _scatter_reduce(input, dim, index, src, reduce, *, include_self=True, reshard=False, fn):
    adds = reduce == "sum" and include_self
    return _plan_element_write(
        input, dim, index, src, adds, reshard, fn, {"reduce": reduce, "include_self": include_self}
    )


def _unsqueeze_scalar_index(run: Callable) -> Callable:
    """Wrap a handler: an index without dims becomes a vector, as in torch."""

    def call(func, types, args, kwargs):
        if len(args) > 2 and args[0].ndim == 1 and isinstance(args[2], Tensor) and not args[2].ndim:
            args = (*args[:2], *(a.reshape(1) if isinstance(a, Tensor) and not a.ndim else a for a in args[2:]))
        return run(func, types, args, kwargs)

    return call


for _name, _planner in (("scatter", _scatter), ("scatter_add", _scatter_add), ("scatter_reduce", _scatter_reduce)):
    register_with_inplace(_name, _unsqueeze_scalar_index(make_handler(_planner, partial=False, merged=False)))


# ---------------------------------------------------------------------- by flat index, and by mask


@composed("put")
def put(input, index, source, accumulate=False):
    """Return a copy with elements written by their flat index."""
    if source.numel() != index.numel():
        raise IndexError(
            f"put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{source.numel()}, index.numel() = {index.numel()}"
        )
    line = torch.index_put(input.reshape(-1), (index.reshape(-1),), source.reshape(-1), accumulate)
    return line.reshape(input.shape)


@handler("put_")
def put_(func, types, args, kwargs):
    """Write elements by their flat index, in place."""
    return args[0].copy_(put(*args, **kwargs))


@composed("masked_scatter")
def masked_scatter(input, mask, source):
    """Return a copy with the elements of `source`, in order, where the mask is true."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    mesh = mesh_of((input, mask, source), None)
    x, chosen = (
        as_shard_tensor(t if t.shape == shape else t.expand(shape), mesh)._reduced_value() for t in (input, mask)
    )
    layout, _ = align_mask_layouts(x._layout, 0, chosen._layout)
    made = wrap(redistribute(x._local_tensor, x._layout, layout).clone(), layout)
    return _masked_scatter(made, chosen, source)


@handler("masked_scatter_")
def masked_scatter_(func, types, args, kwargs):
    """Write the elements of `source`, in order, where the mask is true, in place."""
    return _masked_scatter_(*args, **kwargs)


def _masked_scatter_(input, mask, source):
    if input.__class__ is not ShardTensor:
        return input.copy_(masked_scatter(input, mask, source))
    input._check_writable()
    reduce_partial(input)
    return _masked_scatter(input, mask if mask.shape == input.shape else mask.expand(input.shape), source)


def _masked_scatter(x: ShardTensor, mask: Tensor, source: Tensor) -> ShardTensor:
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_scatter_ only supports boolean masks, but got mask with dtype " + str(mask.dtype))
    if source.dtype != x.dtype:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes but got {x.dtype} and {source.dtype}"
        )
    count = int(mask.sum())
    if source.numel() < count:
        raise RuntimeError("Number of elements of source < number of ones in mask")
    if not x.ndim:  # one element: selected without an exchange
        return x.copy_(torch.where(mask, source.reshape(-1)[0], x)) if count else x
    masked_put(x, 0, mask, source.reshape(-1)[:count])
    return x
