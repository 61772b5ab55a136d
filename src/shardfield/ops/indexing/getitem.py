"""`x[index]`, `x[index] = value` and `index_put`, for slices, ints, None, Ellipsis, masks and index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime, trace_state
from ...comm.consensus import Consensus
from ...dispatch.copied_views import write_through
from ...dispatch.registry import composed, gather_fallback, handler, mesh_of, to_full_tensor
from ...layout import Layout
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from ..spectral import lazy_spectrum
from ..spectral.mode_blocks import format_index
from .basic_index import BasicIndexPlan, as_shard_tensor, plan_basic_index
from .buffers import is_buffer_for, layout_like_value, shard_buffer
from .gather_rows import index_with_tensors
from .index_put import reduce_partial, run_in_place, run_index_put
from .mask import masked_put, masked_rows, nonzero
from .parse_index import (
    ParsedIndex,
    basic_index_key,
    broadcast_index_shapes,
    index_result_dim,
    is_mask,
    parse_index,
)
from .result_placement import has_lasting_aliases


@handler("__getitem__")
def getitem(func, types, args, kwargs):
    x, index = args
    if x.__class__ is ShardTensor:
        if x._deferred is not None:
            found = lazy_spectrum.read_block(x, index)
            if found is not None:
                return found
        key = basic_index_key(index)
        if key is not None:
            return cached_basic_plan(x._layout, key).run(x)
    parsed = parse_index(x.shape, index, x.device)
    if x.__class__ is not ShardTensor:
        if not parsed.tensors:  # the ShardTensors of the index have no dims and were read as numbers
            return x[tuple(i if i is None or isinstance(i, int) else slice(*i) for i in parsed.items)]
        x = as_shard_tensor(x, mesh_of(args, None))
    takes_all = all(i == (0, n, 1) for i, n in zip(parsed.items, x.shape, strict=False)) and len(parsed.items) == x.ndim
    y = x if takes_all and parsed.tensors else plan_basic_index(x._layout, parsed.items).run(x)
    if not parsed.tensors:
        return y
    if len(parsed.tensors) == 1 and is_mask(parsed.tensors[0][1]):
        return masked_rows(y, *parsed.tensors[0])
    return index_with_tensors(y, *masks_to_indices(parsed.tensors))


@runtime.memo
def cached_basic_plan(layout: Layout, key: tuple) -> BasicIndexPlan:
    """Return the plan of an index of slices, ints, None and Ellipsis, cached under the index as written."""
    index = tuple(slice(*k) if k.__class__ is tuple else k for k in key)
    return plan_basic_index(layout, parse_index(layout.shape, index, torch.device("cpu")).items)


def masks_to_indices(tensors: Sequence[tuple[int, Tensor]]) -> tuple[list[Tensor], list[int]]:
    """Return index tensors and the dims that they index; a mask becomes the indices of its true elements."""
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
        return _setitem_on_plain(func, types, args)
    if x._deferred is not None and lazy_spectrum.write_block(x, index, value):
        return None
    if x._copied_view and write_through(x, lambda new: setitem(func, types, (new, index, value), kwargs)):
        return None
    x._check_writable()
    reduce_partial(x)
    parsed, value = parse_index(x.shape, index, x.device), _value_as_tensor(value, x)
    _shard_written(x, parsed, value)
    _assign(x, parsed, value)


def _shard_written(x: Tensor, parsed: ParsedIndex, value: Tensor) -> bool:
    """Shard a buffer that a value is written into, if nothing else refers to it; return whether it was done."""
    values = [value, *(tensor for _, tensor in parsed.tensors)]
    return is_buffer_for(x, values) and shard_buffer(x, values, parsed)


def _value_as_tensor(value: Any, x: Tensor) -> Tensor:
    """Return the assigned value as a tensor; a number is converted as in torch, with torch's errors."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, float, complex)):
        raise TypeError(f"can't assign a {type(value).__name__} to a {type(x).__name__} of {x.dtype}")
    return torch.full((), value, dtype=x.dtype, device=x.device)


def _assign(x: ShardTensor, parsed: ParsedIndex, value: Tensor, accumulate: bool = False) -> None:
    plan = plan_basic_index(x._layout, parsed.items, True)
    if plan.source is not x._layout:  # a slice across the factors of a merged dim is no view
        unmerged = wrap(redistribute(x._local_tensor, x._layout, plan.source).clone(), plan.source)
        _assign(unmerged, parsed, value, accumulate)
        x._write(unmerged)
        return
    y = plan.view(x)
    real = [d for d in range(y.ndim) if d not in plan.kept_dims]  # the dims of torch's result
    shape = [y.shape[d] for d in real]
    tensors = parsed.tensors
    if not tensors:
        written = _insert_singleton_dims(_fit_to_shape(value, shape), y.ndim, plan.kept_dims)
        y.add_(written) if accumulate else y.copy_(written)
    elif len(tensors) == 1 and is_mask(tensors[0][1]) and not accumulate:
        ((at, mask),) = tensors
        if value.numel() != 1:
            _check_same_dtype(x, value)
        value = _move_dims_first(value, shape[:at] + [-1] + shape[at + mask.ndim :], at, 1)
        rest = [d for d in range(y.ndim) if not real[at] <= d < real[at] + mask.ndim]
        masked_put(
            y, real[at], mask, _insert_singleton_dims(value, 1 + len(rest), [1 + rest.index(d) for d in plan.kept_dims])
        )
    else:
        _check_same_dtype(x, value)
        indices, dims = masks_to_indices(tensors)
        value = index_dims_first(value, shape, indices, dims)
        n = value.ndim - (len(real) - len(dims))
        where = [real[d] for d in dims]
        rest = [d for d in range(y.ndim) if d not in where]
        value = _insert_singleton_dims(value, n + len(rest), [n + rest.index(d) for d in plan.kept_dims])
        run_in_place(run_index_put, Tensor.index_put_, y, (value, accumulate, torch.Size(where), *indices), {})


def index_dims_first(value: Tensor, shape: Sequence[int], indices: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Permute the value of `x[indices] = value`, for x of `shape`: index dims first, then the other dims of x."""
    entries = broadcast_index_shapes([i.shape for i in indices])
    at = index_result_dim(dims)
    rest = [n for d, n in enumerate(shape) if d not in dims]
    return _move_dims_first(value, [*rest[:at], *entries, *rest[at:]], at, len(entries))


def _check_same_dtype(x: Tensor, value: Tensor) -> None:
    if value.dtype != x.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
            f"{value.dtype} for the source."
        )


def _fit_to_shape(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `value` without leading dims of size 1 beyond `shape` (-1: any size), or raise torch's error."""
    given = list(value.shape)
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    if value.ndim > len(shape) or any(m not in (n, 1) and n != -1 for m, n in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {given} cannot be broadcast to indexing result of shape {shape}"
        )
    return value


def _move_dims_first(value: Tensor, shape: Sequence[int], at: int, n: int) -> Tensor:
    """Return `value` with all dims of `shape`, the `n` dims from `at` on first."""
    value = _fit_to_shape(value, shape)
    if value.ndim < len(shape):
        value = value[(None,) * (len(shape) - value.ndim)]
    order = [*range(at, at + n), *(d for d in range(len(shape)) if not at <= d < at + n)]
    return value if order == sorted(order) else value.permute(order)


def _insert_singleton_dims(value: Tensor, ndim: int, kept: Sequence[int]) -> Tensor:
    """Return `value` with dims of size 1 at `kept`: dims of our view of `ndim` dims that torch's result lacks."""
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


def _setitem_on_plain(func, types, args):
    """Write a ShardTensor into a plain tensor: `x` itself becomes a ShardTensor, sharded as the value.

    If another tensor or autograd refers to the memory of `x`, on any rank, the value is gathered on all ranks instead:
    after a swap the other tensor would not see the write. Ranks agree on this in one small message, which also checks
    that all of them make the same call. A rank that decided alone, from its own references, would block in a collective
    that the others skip.
    """
    x, index, value = args
    mesh = mesh_of(args, None)
    if x._is_view():  # buffer[0][:, :8] = value
        if _shard_written(x, parse_index(x.shape, index, x.device), _value_as_tensor(value, x)):
            return setitem(func, types, args, {})
    written = getattr(value, "_layout", "a plain value")
    call = f"writing {written} into a plain tensor of {tuple(x.shape)} at {format_index(index)}"
    if Consensus.start(mesh, call, flag=has_lasting_aliases(x), always=True).wait():
        gather_fallback(func, types, args, {})
        return
    out = lazy_spectrum.defer_block_write(x, index, value, mesh)
    if out is None:
        parsed = parse_index(x.shape, index, x.device)
        value = _value_as_tensor(value, x)
        layout = layout_like_value(Layout.replicate(mesh, x.shape), parsed, value)
        if x.dtype.is_complex:
            layout = lazy_spectrum.mark_assembled(layout)
        out = wrap(_take_over(x, layout), layout)
        _assign(out, parsed, value)
    trace_state.drop_fake_reference(x)
    torch.utils.swap_tensors(x, out)


def _take_over(x: Tensor, layout: Layout) -> Tensor:
    """Return the local tensor under `layout` of a plain tensor to whose memory nothing else refers.

    A view that stays alive here would hold `x`, which is swapped.
    """
    local = redistribute(x, Layout.replicate(layout.mesh, x.shape), layout)
    return x.data if local is x and not x.requires_grad else local.clone()


# ---------------------------------------------------------------------- index_put


@composed("index_put")
def index_put(input, indices, values, accumulate=False):
    """Return a copy of `input` with `input[indices] = values`, or `+=`."""
    parsed = _parse_put_indices(input, indices)
    masks = any(is_mask(t) for _, t in parsed.tensors)
    mesh = mesh_of((input, *indices, values), None)
    if parsed.tensors and not any(isinstance(i, int) for i in parsed.items) and (accumulate or not masks):
        _check_same_dtype(input, values)
        found, dims = masks_to_indices(parsed.tensors)
        values = index_dims_first(values, input.shape, found, dims)
        return run_index_put(
            torch.index_put, (), (as_shard_tensor(input, mesh), values, accumulate, torch.Size(dims), *found), {}
        )
    out = as_shard_tensor(input, mesh)._reduced_value()
    out = wrap(out._local_tensor.clone(), out._layout)
    _assign(out, parsed, values, accumulate)
    return out


@handler("index_put_")
def index_put_(func, types, args, kwargs):
    """Write `input[indices] = values`, or `+=`, in place."""
    return _index_put_(*args, **kwargs)


def _index_put_(input, indices, values, accumulate=False):
    parsed = _parse_put_indices(input, indices)
    if input.__class__ is ShardTensor:
        input._check_writable()
        reduce_partial(input)
    _shard_written(input, parsed, values)
    if input.__class__ is ShardTensor:
        _assign(input, parsed, values, accumulate)
        return input
    result = index_put(input, indices, values, accumulate)
    return input.copy_(to_full_tensor(result))


def _parse_put_indices(input: Tensor, indices: Any) -> ParsedIndex:
    if not isinstance(indices, (tuple, list)) or not all(isinstance(i, Tensor) for i in indices):
        raise TypeError("index_put(): indices must be a tuple of tensors")
    return parse_index(input.shape, tuple(indices), input.device)
