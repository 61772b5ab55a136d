"""Shard a replicated buffer like the value that is written into it.

`buf = torch.zeros(...)` or `x.new_zeros(...)` says nothing about a sharding; `buf[:, :8] = x`, `buf[...].add_(x)` and
`buf.narrow(...).copy_(x)` do. The buffer takes the sharding of `x`, without a message for its values. Otherwise `x`
would be gathered into it. A plain buffer becomes a ShardTensor. If anything but the buffer and the view that is written
refers to its memory, on any rank, it stays as it is: the other tensor would not see the write. Ranks agree on this in
one message of a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ... import runtime, trace_state
from ..._compat.storage import is_sole_holder, is_sole_reference, is_viewed_once
from ...comm import consensus
from ...layout import DimSharding, Layout, rescale, starts
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.blockwise import moved_origins
from .basic_index import plan_basic_index
from .parse_index import IndexItem, ParsedIndex, index_result_dim, is_mask
from .result_placement import choose_result_layout, find_row_origin, swap_value

MAX_IMBALANCE = 1.25  # of a buffer's largest shard, relative to that of what is written into it


def is_buffer_for(target: Tensor, values: Sequence[Any]) -> bool:
    """Return whether a value sharded over axes that `target` is not sharded over is written into it, or a slice of it.

    Small targets stay as they are.
    """
    if target.__class__ is ShardTensor:
        held: Layout = target._layout  # type: ignore[attr-defined]
        if held.is_sharded_over_all_axes or held.partial or target._deferred is not None:  # type: ignore[attr-defined]
            return False
        buffer, taken = target._slice_of, held.shard_axes  # type: ignore[attr-defined]
    else:
        buffer, taken = target._base, ()
    if (target if buffer is None else buffer).numel() < runtime.active.min_scattered:
        return False
    layouts = [v._layout for v in values if v.__class__ is ShardTensor]
    return any(a not in taken for layout in layouts for a in layout.nontrivial_axes(layout.shard_axes))


def shard_buffer(target: Tensor, values: Sequence[Any], parsed: ParsedIndex | None = None) -> bool:
    """Shard the buffer of an in-place call on `target` like the largest of `values`; return whether it was done.

    `parsed` is the index of `target` that is written, by default all of it; `values` are then the value and the tensors
    of the index. If `target` is itself a slice of a buffer, that buffer is sharded.

    Communicates: all ranks must call it.
    """
    sharded = [v for v in values if isinstance(v, ShardTensor)]
    value = values[0] if parsed is not None else max(sharded, key=lambda v: v.numel())
    mesh = sharded[0].device_mesh
    written = parsed or ParsedIndex(tuple((0, n, 1) for n in target.shape), [])
    # Nothing below may refer to the local tensors while their references are counted.
    buffer, items = _buffer_of(target)
    refused = buffer is None or not (_is_unshared(buffer) if items is None else _is_viewed_by(buffer, target))
    groups = [mesh.get_group(a) for a in range(mesh.ndim) if mesh.size(a) > 1]
    if consensus.any_rank([refused], groups)[0]:
        return False
    assert buffer is not None
    if items is not None:
        written = ParsedIndex(_nested_items(items, written.items), written.tensors)
    before = buffer._layout if isinstance(buffer, ShardTensor) else Layout.replicate(mesh, buffer.shape)
    layout = layout_like_value(before, written, value)
    if layout.bare is before.bare:
        return False
    local = buffer._local_tensor if isinstance(buffer, ShardTensor) else buffer
    made = wrap(redistribute(local, before, layout).clone(), layout)
    del local
    if items is not None:  # the view first: it refers to the memory of the buffer
        _replace(target, plan_basic_index(layout, items).run(made))
    _replace(buffer, made)
    return True


def _replace(target: Tensor, value: ShardTensor) -> None:
    trace_state.drop_fake_reference(target)
    swap_value(target, value)


def _buffer_of(target: Tensor) -> tuple[Tensor | None, tuple[IndexItem, ...] | None]:
    """Return the buffer that `target` is a slice of, and the slice; `target` and None if it is no view.

    The buffer is None if it cannot be found, or if `target` is another kind of view.
    """
    if isinstance(target, ShardTensor):
        buffer: Any = target._slice_of
        if buffer is None:
            return (None if target._local_tensor._is_view() else target), None
        if buffer._deferred is not None or buffer._layout.partial:
            return None, None
        items = _find_slice(buffer._local_tensor, target._local_tensor)
        items = None if items is None else _global_items(items, buffer._layout, target.shape)
    else:
        buffer = target._base if target._is_view() else None
        if buffer is None:
            return target, None
        items = _find_slice(buffer, target)
    return (None, None) if items is None else (buffer, items)


def _global_items(items: tuple[IndexItem, ...], layout: Layout, shape: Sequence[int]) -> tuple[IndexItem, ...] | None:
    """Return the index of a buffer from that of its shard, where sharded dims are taken in full; None if they are not.

    `shape` is the global shape of the slice.
    """
    found: list[IndexItem] = list(items)
    for dim in layout.sharded_dims:
        if found[dim] != (0, layout.local_shape[dim], 1):
            return None
        found[dim] = (0, layout.shape[dim], 1)
    sizes = [len(range(*item)) for item in found if isinstance(item, tuple)]
    return tuple(found) if sizes == list(shape) else None


def _nested_items(outer: Sequence[IndexItem], inner: Sequence[IndexItem]) -> tuple[IndexItem, ...]:
    """Return the index that takes `inner` of the slice `outer`.

    >>> _nested_items([2, (4, 16, 2), (0, 9, 1)], [None, (1, 5, 3), 7])
    (2, None, (6, 13, 6), 7)
    """
    rest, found = list(inner), list[IndexItem]()
    for item in outer:
        if isinstance(item, tuple):
            while rest[0] is None:
                found.append(rest.pop(0))
            item = _nested_item(item, rest.pop(0))
        found.append(item)
    return (*found, *rest)


def _nested_item(outer: tuple[int, int, int], inner: IndexItem) -> IndexItem:
    start, _, step = outer
    if not isinstance(inner, tuple):
        return start + step * (inner or 0)
    n = len(range(*inner))
    first, step = start + step * inner[0], step * inner[2]
    return (first, first + (n - 1) * step + 1 if n else first, step)


def _find_slice(base: Tensor, view: Tensor) -> tuple[IndexItem, ...] | None:
    """Return the basic index that makes `view` of a contiguous `base`, from offset and strides; None if none does.

    >>> import torch
    >>> base = torch.zeros(4, 6)
    >>> _find_slice(base, base[1:, 2])
    ((1, 4, 1), 2)
    """
    if not base.is_contiguous() or not view.numel() or base.storage_offset() > view.storage_offset():
        return None
    offset, left = view.storage_offset() - base.storage_offset(), list(zip(view.shape, view.stride(), strict=True))
    items: list[IndexItem] = []
    for d, (size, stride) in enumerate(zip(base.shape, base.stride(), strict=True)):
        start, offset = divmod(offset, stride)
        fits = bool(left) and (left[0][0] == 1 or (left[0][1] >= stride and left[0][1] % stride == 0))
        if fits and (left[0][0] > 1 or len(left) == base.ndim - d or size == 1):
            n, step = left.pop(0)
            step = max(step // stride, 1) if n > 1 else 1
            items.append((start, min(start + (n - 1) * step + 1, size), step))
        else:
            items.append(start)
    index = tuple(i if isinstance(i, int) else slice(*i) for i in items if i is not None)
    again = base[index] if not left else base
    same = (again.shape, again.storage_offset()) == (view.shape, view.storage_offset()) and not left
    strides = zip(view.shape, view.stride(), again.stride(), strict=False)
    return tuple(items) if same and all(a == b for n, a, b in strides if n > 1) else None


def _is_unshared(buffer: Tensor) -> bool:
    """Return whether nothing else refers to the memory of a buffer on this rank."""
    if isinstance(buffer, ShardTensor):
        alone = is_sole_holder(buffer.__dict__, "_local_tensor") and not buffer._copied_view
        return alone and _is_writable(buffer._local_tensor) and is_sole_reference(buffer._local_tensor)
    return _is_writable(buffer) and is_sole_reference(buffer)


def _is_viewed_by(buffer: Tensor, view: Tensor) -> bool:
    """Return whether a buffer has a single view, and nothing else refers to the memory of both on this rank."""
    if isinstance(buffer, ShardTensor):
        held = [is_sole_holder(t.__dict__, "_local_tensor", viewed=t is buffer) for t in (buffer, view)]
        return (
            all(held)
            and not (buffer._copied_view or view._copied_view)
            and _is_writable(buffer._local_tensor)
            and is_viewed_once(buffer._local_tensor, view._local_tensor)
        )
    trace_state.drop_fake_reference(view)
    return _is_writable(buffer) and is_viewed_once(buffer, view)


def _is_writable(local: Tensor) -> bool:
    trace_state.drop_fake_reference(local)
    return trace_state.is_plain(local) and not local._is_view() and not (local.is_leaf and local.requires_grad)


# ---------------------------------------------------------------------- the layout


def layout_like_value(layout: Layout, parsed: ParsedIndex, value: Tensor) -> Layout:
    """Shard `layout`, of a buffer, further, so that masks and a value written into it need no redistribute.

    A dim that is written by an index takes the sharding that the values' rows come from, or is divided.
    """
    # for each dim after the basic index: the dim of the tensor that it is a slice of, and the slice
    parts: list[tuple[int, tuple[int, int, int]] | None] = []
    shape, dim = layout.shape, 0
    for item in parsed.items:
        if not isinstance(item, int):
            parts.append(None if item is None else (dim, item))
        dim += item is not None
    for d, tensor, i in _matching_dims(parsed, len(parts), value):
        part = parts[d]
        if part is None or not isinstance(tensor, ShardTensor):
            continue
        (sharding, *_) = tensor._unmerged_value()._layout.dims[i]
        out_dim, fits = part[0], tensor.shape[i] == len(range(*part[1])) and not layout.axes_of(part[0])
        if fits and sharding.axes and not set(sharding.axes) & set(layout.shard_axes):
            layout = layout.with_dim(out_dim, _unslice_sharding(sharding, part[1], shape[out_dim]))
        elif fits and not sharding.axes:
            (factor,) = layout.dims[out_dim]
            layout = layout.with_dim(out_dim, factor.with_origins(factor.origins, moved_origins(tensor._layout, i)))
    return _shard_indexed_dim(layout, parsed, parts, value) if parsed.tensors else layout


def _shard_indexed_dim(layout: Layout, parsed: ParsedIndex, parts: Sequence[Any], value: Tensor) -> Layout:
    """Shard a dim that an index or a mask selects entries of, over the axes that shard the entries of the value."""
    taken, entries = _indexed_dims(parsed)
    dims = [part[0] for part in (parts[d] for d in taken) if part is not None]
    out_dim = next((d for d in dims if not layout.axes_of(d) and layout.shape[d] > 1), None)
    if out_dim is None or not all(map(_has_values, (tensor for _, tensor in parsed.tensors))):
        return layout  # an index whose values are unknown is written into a replicated dim alone
    after = len(parts) - len(taken) - index_result_dim(taken)
    rows = _entry_shardings(value, value.ndim - after - entries, value.ndim - after)
    if not rows and layout.numel >= runtime.active.min_scattered:  # a number that is written at sharded places
        rows = [f for _, index in parsed.tensors if not is_mask(index) for f in _entry_shardings(index, 0, index.ndim)]
    axes = tuple(dict.fromkeys(a for factor in rows for a in factor.axes if a not in layout.shard_axes))
    if not axes:
        return layout
    origin = find_row_origin(layout.shape[out_dim], *(factor.origins for factor in rows))
    return choose_result_layout(layout, out_dim, axes, value.numel(), value.dtype.itemsize, False, origin)


def _has_values(tensor: Tensor) -> bool:
    return not trace_state.values_unknown() or trace_state.is_concrete(tensor)


def _entry_shardings(tensor: Tensor, start: int, stop: int) -> list[DimSharding]:
    """Return the shardings of those of these dims of a tensor that are sharded."""
    if not isinstance(tensor, ShardTensor):
        return []
    layout = tensor._unmerged_value()._layout
    return [layout.dims[i][0] for i in range(max(start, 0), stop) if layout.is_sharded(i)]


def _indexed_dims(parsed: ParsedIndex) -> tuple[list[int], int]:
    """Return the dims after the basic index that masks and index tensors take, and the dims of the entries."""
    taken = [at + d for at, tensor in parsed.tensors for d in range(tensor.ndim if is_mask(tensor) else 1)]
    return taken, max((1 if is_mask(tensor) else tensor.ndim for _, tensor in parsed.tensors), default=0)


def _matching_dims(parsed: ParsedIndex, ndim: int, value: Tensor) -> list[tuple[int, Tensor, int]]:
    """Return (dim after the basic index, tensor, dim of that tensor) for masks of the index and the written value."""
    wanted = [(at + d, tensor, d) for at, tensor in parsed.tensors if is_mask(tensor) for d in range(tensor.ndim)]
    taken, entries = _indexed_dims(parsed)
    rest: list[int | None] = [d for d in range(ndim) if d not in taken]
    if taken:
        rest[index_result_dim(taken) : index_result_dim(taken)] = [None] * entries
    for d, i in zip(reversed(rest), reversed(range(value.ndim)), strict=False):
        if d is not None:
            wanted.append((d, value, i))
    return wanted


def _unslice_sharding(factor: DimSharding, item: tuple[int, int, int], size: int) -> DimSharding:
    """Return a sharding of a dim of `size` whose slice `item` is sharded as `factor`, if it is as balanced as `factor`.

    >>> _unslice_sharding(DimSharding(3, (0,), (1, 2)), (1, 7, 2), 9)
    DimSharding(size=9, axes=(0,), shard_sizes=(3, 6))
    >>> _unslice_sharding(DimSharding(6, (0,), (3, 3)), (0, 6, 1), 12)
    DimSharding(size=12, axes=(0,), shard_sizes=(6, 6))
    """
    start, _, step = item
    marks = [min(size, start + at * step) for at in starts(factor.shard_sizes)[1:]]
    sizes = tuple(b - a for a, b in zip([0, *marks], [*marks, size], strict=True))
    if max(sizes) * factor.size > MAX_IMBALANCE * max(factor.shard_sizes) * size:  # the rows beside a slice
        sizes = rescale(factor.shard_sizes, size)
    return DimSharding(size, factor.axes, sizes)
