"""The order in memory of the result of attention: it decides whether `contiguous` or a reshape of it is a copy.

A CPU's flash kernel returns the order of the queries, and its other kernel returns contiguous memory. Kernels of GPUs
place heads next to features: there results stay in the order in which they are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..._compat import choose_attention_kernel, without_modes

IN_ORDER = (0, 1, 2, 3)
HEADS_INSIDE = (0, 2, 1, 3)  # heads next to features


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
    """Return `t` with its dims in this order in memory: a copy, unless they are.

    Dims of size 1 have the strides of that order too: other ranks, or one device, may have more than one element there.
    """
    order = tuple(range(t.ndim)) if order == IN_ORDER else order  # of any number of leading dims
    if not t.permute(order).is_contiguous():
        inverse = [order.index(d) for d in range(len(order))]
        t = t.permute(order).contiguous().permute(inverse)
    if 1 in t.shape:
        strides = torch.empty_permuted(t.shape, order, device="meta").stride()
        if t.stride() != strides:
            return t.as_strided(t.shape, strides)
    return t
