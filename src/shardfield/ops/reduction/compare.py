"""Comparisons of tensors, and statistics composed of other calls."""

from __future__ import annotations

import torch

from ...dispatch.registry import composed


@composed("equal")
def equal(input, other):
    """Return a Python bool, the same on every rank."""
    return input.shape == other.shape and bool((input == other).all())


@composed("allclose")
def allclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    """Return a Python bool, the same on every rank."""
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


@composed("sum_to_size")
def sum_to_size(input, *size):
    """Sum the dims that a broadcast from `size` would have expanded."""
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    skip = input.ndim - len(size)
    fits = skip >= 0 and all(n in (1, m) for n, m in zip(size, input.shape[skip:], strict=True))
    if not fits:
        raise RuntimeError(f"size {{{list(size)}}} is not expandable to size {{{list(input.shape)}}}.")
    kept = [skip + d for d, n in enumerate(size) if n == 1 and input.shape[skip + d] != 1]
    dims = [*range(skip), *kept]
    return input.sum(dims, keepdim=True).reshape(size) if dims else input


@composed("cov")
def cov(input, *, correction=1, fweights=None, aweights=None):
    """Return the covariances of the rows: one matmul over the columns."""
    x = input.reshape(1, -1) if input.ndim < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        total, mean = x.shape[1], x.mean(1, keepdim=True)
        norm = total - correction
    else:
        total = weights.sum()
        mean = (x * weights).sum(1, keepdim=True) / total
        norm = total - correction * (total if aweights is None else (weights * aweights).sum()) / total
        if aweights is None:
            norm = total - correction
    centered = x - mean
    right = centered if weights is None else centered * weights
    norm = norm.clamp(min=0) if isinstance(norm, torch.Tensor) else max(norm, 0)
    out = torch.matmul(centered, right.t().conj()) / norm
    return out.reshape(()) if x.shape[0] == 1 else out


@composed("corrcoef")
def corrcoef(input):
    """Return the covariances divided by the standard deviations, clipped to [-1, 1]."""
    c = torch.cov(input)
    if c.ndim == 0:
        return c / c
    deviation = torch.sqrt(torch.diagonal(c).real if c.is_complex() else torch.diagonal(c))
    c = c / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if c.is_complex():
        return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))
    return c.clip(-1, 1)
