"""The sharding of one tensor dim: shard sizes over mesh axes, merged and split dims. Import these from `layout.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """The dim that the entries of a tensor dim were selected from: its size, mesh axes and shard sizes.

    `kind` is "rows" for entries taken with an index tensor, "modes" or "half modes" for frequencies of a field, "field"
    for a dim at another resolution, `MOVED_SHARDING` for a dim that was sharded itself until an op moved its sharding
    to another dim. An origin is a hint, never part of a value: rows that are written back to a dim of this size are
    sent to its shards, a spectrum assembled from modes is inverted into the field's sharding, every resolution of a
    field is sharded in the proportions of the first, and a sharding that was moved can return to its former dim.
    """

    kind: str
    size: int
    axes: tuple[int, ...]
    shard_sizes: tuple[int, ...]


MOVED_SHARDING = "moved"
UNBALANCED = 2.0  # the largest shard, in even shares, from which on a dim is unbalanced
MAX_ORIGINS = 4  # per dim; without a limit, results of many operands would accumulate origins


class _ShardingFields(NamedTuple):
    size: int
    axes: tuple[int, ...] = ()
    shard_sizes: tuple[int, ...] = ()


class DimSharding(_ShardingFields):
    """The sharding of one factor of a tensor dim: global size and, if sharded, mesh axes and shard sizes.

    `shard_sizes` holds one size per coordinate over `axes`, row-major. Two axes on one dim nest: the first axis shards
    the dim, the second shards each shard. Most dims have one factor. A dim that merges several
    others, as (H, W) -> (HW,), has one factor for each of them, so that a sharded inner factor keeps its shards.

    `origins` says which dims the entries were selected from. Equality and hash ignore it, because it does not change
    where data is; `Layout.make` interns layouts with different origins as different objects.
    """

    origins: tuple[Origin, ...] = ()

    def with_origins(self, *groups: Iterable[Origin]) -> DimSharding:
        """Return the same sharding with the union of these origins: sorted, at most `MAX_ORIGINS`.

        >>> DimSharding(3).with_origins([Origin("rows", 9, (0,), (4, 5))]).origins[0].size
        9
        """
        # a dim that is sharded again needs no record of its former sharding
        held = {o for group in groups for o in group if not (self.axes and o.kind == MOVED_SHARDING)}
        found = tuple(sorted(held)[:MAX_ORIGINS])
        if found == self.origins:
            return self
        made = DimSharding(*self)
        made.origins = found
        return made

    @property
    def field(self) -> Origin | None:
        """The finest resolution of the field that this dim is another resolution of, sharded by the same axes."""
        fields = [o for o in self.origins if o.kind == "field" and o.axes == self.axes]
        return fields[-1] if fields else None

    @property
    def is_unbalanced(self) -> bool:
        """Whether a rank has at least twice an even share. A dim with fewer indices than ranks cannot be shared."""
        parts = len(self.shard_sizes)
        return 0 < parts <= self.size and max(self.shard_sizes) * parts >= UNBALANCED * self.size


class Span(NamedTuple):
    """A half-open range of global indices."""

    start: int
    stop: int


def chunk(size: int, parts: int) -> tuple[int, ...]:
    """Return the shard sizes of torch.chunk: equal ones, then a smaller one, then zeros.

    >>> chunk(5, 4)
    (2, 2, 1, 0)
    """
    step = -(-size // parts)
    return tuple(max(0, min(step, size - i * step)) for i in range(parts))


def balanced(size: int, parts: int) -> tuple[int, ...]:
    """Return shard sizes that differ by at most one.

    >>> balanced(5, 4)
    (2, 1, 1, 1)
    """
    base, extra = divmod(size, parts)
    return tuple(base + (i < extra) for i in range(parts))


def nested_balanced(size: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes, row-major, of `size` split evenly into parts[0], each of these into parts[1], and so on."""
    return tuple(n for part in balanced(size, parts[0]) for n in nested_balanced(part, parts[1:])) if parts else (size,)


def rescale(shard_sizes: Sequence[int], size: int) -> tuple[int, ...]:
    """Return shard sizes of a dim of another size in the same proportions: boundaries move to the nearest index.

    >>> rescale([33, 31], 16), rescale([33, 31], 4)
    ((8, 8), (2, 2))
    """
    total = max(sum(shard_sizes), 1)
    bounds = [(2 * start * size + total) // (2 * total) for start in starts(shard_sizes)] + [size]
    return tuple(b - a for a, b in pairwise(bounds))


def snapped(shard_sizes: Sequence[int], unit: int) -> tuple[int, ...]:
    """Return how many units of `unit` indices each shard has after every boundary has moved to one between two units.

    A boundary moves to the nearest one. Where this makes the largest shard larger, boundaries move up or down such that
    the largest shard becomes as small as possible: 11 + 5 rows are two windows of four rows each, not three and one.

    >>> snapped([13, 3], 4), snapped([11, 5], 4), snapped([110, 50], 4)
    ((3, 1), (2, 2), (27, 13))
    """
    if not shard_sizes:
        return ()
    bounds = tuple(accumulate(shard_sizes, initial=0))
    marks = [(bound + unit // 2) // unit for bound in bounds]
    if max(b - a for a, b in pairwise(marks)) * unit > max(shard_sizes):
        marks = _balanced_marks(bounds, unit)
    return tuple(b - a for a, b in pairwise(marks))


def _balanced_marks(bounds: Sequence[int], unit: int) -> list[int]:
    """Return the unit below or above each boundary, such that the largest shard is smallest and moves are short."""
    paths: list[tuple[tuple[int, int], Any]] = [((0, 0), (0, None))]  # cost, and marks from the last to the first
    for bound in bounds[1:]:
        paths = [
            min(
                (
                    ((max(largest, mark - last[0]), moved + abs(mark * unit - bound)), (mark, last))
                    for (largest, moved), last in paths
                    if last[0] <= mark
                ),
                key=itemgetter(0),
            )
            for mark in sorted({bound // unit, -(-bound // unit)})
        ]
    node, marks = min(paths, key=itemgetter(0))[1], []
    while node:
        marks.append(node[0])
        node = node[1]
    return marks[::-1]


def starts(shard_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the index at which each shard begins."""
    return tuple(accumulate(shard_sizes, initial=0))[:-1]


def nested_chunk(size: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Return row-major shard sizes of nested torch.chunks: into `parts[0]` shards, each into `parts[1]`, and so on."""
    if not parts:
        return (size,)
    return tuple(n for outer in chunk(size, parts[0]) for n in nested_chunk(outer, parts[1:]))


def outer_shard_sizes(lengths: Sequence[int], inner: int) -> tuple[int, ...]:
    """Return the shard sizes over all but the innermost axis, which has `inner` coordinates."""
    return tuple(sum(lengths[i : i + inner]) for i in range(0, len(lengths), inner))


def shard_sizes_of(factor: DimSharding) -> tuple[int, ...]:
    """Return the shard sizes of a factor; an unsharded one has a single shard."""
    return factor.shard_sizes if factor.axes else (factor.size,)


def canonicalize(factors: Iterable[DimSharding]) -> tuple[DimSharding, ...]:
    """Return the shortest list of factors of a dim: merge a factor into the one before where shards stay contiguous.

    (A sharded, B unsharded) is (AB sharded): the shards of A times all of B are contiguous in AB. The same holds if one
    rank holds all of a sharded B (for example if B has size 1), and if A has size 1.
    """
    if type(factors) is tuple and len(factors) == 1:  # most dims
        return factors
    found: list[DimSharding] = []
    for factor in factors:
        while found and (found[-1].size < 2 or sum(n > 0 for n in shard_sizes_of(factor)) < 2):
            last = found.pop()
            axes = last.axes + factor.axes
            sizes = tuple(m * n for m in shard_sizes_of(last) for n in shard_sizes_of(factor)) if axes else ()
            merged = DimSharding(last.size * factor.size, axes, sizes)
            factor = merged.with_origins(_merged_origins(last, factor))
        found.append(factor)
    return tuple(found) or (DimSharding(1),)


def _merged_origins(outer: DimSharding, inner: DimSharding) -> Iterable[Origin]:
    """Return the origins of a dim that merges two factors: the common ones, or all if one has size 1.

    The shards of a field's rows times all columns have the same proportions as those of the rows.
    """
    if 1 in (outer.size, inner.size):
        return (*outer.origins, *inner.origins)
    return [o for o in outer.origins if o in inner.origins or (o.kind == "field" and o.axes and not inner.axes)]


def regroup(
    factors: Iterable[DimSharding], sizes: Sequence[int], snap: bool = False
) -> list[tuple[DimSharding, ...]] | None:
    """Return the same sharding as dims of other `sizes` with the same product, or None if a shard would split an index.

    This is the effect of a view on a layout: an unsharded factor may be split anywhere, a sharded one only where every
    shard is a multiple of the inner size. With `snap`, other shard boundaries are moved to such an index (`snapped`).

    >>> regroup([DimSharding(6, (0,), (2, 4))], [3, 2])
    [(DimSharding(size=3, axes=(0,), shard_sizes=(1, 2)),), (DimSharding(size=2, axes=(), shard_sizes=()),)]
    """
    rest = list(canonicalize(factors))
    found = []
    if 0 in sizes:
        return None
    for size in sizes:
        taken: list[DimSharding] = []
        need = size
        while need > 1 or (rest and rest[0].size == 1 and rest[0].axes):
            if not rest:
                return None
            factor = rest.pop(0)
            if need % factor.size == 0:
                need //= factor.size
                taken.append(factor)
                continue
            inner, over = divmod(factor.size, need)
            if over or (not snap and any(n % inner for n in factor.shard_sizes)):
                return None
            split = DimSharding(need, factor.axes, snapped(factor.shard_sizes, inner))
            taken.append(split.with_origins(factor.origins))
            rest.insert(0, DimSharding(inner).with_origins(factor.origins))
            need = 1
        found.append(canonicalize(taken))
    return None if any(f.axes for f in rest) else found
