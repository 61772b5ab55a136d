"""x[...] and x[...] = value, with any mix of slices, ints, None, Ellipsis, masks and index tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import tracing
from .._compat import shares_memory
from ..dispatch import composed, gathered, handler, mesh_of, replicated
from ..layout import Factor, Layout, starts
from ..redistribute import redistribute
from ..tensor import ShardTensor, wrap
from . import deferred
from .index import Basic, as_shard, basic
from .mask import nonzero, put_where, rows_where
from .parse import Parsed, is_mask, parse, plain_key
from .put import in_place, run_put, settle
from .take import index_by, place


@handler("__getitem__")
def getitem(func, types, args, kwargs):
    x, index = args
    if x.__class__ is ShardTensor:
        if "_deferred" in x.__dict__:
            found = deferred.part(x, index)
            if found is not None:
                return found
        key = plain_key(index)
        if key is not None:
            return basic_at(x._layout, key).run(x)
    parsed = parse(x.shape, index, x.device)
    if x.__class__ is not ShardTensor:
        if not parsed.tensors:  # the ShardTensors were numbers
            return x[tuple(i if i is None or isinstance(i, int) else slice(*i) for i in parsed.items)]
        x = as_shard(x, mesh_of(args, None))
    whole = all(i == (0, n, 1) for i, n in zip(parsed.items, x.shape, strict=False)) and len(parsed.items) == x.ndim
    y = x if whole and parsed.tensors else basic(x._layout, parsed.items).run(x)
    if not parsed.tensors:
        return y
    if len(parsed.tensors) == 1 and is_mask(parsed.tensors[0][1]):
        return rows_where(y, *parsed.tensors[0])
    return index_by(y, *by_number(parsed.tensors))


@lru_cache(maxsize=8192)
def basic_at(layout: Layout, key: tuple) -> Basic:
    """The plan of an index of slices, ints, None and Ellipsis: found by the index as it is written."""
    index = tuple(slice(*k) if k.__class__ is tuple else k for k in key)
    return basic(layout, parse(layout.shape, index, torch.device("cpu")).items)


def by_number(tensors: Sequence[tuple[int, Tensor]]) -> tuple[list[Tensor], list[int]]:
    """Index tensors and the dims they apply to, masks turned into the numbers of their true elements."""
    found: list[Tensor] = []
    dims: list[int] = []
    for dim, tensor in tensors:
        numbers = nonzero(tensor, as_tuple=True) if is_mask(tensor) else (tensor,)
        found += numbers
        dims += range(dim, dim + len(numbers))
    return found, dims


@handler("__setitem__")
def setitem(func, types, args, kwargs):
    x, index, value = args
    if x.__class__ is not ShardTensor:
        return _into_plain(func, types, args)
    if "_deferred" in x.__dict__ and deferred.put(x, index, value):
        return None
    x._writable()
    settle(x)
    _assign(x, parse(x.shape, index, x.device), _as_value(value, x))


def _as_value(value: Any, x: Tensor) -> Tensor:
    """What is assigned, as a tensor; a number is converted as torch converts it, with torch's errors."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, float, complex)):
        raise TypeError(f"can't assign a {type(value).__name__} to a {type(x).__name__} of {x.dtype}")
    return torch.full((), value, dtype=x.dtype, device=x.device)


def _assign(x: ShardTensor, parsed: Parsed, value: Tensor, accumulate: bool = False) -> None:
    plan = basic(x._layout, parsed.items, keep=True)
    if plan.source is not x._layout:  # a slice across the tiles of a merged dim is no view of them
        moved = wrap(redistribute(x._local_tensor, x._layout, plan.source).clone(), plan.source)
        _assign(moved, parsed, value, accumulate)
        x._write(moved)
        return
    y = plan.run(x)
    real = [d for d in range(y.ndim) if d not in plan.kept]  # the dims that torch's result has
    shape = [y.shape[d] for d in real]
    tensors = parsed.tensors
    if not tensors:
        written = _beside(_fitted(value, shape), y.ndim, plan.kept)
        y.add_(written) if accumulate else y.copy_(written)
    elif len(tensors) == 1 and is_mask(tensors[0][1]) and not accumulate:
        ((at, mask),) = tensors
        if value.numel() != 1:
            _same_dtype(x, value)
        value = _first(value, shape[:at] + [-1] + shape[at + mask.ndim :], at, 1)
        rest = [d for d in range(y.ndim) if not real[at] <= d < real[at] + mask.ndim]
        put_where(y, real[at], mask, _beside(value, 1 + len(rest), [1 + rest.index(d) for d in plan.kept]))
    else:
        _same_dtype(x, value)
        indices, dims = by_number(tensors)
        value = in_order(value, shape, indices, dims)
        n = value.ndim - (len(real) - len(dims))
        where = [real[d] for d in dims]
        rest = [d for d in range(y.ndim) if d not in where]
        value = _beside(value, n + len(rest), [n + rest.index(d) for d in plan.kept])
        in_place(run_put, Tensor.index_put_, y, (value, accumulate, torch.Size(where), *indices), {})


def in_order(value: Tensor, shape: Sequence[int], indices: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """A value for x[indices], x of this shape, with the dims of the indices first and then the others of x."""
    try:
        entries = torch.broadcast_shapes(*(i.shape for i in indices))
    except RuntimeError:
        shapes = ", ".join(str(list(i.shape)) for i in indices)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from None
    at = place(dims)
    rest = [n for d, n in enumerate(shape) if d not in dims]
    return _first(value, [*rest[:at], *entries, *rest[at:]], at, len(entries))


def _same_dtype(x: Tensor, value: Tensor) -> None:
    if value.dtype != x.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
            f"{value.dtype} for the source."
        )


def _fitted(value: Tensor, shape: Sequence[int]) -> Tensor:
    """A value that broadcasts to `shape` (-1: any size), without the leading dims it has too many; or torch's error."""
    asked = list(value.shape)
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    if value.ndim > len(shape) or any(m not in (n, 1) and n != -1 for m, n in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {asked} cannot be broadcast to indexing result of shape {shape}"
        )
    return value


def _first(value: Tensor, shape: Sequence[int], at: int, n: int) -> Tensor:
    """A value that broadcasts to `shape`, with all of its dims, the `n` dims from `at` on in front."""
    value = _fitted(value, shape)
    if value.ndim < len(shape):
        value = value[(None,) * (len(shape) - value.ndim)]
    order = [*range(at, at + n), *(d for d in range(len(shape)) if not at <= d < at + n)]
    return value if order == sorted(order) else value.permute(order)


def _beside(value: Tensor, ndim: int, kept: Sequence[int]) -> Tensor:
    """A value for a view of `ndim` dims, of which torch's result does not have `kept`: of size 1 there."""
    index: list[Any] = []
    left = value.ndim
    for d in reversed(range(ndim)):
        if d in kept:
            index.append(None)
        elif left:
            index.append(slice(None))
            left -= 1
    return value[tuple(reversed(index))] if kept else value


# ---------------------------------------------------------------------- into a plain tensor


def _into_plain(func, types, args):
    """A plain tensor that takes in a ShardTensor becomes one, cut as what it takes in, in place of the caller's.

    Where other tensors look at its memory, or autograd holds it, that would lose the write for them: then what is
    written is gathered.
    """
    x, index, value = args
    mesh = mesh_of(args, None)
    held = not tracing.is_plain(x) or x.is_leaf and x.requires_grad or _shared(x)
    if not held:
        made = deferred.given(x, index, value, mesh)
        if made is None:
            parsed = parse(x.shape, index, x.device)
            value = _as_value(value, x)
            layout = _cut_alike(x.shape, parsed, value, mesh)
            made = wrap(redistribute(x, Layout.replicate(mesh, x.shape), layout).clone(), layout)
            _assign(made, parsed, value)
        tracing.let_go(x)
        try:
            torch.utils.swap_tensors(x, made)
            return
        except RuntimeError:  # saved for backward, or known by a weak reference
            pass
    gathered(func, types, args, {})


def _shared(x: Tensor) -> bool:
    """Whether other tensors look at a plain tensor's memory: the same answer on every rank.

    A backend's thread that has sent or filled it lets go of it a moment later, on each rank in its own time; for that
    moment is waited. What the program itself holds, it holds on all ranks.
    """
    for _ in range(20):
        if not shares_memory(x):
            return False
        time.sleep(0.001)
    return True


def _cut_alike(shape: Sequence[int], parsed: Parsed, value: Tensor, mesh: Any) -> Layout:
    """A layout for a plain tensor in which what it takes in need not move: cut where masks and the value are."""
    layout = Layout.replicate(mesh, shape)
    # for each dim of the basic part: the dim of the tensor it is a slice of, and the slice
    parts: list[tuple[int, tuple[int, int, int]] | None] = []
    dim = 0
    for item in parsed.items:
        if not isinstance(item, int):
            parts.append(None if item is None else (dim, item))
        dim += item is not None
    wanted: list[tuple[int, Tensor, int]] = []  # (dim of the basic part, tensor, dim of it)
    taken: list[int] = []
    entries = 0
    for at, tensor in parsed.tensors:
        n = tensor.ndim if is_mask(tensor) else 1
        taken += range(at, at + n)
        entries = max(entries, 1 if is_mask(tensor) else tensor.ndim)
        if is_mask(tensor):
            wanted += [(at + d, tensor, d) for d in range(n)]
    rest: list[int | None] = [d for d in range(len(parts)) if d not in taken]
    if taken:
        rest[place(taken) : place(taken)] = [None] * entries
    for d, i in zip(reversed(rest), reversed(range(value.ndim)), strict=False):
        if d is not None:
            wanted.append((d, value, i))
    for d, tensor, i in wanted:
        part = parts[d]
        if part is None or not isinstance(tensor, ShardTensor):
            continue
        spot, cut = part[0], tensor._simple_value()._layout.dims[i]
        fits = tensor.shape[i] == len(range(*part[1])) and not set(cut[0].axes) & set(layout.shard_axes)
        if cut[0].axes and fits and not layout.axes_of(spot):
            layout = layout.with_dim(spot, _lifted(cut[0], part[1], shape[spot]))
    return layout


def _lifted(factor: Factor, item: tuple[int, int, int], size: int) -> Factor:
    """The cut of a dim of which a slice is cut as `factor`.

    >>> _lifted(Factor(3, (0,), (1, 2)), (1, 7, 2), 9)
    Factor(size=9, axes=(0,), lengths=(3, 6))
    """
    start, _, step = item
    marks = [min(size, start + at * step) for at in starts(factor.lengths)[1:]]
    ends = zip([0, *marks], [*marks, size], strict=True)
    return Factor(size, factor.axes, tuple(b - a for a, b in ends))


# ---------------------------------------------------------------------- index_put


@composed("index_put")
def index_put(input, indices, values, accumulate=False):
    """x[indices] = values (or +=), out of place."""
    parsed = _put_index(input, indices)
    masks = any(is_mask(t) for _, t in parsed.tensors)
    mesh = mesh_of((input, *indices, values), None)
    if parsed.tensors and not any(isinstance(i, int) for i in parsed.items) and (accumulate or not masks):
        _same_dtype(input, values)
        found, dims = by_number(parsed.tensors)
        values = in_order(values, input.shape, found, dims)
        return run_put(torch.index_put, (), (as_shard(input, mesh), values, accumulate, torch.Size(dims), *found), {})
    made = as_shard(input, mesh)._whole_value()
    made = wrap(made._local_tensor.clone(), made._layout)
    _assign(made, parsed, values, accumulate)
    return made


@handler("index_put_")
def index_put_(func, types, args, kwargs):
    """x[indices] = values (or +=)."""
    return _index_put_(*args, **kwargs)


def _index_put_(input, indices, values, accumulate=False):
    parsed = _put_index(input, indices)
    if input.__class__ is ShardTensor:
        input._writable()
        settle(input)
        _assign(input, parsed, values, accumulate)
        return input
    result = index_put(input, indices, values, accumulate)
    return input.copy_(replicated(result))


def _put_index(input: Tensor, indices: Any) -> Parsed:
    if not isinstance(indices, (tuple, list)) or not all(isinstance(i, Tensor) for i in indices):
        raise TypeError("index_put(): indices must be a tuple of tensors")
    return parse(input.shape, tuple(indices), input.device)
