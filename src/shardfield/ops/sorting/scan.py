"""Scans along a dim. Each block scans what it has and then takes in what the blocks before it came to.

Only the blocks' totals travel: one small all-gather for each axis that cuts the dim. Everything is made of moves and
torch's own functions, so derivatives of any order follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, handler, rule
from .._common.blockwise import Blocks, simplify_dim
from .._common.probe import HALF_DTYPES, probe

INF = float("inf")


@rule("cumsum", "cumprod", partial=True, merged=True)
def cumsum_cumprod(input: Operand, dim, *, dtype=None, fn):
    """A running sum is linear and keeps Partial; the total of a block is its sum or product."""
    probe(fn, input, dim, dtype=dtype)
    layout = input.layout
    linear = fn.__name__ == "cumsum" and dtype in (None, input.dtype)
    if not (linear and input.dtype.is_floating_point and all(op == "sum" for _, op in layout.partial)):
        layout = layout.with_partial(())
    layout, dim, cut = simplify_dim(layout, dim)

    def whole(input):
        return fn(input, dim, dtype=dtype)

    if not cut:
        return Plan(local=whole, operands={"input": layout}, layout=layout)
    blocks = Blocks.along(layout, dim)
    total = torch.sum if fn.__name__ == "cumsum" else torch.prod
    final = dtype or (input.dtype if input.dtype.is_floating_point or input.dtype.is_complex else torch.int64)
    wide = torch.float32 if final in HALF_DTYPES else final  # torch's kernels keep halves in fp32 on the way, so do we

    def local(input):
        x = input.to(wide)  # once, so that gradients of both uses meet before they are rounded
        inside = fn(x, dim)
        totals = blocks.all_gather_unit(total(x, dim, keepdim=True), dim, autograd_collectives.gather_replicate_in)
        before = total(totals.narrow(dim, 0, blocks.index), dim, keepdim=True)
        return (inside + before if total is torch.sum else inside * before).to(final)

    return Plan(local=local, operands={"input": layout}, layout=layout)


@handler("cumsum_", "cumprod_")
def cumsum_cumprod_(func, types, args, kwargs):
    target, *rest = args
    target._check_writable()
    return target._write(getattr(torch, func.__name__[:-1])(target, *rest, **kwargs))


@rule("logcumsumexp", merged=True)
def logcumsumexp(input: Operand, dim, *, fn):
    """What came before is put in front of the block as one more entry, so torch's own stable scan does the rest."""
    probe(fn, input, dim)
    layout, dim, cut = simplify_dim(input.layout, dim)
    if not cut:
        return Plan(local=lambda input: fn(input, dim), operands={"input": layout}, layout=layout)
    blocks = Blocks.along(layout, dim)
    wide = torch.float32 if input.dtype in HALF_DTYPES else input.dtype

    def local(input):
        x = input.to(wide)
        totals = blocks.all_gather_unit(_logsumexp(x, dim), dim, autograd_collectives.gather_replicate_in)
        before = _logsumexp(totals.narrow(dim, 0, blocks.index), dim)
        if x.is_complex():
            before = before + _complex_log_phase(x, before, dim, blocks, fn)
        return fn(torch.cat([before, x], dim), dim).narrow(dim, 1, input.shape[dim]).to(input.dtype)

    return Plan(local=local, operands={"input": layout}, layout=layout)


@torch.no_grad()
def _complex_log_phase(x: Tensor, before: Tensor, dim: int, blocks: Blocks, fn: Callable) -> Tensor:
    """What a complex logarithm of the blocks before lacks to the one torch comes to, entry by entry: whole turns.

    Which of the many logarithms a scan arrives at depends on every step it takes, so one block walks after the other.
    """
    exact = torch.full_like(before, -INF)
    for turn in range(blocks.count - 1):
        walked = fn(torch.cat([exact, x], dim), dim) if turn == blocks.index else exact
        last = blocks.all_gather_unit(walked.narrow(dim, walked.shape[dim] - 1, 1), dim).narrow(dim, turn, 1)
        exact = last if turn + 1 == blocks.index else exact
    return torch.where(before.isfinite(), exact - before, 0)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """logsumexp(keepdim) whose gradient is 0, not NaN, where all of `x` is -inf: a block of nothing is no news."""
    if x.is_complex():
        return torch.logsumexp(x, dim, keepdim=True)
    nothing = (x == -INF).all(dim, keepdim=True)
    return torch.logsumexp(x.masked_fill(nothing, 0), dim, keepdim=True).masked_fill(nothing, -INF)


@rule("cummax", "cummin", merged=True)
def cummax_cummin(input: Operand, dim, *, fn):
    """(values, global indices). As in torch the last of equal values counts, and NaN beats all that follows but NaN."""
    probe(fn, input, dim)
    layout, dim, cut = simplify_dim(input.layout, dim)
    if not cut:
        return Plan(local=lambda input: fn(input, dim), operands={"input": layout}, layout=(layout, layout))
    blocks = Blocks.along(layout, dim)
    beats = torch.ge if fn.__name__ == "cummax" else torch.le
    filled = [i for i in range(blocks.index) if blocks.shard_sizes[i]]

    def local(input):
        values, indices = fn(input, dim)
        indices = indices + blocks.start
        length = input.shape[dim]
        # A block of nothing has no last value; it sends a 0 that nobody reads but that keeps it in the graph.
        last = values.narrow(dim, length - 1, 1) if length else input.sum(dim, keepdim=True).to(input.dtype)
        where = indices.narrow(dim, length - 1, 1) if length else torch.zeros_like(last, dtype=torch.int64)
        lasts = blocks.all_gather_unit(last, dim, autograd_collectives.gather_replicate_in)
        wheres = blocks.all_gather_unit(where, dim)
        stays, value, index = _all_true(values), lasts.narrow(dim, 0, 1), wheres.narrow(dim, 0, 1)
        if filled:
            some = torch.tensor(filled, device=input.device)
            running, which = fn(lasts.index_select(dim, some), dim)
            value, which = (t.narrow(dim, len(filled) - 1, 1) for t in (running, which))
            index = wheres.index_select(dim, some).gather(dim, which)
            stays = _keeps_local(values, value, beats)
        # where() even if nothing came before: every rank's graph must hold the gather, whose adjoint all ranks run
        out = torch.where(stays, values, value), torch.where(stays, indices, index)
        return getattr(torch.return_types, fn.__name__)(out)

    return Plan(local=local, operands={"input": layout}, layout=(layout, layout))


def _all_true(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def _keeps_local(values: Tensor, before: Tensor, beats: Callable) -> Tensor:
    """Where a block's own running extreme holds against what came before."""
    if not values.is_floating_point():
        return beats(values, before)
    return values.isnan() | (beats(values, before) & ~before.isnan())


@composed("cumulative_trapezoid")
def cumulative_trapezoid(y, x=None, *, dx=1, dim=-1):
    """Trapezoids between neighbours, then a running sum."""
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
    """All entries but the last, and all but the first."""
    n = x.shape[dim]
    return x.narrow(dim, 0, max(n - 1, 0)), x.narrow(dim, min(n, 1), max(n - 1, 0))
