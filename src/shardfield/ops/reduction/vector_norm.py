"""Vector and matrix norms: sum the powers over all ranks, then take the root.

The norm of the local norms would have the same value and gradient, but not the same second derivatives: the norm of an
all-zero shard has none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm import autograd_collectives
from ...comm.collectives import accumulate_dtype
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, rule
from .._common.autocast import HALF_DTYPES
from .._common.inplace import register_inplace
from .._common.probe import probe
from .common import reduced_dims, reduced_layout, safe_sqrt, sharding_axes
from .minmax import global_minmax


@rule(torch.linalg.vector_norm, merged=True)
def vector_norm(x: Operand, ord=2, dim=None, keepdim=False, *, dtype=None, fn):
    """Leave orders 0 and 1 Partial; all-reduce the extremes of infinite orders, and the sums of powers of others."""
    result = probe(fn, x, ord, dim=dim, keepdim=keepdim, dtype=dtype).dtype
    layout = x.layout
    dims = reduced_dims(layout.ndim, dim)
    axes = sharding_axes(layout, dims)
    over = process_groups(layout, axes)
    wide = dtype if x.dtype.is_complex else accumulate_dtype(result)
    result_layout = reduced_layout(layout, dims, keepdim, None)
    if not axes:
        return Plan(local=lambda x: fn(x, ord, dim=dim, keepdim=keepdim, dtype=dtype), layout=result_layout)
    if ord in (0, 1):
        return Plan(
            local=lambda x: fn(x, ord, dim=dims, keepdim=keepdim, dtype=dtype),
            layout=reduced_layout(layout, dims, keepdim),
        )
    if math.isinf(ord):

        def extreme(x):
            size = (x if dtype is None else x.to(dtype)).abs()
            return global_minmax(size, dims, over, "max" if ord > 0 else "min").reshape(result_layout.local_shape)

        return Plan(local=extreme, layout=result_layout)

    def fold(x):
        value = x if wide is None else x.to(wide)
        total = autograd_collectives.reduce(abs_pow(value, ord).sum(dims, keepdim=keepdim), over)
        return (safe_sqrt(total) if ord == 2 else _safe_root(total, ord)).to(result)

    return Plan(local=fold, layout=result_layout)


def abs_pow(x: Tensor, ord: float) -> Tensor:
    """Return |x| ** ord with gradient 0 at 0, as in torch's norms, differentiable as often as the power is."""
    if ord == 2:
        return torch.view_as_real(x.resolve_conj()).square().sum(-1) if x.is_complex() else x.square()
    size = x.abs()
    if ord >= 1:
        return size.pow(ord)
    zero = size == 0
    return torch.where(zero, 0 if ord > 0 else math.inf, torch.where(zero, 1, size).pow(ord))


def _safe_root(value: Tensor, degree: float) -> Tensor:
    """Return value ** (1 / degree) with gradient 0 where the root is 0."""
    zero = value == (0 if degree > 0 else math.inf)
    return torch.where(zero, 0, torch.where(zero, 1, value).pow(1 / degree))


@rule(torch.linalg.matrix_norm, merged=True)
def matrix_norm(A: Operand, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None, fn):
    """Compute "fro" as a vector norm, orders 1 and inf as extremes of sums; fall back for the others (SVD)."""
    result = probe(fn, A, ord, dim=dim, keepdim=keepdim, dtype=dtype).dtype
    layout = A.layout
    rows, columns = (d % layout.ndim for d in dim)
    if not sharding_axes(layout, (rows, columns)):
        result_layout = reduced_layout(layout, (rows, columns), keepdim, None)
        return Plan(local=lambda A: fn(A, ord, dim=dim, keepdim=keepdim, dtype=dtype), layout=result_layout)
    if ord == "fro":
        plan = vector_norm(A, 2, (rows, columns), keepdim, dtype=dtype, fn=torch.linalg.vector_norm)
        return replace(plan, takes=("A",))
    if ord not in (1, -1, math.inf, -math.inf):
        return None
    summed, kept = (rows, columns) if abs(ord) == 1 else (columns, rows)
    adding, choosing = (process_groups(layout, sharding_axes(layout, (d,))) for d in (summed, kept))
    out = reduced_layout(layout, (rows, columns), keepdim, None)

    def local(A):
        sums = torch.linalg.vector_norm(A, 1, summed, True, dtype=torch.float32 if result in HALF_DTYPES else dtype)
        sums = autograd_collectives.reduce(sums, adding)
        if not layout.shape[kept]:  # torch returns 0, a constant
            return sums.detach().sum(kept, keepdim=True).to(result).reshape(out.local_shape)
        return global_minmax(sums, (kept,), choosing, "max" if ord > 0 else "min").to(result).reshape(out.local_shape)

    return Plan(local=local, layout=out)


@rule(torch.linalg.norm, merged=True)
def norm(A: Operand, ord=None, dim=None, keepdim=False, *, dtype=None, fn):
    """Plan a vector norm or a matrix norm, by torch's rule."""
    probe(fn, A, ord, dim=dim, keepdim=keepdim, dtype=dtype)
    number = A.ndim if dim is None else 1 if isinstance(dim, int) else len(dim)
    if ord is None or number == 1:
        order = 2 if ord is None else ord
        plan = vector_norm(A, order, dim, keepdim, dtype=dtype, fn=torch.linalg.vector_norm)
        return replace(plan, takes=("A",))
    pair = (0, 1) if dim is None else tuple(dim)
    return matrix_norm(A, ord, pair, keepdim, dtype=dtype, fn=torch.linalg.matrix_norm)


@composed("frobenius_norm")
def frobenius_norm(input, dim=(), keepdim=False):
    return torch.linalg.vector_norm(input, 2, dim or None, keepdim)


@composed("nuclear_norm")
def nuclear_norm(input, dim=(0, 1), keepdim=False):
    return torch.linalg.matrix_norm(input, "nuc", dim, keepdim)


@composed("dist")
def dist(input, other, p=2):
    """Return the norm of the difference."""
    return torch.linalg.vector_norm(input - other, p)


@composed(F.normalize)
def normalize(input, p=2.0, dim=1, eps=1e-12, out=None):
    """Run torch's body without its expand: the gradient of an expanded norm would be as large as the input."""
    size = torch.linalg.vector_norm(input, p, dim, True).clamp_min(eps)
    return input / size if out is None else torch.div(input, size, out=out)


RENORM_EPS = 1e-7  # torch's: it keeps the scaled norm just below `maxnorm`


@rule(torch.renorm, merged=True)
def renorm(input: Operand, p, dim, maxnorm, *, fn):
    """Run locally where only `dim` is sharded; else all-reduce the norms of the slices: a small message each way."""
    probe(fn, input, p, dim, maxnorm)
    p, maxnorm = float(p), float(maxnorm)  # raises TypeError for a tensor: the executor then passes its value
    layout = input.layout
    dims = tuple(d for d in range(layout.ndim) if d != dim % layout.ndim)
    over = process_groups(layout, sharding_axes(layout, dims))
    if not over:
        return Plan(local=lambda input: fn(input, p, dim, maxnorm), layout=layout)
    wide = torch.float32 if input.dtype in HALF_DTYPES else None
    norms = vector_norm(input, p, dims, True, dtype=wide, fn=torch.linalg.vector_norm)

    def local(input):
        norm = norms.local(input)
        if norms.layout.partial:  # order 1
            norm = autograd_collectives.reduce(norm, over)
        scale = torch.where(norm > maxnorm, maxnorm / (norm + RENORM_EPS), 1)
        (scale,) = autograd_collectives.replicate_in([scale], over)
        return input * scale.to(input.dtype)

    return Plan(local=local, layout=layout)


register_inplace("renorm_")
