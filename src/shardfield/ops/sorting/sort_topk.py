"""sort, topk, kthvalue, median and mode along any dim.

Along an unsharded dim all work is local. Along a sharded dim there are three strategies, none of which gathers
the full tensor on one rank:
- `move_shard_off` moves the sharding to another dim by one all_to_all. torch's function then runs locally, and a sort
  moves the sharding back.
- If no other dim is long enough, `samplesort` sorts across the blocks.
- Single order statistics are found by counting (`order_statistics`), and topk among the top k of each block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from .._common.blockwise import Blocks, as_rows, from_rows, move_shard_off, simplify_dim
from .._common.probe import probe
from ..reduction.common import known_sum, reduced_layout
from .order_statistics import count_nans, counting_cost_bytes, kth_index, longest_run, select_columns
from .samplesort import sort_rows

# ---------------------------------------------------------------------- sorts


@rule("sort", merged=True)
def sort(input: Operand, dim=-1, descending=False, *, stable=None):
    return _sort_plan(input, dim, descending, stable, (0, 1))


@rule("argsort", merged=True)
def argsort(input: Operand, dim=-1, descending=False, *, stable=False):
    return _sort_plan(input, dim, descending, stable, (1,))


@rule("msort", merged=True)
def msort(input: Operand):
    return _sort_plan(input, 0, False, False, (0,))


def _sort_plan(input: Operand, dim: int, descending: bool, stable: bool | None, wanted: tuple[int, ...]) -> Plan:
    """Plan a sort whose results have the input's layout. `wanted`: values (0), global indices (1), or both."""
    probe(torch.sort, input, dim=dim)
    layout, dim, sharded = simplify_dim(input.layout, dim)
    sharded = sharded and layout.numel > 0
    target = move_shard_off(layout, dim) if sharded else layout
    result = (layout, layout) if len(wanted) > 1 else layout

    def finish(pair):
        parts = [pair[i]() if callable(pair[i]) else pair[i] for i in wanted]
        return torch.return_types.sort(parts) if len(wanted) > 1 else parts[0]

    def local_sort(input):
        return torch.sort(input, stable=bool(stable), dim=dim, descending=bool(descending))

    def sort_resharded(input):
        assert target is not None
        values, indices = local_sort(input)
        narrow = torch.int32 if layout.shape[dim] < 1 << 31 else torch.int64
        back = [partial(redistribute, t, target, layout) for t in (values, indices.to(narrow))]
        return finish([back[0], lambda: back[1]().to(torch.int64)])

    def sort_across_blocks(input):
        pair = sort_rows(as_rows(input, dim), Blocks.along(layout, dim), bool(descending))
        return finish([from_rows(t, input.shape, dim) for t in pair])

    if not sharded:
        return Plan(local=lambda input: finish(local_sort(input)), operands={"input": layout}, layout=result)
    if target is None:
        return Plan(local=sort_across_blocks, operands={"input": layout}, layout=result)
    return Plan(local=sort_resharded, operands={"input": target}, layout=result)


@rule("topk", merged=True)
def topk(input: Operand, k, dim=-1, largest=True, sorted=True, *, fn):
    """Select among the top k of each block; if that is most of the elements, reshard or sort instead."""
    probe(fn, input, min(1, *input.shape, 1), dim)
    layout, dim, sharded = simplify_dim(input.layout, dim)
    n = layout.shape[dim] if layout.ndim else 1
    if not 0 <= k <= n:
        raise RuntimeError(f"topk: selected index k out of range: {k} of {n}")

    def local_topk(input):
        return fn(input, k, dim, largest, sorted)

    if not sharded:
        result = layout.with_dim(dim, DimSharding(k)) if layout.ndim else layout
        return Plan(local=local_topk, operands={"input": layout}, layout=(result, result))
    blocks, target = Blocks.along(layout, dim), move_shard_off(layout, dim)
    if k * blocks.count <= n:
        candidate_sizes = [min(k, length) for length in blocks.shard_sizes]

        def topk_of_candidates(input):
            values, indices = fn(input, min(k, input.shape[dim]), dim, largest)
            values = blocks.all_gather(values, dim, candidate_sizes)
            indices = blocks.all_gather(indices + blocks.start, dim, candidate_sizes)
            best, which = fn(values, k, dim, largest, sorted)
            return torch.return_types.topk((best, indices.gather(dim, which)))

        result = layout.with_dim(dim, DimSharding(k))
        return Plan(local=topk_of_candidates, operands={"input": layout}, layout=(result, result))
    if target is not None:
        result = target.with_dim(dim, DimSharding(k))
        return Plan(local=local_topk, operands={"input": target}, layout=(result, result))
    result_sizes, remaining = [], k
    for length in blocks.shard_sizes:
        result_sizes.append(min(remaining, length))
        remaining -= result_sizes[-1]

    def topk_of_sorted(input):
        pair = sort_rows(as_rows(input, dim), blocks, bool(largest))
        parts = [from_rows(t, input.shape, dim).narrow(dim, 0, result_sizes[blocks.index]) for t in pair]
        return torch.return_types.topk(parts)

    result = layout.with_dim(dim, DimSharding(k, blocks.axes, tuple(result_sizes)))
    return Plan(local=topk_of_sorted, operands={"input": layout}, layout=(result, result))


# ---------------------------------------------------------------------- one element of each row


def _plan_order_statistic(
    input: Operand, dim: int, keepdim: bool, fn: Callable, column: Callable, cost: int, own: bool = False
) -> Plan:
    """Plan a function that returns (value, index) of one element of each row.

    fn: torch's function, run if `dim` is unsharded; `own` as of Plan. column(rows, blocks): returns the global column
    chosen in each row of a sharded dim, (rows, 1). cost: bytes per row sent by `column`; if moving the sharding to
    another dim sends fewer, plan that.
    """
    layout, dim, sharded = simplify_dim(input.layout, dim)
    target: Layout | None = layout
    if sharded:
        target = move_shard_off(layout, dim)
        local_bytes = layout.shape[dim] * input.dtype.itemsize / len(layout.shard_sizes(dim))
        if target is not None and local_bytes > cost:
            target = None
    if target is not None:
        result = reduced_layout(target, (dim,) if layout.ndim else (), keepdim, None)
        return Plan(local=lambda input: fn(input, dim), operands={"input": target}, layout=(result, result), own=own)
    blocks = Blocks.along(layout, dim)
    result = reduced_layout(layout, (dim,), keepdim, None)

    def local(input):
        rows = as_rows(input, dim)
        index = column(rows, blocks)
        parts = [t.reshape(result.local_shape) for t in (select_columns(rows, index, blocks), index)]
        return getattr(torch.return_types, fn.__name__)(parts)

    return Plan(local=local, operands={"input": layout}, layout=(result, result))


def _with_name(name: str, call: Callable) -> Callable:
    call.__name__ = name
    return call


@rule("kthvalue", merged=True)
def kthvalue(input: Operand, k, dim=-1, keepdim=False, *, fn):
    """Find the k-th smallest element by counting."""
    probe(fn, input, 1, dim)
    n = input.shape[dim] if input.ndim else 1
    if not 1 <= k <= n:
        raise RuntimeError(f"kthvalue(): selected number k out of range for dimension {dim}")

    def column(rows, blocks):
        return kth_index(rows, rows.new_full((len(rows), 1), k - 1, dtype=torch.int64), blocks)

    call = _with_name("kthvalue", lambda x, d: fn(x, k, d, keepdim))
    return _plan_order_statistic(input, dim, keepdim, call, column, counting_cost_bytes(input.dtype, 1))


@rule("median", "nanmedian", merged=True)
def median(input: Operand, dim=None, keepdim=False, *, fn):
    """Return the lower median. A row with a NaN has median NaN; nanmedian skips NaNs."""
    skip = fn.__name__ == "nanmedian"
    if dim is None:
        return _plan_global_median(input, skip, fn)
    probe(fn, input, dim)

    def column(rows, blocks):
        return kth_index(rows, _median_rank(count_nans(rows, blocks), sum(blocks.shard_sizes), skip), blocks)

    # Along an expanded dim, torch's median on CPUs reads elements of other rows (2.11 to 2.15).
    call = _with_name(fn.__name__, lambda x, d: fn(x.contiguous(), d, keepdim))
    return _plan_order_statistic(input, dim, keepdim, call, column, counting_cost_bytes(input.dtype, 1), own=True)


def _median_rank(nans: Tensor, n: int, skip: bool) -> Tensor:
    """Return the order-statistic rank of the median in each row, with NaNs sorted last."""
    if skip:
        return ((n - nans - 1).div(2, rounding_mode="floor")).clamp(min=0)
    return torch.where(nans > 0, n - nans, (n - 1) // 2)


def _plan_global_median(input: Operand, skip: bool, fn: Callable) -> Plan:
    """Plan the median of all elements. All elements equal to it share its gradient, as in torch."""
    probe(fn, input)
    layout = input.layout
    result = Layout.replicate(layout.mesh, ())
    if layout.is_replicated or not layout.numel:
        return Plan(local=lambda input: fn(input), layout=result)
    blocks = Blocks.over_all_shards(layout)

    def local(input):
        rows = input.reshape(1, -1)
        ranks = _median_rank(count_nans(rows, blocks), layout.numel, skip)
        value = select_columns(rows.detach(), kth_index(rows, ranks, blocks), blocks).reshape(())
        if not rows.requires_grad:
            return value
        same = rows.isnan() if value.isnan() else rows == value
        share = same.to(rows.dtype) / autograd_collectives.reduce(same.sum(), blocks.groups)
        return known_sum((rows * share).sum(), value, blocks.groups)

    return Plan(local=local, layout=result)


@rule("mode", merged=True)
def mode(input: Operand, dim=-1, keepdim=False, *, fn):
    """Find the longest run of equal elements in sorted order."""
    probe(fn, input, dim)

    def column(rows, blocks):
        if not len(rows):
            return rows.new_zeros(0, 1).long()
        # torch sorts with <, so NaNs change the order of other elements. Reproduce torch's result.
        if count_nans(rows, blocks).any():
            return fn(blocks.all_gather(rows.detach(), 1, blocks.shard_sizes), 1, True)[1]
        return longest_run(*sort_rows(rows.detach(), blocks, False), blocks)

    call = _with_name("mode", lambda x, d: fn(x, d, keepdim))
    return _plan_order_statistic(input, dim, keepdim, call, column, 1 << 62)
