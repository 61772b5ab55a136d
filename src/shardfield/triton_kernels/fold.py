"""Accumulate the attention output of one key/value block into the output of earlier blocks, in one pass over memory.

Both are softmax means over different keys, with the log of their sums of exponentials (lse). The merged output is their
mean weighted by exp(lse).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .jit import Launch, jit, on_cuda

tl: Any = None  # see jit.py

ROWS = 16  # rows of one head per program
MAX_FEATURES = 512


def supports(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Return whether the kernel supports these tensors: fp32 accumulators, contiguous features."""
    exact = out.dtype is lse.dtype is part_lse.dtype is torch.float32
    contiguous = out.stride(-1) == part.stride(-1) == 1
    small = out.shape[-1] <= MAX_FEATURES and out.shape[0] * out.shape[1] < 1 << 16
    return exact and contiguous and small and on_cuda(out, lse, part, part_lse) and jit(_accumulate_kernel) is not None


def accumulate_block(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a block into `out` (batch, heads, rows, features) and `lse` (batch, heads, rows) in place."""
    if out.numel():
        strides = *out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride()
        _launch(out.shape, strides)(out, lse, part, part_lse)


@lru_cache(maxsize=256)
def _launch(shape: tuple[int, ...], strides: tuple[int, ...]) -> Launch:
    batch, heads, rows, features = shape
    width = max(16, 1 << (features - 1).bit_length())
    grid = -(-rows // ROWS), batch * heads
    return Launch(_accumulate_kernel, grid, heads, rows, features, *strides, ROWS=ROWS, WIDTH=width)


def _accumulate_kernel(
    out, lse, part, part_lse, heads, rows, features,
    out_b, out_h, out_r, lse_b, lse_h, lse_r, part_b, part_h, part_r, new_b, new_h, new_r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    valid = row < rows
    lse_ptr = lse + b * lse_b + h * lse_h + row * lse_r
    old = tl.load(lse_ptr, mask=valid, other=0.0)
    new = tl.load(part_lse + b * new_b + h * new_h + row * new_r, mask=valid, other=0.0)
    tl.debug_barrier()  # all threads must have read a row's lse before one of them overwrites it
    top = tl.maximum(old, new)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows with no key so far: -inf - -inf would be NaN
    new_weight = tl.exp(new - top)
    total = tl.exp(old - top) + new_weight
    tl.store(lse_ptr, tl.where(total == 0, float("-inf"), top + tl.log(total)), mask=valid)
    weight = tl.where(total == 0, 0.0, new_weight / total)
    column = tl.arange(0, WIDTH)
    inside = valid[:, None] & (column < features)[None, :]
    out_ptr = out + b * out_b + h * out_h + row[:, None] * out_r + column[None, :]
    before = tl.load(out_ptr, mask=inside, other=0.0)
    block = tl.load(part + b * part_b + h * part_h + row[:, None] * part_r + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr, before + weight[:, None] * (block.to(tl.float32) - before), mask=inside)
