"""Which scores a rank computes: spans of rows and columns, and the tiles of them that a causal mask leaves. Pure.

Causal attention is a triangle of scores, and equal stretches of rows are unequal work. So rows and columns are dealt:
the sequence in 2P stretches, of which coord c takes the c-th from either end. All ranks then have equal work, not only
in sum but against every block of columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ...layout import Span, balanced, starts

Spans = tuple[Span, ...]
Coords = tuple[int, ...]


class Tile(NamedTuple):
    """Local rows and columns whose scores are computed at once. Causal: row i sees the first i + 1 columns; square."""

    rows: Span
    columns: Span
    causal: bool = False

    @property
    def area(self) -> float:
        """The scores computed, as an area."""
        height, width = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return height * (height + 1) / 2 if self.causal else height * width


def total_length(spans: Spans) -> int:
    """How many indices some spans hold."""
    return sum(stop - start for start, stop in spans)


def full_tiles(rows: Spans, columns: Spans) -> tuple[Tile, ...]:
    """All rows against all columns."""
    tile = Tile(Span(0, total_length(rows)), Span(0, total_length(columns)))
    return (tile,) if tile.area else ()


def causal_tiles(rows: Spans, columns: Spans) -> tuple[Tile, ...]:
    """The tiles in which rows (global indices) see columns up to their own index."""
    found: list[Tile] = []
    for at, (a, b) in zip(starts([stop - start for start, stop in rows]), rows, strict=True):
        for to, (c, d) in zip(starts([stop - start for start, stop in columns]), columns, strict=True):
            for (r0, r1), (c0, c1), is_causal in _visible(a, b, c, d):
                found.append(Tile(Span(r0 - a + at, r1 - a + at), Span(c0 - c + to, c1 - c + to), is_causal))
    return tuple(_merge_tiles(found))


def _visible(a: int, b: int, c: int, d: int) -> list[tuple[Span, Span, bool]]:
    """Rows a..b against columns c..d: columns before all rows, a square on the diagonal, rows after all columns."""
    found = []
    if c < min(a, d) and a < b:
        found.append((Span(a, b), Span(c, min(a, d)), False))
    low, high = max(a, c), min(b, d)
    if low < high:
        found.append((Span(low, high), Span(low, high), True))
        if high < b:
            found.append((Span(high, b), Span(low, high), False))
    return found


def _merge_tiles(tiles: list[Tile]) -> list[Tile]:
    """Fewer, larger tiles: whole ones that lie side by side in local rows, then in local columns."""
    for upright in (True, False):
        done: list[Tile] = []
        for tile in tiles:
            at = next((i for i, t in enumerate(done) if not t.causal and _adjacent(t, tile, upright)), None)
            if tile.causal or at is None:
                done.append(tile)
            elif upright:
                done[at] = Tile(Span(done[at].rows.start, tile.rows.stop), tile.columns)
            else:
                done[at] = Tile(tile.rows, Span(done[at].columns.start, tile.columns.stop))
        tiles = done
    return tiles


def _adjacent(first: Tile, second: Tile, upright: bool) -> bool:
    if upright:
        return first.columns == second.columns and first.rows.stop == second.rows.start
    return first.rows == second.rows and first.columns.stop == second.columns.start


# ---------------------------------------------------------------------- dealing


def zigzag(spans_by_coord: Sequence[Spans], square: int) -> list[Spans]:
    """Spans of several coords dealt anew: indices below `square` from both ends, later ones evenly.

    >>> zigzag([(Span(0, 4),), (Span(4, 8),)], 8)
    [(Span(start=0, stop=2), Span(start=6, stop=8)), (Span(start=2, stop=6),)]
    """
    held_by_all = sorted(s for spans in spans_by_coord for s in spans if s.start < s.stop)
    below = [Span(a, min(b, square)) for a, b in held_by_all if a < square]
    above = [Span(max(a, square), b) for a, b in held_by_all if b > square]
    parts = len(spans_by_coord)
    ends = _split_spans(below, 2 * parts)
    rest = _split_spans(above, parts)
    return [_merge_spans((*ends[c], *ends[2 * parts - 1 - c], *rest[c])) for c in range(parts)]


def _split_spans(spans: Sequence[Span], parts: int) -> list[Spans]:
    """Spans cut, in their order, into `parts` lists that hold about as many indices."""
    lengths = balanced(total_length(tuple(spans)), parts)
    found: list[Spans] = []
    left = list(spans)
    for want in lengths:
        taken = []
        while want:
            start, stop = left.pop(0)
            cut = min(stop, start + want)
            taken.append(Span(start, cut))
            want -= cut - start
            if cut < stop:
                left.insert(0, Span(cut, stop))
        found.append(tuple(taken))
    return found


def _merge_spans(spans: Spans) -> Spans:
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


class ZigzagExchange(NamedTuple):
    """One exchange along a mesh axis: what each of its coords holds before and after."""

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
    """The exchanges, axis by axis, that deal a dim cut over `axes` of a mesh, as the rank at `here` sees them.

    `spans_by_coord` says what the rank at each coords (over all mesh axes) holds. With `drop`, indices from `square`
    on are seen by nobody and stay behind.
    """
    now = dict(spans_by_coords)
    deals = []
    for axis in axes:
        after: dict[Coords, Spans] = {}
        for coords in product(*(range(n) if a != axis else range(1) for a, n in enumerate(sizes))):
            line = [coords[:axis] + (c,) + coords[axis + 1 :] for c in range(sizes[axis])]
            given = zigzag([tuple(_clip_spans(now[x], square)) if drop else now[x] for x in line], square)
            after.update(zip(line, given, strict=True))
        line = [here[:axis] + (c,) + here[axis + 1 :] for c in range(sizes[axis])]
        deals.append(ZigzagExchange(axis, tuple(now[x] for x in line), tuple(after[x] for x in line)))
        now = after
    return deals, now


def _clip_spans(spans: Spans, square: int) -> Spans:
    return tuple(Span(a, min(b, square)) for a, b in spans if a < square)
