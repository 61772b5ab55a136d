"""A block's share of attention taken into what earlier blocks gave, in one pass over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .jit import jit, on_cuda

tl: Any = None  # see jit.py

ROWS = 16  # of a head, in one program
MAX_FEATURES = 512  # features


def supports(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Whether the kernel can do it: sums in fp32, features side by side."""
    exact = out.dtype is lse.dtype is part_lse.dtype is torch.float32
    beside = out.stride(-1) == part.stride(-1) == 1
    small = out.shape[-1] <= MAX_FEATURES and out.shape[0] * out.shape[1] < 1 << 16
    return exact and beside and small and on_cuda(out, lse, part, part_lse) and jit(_accumulate_kernel) is not None


def accumulate_block(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Into `out` (batch, heads, rows, features) and `lse` (batch, heads, rows): a mean weighted by exp(lse)."""
    batch, heads, rows, features = out.shape
    if not out.numel():
        return
    with torch.cuda.device(out.device if out.is_cuda else -1):
        jit(_accumulate_kernel)[(-(-rows // ROWS), batch * heads)](
            out, lse, part, part_lse, heads, rows, features,
            *out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride(),
            ROWS=ROWS, WIDTH=max(16, 1 << (features - 1).bit_length()),
        )  # fmt: skip


def _accumulate_kernel(
    out, lse, part, part_lse, heads, rows, features,
    out_b, out_h, out_r, lse_b, lse_h, lse_r, part_b, part_h, part_r, new_b, new_h, new_r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    here = row < rows
    place = lse + b * lse_b + h * lse_h + row * lse_r
    old = tl.load(place, mask=here, other=0.0)
    new = tl.load(part_lse + b * new_b + h * new_h + row * new_r, mask=here, other=0.0)
    tl.debug_barrier()  # several threads have read a row's number, and one will write it
    top = tl.maximum(old, new)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows that have seen nothing: -inf less -inf is no number
    share = tl.exp(new - top)
    total = tl.exp(old - top) + share
    tl.store(place, tl.where(total == 0, float("-inf"), top + tl.log(total)), mask=here)
    weight = tl.where(total == 0, 0.0, share / total)
    column = tl.arange(0, WIDTH)
    inside = here[:, None] & (column < features)[None, :]
    into = out + b * out_b + h * out_h + row[:, None] * out_r + column[None, :]
    before = tl.load(into, mask=inside, other=0.0)
    added = tl.load(part + b * part_b + h * part_h + row[:, None] * part_r + column[None, :], mask=inside, other=0.0)
    tl.store(into, before + weight[:, None] * (added.to(tl.float32) - before), mask=inside)
