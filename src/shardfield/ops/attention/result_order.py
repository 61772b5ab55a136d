"""The order in memory of the result of attention: it decides whether `contiguous` or a reshape of it is a copy.

A CPU's flash kernel returns the order of the queries, and its other kernel returns contiguous memory. Kernels of GPUs
place heads next to features: there results stay in the order in which they are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..._compat import without_modes
from ..._compat.attention import choose_attention_kernel
from ...tensor import ShardTensor, wrap

IN_ORDER = (0, 1, 2, 3)
HEADS_INSIDE = (0, 2, 1, 3)  # heads next to features


def keep_order(out: ShardTensor, named: Mapping[str, Any]) -> ShardTensor:
    """Return the result in one device's order in memory, which moving the queries or the result may have changed."""
    local = out._local_tensor
    if local.device.type != "cpu":
        return out
    tensors = [t for t in (named.get(name) for name in ("query", "key", "value", "attn_mask")) if t is not None]
    held = [t._local_tensor if isinstance(t, ShardTensor) else t for t in tensors]
    short = _is_short(local, out.shape) or _is_short(held[0], tensors[0].shape)
    if held[0].is_contiguous() and local.is_contiguous() and not short:
        return out  # whatever kernel one device calls
    options = named.get("dropout_p", 0.0), named.get("is_causal", False), named.get("enable_gqa", False)
    order = result_order(held, [t.shape for t in tensors], out.dtype, *options)
    assert order is not None
    ordered = in_order(local, order)
    if short:
        ordered = _with_strides(ordered, order)
    return out if ordered is local else wrap(ordered, out._layout)


def result_order(
    tensors: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[int, ...] | None:
    """Return the dims of one device's result on a CPU, outermost in memory first; None on other devices.

    tensors: the local queries, keys, values and, if any, mask. shapes: their global shapes. dtype: that of the result.
    """
    query = tensors[0]
    if query.device.type != "cpu":
        return None
    modes = contextlib.nullcontext() if type(query) is Tensor else without_modes()  # torch names no kernel in a trace
    with modes:
        kernel = _kernel(tensors, shapes, dtype, dropout_p, is_causal, enable_gqa)
    if kernel != SDPBackend.FLASH_ATTENTION.value:
        return IN_ORDER
    strides, shape = torch.empty_like(query, device="meta").stride(), query.shape
    # A dim of size 1, such as a shard of one head, has the stride of the dim around it. Features stay innermost, also
    # on a rank without rows, whose strides say nothing: torch's backward kernel would be wrong.
    return (*sorted(range(3), key=lambda d: (-strides[d], -shape[d])), 3)


def _kernel(tensors: Sequence[Tensor], shapes, dtype, dropout_p, is_causal, enable_gqa) -> int:
    """Return the kernel that torch chooses for stand-ins of the global shapes, which is the same on all ranks."""
    stand_ins = [  # the memory of one row
        torch.empty_strided(shape, (*[0] * (len(shape) - 1), *t.stride()[-1:]), dtype=dtype)
        for shape, t in zip(shapes[:3], tensors[:3], strict=True)
    ]
    bias = None
    for mask, shape in zip(tensors[3:], shapes[3:], strict=True):
        bias = torch.empty_strided(shape, [0] * len(shape), dtype=torch.bool if mask.dtype is torch.bool else dtype)
        bias.requires_grad_(mask.requires_grad)
    return choose_attention_kernel(*stand_ins, bias, dropout_p, is_causal, enable_gqa=enable_gqa)


def in_order(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `t` with its dims in this order in memory: a copy, unless they are."""
    if order == IN_ORDER:
        return t.contiguous()
    inverse = [order.index(d) for d in range(len(order))]
    return t if t.permute(order).is_contiguous() else t.permute(order).contiguous().permute(inverse)


def _is_short(local: Tensor, shape: Sequence[int]) -> bool:
    """Return whether this rank has at most one element along a longer dim of the global `shape`: it hides the order."""
    return any(n < 2 and n != size for n, size in zip(local.shape, shape, strict=True))


def _with_strides(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `t`, whose dims are in this order in memory, with strides of dims of size 1 that show the order."""
    order = tuple(range(t.ndim)) if order == IN_ORDER else order  # of any number of leading dims
    strides = torch.empty_permuted(t.shape, order, device="meta").stride()
    return t if t.stride() == strides else t.as_strided(t.shape, strides)
