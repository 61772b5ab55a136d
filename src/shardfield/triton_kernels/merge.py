"""Means and squared deviations of several ranks, merged as Welford and Chan do it: on a device, by one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .jit import jit, on_cuda

tl: Any = None  # see jit.py

BLOCK = 128


def supports(parts: Tensor, weights: Tensor) -> bool:
    """Whether the kernel can do it: numbers in fp64, one weight a rank or one for each of its statistics."""
    alike = weights.shape[1:].numel() in (1, parts.shape[2:].numel())
    exact = parts.dtype is weights.dtype is torch.float64 and parts.is_contiguous() and weights.is_contiguous()
    return exact and alike and on_cuda(parts, weights) and jit(_merge_kernel) is not None


def merge_moments(parts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of `parts` (ranks, 2, ...), their means and squared deviations, those of all; `weights`: of how many numbers."""
    if not supports(parts, weights):
        return merge_eager(parts, weights)
    both = torch.empty_like(parts[0])
    n = both[0].numel()
    if n:
        step = int(weights.numel() > len(parts))
        with torch.cuda.device(parts.device if parts.is_cuda else -1):
            grid = (-(-n // BLOCK),)
            jit(_merge_kernel)[grid](parts, weights, both, n, n if step else 1, step, RANKS=len(parts), BLOCK=BLOCK)
    return both[0], both[1]


def merge_eager(parts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch's own calls."""
    means, each = parts.unbind(1)
    mean = means[0] + ((means - means[0]) * weights).sum(0) / weights.sum(0).clamp_min(1)
    return mean, (each + weights * (means - mean).square()).sum(0)


def _merge_kernel(parts, weights, both, n, weight_rank, weight_step, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    first = tl.load(parts + at, mask=here, other=0.0)  # deviations from a mean of one rank keep their digits
    shift = tl.zeros([BLOCK], dtype=tl.float64)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for rank in range(RANKS):
        weight = tl.load(weights + rank * weight_rank + at * weight_step, mask=here, other=0.0)
        shift += (tl.load(parts + rank * 2 * n + at, mask=here, other=0.0) - first) * weight
        total += weight
    mean = first + shift / tl.maximum(total, 1.0)
    squares = tl.zeros([BLOCK], dtype=tl.float64)
    for rank in range(RANKS):
        weight = tl.load(weights + rank * weight_rank + at * weight_step, mask=here, other=0.0)
        off = tl.load(parts + rank * 2 * n + at, mask=here, other=0.0) - mean
        squares += tl.load(parts + (rank * 2 + 1) * n + at, mask=here, other=0.0) + weight * off * off
    tl.store(both + at, mean, mask=here)
    tl.store(both + n + at, squares, mask=here)
