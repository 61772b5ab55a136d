"""`as_strided`: elements by their place in memory, which a sharded tensor has in shards only.

The tensor is gathered into memory with the strides that `stride()` reports, so that windows computed from them, as
Longformer's overlapping chunks, are those of one device. Ranks compare the strides first. Refused are a slice, whose
memory on one device has other elements in between, and shards of size 0 or 1 that do not show the order of the dims:
those of a view on any rank, and, since the result of a call may have the order of a view, those of any other tensor
that is not a leaf if no rank has a larger shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._compat import storage_of
from ...comm.consensus import Consensus
from ...dispatch.registry import gather_fallback, handler
from ...layout import Layout, shard_sizes_of
from ...tensor import ShardTensor


@handler("as_strided")
def as_strided(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Gather the tensor and take elements by strides."""
    named = dict(zip(("input", "size", "stride", "storage_offset"), args, strict=False)) | kwargs
    x = named.pop("input", None)
    if x.__class__ is not ShardTensor or not (x._layout.shard_axes or x._layout.partial):
        return gather_fallback(func, types, args, kwargs)
    strides = x.stride()
    problem = None
    if x._narrowed or not _fills_memory(x._local_tensor):
        problem = "it is a slice of a larger tensor; redistribute it to Replicate first"
    elif _hides_order(x._layout, min if x._local_tensor._is_view() else max) and not _is_made_contiguous(x):
        problem = (
            "a shard of size 0 or 1 does not show the order of the dims in memory; redistribute it to Replicate first"
        )
    asked = ", ".join(f"{name} {value}" for name, value in named.items())
    call = f"as_strided of {x._layout} with strides {strides}: {asked}"
    with Consensus.start(x._layout.mesh, call, problem=problem, always=True):
        order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))

    def as_strided(full: Tensor, **named: Any) -> Tensor:
        in_memory = full.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
        return torch.as_strided(in_memory, **named)

    return gather_fallback(as_strided, types, (x,), named)


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


def _hides_order(layout: Layout, of_ranks: Callable[..., int]) -> bool:
    """Return whether the rank with the smallest or largest shards (`of_ranks`) cannot tell the order of the dims."""
    sizes = [math.prod(of_ranks(shard_sizes_of(f), default=0) for f in factors) for factors in layout.dims]
    long = [n for n, size in zip(sizes, layout.shape, strict=True) if size > 1]
    return len(long) > 1 and min(long) <= 1
