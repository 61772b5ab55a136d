"""Assemble the contiguous block of input cells that one rank's outputs read, with a fill value outside the field.

An op that is not linear in its input (max pooling, for example) cannot add the contribution of a halo later. Its rank
first assembles one block with exactly the cells of all its windows: its own cells, halo cells received from other
ranks, and the fill value in the padding. The local call then has no padding along a sharded dim. The adjoint sends the
gradient of every cell back to the rank that owns the cell, which adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm.autograd_collectives import exchange
from ...comm.route import Route, RowRequest, fetch_route, range_route, readers_of
from ...layout import DimSharding, Layout, Span, shard_sizes_of, starts
from .halo_plan import is_subspan, sharding_of_outputs
from .pad import DimPadding, gather_runs
from .window import shard_spans


class WindowLike(Protocol):
    """The methods of `Window` that `PaddedBlockPlan` uses."""

    @property
    def size(self) -> int: ...

    @property
    def out(self) -> int: ...

    def owned(self, shard_sizes: Sequence[int]) -> tuple[int, ...]: ...

    def receptive_field(self, first: int, stop: int) -> Span: ...


class ExchangedDim(NamedTuple):
    """One dim along which some rank reads cells of another rank."""

    route: Route
    group: ProcessGroup

    def apply(self, block: Tensor, fill: float) -> Tensor:
        return exchange(block, self.route, self.group, fill)

    def apply_adjoint(self, block: Tensor) -> Tensor:
        return exchange(block, self.route.transposed, self.group)


class LocalDim(NamedTuple):
    """One dim along which every rank reads its own cells only: `length` cells from `start`, of the `size` it holds.

    The block gets `before` and `after` cells of the fill value around them.
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


def pad_local_dim(block: Tensor, dim: int, padding: DimPadding, fill: float) -> Tensor:
    """Pad an unsharded dim of a local block."""
    if padding.mode == "constant":
        return LocalDim(dim, padding.size, 0, padding.size, padding.before, padding.after).apply(block, fill)
    return gather_runs(block, dim, padding.source_runs(0, padding.before + padding.size + padding.after))


class PaddedBlockPlan:
    """Exchange that assembles one rank's block for an op with windows along some dims.

    Each of these dims is sharded over at most one mesh axis.

    out_sizes: dim -> shard sizes of the outputs; by default each rank owns the windows centered in its shard.
    dim_paddings: dim -> boundary condition of the field. The window of such a dim reads the padded field, and
        `block_starts` is in indices of the padded field.
    block_starts: dim -> global index of the first cell of the block. It is 0 for an unsharded dim, whose padding is
        left to the local call.
    owned: dim -> the outputs that this rank computes.
    out_shardings: dim -> the sharding of the outputs.
    remote_cells: dim -> the number of cells received from another rank, summed over all ranks.
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
        self._remote_cells: dict[int, Callable[[], int]] = {}
        self.steps: list[ExchangedDim | LocalDim] = []
        self._filled: list[tuple[int, int, int]] = []  # dim, start and length of the cells between fill values
        for dim, window in self.windows.items():
            (sharding,) = layout.dims[dim]
            shard_sizes = shard_sizes_of(sharding)
            padding = self.dim_paddings.get(dim)
            cells = shard_sizes if padding is None else padding.padded_sizes(shard_sizes)
            if out_sizes is None:
                self.out_shardings[dim] = sharding_of_outputs(window, sharding, cells)
            else:
                sizes = tuple(out_sizes[dim]) if sharding.axes else ()
                self.out_shardings[dim] = DimSharding(window.out, sharding.axes, sizes)
            owned_sizes = shard_sizes_of(self.out_shardings[dim])
            coord = layout.index(sharding.axes)
            first = starts(owned_sizes)[coord]
            self.owned[dim] = Span(first, first + owned_sizes[coord])
            self.block_starts[dim] = 0
            if layout.is_sharded(dim) and padding is not None:
                self._plan_padded_dim(layout, dim, shard_sizes, owned_sizes, coord)
            elif layout.is_sharded(dim):
                self._plan_dim(layout, dim, shard_sizes, owned_sizes, coord)
        self.local_paddings = {dim: padding for dim, padding in self.dim_paddings.items() if not layout.is_sharded(dim)}

    def _plan_padded_dim(
        self, layout: Layout, dim: int, shard_sizes: Sequence[int], owned_sizes: Sequence[int], coord: int
    ) -> None:
        window, padding = self.windows[dim], self.dim_paddings[dim]
        fields = [window.receptive_field(*o) for o in shard_spans(owned_sizes)]
        requests = []
        for begin, end in fields:
            first, last = max(begin, 0), min(end, window.size)
            runs = padding.source_runs(first, last) if first < last else []
            requests.append([run._replace(target=run.target + first - begin) for run in runs])
        (axis,) = layout.nontrivial_axes(layout.axes_of(dim))
        route = fetch_route(dim, shard_sizes, coord, requests, [end - begin for begin, end in fields])
        self.block_starts[dim] = fields[coord].start
        self.steps.append(ExchangedDim(route, layout.mesh.get_group(axis)))

    def _plan_dim(
        self, layout: Layout, dim: int, shard_sizes: Sequence[int], owned_sizes: Sequence[int], coord: int
    ) -> None:
        window, begins, owned = self.windows[dim], starts(shard_sizes), starts(owned_sizes)

        def field_of(c: int) -> Span:
            """Return the cells of the block of coord c."""
            if not owned_sizes[c]:
                return Span(begins[c], begins[c])
            return window.receptive_field(owned[c], owned[c] + owned_sizes[c])

        def inside(c: int) -> Span:
            """Return the cells of the block that are in the field."""
            begin, end = field_of(c)
            first = max(begin, 0)
            return Span(first, max(min(end, window.size), first))

        def run_of(c: int) -> RowRequest:
            (begin, end), (first, last) = field_of(c), inside(c)
            return RowRequest(first, last - first, min(first, end) - begin)

        (begin, end), run = field_of(coord), run_of(coord)
        start, stop = begins[coord], begins[coord] + shard_sizes[coord]
        self.block_starts[dim] = begin
        if any(
            not is_subspan(inside(c), Span(b, b + n)) for c, (b, n) in enumerate(zip(begins, shard_sizes, strict=True))
        ):
            (axis,) = layout.nontrivial_axes(layout.axes_of(dim))
            held = [Span(b, b + n) for b, n in zip(begins, shard_sizes, strict=True)]
            self._remote_cells[dim] = lambda: sum(_outside(inside(c), span) for c, span in enumerate(held))
            readers = readers_of(Span(start, stop), inside, coord, len(shard_sizes))
            requests = [(c, [run_of(c)]) for c in readers]
            route = range_route(dim, shard_sizes, layout.coords[axis], requests, [run], end - begin)
            for restriction in self._filled:  # messages do not contain fill values
                route = route.restricted(*restriction)
            if run.length < end - begin:
                self._filled.append((dim, run.target, run.length))
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
        if run.length < end - begin:
            self._filled.append((dim, before, run.length))
        self.steps.append(crop)

    @property
    def remote_cells(self) -> dict[int, int]:
        return {dim: self._remote_cells[dim]() if dim in self._remote_cells else 0 for dim in self.windows}

    def gather_block(self, block: Tensor, fill: float = 0) -> Tensor:
        """Return the cells that this rank's outputs read. Differentiable; at most one exchange per sharded dim."""
        for step in self.steps:
            block = step.apply(block, fill)
        for dim, padding in self.local_paddings.items():  # last: otherwise the exchanges would send these copies
            block = pad_local_dim(block, dim, padding, fill)
        return block

    def scatter_add_block(self, block: Tensor) -> Tensor:
        """Apply the adjoint of `gather_block`: sum the blocks of all ranks into the field; return this rank's shard."""
        assert not self.dim_paddings
        for step in reversed(self.steps):
            block = step.apply_adjoint(block)
        return block

    def result(self, layout: Layout) -> Layout:
        """Return `layout` with the window dims sharded like the outputs."""
        for dim, sharding in self.out_shardings.items():
            layout = layout.with_dim(dim, sharding)
        return layout


def _outside(inner: Span, outer: Span) -> int:
    """Return the number of indices of `inner` that are not in `outer`."""
    return inner.stop - inner.start - max(min(inner.stop, outer.stop) - max(inner.start, outer.start), 0)


def empty_result(block: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty result that is in the autograd graph.

    Without it the backward of a rank with an empty shard would not join the collectives of the other ranks.
    """
    return block.reshape(-1)[:0].reshape(shape).to(dtype)
