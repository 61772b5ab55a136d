"""`as_strided`: elements by their place in memory, which a sharded tensor has in shards only.

Slices and windows of a contiguous tensor, as Longformer's overlapping chunks, are taken by `unfold`. For others the
tensor is gathered into memory with the strides that `stride()` reports. Ranks compare the strides first: the rank with
the largest shards shows the order of the dims, and one that shows another order differs. Refused are a slice, whose
memory on one device has other elements in between, and tensors whose largest shard has size 0 or 1 along a dim, so that
no rank shows the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat.storage import storage_of
from ...comm.consensus import Consensus
from ...dispatch.copied_views import CopiedView
from ...dispatch.registry import gather_fallback, handler
from ...dispatch.write_tracking import set_copied_view
from ...layout import Layout, shard_sizes_of
from ...tensor import ShardTensor
from .strided_windows import find_windows, take_windows


@handler("as_strided")
def as_strided(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Take elements by strides: as windows where they are, otherwise of the gathered tensor."""
    named = dict(zip(("input", "size", "stride", "storage_offset"), args, strict=False)) | kwargs
    x = named.pop("input", None)
    if x.__class__ is not ShardTensor or not (x._layout.shard_axes or x._layout.partial):
        return gather_fallback(func, types, args, kwargs)
    strides = x.stride()
    problem = None
    if x._narrowed or not _fills_memory(x._local_tensor):
        problem = "it is a slice of a larger tensor; redistribute it to Replicate first"
    elif _hides_order(x._layout) and not _is_made_contiguous(x):
        problem = (
            "a shard of size 0 or 1 does not show the order of the dims in memory; redistribute it to Replicate first"
        )
    asked = ", ".join(f"{name} {value}" for name, value in named.items())
    call = f"as_strided of {x._layout} with strides {strides}: {asked}"
    with Consensus.start(x._layout.mesh, call, problem=problem, always=True):
        windows = None
        if len(named) >= 2 and strides == _row_major(x.shape):
            windows = find_windows(x.shape, named["size"], named["stride"], named.get("storage_offset") or 0)
        order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))

    if windows is not None:
        return take_windows(x, windows, named["size"])

    def as_strided(full: Tensor, **named: Any) -> Tensor:
        in_memory = full.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
        return torch.as_strided(in_memory, **named)

    out = gather_fallback(as_strided, types, (x,), named)
    # On one device this is a view: writes into it are refused, and writes into the tensor reach it.
    set_copied_view(out, True)
    CopiedView(out, x, lambda source: torch.as_strided(source, **named))
    return out


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))


def _fills_memory(local: Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory, in any order of the dims."""
    if storage_of(local).nbytes() != local.numel() * local.element_size():
        return False
    sizes = sorted((stride, n) for n, stride in zip(local.shape, local.stride(), strict=True) if n > 1)
    step = 1
    for stride, n in sizes:
        if stride != step:
            return local.numel() < 2
        step *= n
    return True


def _is_made_contiguous(x: ShardTensor) -> bool:
    """Return whether a tensor is a leaf that a program made, not the result of a call."""
    local = x._local_tensor
    return local.is_leaf and local.requires_grad and not local._is_view()


def _hides_order(layout: Layout) -> bool:
    """Return whether the rank with the largest shards cannot tell the order of the dims, so that none can."""
    sizes = [math.prod(max(shard_sizes_of(f), default=0) for f in factors) for factors in layout.dims]
    long = [n for n, size in zip(sizes, layout.shape, strict=True) if size > 1]
    return len(long) > 1 and min(long) <= 1
