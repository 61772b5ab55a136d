"""diff and trapezoid, composed of slices: redistributing a slice exchanges one row between neighboring ranks."""

from __future__ import annotations

import torch

from ..._compat.autocast import concatenate
from ...dispatch.registry import composed
from .._common.probe import meta_tensor


@composed("diff")
def diff(input, n=1, dim=-1, prepend=None, append=None):
    shapes = [None if t is None else meta_tensor(t) for t in (input, prepend, append)]
    torch.diff(shapes[0], n, dim, shapes[1], shapes[2])
    if n == 0:
        return input.clone()
    parts = [t for t in (prepend, input, append) if t is not None]
    x = concatenate(parts, dim) if len(parts) > 1 else input
    for _ in range(min(n, x.shape[dim])):
        size = x.shape[dim]
        right, left = x.narrow(dim, 1, size - 1), x.narrow(dim, 0, size - 1)
        x = right ^ left if x.dtype is torch.bool else right - left
    return x


@composed("trapezoid", "trapz")
def trapezoid(y, x=None, *, dx=1, dim=-1):
    shapes = [None if t is None else meta_tensor(t) for t in (y, x)]
    torch.trapezoid(*shapes, dim=dim) if x is not None else torch.trapezoid(shapes[0], dim=dim)
    size = y.shape[dim]
    if size < 2:
        return y.narrow(dim, 0, 0).sum(dim, dtype=y.dtype)
    sums = y.narrow(dim, 1, size - 1) + y.narrow(dim, 0, size - 1)
    if x is None:
        return sums.sum(dim) * (dx / 2.0)
    step = x.diff(dim=-1 if x.ndim == 1 else dim)
    if x.ndim == 1:
        step = step.reshape([-1 if d == dim % y.ndim else 1 for d in range(y.ndim)])
    return (sums * step).sum(dim) / 2.0
