"""Adaptive pooling of an input sharded along any dim.

A sharded dim is pooled in one of two ways, whichever sends less; a dim pooled to size 1 always uses the second.
Halo: each rank computes the outputs whose windows are centered in its shard and receives the cells they read.
Reduce: each rank pools its own cells of every window. Averages stay Partial sums; maxima are all-reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm.autograd_collectives import Groups
from ...dispatch.empty_shards import connected
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout, Span, starts
from .._common.probe import probe, stand_in
from ..reduction.common import all_reduce_minmax, known_sum
from ..reduction.minmax import NO_INDEX
from ..shape.flip_roll import shard_by_one_axis
from .padded_block import PaddedBlockPlan, empty_result
from .pool import broadcast_along, keep_partial_sums, to_global_flat_index

ADAPTIVE_AVG_POOL: dict[int, Callable] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX_POOL: dict[int, Callable] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
# Functions that return indices. torch.adaptive_max_pool1d is one, F.adaptive_max_pool1d of the same name is not.
WITH_INDICES = (
    torch.adaptive_max_pool1d,
    F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
)


class AdaptiveWindow(NamedTuple):
    """One dim: output `o` reads from `o * size / out`, rounded down, to `(o + 1) * size / out`, rounded up."""

    size: int
    out: int

    def owned(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs whose windows are centered in each shard.

        >>> AdaptiveWindow(8, 3).owned([4, 4])
        (1, 2)
        """
        centered = [-(-(2 * start * self.out - self.size) // (2 * self.size)) for start in starts(shard_sizes)[1:]]
        bounds = [0, *(min(max(o, 0), self.out) for o in centered), self.out]
        return tuple(b - a for a, b in pairwise(bounds))

    def receptive_field(self, first: int, stop: int) -> Span:
        """Return the input range that outputs `first` to `stop` read.

        >>> AdaptiveWindow(7, 3).receptive_field(1, 2)
        Span(start=2, stop=5)
        """
        return Span(first * self.size // self.out, -(-stop * self.size // self.out)) if first < stop else Span(0, 0)


class EqualWindows:
    """Rearrangement of one dim of a block into contiguous windows of equal size, which torch's kernel pools.

    The block holds the cells `held` and gives the outputs `outs`. A window with fewer cells than the longest one
    repeats its last cell as filler.

    index: the cell of the block at each position of the rearranged dim; None if the dim stays unchanged.
    length: size of every window after the rearrangement.
    counts: number of cells of each window in this block, without filler.
    window_sizes: number of cells of each window in the global field.
    """

    def __init__(self, window: AdaptiveWindow, outs: Span, held: Span):
        parts = []
        for o in range(*outs):
            first, stop = window.receptive_field(o, o + 1)
            parts.append(Span(max(first, held.start), min(stop, held.stop)))
        self.begin, self.size = held.start, held.stop - held.start
        self.counts = [max(stop - first, 0) for first, stop in parts]
        self.window_sizes = [b - a for a, b in (window.receptive_field(o, o + 1) for o in range(*outs))]
        self.length = max(self.counts, default=0)
        last = max(self.size - 1, 0)
        cells = [
            min(max(min(first + j, stop - 1) - held.start, 0), last)
            for first, stop in parts
            for j in range(self.length)
        ]
        self.index = None if cells == list(range(self.size)) else cells

    def select(self, block: Tensor, dim: int) -> Tensor:
        if self.index is None:
            return block
        return block.index_select(dim, torch.tensor(self.index, device=block.device))

    def global_index(self, position: Tensor) -> Tensor:
        """Return the global cells at positions along the rearranged dim."""
        if self.index is not None:
            position = torch.tensor(self.index, device=position.device)[position]
        return position + self.begin

    def filler_mask(self, like: Tensor, dim: int) -> Tensor | None:
        """Return which positions of the rearranged dim are filler; None if there is no filler."""
        if all(n == self.length for n in self.counts):
            return None
        extra = [j >= n for n in self.counts for j in range(self.length)]
        return torch.tensor(extra, device=like.device).view(-1, *[1] * (like.ndim - 1 - dim))


class AdaptivePoolPlan:
    """Plan of an adaptive pool of the last dims to the sizes `out`.

    source: layout of the operand. result: layout of the outputs, unsharded along `reduced_dims`.
    reduced_dims: the dims pooled by reduction. axes: their mesh axes, over which the outputs must be reduced.
    rows: dim -> its rearrangement into equal windows, for sharded dims.
    reduce_cost: cost of reducing one output, in cells of input.
    """

    def __init__(self, layout: Layout, out: Sequence[int], reduce_cost: int):
        self.nd = nd = len(out)
        self.dims = dims = tuple(range(layout.ndim - nd, layout.ndim))
        self.source = layout = shard_by_one_axis(layout, dims)
        windows = {d: AdaptiveWindow(layout.shape[d], n) for d, n in zip(dims, out, strict=True)}
        halo_cells, cells = PaddedBlockPlan(layout, windows).remote_cells, layout.shape[-nd:].numel()
        self.reduced_dims = []
        for d in dims:
            if halo_cells[d]:
                shards = math.prod(layout.mesh.size(a) for a in layout.axes_of(d))
                reduce_cells = 2 * (shards - 1) * math.prod(out) * reduce_cost
                if windows[d].out == 1 or halo_cells[d] * (cells // layout.shape[d]) > reduce_cells:
                    self.reduced_dims.append(d)
        self.axes = layout.nontrivial_axes(a for d in self.reduced_dims for a in layout.axes_of(d))
        self.block_plan = PaddedBlockPlan(layout, {d: w for d, w in windows.items() if d not in self.reduced_dims})
        self.result = self.block_plan.result(layout)
        self.rows: dict[int, EqualWindows] = {}
        for d, window in windows.items():
            if d in self.reduced_dims:
                self.result = self.result.with_dim(d, DimSharding(window.out))
                self.rows[d] = EqualWindows(window, Span(0, window.out), layout.span(d))
            elif layout.is_sharded(d):
                owned = self.block_plan.owned[d]
                self.rows[d] = EqualWindows(window, owned, window.receptive_field(*owned))
        self.local_out = self.result.local_shape[-nd:]
        self.has_outputs = self.result.local_shape.numel() > 0
        self.has_inputs = self.has_outputs and all(r.length for r in self.rows.values())  # this rank has cells to pool

    def equalize_windows(self, block: Tensor) -> Tensor:
        """Rearrange the block into windows of equal size along its sharded dims."""
        for dim, rows in self.rows.items():
            block = rows.select(block, dim)
        return block


@rule(*(f"adaptive_avg_pool{nd}d" for nd in ADAPTIVE_AVG_POOL), partial=True, merged=True)
def adaptive_avg_pool(input: Operand, output_size, *, fn):
    """Average windows; along reduced dims the result is Partial, and each rank adds its cells' share of the mean."""
    nd = int(fn.__name__.removeprefix("adaptive_avg_pool")[0])
    call = ADAPTIVE_AVG_POOL[nd]
    out_size = probe(call, input, output_size, meta=True).shape[-nd:]
    # For output size 1 torch calls mean, whose kernels support other dtypes than those of adaptive pooling.
    # A dim of size 0 stays: torch's kernels refuse it, unlike those of meta tensors.
    dtype = probe(call, stand_in(input, [min(n, 1) for n in input.shape]), 1 if set(out_size) == {1} else 2).dtype
    plan = AdaptivePoolPlan(keep_partial_sums(input.layout), out_size, reduce_cost=1)
    shape = plan.result.local_shape

    def pool_block(block):
        if not plan.has_outputs:
            return empty_result(block, shape, dtype)
        if not plan.has_inputs:
            return block.new_zeros(shape, dtype=dtype) + block.reshape(-1)[:0].sum()
        block = plan.equalize_windows(block)
        for dim, rows in plan.rows.items():
            filler = rows.filler_mask(block, dim)
            block = block if filler is None else block.masked_fill(filler, 0)
        out = call(block, plan.local_out)
        for dim, rows in plan.rows.items():
            if any(n != rows.length for n in rows.window_sizes):
                out = out * broadcast_along(out, dim, [rows.length / n for n in rows.window_sizes])
        return out

    run = connected(pool_block, [plan.source, plan.result])

    def local(input):
        return run(plan.block_plan.gather_block(input))

    partial = [*plan.result.partial, *((a, "sum") for a in plan.axes)]
    result = Layout.make(plan.result.mesh, plan.result.dims, partial)
    return Plan(local=local, operands={"input": plan.source}, layout=result)


@rule(*ADAPTIVE_MAX_POOL.values(), *WITH_INDICES, exact=True, merged=True)
def adaptive_max_pool(input: Operand, output_size, return_indices=False, *, fn):
    """Return maxima of windows and their global indices; along reduced dims, all-reduce the local maxima."""
    nd = int(fn.__name__.removeprefix("adaptive_max_pool")[0])
    call, with_indices = ADAPTIVE_MAX_POOL[nd], fn in WITH_INDICES
    out = probe(call, input, output_size, meta=True).shape[-nd:]
    dtype = probe(call, stand_in(input, [min(n, 1) for n in input.shape]), 1).dtype
    plan = AdaptivePoolPlan(input.layout, out, reduce_cost=2)  # an output is a value and an index
    layout, result, groups = plan.source, plan.result, process_groups(plan.source, plan.axes)
    shape, sizes = result.local_shape, layout.shape[-nd:]
    to_global = [plan.rows[d].global_index if d in plan.rows else _identity for d in plan.dims]

    def local_max(block: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima of this rank's cells and their global flat indices."""
        if not plan.has_outputs:
            maxima = empty_result(block, shape, dtype)
            return maxima, torch.empty_like(maxima, dtype=torch.int64)
        if not plan.has_inputs:
            maxima = block.new_full(shape, -math.inf, dtype=dtype) + block.reshape(-1)[:0].sum()
            return maxima, torch.full_like(maxima, NO_INDEX, dtype=torch.int64)
        block = plan.equalize_windows(block)
        maxima, block_index = call(block, plan.local_out, return_indices=True)
        index = to_global_flat_index(block_index, block.shape[-nd:], sizes, to_global) if plan.rows else block_index
        for dim in plan.reduced_dims:
            counts = plan.rows[dim].counts
            if 0 in counts:
                absent = broadcast_along(index, dim, counts) == 0
                maxima, index = maxima.masked_fill(absent, -math.inf), index.masked_fill(absent, NO_INDEX)
        return maxima, index

    run = connected(local_max, [layout, result])

    def local(input):
        maxima, index = run(plan.block_plan.gather_block(input))
        if groups and plan.has_outputs:
            maxima, index = reduce_max_with_index(maxima, index, groups)
        return (maxima, index) if with_indices else maxima

    return Plan(local=local, operands={"input": layout}, layout=(result, result) if with_indices else result)


def _identity(position: Tensor) -> Tensor:
    return position


def reduce_max_with_index(values: Tensor, index: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """All-reduce values to their maximum, with its index: the first index among equals, but the last index of a NaN.

    Both follow torch's kernels. Two small all_reduces. Backward: only the rank that holds the chosen index gets the
    gradient; no communication.
    """
    best = all_reduce_minmax(values, groups, "max")
    nan = best.isnan()
    is_best = (values == best) | (values.isnan() & nan)
    key = torch.where(nan, NO_INDEX - 1 - index, index)
    first = all_reduce_minmax(torch.where(is_best, key, NO_INDEX), groups, "min")
    own_best = torch.where(is_best & (key == first), values, torch.zeros_like(values))
    return known_sum(own_best, best, groups), torch.where(nan, NO_INDEX - 1 - first, first)
