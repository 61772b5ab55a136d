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
from . import wire
from .moves import travel
from .route import Piece, Route, Run, fetch_route


class Halo(NamedTuple):
    """The rows of a strip along `dim`: `before` of them in front of the block, `after` behind it."""

    dim: int
    group: ProcessGroup | None
    route: Route
    before: int
    after: int
    any: bool  # whether any rank of the group sends: if not, nothing is done
    wider: Route  # block -> block with its strips, for those who must have it in one piece

    @staticmethod
    def around(
        dim: int,
        lengths: Sequence[int],
        wanted: Sequence[Span],
        coord: int,
        group: ProcessGroup | None,
        shift: int = 0,
        ask: Callable[[int, int], list[Run]] = lambda start, stop: [Run(start, stop - start)],
    ) -> Halo:
        """Coord c holds its piece of `lengths` and wants the range `wanted[c]`, which lies around it or is empty.

        Ranges count from `shift` places before the first row, and `ask` names the rows that stand in one.
        """
        requests, sizes, whole = [], [], []
        for start, length, (lo, hi) in zip(starts(lengths), lengths, wanted, strict=True):
            start, stop = start + shift, start + shift + length
            if lo < hi:  # with what lies between it and the block
                lo, hi = min(lo, stop), max(hi, start)
            first, last = Span(lo, max(min(hi, start), lo)), Span(max(lo, stop), max(hi, lo, stop))
            before, after = first.stop - first.start, last.stop - last.start
            behind = [run._replace(target=run.target + before) for run in ask(*last)]
            requests.append([*ask(*first), *behind])
            sizes.append((before, after))
            whole.append(ask(start - before, stop + after))
        route = fetch_route(dim, lengths, coord, requests, [a + b for a, b in sizes])
        wide = [a + n + b for n, (a, b) in zip(lengths, sizes, strict=True)]
        wider = fetch_route(dim, lengths, coord, whole, wide)
        return Halo(dim, group, route, *sizes[coord], any(a + b for a, b in sizes), wider)

    def widen(self, block: Tensor) -> Tensor:
        """The block with its strips, in one piece. Differentiable."""
        if self.group is not None:
            return travel(block, self.wider, self.group)
        return torch.cat([_turned(piece.of(block), piece) for piece in self.wider.send[0]], self.dim)

    def start(self, block: Tensor, earlier: Sequence[tuple[Halo, Tensor]]) -> wire.Pending[Tensor]:
        """Send what peers ask of `block` (widened by the strips of `earlier` dims); brings this rank's strip."""
        sends = [
            _flat([_turned(_widened(block, earlier, piece), piece) for piece in pieces], block.new_empty(0))
            for pieces in self.route.send
        ]
        shape = list(block.shape)
        for halo, _ in earlier:
            shape[halo.dim] += halo.before + halo.after
        shape[self.dim] = self.before + self.after
        counts = [[sum(torch.Size(p.shape(shape)).numel() for p in pieces)] for pieces in self.route.recv]
        pending = self._exchange(sends, counts)

        def land() -> Tensor:
            strip = block.new_empty(shape)
            for pieces, flat in zip(self.route.recv, pending.wait(), strict=True):
                _each(pieces, flat, strip, lambda part, received: part.copy_(received))
            return strip

        return wire.Pending((), (), land)

    def give_back(
        self, strip_grad: Tensor, block_shape: Sequence[int], earlier: Sequence[Halo]
    ) -> wire.Pending[list[tuple[Piece, Tensor]]]:
        """Send a strip's gradient to the rows' owners; brings what this rank's rows get, piece by piece."""
        sends = [_flat([p.of(strip_grad) for p in pieces], strip_grad.new_empty(0)) for pieces in self.route.recv]
        shape = list(block_shape)
        for halo in earlier:
            shape[halo.dim] += halo.before + halo.after
        counts = [[sum(torch.Size(p.shape(shape)).numel() for p in pieces)] for pieces in self.route.send]
        pending = self._exchange(sends, counts)

        def land() -> list[tuple[Piece, Tensor]]:
            found = []
            for pieces, flat in zip(self.route.send, pending.wait(), strict=True):
                at = 0
                for piece in pieces:
                    size = torch.Size(piece.shape(shape))
                    found.append((piece, _turned(flat[at : at + size.numel()].view(size), piece)))
                    at += size.numel()
            return found

        return wire.Pending((), (), land)

    def _exchange(self, sends: list[Tensor], counts: Sequence[Sequence[int]]) -> wire.Pending[list[Tensor]]:
        if self.group is None:
            return wire.Pending((), (), lambda: sends)
        return wire.start_exchange(sends, counts, self.group)


def _turned(rows: Tensor, piece: Piece) -> Tensor:
    return rows.flip(piece.flip) if piece.flip else rows


def _flat(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parts]) if len(parts) > 1 else parts[0].reshape(-1) if parts else empty


def _each(pieces: Sequence[Piece], flat: Tensor, target: Tensor, do) -> None:
    at = 0
    for piece in pieces:
        part = piece.of(target)
        do(part, flat[at : at + part.numel()].view(part.shape))
        at += part.numel()


def _widened(block: Tensor, earlier: Sequence[tuple[Halo, Tensor]], piece: Piece) -> Tensor:
    """A piece of the block together with the strips that lie around it along earlier dims."""
    found = piece.of(block)
    for halo, strip in earlier:
        part = piece.of(strip)
        parts = [part.narrow(halo.dim, 0, halo.before), found, part.narrow(halo.dim, halo.before, halo.after)]
        found = torch.cat(parts, halo.dim)
    return found


def add_back(
    returned: Sequence[tuple[Piece, Tensor]], earlier: Sequence[tuple[Halo, Tensor]]
) -> list[tuple[Piece, Tensor]]:
    """The adjoint of widening: gradients go into those of the earlier strips; what is left is the block's."""
    left = []
    for piece, grad in returned:
        for halo, strip in reversed(earlier):
            part, inner = piece.of(strip), grad.shape[halo.dim] - halo.before - halo.after
            first, grad, last = grad.split([halo.before, inner, halo.after], halo.dim)
            part.narrow(halo.dim, 0, halo.before).add_(first)
            part.narrow(halo.dim, halo.before, halo.after).add_(last)
        left.append((piece, grad))
    return left
