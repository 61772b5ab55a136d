"""A block as its outputs look at it: the cells they read, wherever those lie, and a fill outside the field.

Where an op's result is not a sum over its cells, a rank works on one piece that holds all its windows and no more: its
own cells, cropped to what is read, other ranks' cells around them, and the fill. Whatever the field's padding, the
local call then has none along a cut dim. The adjoint adds every cell of the piece to where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm.autograd_collectives import exchange
from ...comm.route import Route, RowRequest, fetch_route
from ...layout import DimSharding, Layout, Span, shard_sizes_of
from .pad import DimPadding, gather_runs
from .window import shard_spans

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by ndim


class WindowLike(Protocol):
    """What a frame asks of a window along one dim."""

    @property
    def size(self) -> int: ...

    @property
    def out(self) -> int: ...

    def owned(self, lengths: Sequence[int]) -> tuple[int, ...]: ...

    def receptive_field(self, first: int, stop: int) -> Span: ...


class ExchangedDim(NamedTuple):
    """One dim whose cells come from several ranks."""

    route: Route
    group: ProcessGroup

    def apply(self, block: Tensor, fill: float) -> Tensor:
        made = exchange(block, self.route, self.group, fill)
        last = CHANNELS_LAST.get(block.ndim)
        if last is None or block.is_contiguous() or not block.is_contiguous(memory_format=last):
            return made
        return made.contiguous(memory_format=last)

    def apply_adjoint(self, block: Tensor) -> Tensor:
        return exchange(block, self.route.transposed, self.group)


class LocalDim(NamedTuple):
    """One dim along which every rank has what it reads: `length` cells from `start`, of the `size` it holds.

    `before` and `after` cells of fill stand around them.
    """

    dim: int
    size: int
    start: int
    length: int
    before: int
    after: int

    def _pad(self, block: Tensor, before: int, after: int, fill: float = 0) -> Tensor:
        if not before and not after:
            return block
        return F.pad(block, [0, 0] * (block.ndim - 1 - self.dim) + [before, after], value=fill)

    def apply(self, block: Tensor, fill: float) -> Tensor:
        if self.length != self.size:
            block = block.narrow(self.dim, self.start, self.length)
        return self._pad(block, self.before, self.after, fill)

    def apply_adjoint(self, block: Tensor) -> Tensor:
        if self.before or self.after:
            block = block.narrow(self.dim, self.before, self.length)
        return self._pad(block, self.start, self.size - self.start - self.length)


def pad_local_dim(block: Tensor, dim: int, edge: DimPadding, fill: float) -> Tensor:
    """A block with the border of a dim that is whole here."""
    if edge.mode == "constant":
        return LocalDim(dim, edge.size, 0, edge.size, edge.before, edge.after).apply(block, fill)
    return gather_runs(block, dim, edge.source_runs(0, edge.before + edge.size + edge.after))


class PaddedBlockPlan:
    """This rank's part of an op that looks through windows along some dims, each cut by one axis at most.

    begins: the global index, by dim, of the piece's first cell; of a dim that is whole here, 0: its padding is left to
    the local call. owned: the outputs this rank makes. factors: how the outputs are cut. sends: cells that travel, all
    ranks together, by dim. made: how the outputs are to be cut, where the cells do not decide it. edges: dims along
    which the field goes on beyond its ends; their windows, and `block_starts`, are those of the longer field.
    """

    def __init__(
        self,
        layout: Layout,
        windows: Mapping[int, WindowLike],
        out_sizes: Mapping[int, Sequence[int]] | None = None,
        dim_paddings: Mapping[int, DimPadding] | None = None,
    ):
        self.windows, self.dim_paddings = dict(windows), dim_paddings or {}
        self.block_starts: dict[int, int] = {}
        self.owned: dict[int, Span] = {}
        self.out_shardings: dict[int, DimSharding] = {}
        self.remote_cells: dict[int, int] = {}
        self.steps: list[ExchangedDim | LocalDim] = []
        for dim, window in self.windows.items():
            (factor,) = layout.dims[dim]
            lengths = shard_sizes_of(factor)
            edge = self.dim_paddings.get(dim)
            cells = lengths if edge is None else edge.padded_sizes(lengths)
            cut = window.owned(cells) if out_sizes is None else tuple(out_sizes[dim])
            at = layout.index(factor.axes)
            self.owned[dim] = shard_spans(cut)[at]
            self.out_shardings[dim] = DimSharding(window.out, factor.axes, cut if factor.axes else ())
            self.block_starts[dim] = self.remote_cells[dim] = 0
            if layout.is_sharded(dim) and edge is not None:
                self._plan_padded_dim(layout, dim, lengths, cut, at)
            elif layout.is_sharded(dim):
                self._plan_dim(layout, dim, lengths, cut, at)
        self.local_paddings = {dim: edge for dim, edge in self.dim_paddings.items() if not layout.is_sharded(dim)}

    def _plan_padded_dim(self, layout: Layout, dim: int, lengths: Sequence[int], cut: Sequence[int], at: int) -> None:
        window, edge = self.windows[dim], self.dim_paddings[dim]
        covers = [window.receptive_field(*o) for o in shard_spans(cut)]
        requests = []
        for begin, end in covers:
            first, last = max(begin, 0), min(end, window.size)
            runs = edge.source_runs(first, last) if first < last else []
            requests.append([run._replace(target=run.target + first - begin) for run in runs])
        (axis,) = layout.nontrivial_axes(layout.axes_of(dim))
        route = fetch_route(dim, lengths, at, requests, [end - begin for begin, end in covers])
        self.block_starts[dim] = covers[at].start
        self.steps.append(ExchangedDim(route, layout.mesh.get_group(axis)))

    def _plan_dim(self, layout: Layout, dim: int, lengths: Sequence[int], cut: Sequence[int], at: int) -> None:
        window, held = self.windows[dim], shard_spans(lengths)
        covers = [
            window.receptive_field(*o) if o.start < o.stop else Span(h.start, h.start)
            for h, o in zip(held, shard_spans(cut), strict=True)
        ]
        runs = []
        for (begin, end), (start, stop) in zip(covers, held, strict=True):
            first, last = max(begin, 0), min(end, window.size)
            runs.append(RowRequest(first, max(last - first, 0), min(first, end) - begin))
            mine = max(min(last, stop) - max(first, start), 0)
            self.remote_cells[dim] += runs[-1].length - mine
        (begin, end), run, (start, stop) = covers[at], runs[at], held[at]
        self.block_starts[dim] = begin
        if self.remote_cells[dim]:
            (axis,) = layout.nontrivial_axes(layout.axes_of(dim))
            sizes = [end - begin for begin, end in covers]
            route = fetch_route(dim, lengths, layout.coords[axis], [[r] for r in runs], sizes)
            self.steps.append(ExchangedDim(route, layout.mesh.get_group(axis)))
            return
        before = run.target if run.length else 0
        crop = LocalDim(
            dim,
            stop - start,
            run.source - start if run.length else 0,
            run.length,
            before,
            end - begin - run.length - before,
        )
        self.steps.append(crop)

    def gather_block(self, block: Tensor, fill: float = 0) -> Tensor:
        """The cells that this rank's outputs read, in one piece. Differentiable; one exchange a cut dim at most."""
        for turn in self.steps:
            block = turn.apply(block, fill)
        for dim, edge in self.local_paddings.items():  # last, so that copies made here do not travel
            block = pad_local_dim(block, dim, edge, fill)
        return block

    def scatter_add_block(self, block: Tensor) -> Tensor:
        """The adjoint of `gather_block`: every rank's piece is added into the field, and this rank gets its part of
        the sum."""
        assert not self.dim_paddings
        for turn in reversed(self.steps):
            block = turn.apply_adjoint(block)
        return block

    def result(self, layout: Layout) -> Layout:
        """`layout` with the dims of the windows cut as their outputs are."""
        for dim, factor in self.out_shardings.items():
            layout = layout.with_dim(dim, factor)
        return layout


def empty_result(block: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A result without elements that is in the graph, so that backward makes the same moves on every rank."""
    return block.reshape(-1)[:0].reshape(shape).to(dtype)
