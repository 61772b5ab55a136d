"""Exchange lists: which rows each rank needs of the others, made once for an index and kept for it.

A rank asks for every distinct row once, however many of its entries name it, and sums what it writes to one row before
it sends it: what travels are the rows along the borders of a graph, not its edges. The lists are kept as long as the
index tensor lives and is not written, so that later calls with it, and with views of it, send rows alone.

Whether the lists of an index are still good is for each rank to see for itself, but all must make the same of it: a
rank that builds lists waits for the others. So they tell each other, a few bytes, before they go on. With
SHARDFIELD_CHECK_SIZES=0, on all ranks, lists that are kept are trusted without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import runtime
from ..._compat import base_and_version
from ...comm import autograd_collectives, consensus
from ...comm.route import Route
from ...debug import explain
from ...layout import Layout
from ...trace_state import concrete_for
from .owners import AxisExchange, Owners, any_out_of_bounds, out_of_bounds_error, select_rows, wrap_negative


class ExchangeStage(NamedTuple):
    """One exchange along one axis. `row_index` says where each entry's row is among those sent: the distinct ones, or
    all
    of them in the order of their peers."""

    row_index: Tensor
    num_sent: int
    distinct: bool
    route: Route
    reverse_route: Route
    group: ProcessGroup

    def fetch(self, rows: Tensor) -> Tensor:
        """Rows come from their owners, one for each entry. Adjoint: `deliver`, sums of distinct rows."""
        return autograd_collectives.exchange(rows, self.reverse_route, self.group).index_select(0, self.row_index)

    def deliver(self, rows: Tensor) -> Tensor:
        """Rows go to their owners; those of one place are summed first. Adjoint: `fetch`."""
        out = rows.new_zeros(self.num_sent, *rows.shape[1:])
        out = out.index_add(0, self.row_index, rows) if self.distinct else out.index_copy(0, self.row_index, rows)
        return autograd_collectives.exchange(out, self.route, self.group)

    def deliver_reduced(self, rows: Tensor, reduce: str) -> Tensor:
        """`deliver` with another reduction than the sum ("amax", "amin"). Without autograd."""
        out = rows.new_zeros(self.num_sent, *rows.shape[1:])
        out = out.scatter_reduce(0, expand_row_index(self.row_index, rows), rows, reduce, include_self=False)
        return autograd_collectives.exchange_no_grad(out, self.route, self.group)


class ExchangeLists:
    """The journey of an index's entries to the ranks that hold what they name: a stage for each axis in
    `exchange_axes`.

    Over the other axes that cut the indexed dims every rank has the same entries: `local_entries` are those that this
    rank has the rows of. `positions` are where they lie in its block, dim by dim.
    """

    def __init__(self, owners: Owners, flat: Tensor, exchange_axes: Sequence[int], distinct: bool):
        with concrete_for(flat):
            self._build(owners, flat, exchange_axes, distinct)

    def _build(self, owners: Owners, flat: Tensor, exchange_axes: Sequence[int], distinct: bool) -> None:
        self.num_entries = len(flat)
        self.has_negative = False  # whether an entry was counted from the end, on any rank
        self.row_counts: Tensor | None = None  # of entries for each row of the block, once asked for
        self.stages: list[ExchangeStage] = []
        for axis in exchange_axes:
            sent, inverse = torch.unique(flat, return_inverse=True) if distinct else (flat, None)
            hop = AxisExchange.to(owners.coord(sent, axis), axis, owners.layout)
            if not hop.is_noop:  # else all entries are where their rows are
                place = hop.inverse if inverse is None else hop.inverse[inverse]
                self.stages.append(ExchangeStage(place, len(sent), distinct, hop.route, hop.reverse_route, hop.group))
                flat = hop.exchange(sent)
        self.num_received = len(flat)
        masked = [a for a in owners.axes if a not in exchange_axes]
        self.local_entries = owners.local_mask(flat, masked).nonzero().flatten() if masked else None
        self.positions = owners.positions(flat if self.local_entries is None else flat[self.local_entries])

    def fetch(self, block: Tensor, dims: Sequence[int]) -> Tensor:
        """The rows of a block along `dims` that the entries name: (entries, other dims). Partial over masked axes."""
        rows = select_rows(block, dims, self.positions)
        if self.local_entries is not None:
            rows = rows.new_zeros(self.num_received, *rows.shape[1:]).index_copy(0, self.local_entries, rows)
        for stage in reversed(self.stages):
            rows = stage.fetch(rows)
        return rows

    def deliver(self, rows: Tensor) -> Tensor:
        """The rows for `positions`, of all that the ranks have: those that name one place summed if made `distinct`."""
        for stage in self.stages:
            rows = stage.deliver(rows)
        return rows if self.local_entries is None else rows.index_select(0, self.local_entries)

    def deliver_reduced(self, rows: Tensor, reduce: str) -> Tensor:
        """`deliver_rows` with another reduction. Without autograd."""
        for stage in self.stages:
            rows = stage.deliver_reduced(rows, reduce)
        return rows if self.local_entries is None else rows.index_select(0, self.local_entries)


def expand_row_index(index: Tensor, rows: Tensor) -> Tensor:
    """A 1-D index for whole rows as a scatter wants it."""
    return index.view(-1, *[1] * (rows.ndim - 1)).expand(rows.shape)


def deliver_rows(
    owners: Owners, flat: Tensor, rows: Tensor, exchange_axes: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Positions in this rank's block of the entries it holds, and their rows, for entries that all differ."""
    lists = ExchangeLists(owners, flat, exchange_axes, distinct=False)
    return lists.positions, lists.deliver(rows)


# ---------------------------------------------------------------------- keeping them

_MAX_LISTS_PER_INDEX = 32  # of lists for one index tensor


class IndexRequest(NamedTuple):
    """What an index is used for: the layout and dims indexed, how, and where the index itself lies."""

    owners: Owners
    exchange_axes: tuple[int, ...]
    index_layout: Layout
    size: int
    negative: bool
    distinct: bool
    error: type[Exception] = IndexError

    def lists_for(self, index: Tensor) -> ExchangeLists:
        """The lists of one local index tensor of whole rows (of any shape: entries are in its order)."""
        found = self.find_or_build(index)
        assert found is not None
        return found

    def find_or_build(self, index: Tensor | None, checked_index: Tensor | None = None) -> ExchangeLists | None:
        """The lists of an index, kept or new; None if some rank has none, where entries name elements, not rows.

        `checked_index` is what is judged on ranks that have no index of rows.
        """
        seen = index if checked_index is None else checked_index
        assert seen is not None
        with concrete_for(seen if index is None else index):
            return self._find_or_build(index, seen)

    def _find_or_build(self, index: Tensor | None, seen: Tensor) -> ExchangeLists | None:
        kept, key = (None, ()) if index is None else self._cache_entry(index)
        lists = None if kept is None else kept.get(key)
        if lists is not None and not consensus.checks_enabled():
            return self._validate_cached(lists)
        wrong = lists is None and bool(any_out_of_bounds(seen, self.size, True))
        below = bool((seen < 0).any()) if lists is None else lists.has_negative
        missing, elements, wrong, below = _any_rank([lists is None, index is None, wrong, below], self.index_layout)
        if wrong or (below and not self.negative):
            raise out_of_bounds_error(self.size, self.error)
        if elements:
            return None
        assert index is not None
        if not missing and lists is not None:
            return self._validate_cached(lists)
        explain.record_outcome("rule: rows by new lists", nested=True)
        with torch.inference_mode(False):  # a training step may use them too
            flat = wrap_negative(index, self.size, below).reshape(-1)
            lists = ExchangeLists(self.owners, flat, self.exchange_axes, self.distinct)
        lists.has_negative = below
        if kept is not None:
            kept[key] = lists
            if len(kept) > _MAX_LISTS_PER_INDEX:
                del kept[next(iter(kept))]
        return lists

    def _validate_cached(self, lists: ExchangeLists) -> ExchangeLists:
        """Kept lists, unless they are of an index that may not be used here."""
        if lists.has_negative and not self.negative:
            raise out_of_bounds_error(self.size, self.error)
        explain.record_outcome("rule: rows by kept lists", nested=True)
        return lists

    def _cache_entry(self, index: Tensor) -> tuple[dict[tuple, ExchangeLists] | None, tuple]:
        """The lists that are kept of an index, and the name of those wanted."""
        found = base_and_version(index)
        if found is None:
            return None, ()
        root, version = found
        table = runtime.active.exchange_lists
        known = table.get(root)
        if known is None or known[0] != version:
            known = table[root] = (version, {})
        owners = self.owners
        layout, cuts = owners.layout, tuple(owners.layout.dims[d] for d in owners.dims)  # other dims may differ
        part = (index.dtype, index.storage_offset(), tuple(index.shape), index.stride())
        return known[1], (part, layout.mesh, cuts, owners.axes, self.exchange_axes, self.distinct)


def _any_rank(flags: Sequence[bool], where: Layout) -> list[bool]:
    """Which flags any rank has set, of those over which an index is cut."""
    return consensus.any_rank(flags, [where.mesh.get_group(axis) for axis in where.nontrivial_axes(where.shard_axes)])


def as_row_index(index: Tensor, dim: int) -> Tensor | None:
    """Return the vector that an index of elements repeats along all dims but `dim`, else None: it names whole rows.

    A constant index of a traced program stays one: a select that is traced would hide its values.
    """
    with concrete_for(index):
        for d in reversed(range(index.ndim)):
            if d != dim:
                if not index.shape[d] or (index.shape[d] > 1 and index.stride(d)):
                    return None
                index = index.select(d, 0)
        return index
