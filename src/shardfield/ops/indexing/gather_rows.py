"""Select by index tensors: index, index_select, gather, take, take_along_dim.

The indexed tensor is never gathered. If the indexed dim is unsharded, the work is local. If the index is sharded over
the same mesh axis, each rank fetches the rows that its entries name from their owners (`exchange_lists`). If the index
is replicated, it is sharded first, without a message, and so is the result. Only a small result (`is_small`) is Partial
instead: each rank selects the rows that it owns and leaves zeros.

Entry dims of a result carry the indexed dim as their `Origin`: rows that are written back go to the same shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import runtime
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, chunk
from ...redistribute import without_partial
from .._common.broadcast import align, broadcast_layout
from .._common.probe import meta_tensor
from ..matmul.sparse_entries import select_entries
from .basic_index import normalize_dim, slice_sharding
from .exchange_lists import ExchangeLists, IndexRequest, as_row_index
from .owners import Owners, validate_index
from .parse_index import broadcast_index_shapes, index_result_dim
from .result_placement import with_row_origins


def align_index_layouts(layout: Layout, dims: Sequence[int], index: Layout, itemsize: int) -> tuple[Layout, Layout]:
    """Return the layouts of operand and index for an index along `dims` of the operand.

    An index sharded over an axis that shards an indexed dim, or that the operand does not use, keeps its sharding. If
    the axis shards another dim of the operand, the smaller of the two tensors is unsharded.
    """
    if any(op != "sum" for _, op in layout.partial) and any(layout.axes_of(d) for d in dims):
        layout = without_partial(layout)
    indexed = {a for d in dims for a in layout.axes_of(d)}
    for b in range(index.ndim):
        clash = set(index.axes_of(b)) & set(layout.shard_axes + layout.partial_axes) - indexed
        if not clash:
            continue
        held = [d for d in range(layout.ndim) if d not in dims and clash & set(layout.axes_of(d))]
        if index.numel * 8 > layout.numel * itemsize and not clash & set(layout.partial_axes):
            layout = layout.unshard(held)
        else:
            index = index.unshard([b])
    return layout, index


def shard_over_axes(index: Layout, dim: int, axes: Sequence[int]) -> Layout:
    """Return an index replicated over `axes` with `dim` sharded over them too: each rank keeps a slice, locally."""
    if len(index.dims[dim]) > 1 or not axes:
        return index
    (factor,) = index.dims[dim]
    parts = math.prod(index.mesh.size(a) for a in axes)
    sizes = [n for length in factor.shard_sizes or (factor.size,) for n in chunk(length, parts)]
    return index.with_dim(dim, DimSharding(factor.size, (*factor.axes, *axes), tuple(sizes)))


def is_small(entries: Layout, source: Layout, dims: Sequence[int]) -> bool:
    """Return whether a result of these entries along `dims` has few elements on a rank, and no more rows than `source`.

    Its sum over ranks is then one message, where an exchange needs several.
    """
    indexed = {a for d in dims for a in source.axes_of(d)}
    shards = math.prod(source.mesh.size(a) for a in {*entries.shard_axes, *source.shard_axes} - indexed)
    rows = math.prod(source.shape[d] for d in dims)
    elements = entries.numel * source.numel // max(rows, 1)
    return entries.numel <= rows and elements < runtime.active.min_scattered * shards


def plan_replicated(local: Callable, result: Layout, **others: Operand) -> Plan:
    """Build a plan for a tensor without dims or an index without entries: `others` are small and are replicated."""
    return Plan(local, result, {name: Layout.replicate(result.mesh, other.shape) for name, other in others.items()})


def has_no_empty_shards(layout: Layout) -> bool:
    """Return whether every rank has elements to index, so that torch itself checks the index values on all ranks."""
    return layout.numel > 0 and all(min(f.shard_sizes, default=1) > 0 for d in layout.dims for f in d)


class AdvancedIndexPlan(NamedTuple):
    """The local work of an index by tensors, and the layouts of its result and operands."""

    local: Callable[[Tensor, Sequence[Tensor]], Tensor]
    result: Layout
    source: Layout
    indices: list[Layout]


def plan_advanced_index(
    input: Operand, indices, dims, at: int, fn: Callable, negative: bool = True
) -> AdvancedIndexPlan:
    """Plan `input` indexed along `dims` by `indices`, whose broadcast dims start at dim `at` of the result.

    `fn(input, indices)` does the work if the dims are unsharded.
    """
    dims = tuple(dims)
    broadcast_index_shapes([i.shape for i in indices])
    layout, where = align_index_layouts(
        input.layout, dims, align(tuple(i.layout for i in indices)).result, input.dtype.itemsize
    )
    owners = Owners(layout, dims)
    if where.ndim and not is_small(where, layout, dims):
        longest = max(range(where.ndim), key=lambda b: where.shape[b])
        where = shard_over_axes(where, longest, [a for a in owners.axes if a not in where.shard_axes])
    exchange_axes = tuple(a for a in owners.axes if a in where.shard_axes)
    request = IndexRequest(owners, exchange_axes, where, layout.shape[dims[0]], negative, distinct=True)
    rest = [d for d in range(layout.ndim) if d not in dims]
    order = [layout.dims[d] for d in rest]
    order[at:at] = [with_row_origins(factors, layout, dims) for factors in where.dims]
    partial = [*layout.partial, *((a, "sum") for a in owners.axes if a not in exchange_axes)]
    result = Layout.make(layout.mesh, order, partial)
    torch_checks = has_no_empty_shards(layout) and not where.nontrivial_axes(where.shard_axes) and not owners.axes
    here = where.local_shape
    rest_shape = [layout.local_shape[d] for d in rest]

    def local(input, indices):
        indices = [index.to(input.device) for index in indices]
        if len(dims) == 1 and exchange_axes:
            lists = request.lists_for(indices[0])
        else:
            found = indices
            if not torch_checks:
                pairs = zip(dims, indices, strict=True)
                found = [validate_index(index, layout.shape[dim], where, negative) for dim, index in pairs]
            if not owners.axes:
                return fn(input, found)
            lists = ExchangeLists(owners, owners.flat(found).expand(here).reshape(-1), exchange_axes, distinct=True)
        rows = lists.fetch(input, dims).reshape((*here, *rest_shape))
        return rows.movedim(list(range(len(here))), list(range(at, at + len(here))))

    return AdvancedIndexPlan(local, result, layout, [broadcast_layout(where, i.shape) for i in indices])


def _advanced_getitem(input: Operand, dims: torch.Size, at: int, *indices: Operand):
    def direct(input, indices):
        where: list = [slice(None)] * input.ndim
        for dim, index in zip(dims, indices, strict=True):
            where[dim] = index
        return input[tuple(where)]

    plan = plan_advanced_index(input, indices, dims, at, direct)
    return Plan(plan.local, plan.result, {"input": plan.source, "indices": plan.indices})


_run_advanced_getitem = make_handler(_advanced_getitem, partial=True, merged=True)


def index_with_tensors(x: Tensor, indices: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Return `x` indexed by tensors along `dims`; `x` or at least one index is a ShardTensor."""
    return _run_advanced_getitem(
        torch.Tensor.__getitem__, (), (x, torch.Size(dims), index_result_dim(dims), *indices), {}
    )


@rule("index_select", partial=True, merged=True, around=select_entries)
def index_select(input: Operand, dim: int, index: Operand, *, fn):
    """Select rows along one dim."""
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if index.ndim > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if not input.ndim:
        return plan_replicated(lambda input, index: fn(input, dim, index), input.layout, index=index)
    at = normalize_dim(dim, input.ndim)
    scalar = not index.ndim  # an index without dims still gives a dim of size 1

    def direct(input, indices):
        rows = fn(input, at, indices[0])
        return rows.squeeze(at) if scalar else rows

    plan = plan_advanced_index(input, [index], [at], at, direct, negative=False)

    def local(input, index):
        rows = plan.local(input, [index])
        return rows.unsqueeze(at) if scalar else rows

    result = plan.result.insert(at) if scalar else plan.result
    return Plan(local, result, {"input": plan.source, "index": plan.indices[0]})


# ---------------------------------------------------------------------- one element at a time


def align_gather_layouts(x: Layout, dim: int, index: Layout, keep_operand: bool = False) -> tuple[Layout, Layout]:
    """Return the layouts of operand and index for a gather or scatter along `dim`.

    Along other dims the index takes the sharding of the operand; an operand that is unsharded there takes that of the
    index, locally. Along `dim` the index keeps its sharding. keep_operand: the operand keeps its layout, and the index
    is not sharded over axes that the operand does not use.
    """
    dims = [(DimSharding(n),) for n in index.shape]
    for d in range(index.ndim):
        (factor,) = x.dims[d]
        if d != dim and factor.axes:
            dims[d] = (slice_sharding(factor, 0, index.shape[d], 1),)
    along = set(x.axes_of(dim))
    used = set(x.shard_axes) - along | set(x.partial_axes)
    for d, (factor,) in enumerate(index.dims):
        axes = set(factor.axes)
        if not axes or used & axes or dims[d][0].axes or (keep_operand and not axes <= along):
            continue
        if d != dim and not along & axes:
            x = x.with_dim(d, extend_sharding(factor, x.shape[d]))
        dims[d] = (factor,)
        used |= axes
    return x, Layout.make(x.mesh, dims)


def extend_sharding(factor: DimSharding, size: int) -> DimSharding:
    """Return the sharding of a longer dim: the last shard takes the added rows."""
    return DimSharding(size, factor.axes, (*factor.shard_sizes[:-1], factor.shard_sizes[-1] + size - factor.size))


def flat_element_indices(index: Tensor, dim: int, owners: Owners, where: Layout) -> Tensor:
    """Return the flat global index of the element that each entry of a gather or scatter index names."""
    at = list(Owners(where, range(where.ndim)).local_indices(index.device))
    at[dim] = index
    return owners.flat(at).expand(index.shape).reshape(-1)


@rule("gather", partial=True)
def gather(input: Operand, dim: int, index: Operand, *, sparse_grad=False, fn):
    """Select one element per entry. The gradient is dense: a sparse one could not be summed over ranks."""
    shape = fn(meta_tensor(input), dim, meta_tensor(index)).shape
    if not input.ndim:
        result = Layout.make(input.layout.mesh, [(DimSharding(n),) for n in shape], input.layout.partial)
        return plan_replicated(lambda input, index: fn(input, dim, index), result, index=index)
    if not index.ndim:  # selects one element of a vector
        plan = plan_advanced_index(
            input, [index], [0], 0, lambda input, indices: fn(input, 0, indices[0]), negative=False
        )
        return Plan(
            lambda input, index: plan.local(input, [index]),
            plan.result,
            {"input": plan.source, "index": plan.indices[0]},
        )
    if not index.numel():  # torch allows any number of dims
        empty = Layout.replicate(input.layout.mesh, shape)
        return Plan(lambda input: input.reshape(-1)[:0].reshape(shape), empty)
    dim = normalize_dim(dim, input.ndim)
    layout = input.layout
    if layout.is_sharded(dim) and any(op != "sum" for _, op in layout.partial):
        layout = without_partial(layout)
    layout, where = align_gather_layouts(layout, dim, index.layout)
    along = layout.nontrivial_axes(layout.axes_of(dim))
    if not is_small(where, layout, range(layout.ndim)):
        free = [d for d in range(where.ndim) if d == dim or not where.axes_of(d)]
        parts = math.prod(where.mesh.size(a) for a in along)
        longest = dim if where.shape[dim] >= parts else max(free, key=lambda d: where.shape[d])
        where = shard_over_axes(where, longest, [a for a in along if a not in where.shard_axes])
    owners = Owners(layout, range(layout.ndim), along)
    exchange_axes = tuple(a for a in owners.axes if a in where.shard_axes)
    by_rows = where.drop_dims([dim]).dims == layout.drop_dims([dim]).dims
    request = IndexRequest(
        Owners(layout, [dim]), exchange_axes, where, layout.shape[dim], False, distinct=True, error=RuntimeError
    )
    partial = [*layout.partial, *((a, "sum") for a in owners.axes if a not in exchange_axes)]
    torch_checks = has_no_empty_shards(layout) and not owners.axes and not where.nontrivial_axes(where.shard_axes)

    def local(input, index):
        if exchange_axes and by_rows:
            lists = request.find_or_build(as_row_index(index, dim), index)
            if lists is not None:
                return lists.fetch(input, [dim]).movedim(0, dim)
            index = index.to(torch.int64)
        elif not torch_checks:
            index = validate_index(index, layout.shape[dim], where, negative=False, error=RuntimeError)
        if not owners.axes:
            return fn(input, dim, index)
        lists = ExchangeLists(owners, flat_element_indices(index, dim, owners, where), exchange_axes, distinct=True)
        return lists.fetch(input, owners.dims).reshape(index.shape)

    result = where.with_dim(dim, *with_row_origins(where.dims[dim], layout, [dim]))
    result = Layout.make(layout.mesh, result.dims, partial)
    return Plan(local=local, layout=result, operands={"input": layout, "index": where})


@composed("take_along_dim")
def take_along_dim(input, indices, dim=None):
    """Return `gather` along a dim, with the other dims broadcast."""
    if dim is None:
        return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
    if input.ndim != indices.ndim:
        raise RuntimeError(
            f"torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{input.ndim} dimensions for input, and {indices.ndim} dimensions for indices"
        )
    dim = normalize_dim(dim, input.ndim)
    shapes = [[1 if d == dim else n for d, n in enumerate(t.shape)] for t in (input, indices)]
    shape = torch.broadcast_shapes(*shapes)

    def expand(t):
        full = [t.shape[dim] if d == dim else n for d, n in enumerate(shape)]
        return t if list(t.shape) == full else t.expand(full)

    indices = torch.where(indices < 0, indices + input.shape[dim], indices)
    return torch.gather(expand(input), dim, expand(indices))


@composed("take")
def take(input, index):
    """Return elements by their flat index."""
    if index.dtype is not torch.int64:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.dtype}")
    if not input.numel() and index.numel():
        raise IndexError("take(): tried to take from an empty tensor")
    return index_with_tensors(input.reshape(-1), [index], [0])
