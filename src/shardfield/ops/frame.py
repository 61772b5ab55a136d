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

from ..comm.moves import travel
from ..comm.route import Route, Run, fetch_route
from ..layout import Factor, Layout, Span, pieces
from .pad import Edge, taken
from .window import spans

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by ndim


class Looks(Protocol):
    """What a frame asks of a window along one dim."""

    @property
    def size(self) -> int: ...

    @property
    def out(self) -> int: ...

    def owned(self, lengths: Sequence[int]) -> tuple[int, ...]: ...

    def covers(self, first: int, stop: int) -> Span: ...


class Travelled(NamedTuple):
    """One dim whose cells come from several ranks."""

    route: Route
    group: ProcessGroup

    def there(self, block: Tensor, fill: float) -> Tensor:
        made = travel(block, self.route, self.group, fill)
        last = CHANNELS_LAST.get(block.ndim)
        if last is None or block.is_contiguous() or not block.is_contiguous(memory_format=last):
            return made
        return made.contiguous(memory_format=last)

    def back(self, block: Tensor) -> Tensor:
        return travel(block, self.route.transposed, self.group)


class Cropped(NamedTuple):
    """One dim along which every rank has what it reads: `length` cells from `start`, of the `size` it holds.

    `before` and `after` cells of fill stand around them.
    """

    dim: int
    size: int
    start: int
    length: int
    before: int
    after: int

    def _around(self, block: Tensor, before: int, after: int, fill: float = 0) -> Tensor:
        if not before and not after:
            return block
        return F.pad(block, [0, 0] * (block.ndim - 1 - self.dim) + [before, after], value=fill)

    def there(self, block: Tensor, fill: float) -> Tensor:
        if self.length != self.size:
            block = block.narrow(self.dim, self.start, self.length)
        return self._around(block, self.before, self.after, fill)

    def back(self, block: Tensor) -> Tensor:
        if self.before or self.after:
            block = block.narrow(self.dim, self.before, self.length)
        return self._around(block, self.start, self.size - self.start - self.length)


def bordered(block: Tensor, dim: int, edge: Edge, fill: float) -> Tensor:
    """A block with the border of a dim that is whole here."""
    if edge.mode == "constant":
        return Cropped(dim, edge.size, 0, edge.size, edge.before, edge.after).there(block, fill)
    return taken(block, dim, edge.shown(0, edge.before + edge.size + edge.after))


class Frame:
    """This rank's part of an op that looks through windows along some dims, each cut by one axis at most.

    begins: the global index, by dim, of the piece's first cell; of a dim that is whole here, 0: its padding is left to
    the local call. owned: the outputs this rank makes. factors: how the outputs are cut. sends: cells that travel, all
    ranks together, by dim. made: how the outputs are to be cut, where the cells do not decide it. edges: dims along
    which the field goes on beyond its ends; their windows, and `begins`, are those of the longer field.
    """

    def __init__(
        self,
        layout: Layout,
        windows: Mapping[int, Looks],
        made: Mapping[int, Sequence[int]] | None = None,
        edges: Mapping[int, Edge] | None = None,
    ):
        self.windows, self.edges = dict(windows), edges or {}
        self.begins: dict[int, int] = {}
        self.owned: dict[int, Span] = {}
        self.factors: dict[int, Factor] = {}
        self.sends: dict[int, int] = {}
        self.turns: list[Travelled | Cropped] = []
        for dim, window in self.windows.items():
            (factor,) = layout.dims[dim]
            lengths = pieces(factor)
            edge = self.edges.get(dim)
            cells = lengths if edge is None else edge.grown(lengths)
            cut = window.owned(cells) if made is None else tuple(made[dim])
            at = layout.index(factor.axes)
            self.owned[dim] = spans(cut)[at]
            self.factors[dim] = Factor(window.out, factor.axes, cut if factor.axes else ())
            self.begins[dim] = self.sends[dim] = 0
            if layout.is_cut(dim) and edge is not None:
                self._look_beyond(layout, dim, lengths, cut, at)
            elif layout.is_cut(dim):
                self._look(layout, dim, lengths, cut, at)
        self.here = {dim: edge for dim, edge in self.edges.items() if not layout.is_cut(dim)}

    def _look_beyond(self, layout: Layout, dim: int, lengths: Sequence[int], cut: Sequence[int], at: int) -> None:
        window, edge = self.windows[dim], self.edges[dim]
        covers = [window.covers(*o) for o in spans(cut)]
        requests = []
        for begin, end in covers:
            first, last = max(begin, 0), min(end, window.size)
            runs = edge.shown(first, last) if first < last else []
            requests.append([run._replace(target=run.target + first - begin) for run in runs])
        (axis,) = layout.wide(layout.axes_of(dim))
        route = fetch_route(dim, lengths, at, requests, [end - begin for begin, end in covers])
        self.begins[dim] = covers[at].start
        self.turns.append(Travelled(route, layout.mesh.get_group(axis)))

    def _look(self, layout: Layout, dim: int, lengths: Sequence[int], cut: Sequence[int], at: int) -> None:
        window, held = self.windows[dim], spans(lengths)
        covers = [
            window.covers(*o) if o.start < o.stop else Span(h.start, h.start)
            for h, o in zip(held, spans(cut), strict=True)
        ]
        runs = []
        for (begin, end), (start, stop) in zip(covers, held, strict=True):
            first, last = max(begin, 0), min(end, window.size)
            runs.append(Run(first, max(last - first, 0), min(first, end) - begin))
            mine = max(min(last, stop) - max(first, start), 0)
            self.sends[dim] += runs[-1].length - mine
        (begin, end), run, (start, stop) = covers[at], runs[at], held[at]
        self.begins[dim] = begin
        if self.sends[dim]:
            (axis,) = layout.wide(layout.axes_of(dim))
            sizes = [end - begin for begin, end in covers]
            route = fetch_route(dim, lengths, layout.coords[axis], [[r] for r in runs], sizes)
            self.turns.append(Travelled(route, layout.mesh.get_group(axis)))
            return
        before = run.target if run.length else 0
        crop = Cropped(
            dim,
            stop - start,
            run.source - start if run.length else 0,
            run.length,
            before,
            end - begin - run.length - before,
        )
        self.turns.append(crop)

    def take(self, block: Tensor, fill: float = 0) -> Tensor:
        """The cells that this rank's outputs read, in one piece. Differentiable; one exchange a cut dim at most."""
        for turn in self.turns:
            block = turn.there(block, fill)
        for dim, edge in self.here.items():  # last, so that copies made here do not travel
            block = bordered(block, dim, edge, fill)
        return block

    def give(self, block: Tensor) -> Tensor:
        """The adjoint of `take`: every rank's piece is added into the field, and this rank gets its part of the sum."""
        assert not self.edges
        for turn in reversed(self.turns):
            block = turn.back(block)
        return block

    def result(self, layout: Layout) -> Layout:
        """`layout` with the dims of the windows cut as their outputs are."""
        for dim, factor in self.factors.items():
            layout = layout.with_dim(dim, factor)
        return layout


def nothing(block: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A result without elements that is in the graph, so that backward makes the same moves on every rank."""
    return block.reshape(-1)[:0].reshape(shape).to(dtype)
