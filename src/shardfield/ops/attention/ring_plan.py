"""The work of one rank in ring attention: what it visits, and the tiles that it computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...comm.autograd_collectives import Groups
from ...comm.ring import Ring, Visit
from .causal_tiles import Spans, Tile, total_length


class Dropout(NamedTuple):
    """Dropout of weights by their global index: the probability, and the global (rows, columns) of the weights."""

    p: float
    shape: tuple[int, int]


@dataclass(frozen=True)
class RingPlan:
    """The work of one rank: the ring, the tiles of each visit's blocks that it computes, and the reductions afterwards.

    visits: the steps of the ring whose blocks are used together. rows: global indices of this rank's queries. columns:
    global indices of the keys of each ring position. used: local spans of each visit's keys that this rank reads, and
    their global indices: the others are dropped, so that a kernel has more columns. tiles: tiles of each visit, in what
    is used. merge: groups whose ranks hold other keys for the same queries.
    """

    ring: Ring
    visits: tuple[Visit, ...]
    rows: Spans
    columns: tuple[Spans, ...]
    used: tuple[tuple[Spans, Spans], ...]
    tiles: tuple[tuple[Tile, ...], ...]
    scale: float
    is_causal: bool
    merge: Groups = ()
    dropout: Dropout | None = None

    @property
    def at_once(self) -> bool:
        """Return whether the blocks of all ranks, also this rank's own, are one visit."""
        return len(self.visits) == 1 and self.ring.num_steps > 1

    @cached_property
    def has_one_tile(self) -> bool:
        """Return whether one kernel computes the scores of all rows, so that there is nothing to combine."""
        if [len(tiles) for tiles in self.tiles] != [1]:
            return False
        ((tile,),) = self.tiles
        return tile.squares == 1 and tile.rows == (0, total_length(self.rows))

    @property
    def scores(self) -> float:
        """Return the number of scores per head that this rank computes."""
        return sum(tile.area for tiles in self.tiles for tile in tiles)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of keys of each ring position."""
        return tuple(map(total_length, self.columns))

    def length(self, number: int) -> int:
        """Return the number of keys of the blocks of a visit."""
        return sum(self.lengths[self.ring.owner(step)] for step in self.visits[number])

    @property
    def origin(self) -> int:
        """Return the first global column of the circulating keys; the columns of a mask start there."""
        return min((span.start for spans in self.columns for span in spans), default=0)
