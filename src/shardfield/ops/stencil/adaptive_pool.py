"""Adaptive pools: the field is divided into a given number of windows, of lengths that differ by one or two.

Along a cut dim there are two ways. Either a rank makes the outputs whose windows have their centre in its piece and
fetches what they read, or every rank pools what it has of every window and the parts are merged: averages by adding
(they stay Partial), maxima by an all-reduce. A pool to 1x1 is merged; whichever sends less is taken.
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
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout, Span, starts
from .._common.probe import all_reduce_minmax, known_sum, probe_shapes
from ..reduction.minmax import NO_INDEX
from ..shape.flip_roll import shard_by_one_axis
from .padded_block import PaddedBlockPlan, empty_result
from .pool import broadcast_along, keep_partial_sums, result_dtype, to_global_flat_index

ADAPTIVE_AVG_POOL: dict[int, Callable] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX_POOL: dict[int, Callable] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
# those that return indices too; one of them has the name of one that does not
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

    def owned(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """How many outputs have the centre of their window in each piece.

        >>> AdaptiveWindow(8, 3).owned([4, 4])
        (1, 2)
        """
        centred = [-(-(2 * start * self.out - self.size) // (2 * self.size)) for start in starts(lengths)[1:]]
        marks = [0, *(min(max(o, 0), self.out) for o in centred), self.out]
        return tuple(b - a for a, b in pairwise(marks))

    def receptive_field(self, first: int, stop: int) -> Span:
        """The inputs that outputs `first` to `stop` read.

        >>> AdaptiveWindow(7, 3).receptive_field(1, 2)
        Span(start=2, stop=5)
        """
        return Span(first * self.size // self.out, -(-stop * self.size // self.out)) if first < stop else Span(0, 0)


class EqualWindows:
    """One dim of a piece, laid out so that all windows are equally long and stand one behind the other.

    The piece holds the cells `held`; the outputs are `local_out`. A window that is shorter than the others (or of
    which the
    piece has only a part) is filled up with its last cell. index: the cells of the new dim, None if they are as they
    were. length: of every window. counts: the cells of each that are its own.
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
        """Global cells of positions along the dim of `of`."""
        if self.index is not None:
            position = torch.tensor(self.index, device=position.device)[position]
        return position + self.begin

    def filler_mask(self, like: Tensor, dim: int) -> Tensor | None:
        """Which of the cells of `of` fill up a window."""
        if all(n == self.length for n in self.counts):
            return None
        extra = [j >= n for n in self.counts for j in range(self.length)]
        return torch.tensor(extra, device=like.device).view(-1, *[1] * (like.ndim - 1 - dim))


class AdaptivePoolPlan:
    """What a rank does along the last dims, each of which it pools to a number of `out`.

    source: where the operand must lie. result: where the outputs do; those along `reduced_dims` dims are whole, and
    over `axes` each rank has made them of its part. rows: by dim, for those that are cut. weight: what a merged output
    costs, in cells of input.
    """

    def __init__(self, layout: Layout, out: Sequence[int], reduce_cost: int):
        self.nd = nd = len(out)
        self.dims = dims = tuple(range(layout.ndim - nd, layout.ndim))
        self.source = layout = shard_by_one_axis(layout, dims)
        windows = {d: AdaptiveWindow(layout.shape[d], n) for d, n in zip(dims, out, strict=True)}
        fetched, cells = PaddedBlockPlan(layout, windows).remote_cells, layout.shape[-nd:].numel()
        self.reduced_dims = []
        for d in dims:
            if fetched[d]:
                parts = math.prod(layout.mesh.size(a) for a in layout.axes_of(d))
                reduced = 2 * (parts - 1) * math.prod(out) * reduce_cost
                if windows[d].out == 1 or fetched[d] * (cells // layout.shape[d]) > reduced:
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
        self.has_inputs = self.has_outputs and all(r.length for r in self.rows.values())  # there are cells to pool

    def equalize_windows(self, block: Tensor) -> Tensor:
        """The piece with windows of one length along its cut dims."""
        for dim, rows in self.rows.items():
            block = rows.select(block, dim)
        return block


@rule(*(f"adaptive_avg_pool{nd}d" for nd in ADAPTIVE_AVG_POOL), partial=True, merged=True)
def adaptive_avg_pool(input: Operand, output_size, *, fn):
    """Means of windows; along merged dims, every rank's share of them."""
    nd = int(fn.__name__.removeprefix("adaptive_avg_pool")[0])
    call = ADAPTIVE_AVG_POOL[nd]
    out = probe_shapes(call, input, output_size).shape[-nd:]
    # torch takes a mean over all of a dim for size 1, which has kernels for other dtypes
    dtype = result_dtype(input, nd, lambda x: call(x, 1 if set(out) == {1} else 2))
    way = AdaptivePoolPlan(keep_partial_sums(input.layout), out, reduce_cost=1)
    shape = way.result.local_shape

    def local(input):
        block = way.block_plan.gather_block(input)
        if not way.has_outputs:
            return empty_result(block, shape, dtype)
        if not way.has_inputs:
            return block.new_zeros(shape, dtype=dtype) + block.reshape(-1)[:0].sum()
        block = way.equalize_windows(block)
        for dim, rows in way.rows.items():
            surplus = rows.filler_mask(block, dim)
            block = block if surplus is None else block.masked_fill(surplus, 0)
        made = call(block, way.local_out)
        for dim, rows in way.rows.items():
            if any(n != rows.length for n in rows.window_sizes):
                made = made * broadcast_along(made, dim, [rows.length / n for n in rows.window_sizes])
        return made

    partial = [*way.result.partial, *((a, "sum") for a in way.axes)]
    result = Layout.make(way.result.mesh, way.result.dims, partial)
    return Plan(local=local, operands={"input": way.source}, layout=result)


@rule(*ADAPTIVE_MAX_POOL.values(), *WITH_INDICES, exact=True, merged=True)
def adaptive_max_pool(input: Operand, output_size, return_indices=False, *, fn):
    """Maxima of windows and where they are; along merged dims, the largest of every rank's."""
    nd = int(fn.__name__.removeprefix("adaptive_max_pool")[0])
    call, pair = ADAPTIVE_MAX_POOL[nd], fn in WITH_INDICES
    out = probe_shapes(call, input, output_size).shape[-nd:]
    dtype = result_dtype(input, nd, lambda x: call(x, 1))
    way = AdaptivePoolPlan(input.layout, out, reduce_cost=2)  # a value and its place
    layout, result, over = way.source, way.result, process_groups(way.source, way.axes)
    shape, sizes = result.local_shape, layout.shape[-nd:]
    steps = [way.rows[d].global_index if d in way.rows else _identity for d in way.dims]

    def pooled(block: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima that this rank finds, and their places in the field."""
        if not way.has_outputs:
            made = empty_result(block, shape, dtype)
            return made, torch.empty_like(made, dtype=torch.int64)
        if not way.has_inputs:
            made = block.new_full(shape, -math.inf, dtype=dtype) + block.reshape(-1)[:0].sum()
            return made, torch.full_like(made, NO_INDEX, dtype=torch.int64)
        block = way.equalize_windows(block)
        made, at = call(block, way.local_out, return_indices=True)
        index = to_global_flat_index(at, block.shape[-nd:], sizes, steps) if way.rows else at
        for dim in way.reduced_dims:
            counts = way.rows[dim].counts
            if 0 in counts:
                absent = broadcast_along(index, dim, counts) == 0
                made, index = made.masked_fill(absent, -math.inf), index.masked_fill(absent, NO_INDEX)
        return made, index

    def local(input):
        found = pooled(way.block_plan.gather_block(input))
        if over and way.has_outputs:
            found = reduce_max_with_index(*found, over)
        return found if pair else found[0]

    return Plan(local=local, operands={"input": layout}, layout=(result, result) if pair else result)


def _identity(position: Tensor) -> Tensor:
    return position


def reduce_max_with_index(made: Tensor, index: Tensor, over: Groups) -> tuple[Tensor, Tensor]:
    """The largest of all ranks' values and its place: the first of equals, but the last NaN, as torch's loops find it.

    The gradient goes to that place alone. Two small all-reduces; backward sends nothing.
    """
    best = all_reduce_minmax(made, over, "max")
    nan = best.isnan()
    mine = (made == best) | (made.isnan() & nan)
    key = torch.where(nan, NO_INDEX - 1 - index, index)
    first = all_reduce_minmax(torch.where(mine, key, NO_INDEX), over, "min")
    part = torch.where(mine & (key == first), made, torch.zeros_like(made))
    return known_sum(part, best, over), torch.where(nan, NO_INDEX - 1 - first, first)
