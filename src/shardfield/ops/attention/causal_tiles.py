"""Which scores a rank computes: spans of rows and columns, and the tiles that a causal mask leaves of them. Pure.

The scores of causal attention are a triangle, so shards of equal length have unequal work. Rows and columns are
therefore distributed in zigzag order. The sequence is split into 2P chunks, and coord c takes the c-th chunk from each
end. Every rank then has equal work, in total and against every block of columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ...layout import Span, balanced, starts

Spans = tuple[Span, ...]
Coords = tuple[int, ...]


class Tile(NamedTuple):
    """Local rows and columns of one kernel call. A causal tile is square, and row i attends to columns 0 to i.

    squares: how many equal causal squares along the diagonal the tile stands for; there is nothing else in it.
    """

    rows: Span
    columns: Span
    causal: bool = False
    squares: int = 1

    @property
    def area(self) -> float:
        """Return the number of scores computed."""
        height, width = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return height * (height // self.squares + 1) / 2 if self.causal else height * width

    @property
    def separate(self) -> tuple[Tile, ...]:
        """Return the squares as tiles of their own."""
        if self.squares == 1:
            return (self,)
        size = (self.rows.stop - self.rows.start) // self.squares
        (r, _), (c, _), shifts = self.rows, self.columns, range(0, self.squares * size, size)
        return tuple(Tile(Span(r + s, r + s + size), Span(c + s, c + s + size), True) for s in shifts)


def total_length(spans: Spans) -> int:
    """Return the number of indices in the spans."""
    return sum(stop - start for start, stop in spans)


def full_tiles(rows: Spans, columns: Spans) -> tuple[Tile, ...]:
    """Return one tile of all rows against all columns."""
    tile = Tile(Span(0, total_length(rows)), Span(0, total_length(columns)))
    return (tile,) if tile.area else ()


def causal_tiles(rows: Spans, columns: Spans) -> tuple[Tile, ...]:
    """Return the tiles in which rows (global indices) attend to columns up to their own index."""
    tiles: list[Tile] = []
    for row_offset, (a, b) in zip(starts([stop - start for start, stop in rows]), rows, strict=True):
        for column_offset, (c, d) in zip(starts([stop - start for start, stop in columns]), columns, strict=True):
            for (r0, r1), (c0, c1), is_causal in _visible(a, b, c, d):
                tiles.append(
                    Tile(
                        Span(r0 - a + row_offset, r1 - a + row_offset),
                        Span(c0 - c + column_offset, c1 - c + column_offset),
                        is_causal,
                    )
                )
    return tuple(_join_squares(_merge_tiles(tiles)))


def all_columns(rows: Spans, columns: Spans) -> tuple[Spans, Spans]:
    """Return all columns, as `visible_columns` does."""
    return (Span(0, total_length(columns)),), columns


def visible_columns(rows: Spans, columns: Spans) -> tuple[Spans, Spans]:
    """Return the columns to which some row attends under a causal mask: local spans, and their global indices.

    >>> visible_columns((Span(4, 8),), (Span(0, 2), Span(12, 14), Span(6, 10)))
    ((Span(start=0, stop=2), Span(start=4, stop=6)), (Span(start=0, stop=2), Span(start=6, stop=8)))
    """
    limit = max((b for a, b in rows if a < b), default=0)
    found = tuple(_clip_spans(columns, limit))
    local: list[Span] = []
    for offset, (c, d) in zip(starts([stop - start for start, stop in columns]), columns, strict=True):
        length = min(d, limit) - c
        if length > 0 and local and local[-1].stop == offset:
            local[-1] = Span(local[-1].start, offset + length)
        elif length > 0:
            local.append(Span(offset, offset + length))
    return tuple(local), tuple(span for span in found if span.start < span.stop)


def _visible(a: int, b: int, c: int, d: int) -> list[tuple[Span, Span, bool]]:
    """Split rows a..b against columns c..d: columns before all rows, the diagonal square, rows after all columns."""
    tiles = []
    if c < min(a, d) and a < b:
        tiles.append((Span(a, b), Span(c, min(a, d)), False))
    low, high = max(a, c), min(b, d)
    if low < high:
        tiles.append((Span(low, high), Span(low, high), True))
        if high < b:
            tiles.append((Span(high, b), Span(low, high), False))
    return tiles


def _merge_tiles(tiles: list[Tile]) -> list[Tile]:
    """Merge full tiles that are adjacent in local rows, then those adjacent in local columns."""
    for by_rows in (True, False):
        merged: list[Tile] = []
        for tile in tiles:
            match = next((i for i, t in enumerate(merged) if not t.causal and _adjacent(t, tile, by_rows)), None)
            if tile.causal or match is None:
                merged.append(tile)
            elif by_rows:
                merged[match] = Tile(Span(merged[match].rows.start, tile.rows.stop), tile.columns)
            else:
                merged[match] = Tile(tile.rows, Span(merged[match].columns.start, tile.columns.stop))
        tiles = merged
    return tiles


def _join_squares(tiles: list[Tile]) -> list[Tile]:
    """Join two causal squares of one size that follow each other on the diagonal, as those of a zigzag order do."""
    squares = [tile for tile in tiles if tile.causal]
    if len(squares) != 2:
        return tiles
    first, second = squares
    adjacent = first.rows.stop == second.rows.start and first.columns.stop == second.columns.start
    if not adjacent or first.area != second.area:
        return tiles
    rows, columns = (Span(a.start, b.stop) for a, b in zip(first[:2], second[:2], strict=True))
    return [Tile(rows, columns, True, 2), *(tile for tile in tiles if not tile.causal)]


def _adjacent(first: Tile, second: Tile, by_rows: bool) -> bool:
    if by_rows:
        return first.columns == second.columns and first.rows.stop == second.rows.start
    return first.rows == second.rows and first.columns.stop == second.columns.start


# ---------------------------------------------------------------------- zigzag order


def zigzag(spans_by_coord: Sequence[Spans], square: int) -> list[Spans]:
    """Return the spans of several coords in zigzag order: indices below `square` from both ends, later ones evenly.

    >>> zigzag([(Span(0, 4),), (Span(4, 8),)], 8)
    [(Span(start=0, stop=2), Span(start=6, stop=8)), (Span(start=2, stop=6),)]
    """
    spans_in_order = sorted(s for spans in spans_by_coord for s in spans if s.start < s.stop)
    below = [Span(a, min(b, square)) for a, b in spans_in_order if a < square]
    above = [Span(max(a, square), b) for a, b in spans_in_order if b > square]
    parts = len(spans_by_coord)
    ends = _split_spans(below, 2 * parts)
    rest = _split_spans(above, parts)
    return [merge_spans((*ends[c], *ends[2 * parts - 1 - c], *rest[c])) for c in range(parts)]


def _split_spans(spans: Sequence[Span], parts: int) -> list[Spans]:
    """Split spans, in their order, into `parts` lists with nearly equal numbers of indices."""
    sizes = balanced(total_length(tuple(spans)), parts)
    lists: list[Spans] = []
    remaining = list(spans)
    for size in sizes:
        chosen = []
        while size:
            start, stop = remaining.pop(0)
            end = min(stop, start + size)
            chosen.append(Span(start, end))
            size -= end - start
            if end < stop:
                remaining.insert(0, Span(end, stop))
        lists.append(tuple(chosen))
    return lists


def merge_spans(spans: Spans) -> Spans:
    """Join spans that follow each other."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = Span(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return tuple(merged)


class ZigzagExchange(NamedTuple):
    """One exchange along a mesh axis: the spans of each coord before and after."""

    axis: int
    before: tuple[Spans, ...]
    after: tuple[Spans, ...]


def plan_zigzag(
    spans_by_coords: Mapping[Coords, Spans],
    sizes: Sequence[int],
    axes: Sequence[int],
    here: Coords,
    square: int,
    drop: bool,
) -> tuple[list[ZigzagExchange], dict[Coords, Spans]]:
    """Return the exchanges, axis by axis, that put a dim sharded over `axes` in zigzag order, and the final spans.

    `spans_by_coords` has the spans of the rank at each coords (over all mesh axes); `here` are this rank's. With
    `drop`, indices from `square` on, to which no row attends, are not sent.
    """
    current = dict(spans_by_coords)
    exchanges = []
    for axis in axes:
        after: dict[Coords, Spans] = {}
        for coords in product(*(range(n) if a != axis else range(1) for a, n in enumerate(sizes))):
            coords_on_axis = [coords[:axis] + (c,) + coords[axis + 1 :] for c in range(sizes[axis])]
            reordered = zigzag(
                [tuple(_clip_spans(current[x], square)) if drop else current[x] for x in coords_on_axis], square
            )
            after.update(zip(coords_on_axis, reordered, strict=True))
        coords_on_axis = [here[:axis] + (c,) + here[axis + 1 :] for c in range(sizes[axis])]
        exchanges.append(
            ZigzagExchange(axis, tuple(current[x] for x in coords_on_axis), tuple(after[x] for x in coords_on_axis))
        )
        current = after
    return exchanges, current


def _clip_spans(spans: Spans, square: int) -> Spans:
    return tuple(Span(a, min(b, square)) for a, b in spans if a < square)
