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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from .. import report
from .._compat import root_of
from ..comm import agree, moves
from ..comm.route import Route
from ..layout import Layout
from ..tracing import beside
from .owners import Hop, Owners, from_front, out_of_bounds, outside, rows_at


class Stage(NamedTuple):
    """One exchange along one axis. `place` says where each entry's row is among those sent: the distinct ones, or all
    of them in the order of their peers."""

    place: Tensor
    width: int
    distinct: bool
    there: Route
    home: Route
    group: ProcessGroup

    def back(self, rows: Tensor) -> Tensor:
        """Rows come from their owners, one for each entry. Adjoint: `forth`, sums of distinct rows."""
        return moves.travel(rows, self.home, self.group).index_select(0, self.place)

    def forth(self, rows: Tensor) -> Tensor:
        """Rows go to their owners; those of one place are summed first. Adjoint: `back`."""
        out = rows.new_zeros(self.width, *rows.shape[1:])
        out = out.index_add(0, self.place, rows) if self.distinct else out.index_copy(0, self.place, rows)
        return moves.travel(out, self.there, self.group)

    def forth_by(self, rows: Tensor, reduce: str) -> Tensor:
        """`forth` with another reduction than the sum ("amax", "amin"). Without autograd."""
        out = rows.new_zeros(self.width, *rows.shape[1:])
        out = out.scatter_reduce(0, like_rows(self.place, rows), rows, reduce, include_self=False)
        return moves.walk(out, self.there, self.group)


class Lists:
    """The journey of an index's entries to the ranks that hold what they name: a stage for each axis in `ask`.

    Over the other axes that cut the indexed dims every rank has the same entries: `held` are those that this rank has
    the rows of. `positions` are where they lie in its block, dim by dim.
    """

    def __init__(self, owners: Owners, flat: Tensor, ask: Sequence[int], distinct: bool):
        with beside(flat):
            self._make(owners, flat, ask, distinct)

    def _make(self, owners: Owners, flat: Tensor, ask: Sequence[int], distinct: bool) -> None:
        self.entries = len(flat)
        self.below = False  # whether an entry was counted from the end, on any rank
        self.count: Tensor | None = None  # of entries for each row of the block, once asked for
        self.stages: list[Stage] = []
        for axis in ask:
            sent, inverse = torch.unique(flat, return_inverse=True) if distinct else (flat, None)
            hop = Hop.to(owners.coord(sent, axis), axis, owners.layout)
            if not hop.idle:  # else all entries are where their rows are
                place = hop.inverse if inverse is None else hop.inverse[inverse]
                self.stages.append(Stage(place, len(sent), distinct, hop.route, hop.home, hop.group))
                flat = hop.there(sent)
        self.arrived = len(flat)
        masked = [a for a in owners.axes if a not in ask]
        self.held = owners.mine(flat, masked).nonzero().flatten() if masked else None
        self.positions = owners.positions(flat if self.held is None else flat[self.held])

    def fetch(self, block: Tensor, dims: Sequence[int]) -> Tensor:
        """The rows of a block along `dims` that the entries name: (entries, other dims). Partial over masked axes."""
        rows = rows_at(block, dims, self.positions)
        if self.held is not None:
            rows = rows.new_zeros(self.arrived, *rows.shape[1:]).index_copy(0, self.held, rows)
        for stage in reversed(self.stages):
            rows = stage.back(rows)
        return rows

    def deliver(self, rows: Tensor) -> Tensor:
        """The rows for `positions`, of all that the ranks have: those that name one place summed if made `distinct`."""
        for stage in self.stages:
            rows = stage.forth(rows)
        return rows if self.held is None else rows.index_select(0, self.held)

    def deliver_by(self, rows: Tensor, reduce: str) -> Tensor:
        """`deliver` with another reduction. Without autograd."""
        for stage in self.stages:
            rows = stage.forth_by(rows, reduce)
        return rows if self.held is None else rows.index_select(0, self.held)


def like_rows(index: Tensor, rows: Tensor) -> Tensor:
    """A 1-D index for whole rows as a scatter wants it."""
    return index.view(-1, *[1] * (rows.ndim - 1)).expand(rows.shape)


def deliver(owners: Owners, flat: Tensor, rows: Tensor, ask: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Positions in this rank's block of the entries it holds, and their rows, for entries that all differ."""
    lists = Lists(owners, flat, ask, distinct=False)
    return lists.positions, lists.deliver(rows)


# ---------------------------------------------------------------------- keeping them

# index tensor (a base, if it is a view) -> (how often it was written, {what was asked of it: lists})
_KEPT: Any = WeakIdKeyDictionary()
_BOUND = 32  # of lists for one index tensor


class Asked(NamedTuple):
    """What an index is used for: the layout and dims indexed, how, and where the index itself lies."""

    owners: Owners
    ask: tuple[int, ...]
    where: Layout
    size: int
    negative: bool
    distinct: bool
    error: type[Exception] = IndexError

    def lists(self, index: Tensor) -> Lists:
        """The lists of one local index tensor of whole rows (of any shape: entries are in its order)."""
        found = self.settle(index)
        assert found is not None
        return found

    def settle(self, index: Tensor | None, judged: Tensor | None = None) -> Lists | None:
        """The lists of an index, kept or new; None if some rank has none, where entries name elements, not rows.

        `judged` is what is judged on ranks that have no index of rows.
        """
        seen = index if judged is None else judged
        assert seen is not None
        with beside(seen if index is None else index):
            return self._settled(index, seen)

    def _settled(self, index: Tensor | None, seen: Tensor) -> Lists | None:
        kept, key = (None, ()) if index is None else self._kept(index)
        lists = None if kept is None else kept.get(key)
        if lists is not None and not agree.checking():
            return self._judged(lists)
        wrong = lists is None and bool(outside(seen, self.size, True))
        below = bool((seen < 0).any()) if lists is None else lists.below
        missing, elements, wrong, below = _anyone([lists is None, index is None, wrong, below], self.where)
        if wrong or (below and not self.negative):
            raise out_of_bounds(self.size, self.error)
        if elements:
            return None
        assert index is not None
        if not missing and lists is not None:
            return self._judged(lists)
        report.ending("rule: rows by new lists", within=True)
        with torch.inference_mode(False):  # a training step may use them too
            flat = from_front(index, self.size, below).reshape(-1)
            lists = Lists(self.owners, flat, self.ask, self.distinct)
        lists.below = below
        if kept is not None:
            kept[key] = lists
            if len(kept) > _BOUND:
                del kept[next(iter(kept))]
        return lists

    def _judged(self, lists: Lists) -> Lists:
        """Kept lists, unless they are of an index that may not be used here."""
        if lists.below and not self.negative:
            raise out_of_bounds(self.size, self.error)
        report.ending("rule: rows by kept lists", within=True)
        return lists

    def _kept(self, index: Tensor) -> tuple[dict[tuple, Lists] | None, tuple]:
        """The lists that are kept of an index, and the name of those wanted."""
        found = root_of(index)
        if found is None:
            return None, ()
        root, version = found
        known = _KEPT.get(root)
        if known is None or known[0] != version:
            known = _KEPT[root] = (version, {})
        owners = self.owners
        layout, cuts = owners.layout, tuple(owners.layout.dims[d] for d in owners.dims)  # other dims may differ
        part = (index.dtype, index.storage_offset(), tuple(index.shape), index.stride())
        return known[1], (part, layout.mesh, cuts, owners.axes, self.ask, self.distinct)


def _anyone(flags: Sequence[bool], where: Layout) -> list[bool]:
    """Which flags any rank has set, of those over which an index is cut."""
    return agree.anyone(flags, [where.mesh.get_group(axis) for axis in where.wide(where.shard_axes)])


def rowwise(index: Tensor, dim: int) -> Tensor | None:
    """The index of rows, if that is what an index of elements is: one vector along `dim`, expanded along all others."""
    for d in reversed(range(index.ndim)):
        if d != dim:
            if not index.shape[d] or (index.shape[d] > 1 and index.stride(d)):
                return None
            index = index.select(d, 0)
    return index
