"""`as_strided`: elements by their place in memory, which a sharded tensor has in shards only.

The tensor is gathered into memory with the strides that `stride()` reports, so that windows computed from them, as
Longformer's overlapping chunks, are those of one device. A rank whose shard has size 0 or 1 along a dim may report
other strides than the rest: ranks compare them first. A slice, whose memory on one device has other elements in
between, is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...comm.consensus import Consensus
from ...dispatch.registry import gather_fallback, handler
from ...tensor import ShardTensor


@handler("as_strided")
def as_strided(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Gather the tensor and take elements by strides."""
    named = dict(zip(("input", "size", "stride", "storage_offset"), args, strict=False)) | kwargs
    x = named.pop("input", None)
    if x.__class__ is not ShardTensor or not x._layout.shard_axes:
        return gather_fallback(func, types, args, kwargs)
    strides = x.stride()
    sliced = x._narrowed or not _is_dense(x._local_tensor)
    problem = "it is a slice of a larger tensor; take contiguous() first" if sliced else None
    asked = ", ".join(f"{name} {value}" for name, value in named.items())
    call = f"as_strided of {x._layout} with strides {strides}: {asked}"
    with Consensus.start(x._layout.mesh, call, problem=problem, always=True):
        order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))

    def as_strided(full: Tensor, **named: Any) -> Tensor:
        in_memory = full.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
        return torch.as_strided(in_memory, **named)

    return gather_fallback(as_strided, types, (x,), named)


def _is_dense(local: Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory, in any order of the dims."""
    sizes = sorted((stride, n) for n, stride in zip(local.shape, local.stride(), strict=True) if n > 1)
    step = 1
    for stride, n in sizes:
        if stride != step:
            return local.numel() < 2
        step *= n
    return True
