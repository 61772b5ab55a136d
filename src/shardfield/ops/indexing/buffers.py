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
from ..._compat import is_sole_holder, is_sole_reference, is_viewed_once
from ...comm import consensus
from ...layout import DimSharding, Layout, starts
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.blockwise import moved_origins
from .basic_index import plan_basic_index
from .parse_index import IndexItem, ParsedIndex, index_result_dim, is_mask
from .result_placement import swap_value


def is_buffer_for(target: Tensor, values: Sequence[Any]) -> bool:
    """Return whether a sharded value is written into a large plain or replicated `target`, or into a slice of one."""
    if target.__class__ is ShardTensor:
        if _is_placed(target):  # type: ignore[arg-type]
            return False
        buffer: Any = target._slice_of  # type: ignore[attr-defined]
    else:
        buffer = target._base
    if (target if buffer is None else buffer).numel() < runtime.active.min_scattered:
        return False
    return any(v.__class__ is ShardTensor and v._layout.nontrivial_axes(v._layout.shard_axes) for v in values)


def _is_placed(target: ShardTensor) -> bool:
    return target._deferred is not None or not target._layout.is_replicated


def shard_buffer(target: Tensor, values: Sequence[Any], parsed: ParsedIndex | None = None) -> bool:
    """Shard the buffer of an in-place call on `target` like the largest of `values`; return whether it was done.

    `parsed` is the index of `target` that is written, by default all of it. If `target` is itself a slice of a buffer,
    that buffer is sharded. Communicates: all ranks must call it.
    """
    value = max((v for v in values if isinstance(v, ShardTensor)), key=lambda v: v.numel())
    mesh = value.device_mesh
    written = parsed or ParsedIndex(tuple((0, n, 1) for n in target.shape), [])
    # Nothing below may refer to the local tensors while their references are counted.
    buffer, items = (target, None) if parsed is not None else _buffer_of(target)
    refused = buffer is None or not (_is_unshared(buffer) if items is None else _is_viewed_by(buffer, target))
    groups = [mesh.get_group(a) for a in range(mesh.ndim) if mesh.size(a) > 1]
    if consensus.any_rank([refused], groups)[0]:
        return False
    assert buffer is not None
    layout = layout_like_value(buffer.shape, written if items is None else ParsedIndex(items, []), value, mesh)
    if not layout.nontrivial_axes(layout.shard_axes):
        return False
    local = buffer._local_tensor if isinstance(buffer, ShardTensor) else buffer
    made = wrap(redistribute(local, Layout.replicate(mesh, buffer.shape), layout).clone(), layout)
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
        if buffer._slice_of is not None or _is_placed(buffer):
            return None, None
        items = _find_slice(buffer._local_tensor, target._local_tensor)
    else:
        buffer = target._base if target._is_view() else None
        if buffer is None:
            return target, None
        items = _find_slice(buffer, target)
    return (None, None) if items is None else (buffer, items)


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
        both = [is_sole_holder(t.__dict__, "_local_tensor") and not t._copied_view for t in (buffer, view)]
        return (
            all(both)
            and _is_writable(buffer._local_tensor)
            and is_viewed_once(buffer._local_tensor, view._local_tensor)
        )
    trace_state.drop_fake_reference(view)
    return _is_writable(buffer) and is_viewed_once(buffer, view)


def _is_writable(local: Tensor) -> bool:
    trace_state.drop_fake_reference(local)
    return trace_state.is_plain(local) and not local._is_view() and not (local.is_leaf and local.requires_grad)


# ---------------------------------------------------------------------- the layout


def layout_like_value(shape: Sequence[int], parsed: ParsedIndex, value: Tensor, mesh: Any) -> Layout:
    """Build a layout for a buffer, so that masks and a value written into it need no redistribute."""
    layout = Layout.replicate(mesh, shape)
    # for each dim after the basic index: the dim of the tensor that it is a slice of, and the slice
    parts: list[tuple[int, tuple[int, int, int]] | None] = []
    dim = 0
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
    return layout


def _matching_dims(parsed: ParsedIndex, ndim: int, value: Tensor) -> list[tuple[int, Tensor, int]]:
    """Return (dim after the basic index, tensor, dim of that tensor) for masks of the index and the written value."""
    wanted: list[tuple[int, Tensor, int]] = []
    taken: list[int] = []
    entries = 0
    for at, tensor in parsed.tensors:
        n = tensor.ndim if is_mask(tensor) else 1
        taken += range(at, at + n)
        entries = max(entries, 1 if is_mask(tensor) else tensor.ndim)
        if is_mask(tensor):
            wanted += [(at + d, tensor, d) for d in range(n)]
    rest: list[int | None] = [d for d in range(ndim) if d not in taken]
    if taken:
        rest[index_result_dim(taken) : index_result_dim(taken)] = [None] * entries
    for d, i in zip(reversed(rest), reversed(range(value.ndim)), strict=False):
        if d is not None:
            wanted.append((d, value, i))
    return wanted


def _unslice_sharding(factor: DimSharding, item: tuple[int, int, int], size: int) -> DimSharding:
    """Return a sharding of a dim of `size` whose slice `item` is sharded as `factor`.

    >>> _unslice_sharding(DimSharding(3, (0,), (1, 2)), (1, 7, 2), 9)
    DimSharding(size=9, axes=(0,), shard_sizes=(3, 6))
    """
    start, _, step = item
    marks = [min(size, start + at * step) for at in starts(factor.shard_sizes)[1:]]
    ends = zip([0, *marks], [*marks, size], strict=True)
    return DimSharding(size, factor.axes, tuple(b - a for a, b in ends))
