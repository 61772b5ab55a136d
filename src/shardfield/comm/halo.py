"""Halo exchange: each rank requests a global index range around its block and receives the rows of other ranks.

A `Halo` describes one sharded dim: the rows of this rank's block that peers request, and the rows that this rank
receives. The received rows form one tensor, `before` rows that precede the block and `after` rows that follow it. On a
mesh that shards several dims, the halo of the first dim takes part in the exchange along the second, so that corners
arrive by way of the neighbors: one message per neighbor and direction. The adjoint sends the gradients of the halo back
and adds them to the rows that were sent.

With a periodic or reflecting boundary, the rows beyond the ends are other rows of the field and are part of the same
messages. Along an unsharded dim they are this rank's own rows: such a halo has no group and sends nothing.
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
    """The halo rows along `dim`: `before` of them precede the block, `after` follow it."""

    dim: int
    group: ProcessGroup | None
    route: Route
    before: int
    after: int
    any: bool  # whether any rank of the group sends; if not, the exchange is skipped on all ranks
    block_route: Route  # block -> block with its halo in one tensor

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
        """Build the halo of the rank at `coord`: coord c owns shard c of `lengths` and reads the range `ranges[c]`.

        A range contains the shard or is empty. Range index 0 is `shift` positions before the first row. `rows_at(start,
        stop)` maps a range to rows of the field, which is how boundary conditions are applied.
        """
        requests, sizes, full_requests = [], [], []
        for start, length, (lo, hi) in zip(starts(lengths), lengths, ranges, strict=True):
            start, stop = start + shift, start + shift + length
            if lo < hi:  # include the rows between the range and the block
                lo, hi = min(lo, stop), max(hi, start)
            first, last = Span(lo, max(min(hi, start), lo)), Span(max(lo, stop), max(hi, lo, stop))
            before, after = first.stop - first.start, last.stop - last.start
            following = [run._replace(target=run.target + before) for run in rows_at(*last)]
            requests.append([*rows_at(*first), *following])
            sizes.append((before, after))
            full_requests.append(rows_at(start - before, stop + after))
        route = fetch_route(dim, lengths, coord, requests, [a + b for a, b in sizes])
        padded_sizes = [a + n + b for n, (a, b) in zip(lengths, sizes, strict=True)]
        block_route = fetch_route(dim, lengths, coord, full_requests, padded_sizes)
        return Halo(dim, group, route, *sizes[coord], any(a + b for a, b in sizes), block_route)

    def with_halo(self, block: Tensor) -> Tensor:
        """Return the block and its halo as one tensor. Differentiable; one exchange, adjoint: the exchange reversed."""
        if self.group is not None:
            return exchange(block, self.block_route, self.group)
        return torch.cat([_flipped(region.view(block), region) for region in self.block_route.send[0]], self.dim)

    def start(self, block: Tensor, earlier: Sequence[tuple[Halo, Tensor]]) -> collectives.Pending[Tensor]:
        """Start the exchange: send the requested rows of `block`, extended by the halos of `earlier` dims.

        Waiting for the result returns this rank's halo.
        """
        shape = list(block.shape)
        for halo, _ in earlier:
            shape[halo.dim] += halo.before + halo.after
        shape[self.dim] = self.before + self.after
        outgoing = [
            [_flipped(_with_earlier_halos(block, earlier, r), r) for r in regions] for regions in self.route.send
        ]
        pending = self._exchange(outgoing, self.route.recv, block, shape)

        def finish() -> Tensor:
            # in the order of the halo rows, so that one call concatenates them
            parts = sorted(self._rows(self.route.recv, pending.wait()), key=lambda pair: pair[0].ranges)
            rows = [part for _, part in parts]
            return (
                torch.cat(rows, self.dim) if len(rows) > 1 else rows[0].contiguous() if rows else block.new_empty(shape)
            )

        return collectives.Pending((), (), finish)

    def start_adjoint(
        self, halo_grad: Tensor, block_shape: Sequence[int], earlier: Sequence[Halo]
    ) -> collectives.Pending[list[tuple[Region, Tensor]]]:
        """Start sending the gradient of the halo to the owners of its rows.

        Waiting for the result returns the gradients of this rank's rows, region by region.
        """
        shape = list(block_shape)
        for halo in earlier:
            shape[halo.dim] += halo.before + halo.after
        outgoing = [[r.view(halo_grad) for r in regions] for regions in self.route.recv]
        pending = self._exchange(outgoing, self.route.send, halo_grad, shape)

        def finish() -> list[tuple[Region, Tensor]]:
            return [(region, _flipped(part, region)) for region, part in self._rows(self.route.send, pending.wait())]

        return collectives.Pending((), (), finish)

    def _exchange(
        self, outgoing: list[list[Tensor]], incoming: Sequence[Sequence[Region]], like: Tensor, shape: Sequence[int]
    ) -> collectives.Pending[list[Tensor]]:
        """Start sending `outgoing[c]` to coord c and receiving the regions `incoming[c]` of a block of `shape`.

        Rows are packed along the first dim, peer after peer, so that one call packs the messages to all peers.
        """
        rows = [part.movedim(self.dim, 0) for parts in outgoing for part in parts]
        others = [n for d, n in enumerate(shape) if d != self.dim]
        packed = torch.cat(rows) if len(rows) > 1 else rows[0].contiguous() if rows else like.new_empty([0, *others])
        sends = list(packed.split([sum(part.shape[self.dim] for part in parts) for parts in outgoing]))
        if self.group is None:
            return collectives.Pending((), (), lambda: sends)
        counts = [sum(region.ranges[0][2] for region in regions) for regions in incoming]
        return collectives.start_exchange(sends, [(n, *others) for n in counts], self.group)

    def _rows(self, incoming: Sequence[Sequence[Region]], received: Sequence[Tensor]) -> list[tuple[Region, Tensor]]:
        """Return views of the received buffers, one per region."""
        found = []
        for regions, rows in zip(incoming, received, strict=True):
            parts = rows.split([region.ranges[0][2] for region in regions]) if regions else ()
            found += [(region, part.movedim(0, self.dim)) for region, part in zip(regions, parts, strict=True)]
        return found


def _flipped(rows: Tensor, region: Region) -> Tensor:
    return rows.flip(region.flip) if region.flip else rows


def _with_earlier_halos(block: Tensor, earlier: Sequence[tuple[Halo, Tensor]], region: Region) -> Tensor:
    """Return a region of the block extended by its halos along earlier dims."""
    extended = region.view(block)
    for halo, rows in earlier:
        part = region.view(rows)
        parts = [part.narrow(halo.dim, 0, halo.before), extended, part.narrow(halo.dim, halo.before, halo.after)]
        extended = torch.cat(parts, halo.dim)
    return extended


def add_to_earlier_halos(
    returned: Sequence[tuple[Region, Tensor]], earlier: Sequence[tuple[Halo, Tensor]]
) -> list[tuple[Region, Tensor]]:
    """Add returned gradients to those of the halos along earlier dims; return the gradients of the block's own rows.

    Adjoint of `_with_earlier_halos`.
    """
    own = []
    for region, grad in returned:
        for halo, rows in reversed(earlier):
            part, inner = region.view(rows), grad.shape[halo.dim] - halo.before - halo.after
            first, grad, last = grad.split([halo.before, inner, halo.after], halo.dim)
            part.narrow(halo.dim, 0, halo.before).add_(first)
            part.narrow(halo.dim, halo.before, halo.after).add_(last)
        own.append((region, grad))
    return own
