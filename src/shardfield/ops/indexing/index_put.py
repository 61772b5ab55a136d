"""Write by index tensors: index_put, index_add, index_copy, index_fill, index_reduce.

The written rows are sent, never the target. Each entry is written by the rank that owns its row. If entries are
replicated, each rank selects its own; if they are sharded over the axis that shards the indexed dim, they are sent to
the owners. Rows that are summed are summed before they are sent, so that each rank sends one row per place
(`exchange_lists`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import handler, mesh_of, to_full_tensor
from ...dispatch.torch_aliases import function_name
from ...layout import DimSharding, Layout, chunk
from ...tensor import ShardTensor
from .._common.autocast import HALF_DTYPES
from .._common.broadcast import align, broadcast_layout
from .basic_index import normalize_dim
from .exchange_lists import ExchangeLists, IndexRequest
from .gather_rows import has_no_empty_shards, plan_replicated
from .owners import Owners, validate_index
from .result_placement import choose_result_layout, find_row_origin, may_reshard, report_placement, swap_value
from .scatter_reduce import can_prereduce, scatter_reduce_rows

Dims = list[tuple[DimSharding, ...]]


def align_write_layouts(
    target: Layout,
    dims: Sequence[int],
    entries: Layout,
    values: Layout | None,
    accumulate: bool,
    inplace: bool,
    item: int,
    reshard: bool,
) -> tuple[Layout, Layout, Layout | None]:
    """Return the layouts of target, entries and values for a write along `dims` of the target.

    values: the entries' dims first, then the target's other dims (of size 1 where it broadcasts). accumulate: writes to
    one place are summed, so that an unsharded target may become Partial. inplace: the target keeps its layout, unless
    the values are larger or `reshard` says that nothing else refers to it (`result_placement.may_reshard`).
    """
    n, rest = entries.ndim, [d for d in range(target.ndim) if d not in dims]
    indexed = {a for d in dims for a in target.axes_of(d)}
    keep_target = inplace and not reshard and (values is None or values.numel <= target.numel)
    if values is not None and not keep_target:  # an unsharded dim takes the sharding of the values, locally
        for i, d in enumerate(rest, n):
            used_axes = {*target.shard_axes, *target.partial_axes}
            if values.axes_of(i) and values.shape[i] == target.shape[d] and not target.axes_of(d):
                if not used_axes & set(values.axes_of(i)):
                    target = target.with_dim(d, *values.dims[i])
    index, entries = entries, _entry_layout(entries, values, {a for d in rest for a in target.axes_of(d)}, indexed)
    free = tuple(a for a in entries.shard_axes if a not in indexed)
    out_dim = next((d for d in dims if not target.axes_of(d) and target.shape[d] > 1), None)
    if free and out_dim is not None and not keep_target and (not accumulate or not indexed):
        held = [layout.origins(b) for layout in (values, index) if layout is not None for b in range(n)]
        origin = find_row_origin(target.shape[out_dim], *held)
        target = choose_result_layout(target, out_dim, free, entries.numel, item, accumulate, origin)
    elif free and accumulate and not keep_target:
        target = Layout.make(target.mesh, target.dims, [*target.partial, *((a, "sum") for a in free)])
    elif free:
        entries = entries.unshard([b for b in range(n) if set(free) & set(entries.axes_of(b))])
    if values is None:
        return target, entries, None
    wanted = [*entries.dims, *(target.dims[d] for d in rest)]
    sizes = [*entries.shape, *(target.shape[d] for d in rest)]
    pairs = zip(values.shape, sizes, wanted, strict=True)
    return target, entries, Layout.make(target.mesh, [f if m == n else (DimSharding(m),) for m, n, f in pairs])


def _entry_layout(entries: Layout, values: Layout | None, busy: set[int], indexed: set[int]) -> Layout:
    """Return the layout of the entries: sharded as the values, then as the index, over axes that are not `busy`."""
    dims: Dims = [(DimSharding(n),) for n in entries.shape]
    used = set(busy)
    for source in (values, entries):
        for b, size in enumerate(entries.shape):
            if source is None or source.shape[b] != size or len(dims[b]) > 1 or dims[b][0].axes:
                continue
            axes = set(source.axes_of(b))
            if source.nontrivial_axes(axes) and not axes & used:
                dims[b] = source.dims[b]
                used |= axes
    # values that an axis of the indexed dims shards along another dim are resharded along an entry dim instead
    for axis in values.nontrivial_axes(values.shard_axes) if values is not None else ():
        unsharded = [b for b, d in enumerate(dims) if d == (DimSharding(entries.shape[b]),) and entries.shape[b] > 1]
        if axis in indexed and axis not in used and unsharded:
            b = max(unsharded, key=lambda b: entries.shape[b])
            dims[b] = (DimSharding(entries.shape[b], (axis,), chunk(entries.shape[b], entries.mesh.size(axis))),)
            used.add(axis)
    return Layout.make(entries.mesh, dims)


class IndexedWrite:
    """The plan of a write along `dims`: layouts, and the exchange that brings each rank the rows that it writes."""

    def __init__(
        self,
        input: Operand,
        dims,
        entries: Layout,
        values: Layout | None,
        accumulate: bool,
        inplace: bool,
        negative: bool = True,
        sum_duplicates: bool = False,
        reshard: bool = False,
        error: type[Exception] = IndexError,
    ):
        found = align_write_layouts(
            input.layout, dims, entries, values, accumulate, inplace, input.dtype.itemsize, reshard
        )
        self.input_layout, (self.target, self.entries, self.values) = input.layout, found
        self.owners = Owners(self.target, dims)
        self.exchange_axes = tuple(a for a in self.owners.axes if a in self.entries.shard_axes)
        self.dims = tuple(dims)
        self.negative = negative
        self.sum_duplicates = sum_duplicates and input.dtype is not torch.bool
        size = self.target.shape[self.dims[0]]
        self.request = IndexRequest(
            self.owners, self.exchange_axes, self.entries, size, negative, self.sum_duplicates, error
        )
        self.writes_local = inplace and self.target.bare is input.layout.bare
        self.inplace = inplace
        self.torch_checks = (
            has_no_empty_shards(self.target)
            and not self.owners.axes
            and not self.entries.nontrivial_axes(self.entries.shard_axes)
        )
        self.rest_shape = [n for d, n in enumerate(self.target.local_shape) if d not in dims]

    def writable_target(self, input: Tensor) -> Tensor:
        """Return the tensor to write into: the operand, or a copy if an in-place call must not change it yet."""
        return input.clone() if self.inplace and not self.writes_local else input

    def local_updates(self, indices: Sequence[Tensor], values: Tensor | None, device: torch.device) -> tuple[list, Any]:
        """Return the positions in this rank's shard that are written, and their rows.

        torch checks index values that are equal on all ranks; others are checked here, so that all ranks raise.
        """
        report_placement(self.input_layout, self.target)
        # an index without dims is one entry
        vectors = [
            i.reshape(1)[: self.entries.local_shape[0]] if not i.ndim and self.entries.ndim else i for i in indices
        ]
        found = [i.to(device) for i in vectors]
        here = self.entries.local_shape
        if len(self.dims) == 1 and self.exchange_axes:
            lists = self.request.lists_for(found[0].expand(here))
        else:
            if not self.torch_checks:
                pairs = zip(self.dims, found, strict=True)
                error = self.request.error
                found = [validate_index(i, self.target.shape[d], self.entries, self.negative, error) for d, i in pairs]
            if not self.owners.axes:
                return found, values
            lists = ExchangeLists(
                self.owners, self.owners.flat(found).expand(here).reshape(-1), self.exchange_axes, self.sum_duplicates
            )
        if values is None:
            return lists.positions, None
        return lists.positions, lists.deliver(
            values.expand(*here, *self.rest_shape).reshape(here.numel(), *self.rest_shape)
        )


def run_in_place(run: Callable, func: Any, target: Any, args: tuple, kwargs: dict) -> Any:
    """Run an in-place call. If the plan did not write the local tensor, the result replaces the target's value."""
    if target.__class__ is ShardTensor:
        target._check_writable()
        reduce_partial(target)
    reshard = _may_reshard_target(function_name(func), target, args, kwargs)
    result = run(func, (), (target, *args), {**kwargs, "reshard": True} if reshard else kwargs)
    if result._local_tensor is (target._local_tensor if target.__class__ is ShardTensor else target):
        return target
    if reshard:
        swap_value(target, result)
        return target
    return target._write(result) if target.__class__ is ShardTensor else target.copy_(to_full_tensor(result))


def _may_reshard_target(name: str, target: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether the target of an in-place `fn(target, dim, index, source, ...)` may be resharded.

    The source is a tensor or a number: `torch.zeros(n, classes).scatter_(1, index, 1)` is sharded as the index is.
    """
    given = dict(zip(("dim", "index", "source"), args, strict=False)) | kwargs
    dim, index = given.get("dim"), given.get("index")
    source = next((given[key] for key in ("source", "src", "value") if key in given), None)
    if not isinstance(dim, int) or not all(isinstance(t, Tensor) for t in (target, index)):
        return False
    assert isinstance(index, Tensor)
    if index.ndim != (1 if name.startswith("index_") else target.ndim) or not -target.ndim <= dim < target.ndim:
        return False
    if isinstance(source, (bool, int, float, complex)):  # a small target stays as it is
        is_large = target.numel() >= runtime.active.min_scattered
        return is_large and may_reshard(target, (index,), mesh_of((target, index), None))
    if not isinstance(source, Tensor) or source.ndim != target.ndim:
        return False
    return may_reshard(target, (index, source), mesh_of((target, index, source), None))


def reduce_partial(target: ShardTensor) -> None:
    """Reduce a Partial tensor before it is written."""
    if target._layout.partial:
        if target.is_leaf and target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        reduced = target._reduced_value()
        target._local_tensor, target._layout, target._reduced_cache = reduced._local_tensor, reduced._layout, None


# ---------------------------------------------------------------------- index_put


def _plan_index_put(input: Operand, value: Operand, accumulate: bool, dims: torch.Size, *indices: Operand, fn):
    """Plan index_put. `value` has entry dims first, then the other dims of `input`, of size 1 where it broadcasts."""
    entries = align(tuple(i.layout for i in indices)).result
    write = IndexedWrite(
        input, dims, entries, value.layout, accumulate, fn.__name__.endswith("_"), sum_duplicates=accumulate
    )
    assert write.values is not None

    def local(input, indices, value):
        target = write.writable_target(input) if write.inplace else input.clone()
        positions, rows = write.local_updates(indices, value.to(target.device), target.device)
        block = target.movedim(list(dims), list(range(len(dims))))
        block.index_put_(tuple(positions), rows, accumulate)
        return target

    return Plan(
        local=local,
        layout=write.target,
        operands={
            "input": write.target,
            "indices": [broadcast_layout(write.entries, i.shape) for i in indices],
            "value": write.values,
        },
    )


run_index_put = make_handler(_plan_index_put, partial=False, merged=True)


# ---------------------------------------------------------------------- rows along one dim


def _plan_row_write(
    input: Operand,
    dim: int,
    index: Operand,
    source: Operand,
    accumulate: bool,
    reshard: bool,
    fn: Callable,
    write_fn: Callable,
    merge: Any = (None, True),
    error: type[Exception] = IndexError,
):
    """Plan a function `fn(input, dim, index, source, ...)` that writes one row of `source` per entry of the index.

    merge: the reduction, and whether the target's own values take part in it. error: raised for an index out of bounds.
    """
    name = fn.__name__
    if not input.ndim or not source.ndim:
        if input.ndim:
            return None  # the fallback raises torch's error: a source without dims fits no row
        return plan_replicated(
            lambda input, index, source: write_fn(input, dim, index, source), input.layout, index=index, source=source
        )
    dim = normalize_dim(dim, input.ndim)
    if index.ndim > 1:
        raise IndexError(f"{name}(): Index is supposed to be a vector")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index")
    if source.dtype != input.dtype:
        raise RuntimeError(
            f"{name}(): self and source expected to have the same dtype, got {input.dtype}, {source.dtype}"
        )
    count, other = index.numel(), list(input.shape)
    other[dim] = count
    if list(source.shape) != other:
        raise RuntimeError(f"{name}(): source has shape {list(source.shape)}; {count} indices need {other}")
    order = [dim, *(d for d in range(input.ndim) if d != dim)]
    entries = index.layout if index.ndim else Layout.replicate(input.layout.mesh, (1,))
    write = IndexedWrite(
        input,
        [dim],
        entries,
        source.layout.permute(order),
        accumulate,
        name.endswith("_"),
        negative=False,
        sum_duplicates=accumulate,
        reshard=reshard,
        error=error,
    )
    assert write.values is not None
    merging = bool(write.exchange_axes) and can_prereduce(merge[0], input.dtype)

    def local(input, index, source):
        target = write.writable_target(input)
        if merging:
            vector = index.reshape(1)[: write.entries.local_shape[0]] if not index.ndim else index
            lists = write.request._replace(distinct=True).lists_for(vector.to(target.device))
            rows = source.movedim(dim, 0)
            if not write.writes_local:
                return scatter_reduce_rows(target, dim, lists, rows, *merge)
            return target.copy_(scatter_reduce_rows(target.clone(), dim, lists, rows, *merge))
        (position,), rows = write.local_updates([index], source.movedim(dim, 0), target.device)
        return write_fn(target, dim, position, rows.movedim(0, dim))

    back = [order.index(d) for d in range(input.ndim)]
    where = broadcast_layout(write.entries, index.shape)
    return Plan(local, write.target, {"input": write.target, "index": where, "source": write.values.permute(back)})


def _index_add(input, dim, index, source, *, alpha=1, reshard=False, fn):
    error = RuntimeError if input.ndim > 1 else IndexError  # torch's own types
    write_fn: Callable = lambda x, d, i, s: fn(x, d, i, s, alpha=alpha)  # noqa: E731
    return _plan_row_write(input, dim, index, source, True, reshard, fn, write_fn, error=error)


def _index_copy(input, dim, index, source, *, reshard=False, fn):
    return _plan_row_write(input, dim, index, source, False, reshard, fn, fn)


def _index_reduce(input, dim, index, source, reduce, *, include_self=True, reshard=False, fn):
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"index_reduce(): Expected reduce to be one of prod, mean, amax, amin but got {reduce}.")

    def reduce_rows(x: Tensor, d: int, i: Tensor, s: Tensor) -> Tensor:
        if reduce != "prod" or x.dtype not in HALF_DTYPES:
            return fn(x, d, i, s, reduce, include_self=include_self)
        # torch's kernel refuses rows of one element in half precision, which are on some ranks only.
        wide = torch.index_reduce(x.float(), d, i, s.float(), reduce, include_self=include_self).to(x.dtype)
        return x.copy_(wide) if fn.__name__.endswith("_") else wide

    return _plan_row_write(input, dim, index, source, False, reshard, fn, reduce_rows, (reduce, include_self))


def _index_fill(input, dim, index, value, *, reshard=False, fn):
    if not input.ndim:
        return plan_replicated(lambda input, index, value: fn(input, dim, index, value), input.layout, index=index)
    dim = normalize_dim(dim, input.ndim)
    if index.ndim > 1:
        raise IndexError("index_fill_(): Index is supposed to be a vector")
    if isinstance(value, Operand) and value.ndim:
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got {value.ndim} dimension(s)."
        )
    entries = index.layout if index.ndim else Layout.replicate(input.layout.mesh, (1,))
    write = IndexedWrite(input, [dim], entries, None, False, fn.__name__.endswith("_"), reshard=reshard)

    def local(input, index, value):
        target = write.writable_target(input)
        (position,), _ = write.local_updates([index], None, target.device)
        return fn(target, dim, position, value)

    return Plan(local, write.target, {"input": write.target, "index": broadcast_layout(write.entries, index.shape)})


def register_with_inplace(name: str, run: Callable) -> None:
    """Register a planned function and its in-place form."""
    handler(name)(run)
    handler(name + "_")(lambda func, types, args, kwargs: run_in_place(run, func, args[0], args[1:], kwargs))


for _name, _planner in (
    ("index_add", _index_add),
    ("index_copy", _index_copy),
    ("index_reduce", _index_reduce),
    ("index_fill", _index_fill),
):
    register_with_inplace(_name, make_handler(_planner, partial=False, merged=True))
