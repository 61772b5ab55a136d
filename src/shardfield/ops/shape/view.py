"""Views: reshape, view, flatten, unflatten, dtype views, complex views.

A merged dim keeps one factor for each of the dims it was merged from, so that merging dims and splitting them again
needs no communication. Only a shard boundary that falls inside a new dim forces a redistribute (`view_layouts`). The
new shape is computed by torch on a meta tensor, so that argument parsing and errors are torch's on every rank. The
result aliases its operand unless a redistribute was needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..._compat import tensor_getter
from ...dispatch.plan import Operand, Plan, Returns, ViewKind
from ...dispatch.registry import composed, register, rule
from ...layout import DimSharding, Layout, canonicalize, nested_chunk, regroup, shard_sizes_of
from ...redistribute import is_local, redistribute, without_partial
from ...tensor import wrap
from .._common.autocast import under_autocast
from .._common.probe import meta_tensor


def segments(old: Sequence[int], new: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return the shortest runs of old and new dims, in order, with equal element counts (no dim has size 0).

    >>> segments([2, 3, 4], [6, 4])
    [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(1, 2, None))]
    """
    runs: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        first, counts = (i, j), (old[i], new[j])
        i, j = i + 1, j + 1
        while counts[0] != counts[1]:
            if counts[0] < counts[1]:
                counts, i = (counts[0] * old[i], counts[1]), i + 1
            else:
                counts, j = (counts[0], counts[1] * new[j]), j + 1
        runs.append((slice(first[0], i), slice(first[1], j)))
    if i < len(old) or j < len(new):  # trailing dims of size 1 join the last run
        last = (runs[-1][0].start, runs[-1][1].start) if runs else (0, 0)
        runs[-1:] = [(slice(last[0], len(old)), slice(last[1], len(new)))]
    return runs


def merged_dim_groups(old: Sequence[int], new: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of old dims that must be contiguous with each other for the reshape to be a view.

    >>> merged_dim_groups([2, 3, 1, 4, 5], [6, 4, 5])
    ((0, 1),)
    """
    if 0 in new:
        return ()
    groups = [tuple(d for d in range(a.start, a.stop) if old[d] > 1) for a, _ in segments(old, new)]
    return tuple(g for g in groups if len(g) > 1)


def view_layouts(layout: Layout, shape: Sequence[int]) -> tuple[Layout, Layout, Layout]:
    """Return the operand's layout with merged dims, the layout to redistribute to, and the view's layout.

    The first two are equal if no shard boundary falls inside a new dim. `shape` has at least one dim.
    """
    flat: list[tuple[DimSharding, ...]] = []
    moved: list[tuple[DimSharding, ...]] = []
    result: list[tuple[DimSharding, ...]] = []
    if 0 in shape:
        flat = moved = [tuple(f for d in layout.unshard(range(layout.ndim)).dims for f in d)]
        result = [(DimSharding(n),) for n in shape]
        return layout.with_dims(flat), layout.with_dims(moved), layout.with_dims(result)
    for before, after in segments(layout.shape, shape):
        dims, sizes = layout.dims[before], shape[after]
        if len(dims) == len(sizes) == 1:
            groups: list[tuple[DimSharding, ...]] | None = list(dims)
        else:
            groups = regroup([f for d in dims for f in d], sizes)
        if groups is not None:
            flat += dims
            moved += dims
        else:
            factors = canonicalize(f for d in dims for f in d)
            groups = _reshard_for_view(layout, factors, sizes)
            flat.append(factors)
            moved.append(tuple(f for g in groups for f in g))
        result += groups
    return layout.with_dims(flat), layout.with_dims(moved), layout.with_dims(result)


def _reshard_for_view(
    layout: Layout, factors: Sequence[DimSharding], sizes: Sequence[int]
) -> list[tuple[DimSharding, ...]]:
    """Return shardings for dims of `sizes` with no boundary inside a dim.

    Shards have nearly the boundaries of `factors`; if these shards are too unbalanced, they are equal chunks.
    """

    def largest(factors: Sequence[DimSharding]) -> int:
        return math.prod(max(shard_sizes_of(f)) for f in factors)

    axes = tuple(a for f in factors for a in f.axes)
    parts = [layout.mesh.size(a) for a in axes]
    ranks = math.prod(parts)
    even_dim = next((k for k, n in enumerate(sizes) if n >= ranks), max(range(len(sizes)), key=sizes.__getitem__))
    even: list[tuple[DimSharding, ...]]
    even = [
        (DimSharding(n, axes, nested_chunk(n, parts)) if k == even_dim else DimSharding(n),)
        for k, n in enumerate(sizes)
    ]
    near = regroup(factors, sizes, snap=True)
    if near is not None:
        largest_shard = largest([f for g in near for f in g])
        if largest_shard <= max(1.5 * largest(factors), largest([f for g in even for f in g])):
            return near
    return even


def plan_scalar(layout: Layout) -> Plan:
    """Reshape a tensor of one element to a scalar: a partial sum in which ranks with an empty shard add zero."""
    axes = layout.nontrivial_axes(layout.shard_axes)
    result = Layout.make(layout.mesh, [], [*layout.partial, *((a, "sum") for a in axes)])
    if not axes:
        return Plan(local=lambda input: input.reshape(()), layout=result, view=ViewKind.view(lost=bool(layout.partial)))
    return Plan(local=single_element, layout=result, view=ViewKind.view(lost=True))


def single_element(input: Tensor) -> Tensor:
    """Return the only element, or zero for an empty tensor, in the input's dtype."""
    return input.any() if input.dtype is torch.bool else input.sum(dtype=input.dtype)


@rule("reshape", "view", "flatten", "unflatten", partial=True, merged=True)
def view(input: Operand, *args, fn, **kwargs):
    """Reshape locally if no shard boundary falls inside a new dim, else redistribute between two local reshapes."""
    if args and isinstance(args[0], torch.dtype) or "dtype" in kwargs:
        return view_dtype(input, *args, **kwargs)
    shape = fn(meta_tensor(input), *args, **kwargs).shape
    layout = input.layout
    if not shape:
        return plan_scalar(layout)
    flat, moved, result = view_layouts(layout, shape)
    joined = merged_dim_groups(layout.shape, shape)
    # where torch's reshape returns a copy, a write into the result is not expected to reach the operand
    returns = Returns.VIEW if fn.__name__ == "view" else Returns.VIEW_OR_COPY
    if layout.numel and loses_writes(flat, moved):
        returns = Returns.LOST_VIEW
    short = any(
        min(shard_sizes_of(f)) < 2 for group in joined for d in group for f in layout.dims[d] if layout.is_sharded(d)
    )
    return Plan(
        local=_local_reshape(layout, flat, moved, result),
        layout=result,
        view=ViewKind(returns, merged=joined, ranks_differ=short, splits=not joined),
    )


def _contiguous_partial(run: Callable) -> Callable:
    def contiguous_or_self(func, types, args, kwargs):
        """Return a Partial itself where one device does: a write into it, which reduces it, gives it other memory."""
        target = args[0]
        if not target._layout.partial:
            return run(func, types, args, kwargs)
        local = func(target._local_tensor, *args[1:], **kwargs)
        return target if local is target._local_tensor else wrap(local, target._layout)

    return contiguous_or_self


@rule("contiguous", merged=True, around=_contiguous_partial)
def contiguous(input: Operand, memory_format: torch.memory_format = torch.contiguous_format, *, fn):
    """Return the tensor itself where its dims are in order in memory, else a copy. Ranks agree on it before a write."""
    in_order = memory_format is torch.contiguous_format
    dims = [d for d in range(input.ndim) if input.shape[d] > 1]  # the strides of the others are no matter anywhere
    return Plan(
        local=lambda input: fn(input, memory_format=memory_format),
        layout=input.layout,
        view=ViewKind(
            Returns.VIEW_OR_COPY,
            merged=[dims] if in_order and len(dims) > 1 else (),
            ranks_differ=has_short_shards(input.layout) or not in_order,
        ),
    )


@composed("ravel")
def ravel(input):
    """Return one dim; unlike `reshape`, torch copies whatever is not contiguous."""
    return input.contiguous().view(-1)


def loses_writes(source: Layout, target: Layout) -> bool:
    """Return whether a write into a view taken after redistributing from `source` to `target` misses the operand.

    The answer is the same on all ranks. A write into a partial operand always misses it: reducing allocates new memory.
    """
    return bool(source.partial) or not is_local(source, target)


def has_short_shards(layout: Layout) -> bool:
    """Return whether a shard has size 0 or 1 along a sharded dim: strides may then decide differently on its rank."""
    return any(min(shard_sizes_of(f)) < 2 for d in layout.sharded_dims for f in layout.dims[d])


def _local_reshape(layout: Layout, flat: Layout, moved: Layout, result: Layout) -> Callable[[Tensor], Tensor]:
    shape, flat_shape = result.local_shape, flat.local_shape
    if flat is moved:
        return lambda input: torch.reshape(input, shape)  # the method takes twice as long to parse a Size
    return lambda input: redistribute(input.reshape(flat_shape), flat, moved).reshape(shape)


def view_dtype(input: Operand, dtype: torch.dtype) -> Plan:
    """Reinterpret the bits as `dtype`: the last dim grows or shrinks with the element size."""
    shape = meta_tensor(input).view(dtype).shape
    layout = source = without_partial(input.layout)
    if shape != input.shape:
        *dims, last = layout.dims
        if shape[-1] > input.shape[-1]:
            layout = layout.with_dims([*dims, (*last, DimSharding(shape[-1] // input.shape[-1]))])
        elif input.numel():
            sizes = [shape[-1], input.shape[-1] // shape[-1]]
            groups = regroup(last, sizes) or regroup(last, sizes, snap=True)
            if groups is None or any(f.axes for f in groups[1]):
                groups = [(DimSharding(n),) for n in sizes]
            source = layout.with_dims([*dims, (*groups[0], *groups[1])])
            layout = layout.with_dims([*dims, groups[0]])
        else:
            source, layout = layout.unshard([-1]), layout.with_dims([*dims, (DimSharding(shape[-1]),)])
    resized, local_shape = shape != input.shape, layout.local_shape

    def local(input):
        if resized and not input.numel():  # torch rejects the strides of some empty tensors
            return input.new_empty(local_shape, dtype=dtype)
        return (input.contiguous() if resized else input).view(dtype)

    return Plan(
        local=local,
        operands={"input": source},
        layout=layout,
        view=ViewKind.view(lost=loses_writes(input.layout, source), ranks_differ=resized and has_short_shards(source)),
    )


def _atleast_nd(fn: Callable) -> Callable:
    def each(*tensors):
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            shape = fn(meta_tensor(tensors[0])).shape
            return tensors[0] if shape == tensors[0].shape else tensors[0].reshape(shape)
        return tuple(each(t) for t in (tensors[0] if len(tensors) == 1 else tensors))

    return each


for _fn in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d):
    composed(_fn)(_atleast_nd(_fn))


@composed("view_as", "reshape_as")
def view_as(input, other):
    return input.reshape(other.shape)


# ---------------------------------------------------------------------- complex numbers as pairs


@rule("view_as_real", partial=True, merged=True)
def view_as_real(input: Operand):
    torch.view_as_real(meta_tensor(input))
    layout = input.layout
    return Plan(
        local=lambda input: torch.view_as_real(input),
        layout=layout.insert(layout.ndim, 2),
        view=ViewKind.view(lost=bool(layout.partial)),
    )


@rule("view_as_complex", partial=True, merged=True, around=under_autocast(torch.view_as_complex, 2))
def view_as_complex(input: Operand):
    """View pairs as complex numbers; the last dim is unsharded first, so that both parts are on one rank."""
    torch.view_as_complex(meta_tensor(input))
    source = input.layout.unshard([-1])

    def local(input):
        aligned = input.stride(-1) == 1 and not any(s % 2 for s in (*input.stride()[:-1], input.storage_offset()))
        return torch.view_as_complex(input if aligned else input.contiguous())

    return Plan(
        local=local,
        operands={"input": source},
        layout=source.drop_dims([-1]),
        view=ViewKind.view(lost=loses_writes(input.layout, source), ranks_differ=has_short_shards(source)),
    )


@rule("real", "imag", tensor_getter("real"), tensor_getter("imag"), partial=True, merged=True)
def real_imag(input: Operand, *, fn):
    """View the real or imaginary part of the local tensor."""
    fn(meta_tensor(input))
    layout = input.layout
    return Plan(local=fn, takes=["input"], layout=layout, view=ViewKind.view(lost=bool(layout.partial)))


def set_real_imag(func, types, args, kwargs):
    """Assign `x.real = y` or `x.imag = y`."""
    target, value = args
    (target.real if func == tensor_getter("real", "__set__") else target.imag).copy_(value)


for _name in ("real", "imag"):
    register(tensor_getter(_name, "__set__"), set_real_imag)
