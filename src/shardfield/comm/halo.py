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

from torch import Tensor
from torch.distributed import ProcessGroup

from .._compat.autocast import concatenate
from ..layout import Span, starts
from . import collectives
from .autograd_collectives import exchange
from .route import Region, Route, RowRequest, range_route, readers_of


class Halo(NamedTuple):
    """The halo rows along `dim`: `before` of them precede the block, `after` follow it."""

    dim: int
    group: ProcessGroup | None
    route: Route
    before: int
    after: int
    block_route: Route  # block -> block with its halo in one tensor

    @staticmethod
    def plan(
        dim: int,
        lengths: Sequence[int],
        range_of: Callable[[int], Span],
        coord: int,
        group: ProcessGroup | None,
        shift: int = 0,
        rows_at: Callable[[int, int], list[RowRequest]] | None = None,
    ) -> Halo:
        """Build the halo of the rank at `coord`: coord c owns shard c of `lengths` and reads the range `range_of(c)`.

        A range contains the shard or is empty. Range index 0 is `shift` positions before the first row. `rows_at(start,
        stop)` maps a range to rows of the field, which is how boundary conditions are applied. Without it, a range is
        the same rows of the field, and the ranges increase with the coord, so that only neighbors are visited.
        """
        begins = starts(lengths)
        held = Span(begins[coord] + shift, begins[coord] + shift + lengths[coord])

        def sides(c: int) -> tuple[Span, Span]:
            """Return the rows before and after the block of coord c."""
            start, (lo, hi) = begins[c] + shift, range_of(c)
            stop = start + lengths[c]
            if lo < hi:  # include the rows between the range and the block
                lo, hi = min(lo, stop), max(hi, start)
            return Span(lo, max(min(hi, start), lo)), Span(max(lo, stop), max(hi, lo, stop))

        def rows(start: int, stop: int, target: int = 0) -> list[RowRequest]:
            if rows_at is None:
                return [RowRequest(start, stop - start, target)]
            return [run._replace(target=run.target + target) for run in rows_at(start, stop)]

        def halo_rows(c: int) -> list[RowRequest]:
            first, last = sides(c)
            return [*rows(*first), *rows(*last, first.stop - first.start)]

        def block_rows(c: int) -> list[RowRequest]:
            first, last = sides(c)
            start, before, after = begins[c] + shift, first.stop - first.start, last.stop - last.start
            return rows(start - before, start + lengths[c] + after)

        first, last = sides(coord)
        before, after = first.stop - first.start, last.stop - last.start
        if rows_at is None:

            def reach(c: int) -> Span:
                first, last = sides(c)
                if first.start == first.stop and last.start == last.stop:
                    return Span(0, 0)  # reads its own rows only
                return Span(begins[c] + first.start - first.stop, begins[c] + lengths[c] + last.stop - last.start)

            readers = readers_of(held, reach, coord, len(lengths))
        else:
            readers = list(range(len(lengths)))
        sizes = before + after, before + lengths[coord] + after
        route, block_route = (
            range_route(dim, lengths, coord, [(c, wanted(c)) for c in readers], wanted(coord), size)
            for wanted, size in zip((halo_rows, block_rows), sizes, strict=True)
        )
        return Halo(dim, group, route, before, after, block_route)

    def with_halo(self, block: Tensor) -> Tensor:
        """Return the block and its halo as one tensor. Differentiable; one exchange, adjoint: the exchange reversed."""
        if self.group is not None:
            return exchange(block, self.block_route, self.group)
        return concatenate([_flipped(region.view(block), region) for region, _ in self.block_route.own], self.dim)

    def start(self, block: Tensor, earlier: Sequence[tuple[Halo, Tensor]]) -> collectives.Pending[Tensor]:
        """Start the exchange: send the requested rows of `block`, extended by the halos of `earlier` dims.

        Waiting for the result returns this rank's halo.
        """
        shape = list(block.shape)
        for halo, _ in earlier:
            shape[halo.dim] += halo.before + halo.after
        shape[self.dim] = self.before + self.after

        def extended(region: Region) -> Tensor:
            return _flipped(_with_earlier_halos(block, earlier, region), region)

        pending = self._exchange(self.route, extended, block, shape)

        def finish() -> Tensor:
            # in the order of the halo rows, so that one call concatenates them
            own = [(there, extended(here)) for here, there in self.route.own]
            parts = sorted([*own, *self._rows(self.route, pending.wait())], key=lambda pair: pair[0].ranges)
            rows = [part for _, part in parts]
            return (
                concatenate(rows, self.dim)
                if len(rows) > 1
                else rows[0].contiguous()
                if rows
                else block.new_empty(shape)
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
        route = self.route.transposed
        pending = self._exchange(route, lambda region: region.view(halo_grad), halo_grad, shape)

        def finish() -> list[tuple[Region, Tensor]]:
            own = [(there, here.view(halo_grad)) for here, there in route.own]
            return [(region, _flipped(part, region)) for region, part in [*own, *self._rows(route, pending.wait())]]

        return collectives.Pending((), (), finish)

    def _exchange(
        self, route: Route, region_of: Callable[[Region], Tensor], like: Tensor, shape: Sequence[int]
    ) -> collectives.Pending[list[Tensor]]:
        """Start sending the regions of a route and receiving those of a block of `shape`.

        Rows are packed along the first dim, peer after peer, so that one call packs the messages to all peers.
        """
        if self.group is None:
            return collectives.Pending((), (), list)
        outgoing = [[region_of(r).movedim(self.dim, 0) for r in regions] for _, regions in route.send]
        rows = [part for parts in outgoing for part in parts]
        sends: Sequence[Tensor] = rows
        if len(rows) > 1:
            sends = concatenate(rows).split([sum(len(part) for part in parts) for parts in outgoing])
        others = [n for d, n in enumerate(shape) if d != self.dim]
        receives = [(peer, (sum(r.ranges[0][2] for r in regions), *others)) for peer, regions in route.recv]
        peers = [peer for peer, _ in route.send]
        return collectives.start_sends(list(zip(peers, sends, strict=True)), receives, self.group, like)

    def _rows(self, route: Route, received: Sequence[Tensor]) -> list[tuple[Region, Tensor]]:
        """Return views of the received buffers, one per region."""
        found = []
        for (_, regions), rows in zip(route.recv, received, strict=True):
            parts = rows.split([region.ranges[0][2] for region in regions])
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
        extended = concatenate(parts, halo.dim)
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
