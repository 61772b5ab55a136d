"""Shapes for which torch's half-precision CPU convolutions are wrong, which shards have and full fields rarely have.

torch 2.11-2.15 (oneDNN) reads memory that was never written where a window is larger than the input or the output along
a dim: weight gradients of conv3d with an output depth of 2 are infinite, results of narrow channels-last fields are
wrong. A rank computes such blocks in fp32. They are narrow, so this costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._common.autocast import HALF_DTYPES, autocast_disabled


def is_narrow(sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> bool:
    """Return whether the window is larger than the input or the output along some dim."""
    return any(min(n, m) < (k - 1) * d + 1 for n, m, k, d in zip(sizes, out, kernel, dilation, strict=True))


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
