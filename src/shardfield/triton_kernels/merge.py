"""Merge means and sums of squared deviations of several ranks (Welford, Chan), on CUDA by one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .jit import jit, on_cuda

tl: Any = None  # see jit.py

BLOCK = 128


def supports(parts: Tensor, weights: Tensor) -> bool:
    """Return whether the kernel supports these tensors: fp64, with one weight per rank or one per statistic."""
    same_size = weights.shape[1:].numel() in (1, parts.shape[2:].numel())
    exact = parts.dtype is weights.dtype is torch.float64 and parts.is_contiguous() and weights.is_contiguous()
    return exact and same_size and on_cuda(parts, weights) and jit(_merge_kernel) is not None


def merge_moments(parts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the sum of squared deviations over all ranks.

    parts: (ranks, 2, ...), the mean and the sum of squared deviations of each rank.
    weights: the number of values on each rank, one per rank or one per statistic.
    """
    if not supports(parts, weights):
        return merge_eager(parts, weights)
    merged = torch.empty_like(parts[0])
    n = merged[0].numel()
    if n:
        step = int(weights.numel() > len(parts))
        with torch.cuda.device(parts.device if parts.is_cuda else -1):
            grid = (-(-n // BLOCK),)
            jit(_merge_kernel)[grid](parts, weights, merged, n, n if step else 1, step, RANKS=len(parts), BLOCK=BLOCK)
    return merged[0], merged[1]


def merge_eager(parts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `merge_moments` with torch ops."""
    means, deviations = parts.unbind(1)
    mean = means[0] + ((means - means[0]) * weights).sum(0) / weights.sum(0).clamp_min(1)
    return mean, (deviations + weights * (means - mean).square()).sum(0)


def _merge_kernel(parts, weights, merged, n, weight_rank, weight_step, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = index < n
    first = tl.load(parts + index, mask=valid, other=0.0)  # sums of differences from one rank's mean lose no digits
    shift = tl.zeros([BLOCK], dtype=tl.float64)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for rank in range(RANKS):
        weight = tl.load(weights + rank * weight_rank + index * weight_step, mask=valid, other=0.0)
        shift += (tl.load(parts + rank * 2 * n + index, mask=valid, other=0.0) - first) * weight
        total += weight
    mean = first + shift / tl.maximum(total, 1.0)
    squares = tl.zeros([BLOCK], dtype=tl.float64)
    for rank in range(RANKS):
        weight = tl.load(weights + rank * weight_rank + index * weight_step, mask=valid, other=0.0)
        difference = tl.load(parts + rank * 2 * n + index, mask=valid, other=0.0) - mean
        squares += tl.load(parts + (rank * 2 + 1) * n + index, mask=valid, other=0.0) + weight * difference * difference
    tl.store(merged + index, mean, mask=valid)
    tl.store(merged + n + index, squares, mask=valid)
