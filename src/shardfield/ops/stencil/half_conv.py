"""Shapes for which torch's half-precision CPU convolutions are wrong, which shards have and full fields rarely have.

torch 2.11-2.15 (oneDNN) reads memory that was never written where a window or a stride is larger than the input along a
dim, or a window larger than an output of few cells: weight gradients of conv3d with an output depth of 2 are infinite,
results of narrow channels-last fields are wrong. A rank computes such blocks in fp32. They are narrow, so this costs
little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._common.autocast import HALF_DTYPES, autocast_disabled

# An output of this size is computed correctly from any input that is not narrow, as in patch embeddings.
WIDE_OUTPUT = 4


def is_narrow(
    sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Return whether the input or the output of a convolution is narrow along some dim."""
    for n, m, k, s, d in zip(sizes, out, kernel, stride, dilation, strict=True):
        window = (k - 1) * d + 1
        if n < max(window, s) or m < min(window, WIDE_OUTPUT):
            return True
    return False


def may_be_wrong(input: Tensor) -> bool:
    """Return whether torch computes with the kernels that are wrong for narrow shapes."""
    return input.dtype in HALF_DTYPES and input.device.type == "cpu"


def in_fp32(call: Callable, *tensors: Tensor | None) -> Any:
    """Return `call(*tensors)` computed in fp32 and rounded to the dtype of the first tensor. Differentiable."""
    first = tensors[0]
    assert first is not None
    with autocast_disabled(first):
        result = call(*(None if t is None else t.float() for t in tensors))
    if isinstance(result, Tensor):
        return result.to(first.dtype)
    return tuple(None if t is None else t.to(first.dtype) for t in result)
