"""Halos: each rank asks for global index ranges around its block, and gets the rows that other ranks hold.

A `Halo` is one cut dim: which rows of a block its peers ask for and which this rank receives, as a strip: the rows
before the block and the rows behind it. On a mesh that cuts several dims, the strips of the first dim take part in
the exchange along the second, so that corners come by way of the neighbours: one message for each neighbour and
direction. The adjoint sends the strips' gradients back and adds them where the rows came from.

Where the field goes on beyond its ends (in a circle, mirrored), the rows there are other rows of it, and travel in the
same messages. Along a dim that is whole they are this rank's own: such a halo has no group and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..layout import Span, starts
from . import collectives
from .autograd_collectives import exchange
from .route import Region, Route, RowRequest, fetch_route


class Halo(NamedTuple):
    """The rows of a strip along `dim`: `before` of them in front of the block, `after` behind it."""

    dim: int
    group: ProcessGroup | None
    route: Route
    before: int
    after: int
    any: bool  # whether any rank of the group sends: if not, nothing is done
    block_route: Route  # block -> block with its strips, for those who must have it in one piece

    @staticmethod
    def plan(
        dim: int,
        lengths: Sequence[int],
        ranges: Sequence[Span],
        coord: int,
        group: ProcessGroup | None,
        shift: int = 0,
        rows_at: Callable[[int, int], list[RowRequest]] = lambda start, stop: [RowRequest(start, stop - start)],
    ) -> Halo:
        """Coord c holds its piece of `lengths` and wants the range `wanted[c]`, which lies around it or is empty.

        Ranges count from `shift` places before the first row, and `rows_at` names the rows that stand in one.
        """
        requests, sizes, whole = [], [], []
        for start, length, (lo, hi) in zip(starts(lengths), lengths, ranges, strict=True):
            start, stop = start + shift, start + shift + length
            if lo < hi:  # with what lies between it and the block
                lo, hi = min(lo, stop), max(hi, start)
            first, last = Span(lo, max(min(hi, start), lo)), Span(max(lo, stop), max(hi, lo, stop))
            before, after = first.stop - first.start, last.stop - last.start
            behind = [run._replace(target=run.target + before) for run in rows_at(*last)]
            requests.append([*rows_at(*first), *behind])
            sizes.append((before, after))
            whole.append(rows_at(start - before, stop + after))
        route = fetch_route(dim, lengths, coord, requests, [a + b for a, b in sizes])
        wide = [a + n + b for n, (a, b) in zip(lengths, sizes, strict=True)]
        wider = fetch_route(dim, lengths, coord, whole, wide)
        return Halo(dim, group, route, *sizes[coord], any(a + b for a, b in sizes), wider)

    def with_halo(self, block: Tensor) -> Tensor:
        """The block with its strips, in one piece. Differentiable."""
        if self.group is not None:
            return exchange(block, self.block_route, self.group)
        return torch.cat([_flipped(piece.view(block), piece) for piece in self.block_route.send[0]], self.dim)

    def start(self, block: Tensor, earlier: Sequence[tuple[Halo, Tensor]]) -> collectives.Pending[Tensor]:
        """Send what peers ask of `block` (widened by the strips of `earlier` dims); brings this rank's strip."""
        shape = list(block.shape)
        for halo, _ in earlier:
            shape[halo.dim] += halo.before + halo.after
        shape[self.dim] = self.before + self.after
        asked = [[_flipped(_with_earlier_halos(block, earlier, p), p) for p in pieces] for pieces in self.route.send]
        pending = self._exchange(asked, self.route.recv, block, shape)

        def land() -> Tensor:
            # in the order of the strip, by one call
            parts = sorted(self._rows(self.route.recv, pending.wait()), key=lambda found: found[0].ranges)
            rows = [part for _, part in parts]
            return (
                torch.cat(rows, self.dim) if len(rows) > 1 else rows[0].contiguous() if rows else block.new_empty(shape)
            )

        return collectives.Pending((), (), land)

    def start_adjoint(
        self, strip_grad: Tensor, block_shape: Sequence[int], earlier: Sequence[Halo]
    ) -> collectives.Pending[list[tuple[Region, Tensor]]]:
        """Send a strip's gradient to the rows' owners; brings what this rank's rows get, piece by piece."""
        shape = list(block_shape)
        for halo in earlier:
            shape[halo.dim] += halo.before + halo.after
        asked = [[p.view(strip_grad) for p in pieces] for pieces in self.route.recv]
        pending = self._exchange(asked, self.route.send, strip_grad, shape)

        def land() -> list[tuple[Region, Tensor]]:
            return [(piece, _flipped(part, piece)) for piece, part in self._rows(self.route.send, pending.wait())]

        return collectives.Pending((), (), land)

    def _exchange(
        self, asked: list[list[Tensor]], comes: Sequence[Sequence[Region]], like: Tensor, shape: Sequence[int]
    ) -> collectives.Pending[list[Tensor]]:
        """Send `asked[c]` to coord c and receive its pieces `comes[c]` of a block of `shape`.

        Rows travel row by row, one peer's behind the other's, so that one call packs what goes to all of them.
        """
        rows = [part.movedim(self.dim, 0) for parts in asked for part in parts]
        others = [n for d, n in enumerate(shape) if d != self.dim]
        packed = torch.cat(rows) if len(rows) > 1 else rows[0].contiguous() if rows else like.new_empty([0, *others])
        sends = list(packed.split([sum(part.shape[self.dim] for part in parts) for parts in asked]))
        if self.group is None:
            return collectives.Pending((), (), lambda: sends)
        counts = [sum(piece.ranges[0][2] for piece in pieces) for pieces in comes]
        return collectives.start_exchange(sends, [(n, *others) for n in counts], self.group)

    def _rows(self, comes: Sequence[Sequence[Region]], received: Sequence[Tensor]) -> list[tuple[Region, Tensor]]:
        """What came, piece by piece, as views of it."""
        found = []
        for pieces, rows in zip(comes, received, strict=True):
            parts = rows.split([piece.ranges[0][2] for piece in pieces]) if pieces else ()
            found += [(piece, part.movedim(0, self.dim)) for piece, part in zip(pieces, parts, strict=True)]
        return found


def _flipped(rows: Tensor, piece: Region) -> Tensor:
    return rows.flip(piece.flip) if piece.flip else rows


def _with_earlier_halos(block: Tensor, earlier: Sequence[tuple[Halo, Tensor]], piece: Region) -> Tensor:
    """A piece of the block together with the strips that lie around it along earlier dims."""
    found = piece.view(block)
    for halo, strip in earlier:
        part = piece.view(strip)
        parts = [part.narrow(halo.dim, 0, halo.before), found, part.narrow(halo.dim, halo.before, halo.after)]
        found = torch.cat(parts, halo.dim)
    return found


def add_to_earlier_halos(
    returned: Sequence[tuple[Region, Tensor]], earlier: Sequence[tuple[Halo, Tensor]]
) -> list[tuple[Region, Tensor]]:
    """The adjoint of widening: gradients go into those of the earlier strips; what is left is the block's."""
    left = []
    for piece, grad in returned:
        for halo, strip in reversed(earlier):
            part, inner = piece.view(strip), grad.shape[halo.dim] - halo.before - halo.after
            first, grad, last = grad.split([halo.before, inner, halo.after], halo.dim)
            part.narrow(halo.dim, 0, halo.before).add_(first)
            part.narrow(halo.dim, halo.before, halo.after).add_(last)
        left.append((piece, grad))
    return left
