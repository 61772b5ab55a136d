"""Exchange lists: the rows that each rank needs from every other, computed once per index tensor and cached.

A rank fetches each distinct row once, however many of its entries name it, and sums the rows that it writes to one
place before it sends them. For a graph, the bytes sent depend on the number of nodes along shard boundaries, not on the
number of edges. Lists are cached as long as the index tensor is alive and not written. Later calls with this tensor, or
with views of it, send rows only.

Each rank checks by itself whether its cached lists are valid, but building lists communicates, so all ranks must decide
the same: they agree with a few bytes first. With SHARDFIELD_CHECK_SIZES=0, on all ranks, cached lists are used without
this message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import runtime
from ..._compat.autocast import index_copy
from ..._compat.storage import base_and_version
from ...comm import autograd_collectives, consensus, route_messages
from ...comm.route import Route
from ...debug import explain
from ...dispatch.plan import process_groups
from ...layout import Layout
from ...trace_state import concrete_for
from .owners import AxisExchange, Owners, out_of_bounds_error, select_rows, wrap_negative


class ExchangeStage(NamedTuple):
    """One exchange along one axis.

    row_index: the position of each entry's row among the rows sent; these are the distinct rows, or all rows ordered by
    destination. num_sent: the number of rows sent.
    """

    row_index: Tensor
    num_sent: int
    distinct: bool
    route: Route
    reverse_route: Route
    group: ProcessGroup

    def fetch(self, rows: Tensor) -> Tensor:
        """Fetch one row per entry from the owners. Adjoint: `deliver`."""
        return autograd_collectives.exchange(rows, self.reverse_route, self.group).index_select(0, self.row_index)

    def deliver(self, rows: Tensor) -> Tensor:
        """Send rows to their owners; with `distinct`, rows of one place are summed first. Adjoint: `fetch`."""
        out = rows.new_zeros(self.num_sent, *rows.shape[1:])
        out = out.index_add(0, self.row_index, rows) if self.distinct else index_copy(out, 0, self.row_index, rows)
        return autograd_collectives.exchange(out, self.route, self.group)

    def deliver_reduced(self, rows: Tensor, reduce: str) -> Tensor:
        """Send rows to their owners, reduced with "amax" or "amin" first. Without autograd."""
        out = rows.new_zeros(self.num_sent, *rows.shape[1:])
        out = out.scatter_reduce(0, expand_row_index(self.row_index, rows), rows, reduce, include_self=False)
        return route_messages.exchange_no_grad(out, self.route, self.group)


class ExchangeLists:
    """The exchange of an index's entries with the owners of their rows: one stage per axis in `exchange_axes`.

    Along other axes that shard the indexed dims (masked axes) every rank has the same entries, and `local_entries` are
    those whose rows this rank owns. `positions` are their local positions, dim by dim.
    """

    def __init__(self, owners: Owners, flat: Tensor, exchange_axes: Sequence[int], distinct: bool):
        with concrete_for(flat):
            self._build(owners, flat, exchange_axes, distinct)

    def _build(self, owners: Owners, flat: Tensor, exchange_axes: Sequence[int], distinct: bool) -> None:
        self.num_entries = len(flat)
        self.has_negative = False  # whether any rank has a negative entry
        self.row_counts: Tensor | None = None  # number of entries per local row, computed on first use
        self.stages: list[ExchangeStage] = []
        for axis in exchange_axes:
            sent, inverse = torch.unique(flat, return_inverse=True) if distinct else (flat, None)
            exchange = AxisExchange.to(owners.coord(sent, axis), axis, owners.layout)
            if not exchange.is_noop:  # else every rank owns the rows of its entries
                row_index = exchange.inverse if inverse is None else exchange.inverse[inverse]
                self.stages.append(
                    ExchangeStage(
                        row_index, len(sent), distinct, exchange.route, exchange.reverse_route, exchange.group
                    )
                )
                flat = exchange.exchange(sent)
        self.num_received = len(flat)
        masked = [a for a in owners.axes if a not in exchange_axes]
        self.local_entries = owners.local_mask(flat, masked).nonzero().flatten() if masked else None
        self.positions = owners.positions(flat if self.local_entries is None else flat[self.local_entries])

    def fetch(self, block: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the rows of a shard along `dims` that entries name: (entries, other dims), Partial over masked axes.

        Adjoint: `deliver`.
        """
        rows = select_rows(block, dims, self.positions)
        if self.local_entries is not None:
            zeros = rows.new_zeros(self.num_received, *rows.shape[1:])
            rows = index_copy(zeros, 0, self.local_entries, rows)
        for stage in reversed(self.stages):
            rows = stage.fetch(rows)
        return rows

    def deliver(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows for `positions`; rows of one place are summed if `distinct`. Adjoint: `fetch`."""
        for stage in self.stages:
            rows = stage.deliver(rows)
        return rows if self.local_entries is None else rows.index_select(0, self.local_entries)

    def deliver_reduced(self, rows: Tensor, reduce: str) -> Tensor:
        """Return `deliver` with another reduction. Without autograd."""
        for stage in self.stages:
            rows = stage.deliver_reduced(rows, reduce)
        return rows if self.local_entries is None else rows.index_select(0, self.local_entries)


def expand_row_index(index: Tensor, rows: Tensor) -> Tensor:
    """Return an index of rows, expanded to the shape of `rows` for a scatter."""
    return index.view(-1, *[1] * (rows.ndim - 1)).expand(rows.shape)


def deliver_rows(
    owners: Owners, flat: Tensor, rows: Tensor, exchange_axes: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Return the local positions of the entries that this rank owns, and their rows; all entries differ."""
    lists = ExchangeLists(owners, flat, exchange_axes, distinct=False)
    return lists.positions, lists.deliver(rows)


# ---------------------------------------------------------------------- the cache

_MAX_LISTS_PER_INDEX = 32  # the oldest are evicted
_AMBIGUOUS = None  # cached by a rank without entries if several indices look alike there: their lists are built anew


class IndexRequest(NamedTuple):
    """A use of an index: the owners of the indexed dims, the axes to exchange over, and the layout of the index.

    negative: entries may count from the end. distinct: rows of one place are sent once. error: raised if out of bounds.
    """

    owners: Owners
    exchange_axes: tuple[int, ...]
    index_layout: Layout
    size: int
    negative: bool
    distinct: bool
    error: type[Exception] = IndexError

    def lists_for(self, index: Tensor) -> ExchangeLists:
        """Return the lists of a local index tensor of rows, of any shape."""
        found = self.find_or_build(index)
        assert found is not None
        return found

    def find_or_build(self, index: Tensor | None, checked_index: Tensor | None = None) -> ExchangeLists | None:
        """Return the cached or new lists of an index of rows; None if the entries of some rank name elements instead.

        Communicates. `checked_index` holds the values to check on ranks that have no index of rows.
        """
        values = checked_index if index is None else index
        assert values is not None
        with concrete_for(values):
            return self._find_or_build(index, values)

    def _find_or_build(self, index: Tensor | None, values: Tensor) -> ExchangeLists | None:
        cached, key = (None, ()) if index is None else self._cache_entry(index)
        lists = None if cached is None else cached.get(key)
        if lists is not None and not consensus.checks_enabled():
            return self._validate_cached(lists)
        invalid, has_negative = False, lists is not None and lists.has_negative
        if lists is None and values.numel():
            low, high = (int(n) for n in values.aminmax())
            invalid, has_negative = low < -self.size or high >= self.size, low < 0
        missing, names_elements, invalid, has_negative = _any_rank(
            [lists is None, index is None, invalid, has_negative], self.index_layout
        )
        if invalid or (has_negative and not self.negative):
            raise out_of_bounds_error(self.size, self.error)
        if names_elements:
            return None
        assert index is not None
        if not missing and lists is not None:
            return self._validate_cached(lists)
        explain.record_outcome("rule: rows by new lists", nested=True)
        with torch.inference_mode(False):  # lists built in inference mode must work in a training step too
            flat = wrap_negative(index, self.size, has_negative).reshape(-1)
            lists = ExchangeLists(self.owners, flat, self.exchange_axes, self.distinct)
        lists.has_negative = has_negative
        if cached is not None:
            # A rank without entries may have the same empty view of two indices, of which each has its own route.
            cached[key] = _AMBIGUOUS if not index.numel() and key in cached else lists
            if len(cached) > _MAX_LISTS_PER_INDEX:
                del cached[next(iter(cached))]
        return lists

    def _validate_cached(self, lists: ExchangeLists) -> ExchangeLists:
        """Return cached lists, or raise if the index has negative entries that are not allowed here."""
        if lists.has_negative and not self.negative:
            raise out_of_bounds_error(self.size, self.error)
        explain.record_outcome("rule: rows by cached lists", nested=True)
        return lists

    def _cache_entry(self, index: Tensor) -> tuple[dict[tuple, ExchangeLists | None] | None, tuple]:
        """Return the cached lists of an index tensor, and the key of this request among them.

        The sharding of the index is part of the key: a replicated index may be sharded in several ways, and the slices
        of one rank may be equal in two of them.
        """
        found = base_and_version(index)
        if found is None:
            return None, ()
        base, version = found
        table = runtime.active.exchange_lists
        entry = table.get(base)
        if entry is None or entry[0] != version:
            entry = table[base] = (version, {})
        owners = self.owners
        layout = owners.layout
        shardings = tuple(layout.dims[d] for d in owners.dims)  # lists do not depend on the other dims
        entries = tuple(f for factors in self.index_layout.dims for f in factors if f.axes)
        view = (index.dtype, index.storage_offset(), tuple(index.shape), index.stride())
        return entry[1], (view, entries, layout.mesh, shardings, owners.axes, self.exchange_axes, self.distinct)


def _any_rank(flags: Sequence[bool], where: Layout) -> list[bool]:
    """Return for each flag whether any rank along the axes that shard the index has set it."""
    return consensus.any_rank(flags, process_groups(where, where.shard_axes))


def as_row_index(index: Tensor, dim: int) -> Tensor | None:
    """Return the vector that an index of elements repeats along all dims but `dim`: it names rows. Else None.

    A constant index of a traced program stays a constant: a traced select would hide its values.
    """
    with concrete_for(index):
        for d in reversed(range(index.ndim)):
            if d != dim:
                if not index.shape[d] or (index.shape[d] > 1 and index.stride(d)):
                    return None
                index = index.select(d, 0)
        return index
