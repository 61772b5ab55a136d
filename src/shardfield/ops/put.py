"""Writing by index tensors: index_put, index_add, index_copy, index_fill, index_reduce, put.

What is written travels, not what it is written into. An entry is written by the rank that holds its place: picked out
where every rank has all entries, sent there where they are cut over the axis that cuts the indexed dim. What adds up
is summed first, so that each rank sends one row for each place (see `lists`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import handler, mesh_of, replicated
from ..execute import planned
from ..layout import Factor, Layout, chunk
from ..plan import Operand, Plan
from ..tensor import ShardTensor
from .align import align, project
from .homes import NOWHERE, Home, become, home_of, landed, note_cut, say_where
from .index import dim_of
from .lists import Asked, Lists
from .merged_rows import merged, merges
from .owners import Owners, checked
from .take import filled, small

Dims = list[tuple[Factor, ...]]


def meet(
    target: Layout,
    dims: Sequence[int],
    entries: Layout,
    values: Layout | None,
    adds: bool,
    fixed: bool,
    item: int,
    home: Home,
) -> tuple[Layout, Layout, Layout | None]:
    """Where target, entries and values must lie for a write along `dims` of the target.

    `values` has the entries' dims first, then the target's other dims (of size 1 where it broadcasts). adds: writes to
    one place add up, so that a target no rank has cut may become Partial. fixed: the target is written in place and
    keeps its layout, unless what is written is larger than it, or it may become another (see `homes`).
    """
    n, rest = entries.ndim, [d for d in range(target.ndim) if d not in dims]
    indexed = {a for d in dims for a in target.axes_of(d)}
    still = fixed and not home[0] and (values is None or values.numel <= target.numel)
    if values is not None and not still:  # the target follows the values where it is not cut, which is free
        for i, d in enumerate(rest, n):
            taken = {*target.shard_axes, *target.partial_axes}
            if values.axes_of(i) and values.shape[i] == target.shape[d] and not target.axes_of(d):
                if not taken & set(values.axes_of(i)):
                    target = target.with_dim(d, *values.dims[i])
    entries = _entries(entries, values, {a for d in rest for a in target.axes_of(d)}, indexed)
    free = tuple(a for a in entries.shard_axes if a not in indexed)
    spot = next((d for d in dims if not target.axes_of(d) and target.shape[d] > 1), None)
    if free and spot is not None and not still and (not adds or not indexed):
        target = landed(target, spot, free, entries.numel, item, adds, home)
    elif free and adds and not still:
        target = Layout.make(target.mesh, target.dims, [*target.partial, *((a, "sum") for a in free)])
    elif free:
        entries = entries.uncut([b for b in range(n) if set(free) & set(entries.axes_of(b))])
    if values is None:
        return target, entries, None
    wanted = [*entries.dims, *(target.dims[d] for d in rest)]
    sizes = [*entries.shape, *(target.shape[d] for d in rest)]
    pairs = zip(values.shape, sizes, wanted, strict=True)
    return target, entries, Layout.make(target.mesh, [f if m == n else (Factor(m),) for m, n, f in pairs])


def _entries(entries: Layout, values: Layout | None, busy: set[int], indexed: set[int]) -> Layout:
    """The cut of the entries: as the values are cut, then as the index is, over axes that are not `busy`."""
    dims: Dims = [(Factor(n),) for n in entries.shape]
    used = set(busy)
    for source in (values, entries):
        for b, size in enumerate(entries.shape):
            if source is None or source.shape[b] != size or len(dims[b]) > 1 or dims[b][0].axes:
                continue
            axes = set(source.axes_of(b))
            if source.wide(axes) and not axes & used:
                dims[b] = source.dims[b]
                used |= axes
    # values that are cut over an axis of the indexed dims, but along another dim, are sent from entry to entry instead
    for axis in values.wide(values.shard_axes) if values is not None else ():
        open_ = [b for b, d in enumerate(dims) if d == (Factor(entries.shape[b]),) and entries.shape[b] > 1]
        if axis in indexed and axis not in used and open_:
            b = max(open_, key=lambda b: entries.shape[b])
            dims[b] = (Factor(entries.shape[b], (axis,), chunk(entries.shape[b], entries.mesh.size(axis))),)
            used.add(axis)
    return Layout.make(entries.mesh, dims)


class Write:
    """A write along `dims`, planned: the layouts, and how a rank finds what it is to write."""

    def __init__(
        self,
        input: Operand,
        dims,
        entries: Layout,
        values: Layout | None,
        adds: bool,
        fixed: bool,
        negative: bool = True,
        sums: bool = False,
        home: Home = NOWHERE,
    ):
        found = meet(input.layout, dims, entries, values, adds, fixed, input.dtype.itemsize, home)
        self.before, (self.target, self.entries, self.values) = input.layout, found
        self.owners = Owners(self.target, dims)
        self.ask = tuple(a for a in self.owners.axes if a in self.entries.shard_axes)
        self.dims = tuple(dims)
        self.negative = negative
        self.sums = sums and input.dtype is not torch.bool
        size = self.target.shape[self.dims[0]]
        self.asked = Asked(self.owners, self.ask, self.entries, size, negative, distinct=self.sums)
        self.in_place = fixed and self.target is input.layout
        self.fixed = fixed
        self.judged = filled(self.target) and not self.owners.axes and not self.entries.wide(self.entries.shard_axes)
        self.rest = [n for d, n in enumerate(self.target.local_shape) if d not in dims]

    def start(self, input: Tensor) -> Tensor:
        """The tensor that is written: the operand itself, or a copy if it must not change."""
        return input.clone() if self.fixed and not self.in_place else input

    def arrived(self, indices: Sequence[Tensor], values: Tensor | None, device: torch.device) -> tuple[list, Any]:
        """Positions in this rank's block that are written, and the rows for them: all others are left out.

        Index values are judged by torch where all ranks see the same, and by us where they do not.
        """
        note_cut(self.target, self.dims)
        say_where(self.before, self.target)
        # a number where a list of one is meant
        few = [i.reshape(1)[: self.entries.local_shape[0]] if not i.ndim and self.entries.ndim else i for i in indices]
        found = [i.to(device) for i in few]
        here = self.entries.local_shape
        if len(self.dims) == 1 and self.ask:
            lists = self.asked.lists(found[0].expand(here))
        else:
            if not self.judged:
                pairs = zip(self.dims, found, strict=True)
                found = [checked(i, self.target.shape[d], self.entries, self.negative) for d, i in pairs]
            if not self.owners.axes:
                return found, values
            lists = Lists(self.owners, self.owners.flat(found).expand(here).reshape(-1), self.ask, self.sums)
        if values is None:
            return lists.positions, None
        return lists.positions, lists.deliver(values.expand(*here, *self.rest).reshape(here.numel(), *self.rest))


def in_place(run: Callable, func: Any, target: Any, args: tuple, kwargs: dict) -> Any:
    """Run a planned in-place call: the local tensor was written, or the result is written into the target."""
    if target.__class__ is ShardTensor:
        target._writable()
        settle(target)
    kwargs = homed((target, *args), kwargs, True)
    result = run(func, (), (target, *args), kwargs)
    if result._local_tensor is (target._local_tensor if target.__class__ is ShardTensor else target):
        return target
    if kwargs.get("home", NOWHERE)[0]:
        become(target, result)
        return target
    return target._write(result) if target.__class__ is ShardTensor else target.copy_(replicated(result))


def homed(args: tuple, kwargs: dict, in_place: bool) -> dict:
    """The arguments of `fn(target, dim, index, source, ...)` with what is known of a place for the rows."""
    if len(args) < 4 or not all(isinstance(args[i], Tensor) for i in (0, 2, 3)) or not isinstance(args[1], int):
        return kwargs
    target, dim, index, source = args[:4]
    if source.ndim != target.ndim or index.ndim not in (1, target.ndim) or not -target.ndim <= dim < target.ndim:
        return kwargs
    home = home_of(target, dim, args[2:4], mesh_of(args, None), in_place)
    return kwargs if home is NOWHERE else {**kwargs, "home": home}


def settle(target: ShardTensor) -> None:
    """Reduce a Partial that is about to be written."""
    if target._layout.partial:
        if target.is_leaf and target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        whole = target._whole_value()
        target._local_tensor, target._layout, target._whole = whole._local_tensor, whole._layout, None


# ---------------------------------------------------------------------- index_put


def _put(input: Operand, value: Operand, accumulate: bool, dims: torch.Size, *indices: Operand, fn):
    """`value`: entry dims first, then the other dims of `input`, of size 1 where it broadcasts."""
    entries = align(tuple(i.layout for i in indices)).result
    write = Write(input, dims, entries, value.layout, accumulate, fn.__name__.endswith("_"), sums=accumulate)
    assert write.values is not None

    def local(input, indices, value):
        target = write.start(input) if write.fixed else input.clone()
        positions, rows = write.arrived(indices, value.to(target.device), target.device)
        block = target.movedim(list(dims), list(range(len(dims))))
        block.index_put_(tuple(positions), rows, accumulate)
        return target

    return Plan(
        local=local,
        layout=write.target,
        operands={
            "input": write.target,
            "indices": [project(write.entries, i.shape) for i in indices],
            "value": write.values,
        },
    )


run_put = planned(_put, partial=False, merged=True)


# ---------------------------------------------------------------------- whole rows of one dim


def _rows(
    input: Operand,
    dim: int,
    index: Operand,
    source: Operand,
    adds: bool,
    home: Home,
    fn: Callable,
    more: Callable,
    merge: Any = (None, True),
):
    """A function `fn(input, dim, index, source, ...)` that writes one row of `source` for each entry of the index.

    merge: the reduction, and whether the target's own values take part in it.
    """
    name = fn.__name__
    if not input.ndim or not source.ndim:
        if input.ndim:
            return None  # a source without dims fits no row: torch says so
        return small(
            lambda input, index, source: more(input, dim, index, source), input.layout, index=index, source=source
        )
    dim = dim_of(dim, input.ndim)
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
        raise RuntimeError(f"{name}(): source has shape {list(source.shape)}; {count} indices want {other}")
    order = [dim, *(d for d in range(input.ndim) if d != dim)]
    entries = index.layout if index.ndim else Layout.replicate(input.layout.mesh, (1,))
    write = Write(input, [dim], entries, source.layout.permute(order), adds, name.endswith("_"), False, adds, home)
    assert write.values is not None
    merging = bool(write.ask) and merges(merge[0], input.dtype)

    def local(input, index, source):
        target = write.start(input)
        if merging:
            note_cut(write.target, write.dims)
            vector = index.reshape(1)[: write.entries.local_shape[0]] if not index.ndim else index
            lists = write.asked._replace(distinct=True).lists(vector.to(target.device))
            rows = source.movedim(dim, 0)
            if not write.in_place:
                return merged(target, dim, lists, rows, *merge)
            return target.copy_(merged(target.clone(), dim, lists, rows, *merge))
        (position,), rows = write.arrived([index], source.movedim(dim, 0), target.device)
        return more(target, dim, position, rows.movedim(0, dim))

    back = [order.index(d) for d in range(input.ndim)]
    where = project(write.entries, index.shape)
    return Plan(local, write.target, {"input": write.target, "index": where, "source": write.values.permute(back)})


def _index_add(input, dim, index, source, *, alpha=1, home=NOWHERE, fn):
    return _rows(input, dim, index, source, True, home, fn, lambda x, d, i, s: fn(x, d, i, s, alpha=alpha))


def _index_copy(input, dim, index, source, *, home=NOWHERE, fn):
    return _rows(input, dim, index, source, False, home, fn, fn)


def _index_reduce(input, dim, index, source, reduce, *, include_self=True, home=NOWHERE, fn):
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"index_reduce(): Expected reduce to be one of prod, mean, amax, amin but got {reduce}.")
    more: Callable = lambda x, d, i, s: fn(x, d, i, s, reduce, include_self=include_self)  # noqa: E731
    return _rows(input, dim, index, source, False, home, fn, more, (reduce, include_self))


def _index_fill(input, dim, index, value, *, fn):
    if not input.ndim:
        return small(lambda input, index, value: fn(input, dim, index, value), input.layout, index=index)
    dim = dim_of(dim, input.ndim)
    if index.ndim > 1:
        raise IndexError("index_fill_(): Index is supposed to be a vector")
    if isinstance(value, Operand) and value.ndim:
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got {value.ndim} dimension(s)."
        )
    entries = index.layout if index.ndim else Layout.replicate(input.layout.mesh, (1,))
    write = Write(input, [dim], entries, None, False, fn.__name__.endswith("_"))

    def local(input, index, value):
        target = write.start(input)
        (position,), _ = write.arrived([index], None, target.device)
        return fn(target, dim, position, value)

    return Plan(local, write.target, {"input": write.target, "index": project(write.entries, index.shape)})


def register(name: str, run: Callable) -> None:
    """A planned function and its in-place form."""
    handler(name)(lambda func, types, args, kwargs: run(func, types, args, homed(args, kwargs, False)))
    handler(name + "_")(lambda func, types, args, kwargs: in_place(run, func, args[0], args[1:], kwargs))


for _name, _planner in (
    ("index_add", _index_add),
    ("index_copy", _index_copy),
    ("index_reduce", _index_reduce),
    ("index_fill", _index_fill),
):
    register(_name, planned(_planner, partial=False, merged=True))
