"""Scans along a dim: cumsum, cumprod, logcumsumexp, cummax, cummin, cumulative_trapezoid.

Each block scans its own shard and then combines it with the totals of the blocks before. Only the totals are
communicated, by one small all_gather for each axis that shards the dim. The rules consist of collectives and torch
functions that are differentiable, so derivatives of any order follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._compat.autocast import concatenate
from ...comm import autograd_collectives
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...redistribute import without_partial
from .._common.autocast import HALF_DTYPES
from .._common.blockwise import Blocks, simplify_dim
from .._common.inplace import register_inplace
from .._common.probe import probe

INF = float("inf")


@rule("cumsum", "cumprod", partial=True, merged=True)
def cumsum_cumprod(input: Operand, dim, *, dtype=None, fn):
    """Scan locally and add (or multiply by) the totals of the blocks before. cumsum is linear and keeps Partial."""
    probe(fn, input, dim, dtype=dtype)
    layout = input.layout
    linear = fn.__name__ == "cumsum" and dtype in (None, input.dtype)
    if not (linear and input.dtype.is_floating_point and all(op == "sum" for _, op in layout.partial)):
        layout = without_partial(layout)
    layout, dim, sharded = simplify_dim(layout, dim)

    def unsharded_scan(input):
        return fn(input, dim, dtype=dtype)

    if not sharded:
        return Plan(local=unsharded_scan, operands={"input": layout}, layout=layout)
    blocks = Blocks.along(layout, dim)
    total = torch.sum if fn.__name__ == "cumsum" else torch.prod
    result_dtype = dtype or (input.dtype if input.dtype.is_floating_point or input.dtype.is_complex else torch.int64)
    # torch's kernels accumulate halves in fp32, so do we
    accumulate_dtype = torch.float32 if result_dtype in HALF_DTYPES else result_dtype

    def local(input):
        x = input.to(accumulate_dtype)  # cast once, so that gradients of both uses are added before they are rounded
        local_scan = fn(x, dim)
        totals = blocks.all_gather_unit(total(x, dim, keepdim=True), dim, autograd_collectives.gather_replicate_in)
        before = total(totals.narrow(dim, 0, blocks.index), dim, keepdim=True)
        return (local_scan + before if total is torch.sum else local_scan * before).to(result_dtype)

    return Plan(local=local, operands={"input": layout}, layout=layout)


register_inplace("cumsum_", "cumprod_")


@rule("logcumsumexp", merged=True)
def logcumsumexp(input: Operand, dim, *, fn):
    """Put the logsumexp of the blocks before in front of the block as one entry, and run torch's stable scan."""
    probe(fn, input, dim)
    layout, dim, sharded = simplify_dim(input.layout, dim)
    if not sharded:
        return Plan(local=lambda input: fn(input, dim), operands={"input": layout}, layout=layout)
    blocks = Blocks.along(layout, dim)
    accumulate_dtype = torch.float32 if input.dtype in HALF_DTYPES else input.dtype

    def local(input):
        x = input.to(accumulate_dtype)
        # An empty block sends 0, which no rank reads: behind its -inf, second derivatives of complex numbers are NaN.
        total = _logsumexp(x, dim) if x.shape[dim] else x.sum(dim, keepdim=True)
        totals = blocks.all_gather_unit(total, dim, autograd_collectives.gather_replicate_in)
        filled = [i for i in range(blocks.index) if blocks.shard_sizes[i]]
        before = _logsumexp(totals[(slice(None),) * dim + (filled,)], dim)
        if x.is_complex():
            before = before + _complex_log_phase(x, before, dim, blocks, fn)
            if not (filled and x.shape[dim]):
                # The second derivative of torch's complex scan is NaN behind an entry of -inf, and where the gradient
                # is 0. The sum of no elements keeps the all_gather in the graph, for derivatives of any order.
                return fn(x, dim) + totals.narrow(dim, 0, 0).square().sum()
        return fn(concatenate([before, x], dim), dim).narrow(dim, 1, input.shape[dim]).to(input.dtype)

    return Plan(local=local, operands={"input": layout}, layout=layout)


@torch.no_grad()
def _complex_log_phase(x: Tensor, before: Tensor, dim: int, blocks: Blocks, fn: Callable) -> Tensor:
    """Return the multiples of 2*pi*i by which torch's complex logarithm differs from `before`, entry by entry.

    The branch of the logarithm that a scan reaches depends on every step, so the blocks scan one after the other.
    """
    exact = torch.full_like(before, -INF)
    for turn in range(blocks.count - 1):
        scanned = fn(concatenate([exact, x], dim), dim) if turn == blocks.index else exact
        last = blocks.all_gather_unit(scanned.narrow(dim, scanned.shape[dim] - 1, 1), dim).narrow(dim, turn, 1)
        exact = last if turn + 1 == blocks.index else exact
    return torch.where(before.isfinite(), exact - before, 0)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """Return logsumexp(keepdim) with gradient 0 instead of NaN if all of `x` is -inf, as in an empty block."""
    if x.is_complex():
        return torch.logsumexp(x, dim, keepdim=True)
    all_inf = (x == -INF).all(dim, keepdim=True)
    return torch.logsumexp(x.masked_fill(all_inf, 0), dim, keepdim=True).masked_fill(all_inf, -INF)


@rule("cummax", "cummin", merged=True)
def cummax_cummin(input: Operand, dim, *, fn):
    """Return (values, global indices). As in torch, ties take the last index, and NaN wins over all later numbers."""
    probe(fn, input, dim)
    layout, dim, sharded = simplify_dim(input.layout, dim)
    if not sharded:
        return Plan(local=lambda input: fn(input, dim), operands={"input": layout}, layout=(layout, layout))
    blocks = Blocks.along(layout, dim)
    wins = torch.ge if fn.__name__ == "cummax" else torch.le
    nonempty = [i for i in range(blocks.index) if blocks.shard_sizes[i]]

    def local(input):
        values, indices = fn(input, dim)
        indices = indices + blocks.start
        length = input.shape[dim]
        # An empty block has no last value. It sends a 0, which no rank reads, to keep the all_gather in its graph.
        last = values.narrow(dim, length - 1, 1) if length else input.sum(dim, keepdim=True).to(input.dtype)
        last_index = indices.narrow(dim, length - 1, 1) if length else torch.zeros_like(last, dtype=torch.int64)
        lasts = blocks.all_gather_unit(last, dim, autograd_collectives.gather_replicate_in)
        last_indices = blocks.all_gather_unit(last_index, dim)
        keep_local, value, index = _all_true(values), lasts.narrow(dim, 0, 1), last_indices.narrow(dim, 0, 1)
        if nonempty:
            selected = torch.tensor(nonempty, device=input.device)
            running, which = fn(lasts.index_select(dim, selected), dim)
            value, which = (t.narrow(dim, len(nonempty) - 1, 1) for t in (running, which))
            index = last_indices.index_select(dim, selected).gather(dim, which)
            keep_local = _keeps_local(values, value, wins)
        # Call where() even if no block comes before: the graph of every rank must hold the all_gather, whose adjoint
        # all ranks run.
        out = torch.where(keep_local, values, value), torch.where(keep_local, indices, index)
        return getattr(torch.return_types, fn.__name__)(out)

    return Plan(local=local, operands={"input": layout}, layout=(layout, layout))


def _all_true(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def _keeps_local(values: Tensor, before: Tensor, wins: Callable) -> Tensor:
    """Return the mask of positions where the block's own running extreme wins over `before`."""
    if not values.is_floating_point():
        return wins(values, before)
    return values.isnan() | (wins(values, before) & ~before.isnan())


@composed("cumulative_trapezoid")
def cumulative_trapezoid(y, x=None, *, dx=1, dim=-1):
    """Sum trapezoids of adjacent entries."""
    if y.ndim == 0:
        raise IndexError("slice() cannot be applied to a 0-dim tensor.")
    if torch.bool in (y.dtype, None if x is None else x.dtype):
        raise RuntimeError("cumulative_trapezoid: received a bool input for `x` or `y`, but bool is not supported")
    dim %= y.ndim
    left, right = _adjacent_pairs(y, dim)
    if x is None:
        return ((left + right) * (dx / 2)).cumsum(dim)
    if x.ndim == 1:
        if x.shape[0] != y.shape[dim]:
            raise RuntimeError("cumulative_trapezoid: There must be one `x` value for each sample point")
        x = x.reshape([x.shape[0] if d == dim else 1 for d in range(y.ndim)])
    elif x.ndim < y.ndim:
        x = x.reshape([1] * (y.ndim - x.ndim) + list(x.shape))
    near, far = _adjacent_pairs(x, dim)
    return ((left + right) * (far - near)).cumsum(dim) / 2


def _adjacent_pairs(x, dim: int):
    """Return all entries but the last, and all entries but the first."""
    n = x.shape[dim]
    return x.narrow(dim, 0, max(n - 1, 0)), x.narrow(dim, min(n, 1), max(n - 1, 0))
