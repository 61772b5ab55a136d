"""Which dims the work of a product is divided over: the one planner behind matmul, einsum, cdist and the like. Pure.

A product is an einsum: the dims of every operand carry labels, and labels that the result does not have are summed
over. For each mesh axis one label is chosen, which this axis then divides in all operands that have it. A label of
the result leaves the result cut; a summed one leaves it Partial. Operands without the label are whole on that axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ...layout import DimSharding, Layout, canonicalize, nested_chunk, outer_shard_sizes, starts

Label = Hashable
LabelSharding = tuple[DimSharding, ...]

# A Partial result this many times larger than the largest operand is not left to the next op: something moves instead.
MAX_PARTIAL_GROWTH = 4
# How many labels that the axis does not cut yet are tried as places to move a cut to.
MAX_NEW_LABELS = 4


class Term(NamedTuple):
    """An operand: its layout, a label for each dim (None: the dim must be whole), bytes per element."""

    layout: Layout
    labels: tuple[Label | None, ...]
    itemsize: int = 1


class KeepPartial(NamedTuple):
    """A choice for an axis: the operand that stays Partial on it."""

    term: int


class ContractionPlan(NamedTuple):
    """Where the operands go, where the result lies, and how each label is cut."""

    targets: tuple[Layout, ...]
    result: Layout
    label_shardings: dict[Label, LabelSharding]


def plan_contraction(
    terms: Sequence[Term],
    out: Sequence[Label | tuple[Label, ...]],
    *,
    unsharded: Collection[Label] = (),
    linear: bool = True,
    allow_partial: bool = True,
    prefer_local: bool = True,
    use_all_axes: bool = False,
    broadcast: bool = False,
    constants: Collection[int] = (),
) -> ContractionPlan:
    """The cheapest division of a product, by bytes moved before it and to be summed after it.

    `out` lists the result's labels; a tuple of them is one merged dim. Labels in `unsharded` are never cut. If the
    function is not `linear`, no operand stays Partial; without `allow_partial`, no summed label is cut. With
    `prefer_local`, a way that
    moves nothing is taken before a cheaper one that does, unless its Partial result is much larger than the operands.
    With `use_all_axes`, a way that leaves fewer axes idle comes first. A dim of size 1 broadcasts where its label is
    a number, or any label with `broadcast`.

    `constants` are operands that are whole everywhere and constant, as those of a transform are. One that sums over a
    cut
    dim of a field leaves a Partial; one that takes such a Partial back to a field of its size or larger divides the
    dim that it brings: the Partial is summed while it is small, and the field lies in pieces again.
    """
    mesh = terms[0].layout.mesh
    found = [label for group in out for label in (group if type(group) is tuple else (group,))]
    plan = _StrategySearch(mesh, terms, found, unsharded, linear, allow_partial, broadcast, constants)
    best, least = None, None
    for choice in itertools.product(*(plan.choices(axis) for axis in plan.axes)):
        cuts = plan.label_shardings(dict(zip(plan.axes, choice, strict=True)))
        if cuts is None:
            continue
        moved, summed, size = plan.cost(cuts, choice)
        # 0: nothing moves and the result is of a size to be left Partial; 1: a table's dim takes the place of one that
        # was summed away
        left = not summed or (size <= MAX_PARTIAL_GROWTH * plan.largest and not plan.expands_partial(choice, size))
        rank = 0 if prefer_local and not moved and left else 1 if plan.shards_constant_dims(choice) else 2
        key = (choice.count(None) if use_all_axes else 0, rank, moved + summed)
        if least is None or key < least:
            best, least = (choice, cuts), key
    assert best is not None, "every axis may be left idle"
    choice, cuts = best
    kept = {(axis, c.term) for axis, c in zip(plan.axes, choice, strict=True) if isinstance(c, KeepPartial)}
    targets = tuple(plan.target(i, cuts, [a for a, term in kept if term == i]) for i in range(len(terms)))
    dims = [[f for label in (g if type(g) is tuple else (g,)) for f in cuts[label]] for g in out]
    partial = {a for label, cut in cuts.items() if label not in found for f in cut for a in f.axes}
    partial |= {a for a, _ in kept}
    wide = [a for a in sorted(partial) if mesh.size(a) > 1]
    return ContractionPlan(targets, Layout.make(mesh, dims, [(a, "sum") for a in wide]), cuts)


class _StrategySearch:
    """What is asked about one product while its division is chosen."""

    def __init__(
        self, mesh: DeviceMesh, terms, found: Sequence[Label], whole: Collection[Label], linear, sums, broadcast, tables
    ):
        self.mesh, self.terms, self.unsharded, self.linear, self.allow_partial = mesh, terms, set(whole), linear, sums
        self.out_labels = list(
            found
        )  # in order: ranks must round costs alike, and sets of strings are ordered by chance
        self.sizes: dict[Label, int] = {}
        for term in terms:
            for label, size in zip(term.labels, term.layout.shape, strict=True):
                known = self.sizes.setdefault(label, size)
                if known != size and label is not None:
                    if not (broadcast or isinstance(label, int)) or 1 not in (known, size):
                        shapes = [tuple(t.layout.shape) for t in terms]
                        raise RuntimeError(f"operands of shapes {shapes} do not fit: {known} meets {size}")
                    self.sizes[label] = known if size == 1 else size
        self.sizes.pop(None, None)
        self.repeated = {x for t in terms for x in t.labels if x is not None and t.labels.count(x) > 1}
        self.bytes = [t.layout.numel * t.itemsize for t in terms]
        self.largest = max(self.bytes)
        self.by_size = sorted(range(len(terms)), key=lambda i: -self.bytes[i])
        self.itemsize = max(t.itemsize for t in terms)
        used = {a for t in terms for a in t.layout.shard_axes + t.layout.partial_axes}
        self.axes = sorted(used)
        self.constant_labels = {a: self._constant_labels(a, tables) for a in self.axes}

    def choices(self, axis: int) -> list[Label | KeepPartial | None]:
        """What may be divided by an axis: labels it cuts already come first, larger operands before smaller ones."""
        cutting: list[Label] = []
        others: list[Label] = []
        keeps: list[KeepPartial] = []
        for i in self.by_size:
            term = self.terms[i]
            if (axis, "sum") in term.layout.partial and self.linear:
                keeps.append(KeepPartial(i))
            for label, dim in self._labels_of(term):
                if axis in term.layout.axes_of(dim):
                    cutting.append(label)
                elif axis in term.layout.shard_axes + term.layout.partial_axes and self.sizes[label] > 1:
                    others.append(label)
        allowed = [x for x in dict.fromkeys(cutting) if self._may_shard(x)]
        allowed.sort(key=lambda x: x not in self.out_labels)
        new = [x for x in dict.fromkeys(others) if self._may_shard(x) and x not in allowed]
        new.sort(key=lambda x: -self.sizes[x])
        return [*allowed, *keeps, *self.constant_labels[axis], *new[:MAX_NEW_LABELS], None]

    def _constant_labels(self, axis: int, tables: Collection[int]) -> list[Label]:
        """The result's labels, long enough for an axis on which an operand is Partial, that tables alone have."""
        if not self.linear or not any((axis, "sum") in t.layout.partial for t in self.terms):
            return []
        held = [{label for label, _ in self._labels_of(t)} for t in self.terms]
        others = {x for i, labels in enumerate(held) if i not in tables for x in labels}
        own = {x for i in tables for x in held[i]} - others
        return [x for x in self.out_labels if x in own and self._may_shard(x) and self.sizes[x] >= self.mesh.size(axis)]

    def shards_constant_dims(self, choice: Sequence[Label | KeepPartial | None]) -> bool:
        """Whether all axes on which an operand is Partial divide a dim that a table brings, if it brings any."""
        pairs = [
            (c, self.constant_labels[axis])
            for axis, c in zip(self.axes, choice, strict=True)
            if self.constant_labels[axis]
        ]
        return bool(pairs) and all(c in brought for c, brought in pairs)

    def expands_partial(self, choice: Sequence[Label | KeepPartial | None], size: float) -> bool:
        """Whether a table makes a result of an operand that stays Partial, and it is no smaller than the operand."""
        return any(
            isinstance(c, KeepPartial) and self.constant_labels[axis] and size >= self._local_bytes(c.term)
            for axis, c in zip(self.axes, choice, strict=True)
        )

    def _local_bytes(self, i: int) -> float:
        """Bytes of an operand here."""
        layout = self.terms[i].layout
        shares = [n * _max_local_fraction(cut) for n, cut in zip(layout.shape, layout.dims, strict=True)]
        return self.terms[i].itemsize * math.prod(shares)

    def _may_shard(self, label: Label) -> bool:
        return label not in self.unsharded and (self.allow_partial or label in self.out_labels)

    def _labels_of(self, term: Term) -> Iterator[tuple[Label, int]]:
        """The labels that a term really has (not as a dim of size 1 that is broadcast), and where."""
        for dim, (label, size) in enumerate(zip(term.labels, term.layout.shape, strict=True)):
            if label is not None and size == self.sizes[label]:
                yield label, dim

    def label_shardings(self, choice: dict[int, Label | KeepPartial | None]) -> dict[Label, LabelSharding] | None:
        """How every label is cut if these are the choices; None where there is no such cut."""
        cuts: dict[Label, LabelSharding] = {}
        for label, size in self.sizes.items():
            axes = [a for a, chosen in choice.items() if chosen == label and not isinstance(chosen, KeepPartial)]
            cut = self._label_sharding(label, axes) if axes else (DimSharding(size),)
            if cut is None or (len(cut) > 1 and label in self.repeated):
                return None
            cuts[label] = cut
        return cuts

    def _label_sharding(self, label: Label, axes: Sequence[int]) -> LabelSharding | None:
        """A label cut by `axes`: where the largest operand is cut so, by all or some of them, as it is there."""
        for i in self.by_size:
            for held, dim in self._labels_of(self.terms[i]):
                layout = self.terms[i].layout
                if held == label and set(axes) & set(layout.axes_of(dim)):
                    return _shard_further(restrict_axes(layout.dims[dim], axes, self.mesh), axes, self.mesh)
        return _shard_further((DimSharding(self.sizes[label]),), axes, self.mesh)

    def dims(self, i: int, cuts: dict[Label, LabelSharding]) -> list[LabelSharding]:
        """The dims of an operand; of several dims with one label, one is cut and the others are whole."""
        term = self.terms[i]
        dims: list[LabelSharding] = [(DimSharding(n),) for n in term.layout.shape]
        best: dict[Label, int] = {}
        for label, dim in self._labels_of(term):
            axes = {a for f in cuts[label] for a in f.axes}
            if label not in best or len(axes & set(term.layout.axes_of(dim))) > len(
                axes & set(term.layout.axes_of(best[label]))
            ):
                best[label] = dim
        for label, dim in best.items():
            dims[dim] = cuts[label]
        return dims

    def target(self, i: int, cuts: dict[Label, LabelSharding], kept: Sequence[int]) -> Layout:
        """Where an operand goes; where it is, if the difference is on axes of one rank only."""
        source = self.terms[i].layout
        dims = self.dims(i, cuts)
        partial = [(a, "sum") for a in kept]
        wide = set(source.nontrivial_axes(range(self.mesh.ndim)))
        same = all(
            restrict_axes(a, wide, self.mesh) == restrict_axes(b, wide, self.mesh)
            for a, b in zip(source.dims, dims, strict=True)
        )
        if same and {p for p in source.partial if p[0] in wide} == {p for p in partial if p[0] in wide}:
            return source
        return Layout.make(self.mesh, dims, partial)

    def cost(
        self, cuts: dict[Label, LabelSharding], choice: Sequence[Label | KeepPartial | None]
    ) -> tuple[float, float, float]:
        """Bytes moved to make the operands ready, bytes to be moved to sum the result, bytes of the result here."""
        moved = 0.0
        for i in range(len(self.terms)):
            kept = [
                a for a, c in zip(self.axes, choice, strict=True) if c == KeepPartial(i) and isinstance(c, KeepPartial)
            ]
            moved += self._redistribute_bytes(i, self.dims(i, cuts), kept)
        size = self.itemsize * math.prod(self.sizes[x] * _max_local_fraction(cuts[x]) for x in self.out_labels)
        summed = 0.0
        for axis, chosen in zip(self.axes, choice, strict=True):
            part = 1 - 1 / self.mesh.size(axis)
            if isinstance(chosen, KeepPartial):
                summed += 2 * part * size
            elif chosen is not None and chosen not in self.out_labels:
                summed += part * size
        return moved, summed, size

    def _redistribute_bytes(self, i: int, dims: Sequence[LabelSharding], kept: Sequence[int]) -> float:
        """Bytes that a rank sends to bring an operand from where it is to `dims`, about."""
        layout, nbytes = self.terms[i].layout, float(self.bytes[i])
        here = {a: d for d in range(layout.ndim) for a in layout.axes_of(d)}
        there = {a: d for d, cut in enumerate(dims) for f in cut for a in f.axes}
        parts = {a: self.mesh.size(a) for a in range(self.mesh.ndim)}
        still = set()
        for dim, cut in enumerate(dims):
            common = [a for a in here if here[a] == dim and there.get(a) == dim]
            if restrict_axes(layout.dims[dim], common, self.mesh) == restrict_axes(cut, common, self.mesh):
                still |= set(common)
        nbytes /= math.prod(parts[a] for a in still)
        total = 0.0
        for axis, size in parts.items():
            part = 1 - 1 / size
            if axis in layout.partial_axes:
                total += 0 if axis in kept else part * nbytes * (1 if axis in there else 2)
            elif axis in still or axis not in here:
                continue
            elif axis not in there:
                total += part * nbytes
            elif there[axis] != here[axis]:
                total += part * nbytes * _max_local_fraction(dims[there[axis]])
            else:
                total += nbytes * _moved_fraction(layout.dims[here[axis]], dims[here[axis]], part)
        return total


def restrict_axes(cut: LabelSharding, axes: Collection[int], mesh: DeviceMesh) -> LabelSharding:
    """A cut of a dim as it is by some of its axes alone; the pieces of an inner axis alone are chunks."""
    found = []
    for factor in cut:
        kept = [a for a in factor.axes if a in axes]
        lengths = factor.shard_sizes
        if kept == list(factor.axes[: len(kept)]):
            for axis in reversed(factor.axes[len(kept) :]):
                lengths = outer_shard_sizes(lengths, mesh.size(axis))
        elif all(a in kept or mesh.size(a) == 1 for a in factor.axes):
            pass  # an axis of one rank cuts nothing
        else:
            lengths = nested_chunk(factor.size, [mesh.size(a) for a in kept])
        found.append(DimSharding(factor.size, tuple(kept), lengths if kept else ()))
    return canonicalize(found)


def _shard_further(cut: LabelSharding, axes: Sequence[int], mesh: DeviceMesh) -> LabelSharding | None:
    """A cut by those of `axes` it has, its pieces chunked by those it has not."""
    rest = [a for a in axes if not any(a in f.axes for f in cut)]
    if not rest:
        return cut
    if len(cut) > 1:
        return None
    (factor,) = cut
    parts = [mesh.size(a) for a in rest]
    lengths = [n for piece in factor.shard_sizes or (factor.size,) for n in nested_chunk(piece, parts)]
    return (DimSharding(factor.size, (*factor.axes, *rest), tuple(lengths)),)


def _max_local_fraction(cut: LabelSharding) -> float:
    """The part of a dim that the rank with the most of it holds."""
    return math.prod(max(f.shard_sizes) / f.size for f in cut if f.axes and f.size)


def _moved_fraction(old: LabelSharding, new: LabelSharding, part: float) -> float:
    """The part of a dim that moves when the same axis cuts it elsewhere."""
    if len(old) > 1 or len(new) > 1 or old[0].axes != new[0].axes or not old[0].size:
        return part
    stays = 0
    begins = zip(
        starts(old[0].shard_sizes), old[0].shard_sizes, starts(new[0].shard_sizes), new[0].shard_sizes, strict=True
    )
    for a, n, b, m in begins:
        stays += max(0, min(a + n, b + m) - max(a, b))
    return (old[0].size - stays) / old[0].size / len(old[0].shard_sizes)
