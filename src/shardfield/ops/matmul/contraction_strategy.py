"""Choose how mesh axes divide the work of a contraction: the planner of matmul, einsum, cdist and others. Pure.

A contraction is an einsum. The dims of every operand have labels, and labels that the result does not have are summed
over. The planner chooses one label for each mesh axis, and the axis then shards this label in all operands that have
it. A label of the result makes the result sharded; a summed label makes it Partial. Operands without the label are
replicated on that axis. The choice minimizes the bytes sent to redistribute operands and to reduce the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ... import runtime
from ...dim_sharding import Origin
from ...layout import DimSharding, Layout, shard_sizes_of
from .label_sharding import LabelSharding, max_local_fraction, moved_fraction, restrict_axes, shard_further
from .replaced_dims import replaced_origins

Label = Hashable

# If a Partial result is this many times larger than the largest operand, operands are redistributed instead.
MAX_PARTIAL_GROWTH = 4
# Number of labels, not sharded by the axis so far, that are tried as the new sharded label.
MAX_NEW_LABELS = 4


class Term(NamedTuple):
    """An operand: its layout, a label for each dim (None: the dim must be unsharded), bytes per element."""

    layout: Layout
    labels: tuple[Label | None, ...]
    itemsize: int = 1


class KeepPartial(NamedTuple):
    """The choice that the operand `term` stays Partial on an axis."""

    term: int


class ContractionPlan(NamedTuple):
    """The layouts of the operands, the layout of the result, and the sharding of each label."""

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
    replaces: bool = False,
) -> ContractionPlan:
    """Return the plan that sends the fewest bytes, to redistribute the operands and to reduce the result.

    out: labels of the result; a tuple of labels is one merged dim.
    unsharded: labels that must not be sharded.
    linear: if False, no operand stays Partial.
    allow_partial: if False, no summed label is sharded.
    prefer_local: prefer a choice that redistributes nothing over a cheaper one that does, unless its Partial result is
        much larger than the operands.
    use_all_axes: prefer choices that leave fewer axes without a label.
    broadcast: a dim of size 1 broadcasts against any label; if False, only against labels that are numbers.
    constants: positions of operands that are replicated constants, as the matrices of a transform. A constant that sums
        over a sharded dim of a field leaves a Partial result. A later constant may expand the Partial operand to a
        result at least as large. The dim that this constant adds is then sharded: the operand is reduced while it is
        small, and the result is sharded again.
    replaces: a label of the result may take the place of a summed one, as in a transform of a dim (`replaced_dims`).
    """
    mesh = terms[0].layout.mesh
    out_labels = [label for group in out for label in (group if type(group) is tuple else (group,))]
    search = _StrategySearch(mesh, terms, out_labels, unsharded, linear, allow_partial, broadcast, constants)
    best, lowest = None, None
    candidates = []
    for choice in itertools.product(*(search.choices(axis) for axis in search.axes)):
        shardings = search.label_shardings(dict(zip(search.axes, choice, strict=True)))
        if shardings is None:
            continue
        candidates.append((choice, shardings, *search.cost(shardings, choice)))
        # Points and edges that change in every step are planned in every step: do not search beyond a free choice.
        if prefer_local and candidates[-1][2] == candidates[-1][3] == 0 and not (use_all_axes and None in choice):
            candidates = candidates[-1:]
            break
    # what it takes to redistribute the operands so that every rank computes its share of the result
    sharded_bytes = min((c[2] for c in candidates if search.shares_result(*c[:2])), default=math.inf)
    for choice, shardings, moved_bytes, reduce_bytes, size in candidates:
        # tier 0: nothing is redistributed, and the result is small enough to stay Partial; tier 1: a dim of a constant
        # is sharded in place of the one that was summed
        may_leave_partial = not reduce_bytes or (
            size <= MAX_PARTIAL_GROWTH * search.largest
            and not search.expands_partial(choice, size)
            and (reduce_bytes <= sharded_bytes or size < runtime.active.min_scattered * search.itemsize)
        )
        local = prefer_local and not moved_bytes and may_leave_partial
        tier = 0 if local else 1 if search.shards_constant_dims(choice) else 2
        key = (choice.count(None) if use_all_axes else 0, tier, moved_bytes + reduce_bytes)
        if lowest is None or key < lowest:
            best, lowest = (choice, shardings), key
    assert best is not None, "every axis may be left idle"
    choice, shardings = best
    kept_partial = {(axis, c.term) for axis, c in zip(search.axes, choice, strict=True) if isinstance(c, KeepPartial)}
    targets = tuple(
        search.target(i, shardings, [a for a, term in kept_partial if term == i]) for i in range(len(terms))
    )
    replaced = replaced_origins(terms, out_labels, shardings) if replaces else {}
    hinted = {x: search.with_origins(x, sharding, replaced.get(x, ())) for x, sharding in shardings.items()}
    dims = [[f for label in (g if type(g) is tuple else (g,)) for f in hinted[label]] for g in out]
    partial = {a for label, sharding in shardings.items() if label not in out_labels for f in sharding for a in f.axes}
    partial |= {a for a, _ in kept_partial}
    axes = [a for a in sorted(partial) if mesh.size(a) > 1]
    return ContractionPlan(targets, Layout.make(mesh, dims, [(a, "sum") for a in axes]), shardings)


class _StrategySearch:
    """The candidate choices of one contraction, with their shardings and costs."""

    def __init__(
        self,
        mesh: DeviceMesh,
        terms: Sequence[Term],
        out_labels: Sequence[Label],
        unsharded: Collection[Label],
        linear: bool,
        allow_partial: bool,
        broadcast: bool,
        constants: Collection[int],
    ):
        self.mesh, self.terms, self.unsharded = mesh, terms, set(unsharded)
        self.linear, self.allow_partial = linear, allow_partial
        # an ordered list: ranks must round costs equally, and sets of strings have no fixed order
        self.out_labels = list(out_labels)
        self.sizes: dict[Label, int] = {}
        for term in terms:
            for label, size in zip(term.labels, term.layout.shape, strict=True):
                other = self.sizes.setdefault(label, size)
                if other != size and label is not None:
                    if not (broadcast or isinstance(label, int)) or 1 not in (other, size):
                        shapes = [tuple(t.layout.shape) for t in terms]
                        raise RuntimeError(
                            f"operands of shapes {shapes} do not match: sizes {other} and {size} must be equal"
                        )
                    self.sizes[label] = other if size == 1 else size
        self.sizes.pop(None, None)
        self.repeated = {x for t in terms for x in t.labels if x is not None and t.labels.count(x) > 1}
        self.bytes = [t.layout.numel * t.itemsize for t in terms]
        self.largest = max(self.bytes)
        self.by_size = sorted(range(len(terms)), key=lambda i: -self.bytes[i])
        self.itemsize = max(t.itemsize for t in terms)
        used = {a for t in terms for a in t.layout.shard_axes + t.layout.partial_axes}
        self.axes = sorted(used)
        self.constant_labels = {a: self._constant_labels(a, constants) for a in self.axes}

    def choices(self, axis: int) -> list[Label | KeepPartial | None]:
        """Return the labels an axis may shard: those it shards already first, larger operands before smaller ones."""
        current: list[Label] = []
        others: list[Label] = []
        outer: dict[Label, int] = {}
        partials: list[KeepPartial] = []
        for i in self.by_size:
            term = self.terms[i]
            if (axis, "sum") in term.layout.partial and self.linear:
                partials.append(KeepPartial(i))
            for label, dim in self._labels_of(term):
                if axis in term.layout.axes_of(dim):
                    current.append(label)
                elif axis in term.layout.shard_axes and self.sizes[label] > 1:
                    others.append(label)
                elif axis in term.layout.partial_axes and self.sizes[label] > 1 and self._may_scatter(term):
                    others.append(label)
                    if dim < term.layout.ndim - 1 and not self.sizes[label] % self.mesh.size(axis):
                        outer.setdefault(label, dim)
        allowed = [x for x in dict.fromkeys(current) if self._may_shard(x)]
        allowed.sort(key=lambda x: x not in self.out_labels)
        new = [x for x in dict.fromkeys(others) if self._may_shard(x) and x not in allowed]
        former = {self.terms[i].labels[t[0]] for i, t in self._former(axis)}  # labels that the axis has sharded before
        # A label that all operands have comes before one of a single operand: it divides the other operands too. A
        # Partial operand is scattered along its first dim that divides evenly: samples and heads do not mix later.
        new.sort(
            key=lambda x: (
                x not in former,
                not all(x in t.labels for t in self.terms),
                outer.get(x, math.inf),
                -self.sizes[x],
            )
        )
        return [*allowed, *partials, *self.constant_labels[axis], *new[:MAX_NEW_LABELS], None]

    def _constant_labels(self, axis: int, constants: Collection[int]) -> list[Label]:
        """Return the result's labels that only constants have and `axis` can shard, if an operand is Partial on it."""
        if not self.linear or not any((axis, "sum") in t.layout.partial for t in self.terms):
            return []
        labels_of = [{label for label, _ in self._labels_of(t)} for t in self.terms]
        others = {x for i, term_labels in enumerate(labels_of) if i not in constants for x in term_labels}
        constant_only = {x for i in constants for x in labels_of[i]} - others
        return [
            x
            for x in self.out_labels
            if x in constant_only and self._may_shard(x) and self.sizes[x] >= self.mesh.size(axis)
        ]

    def shards_constant_dims(self, choice: Sequence[Label | KeepPartial | None]) -> bool:
        """Return whether all axes with a Partial operand shard a dim that a constant adds, if there is such a dim."""
        pairs = [
            (c, self.constant_labels[axis])
            for axis, c in zip(self.axes, choice, strict=True)
            if self.constant_labels[axis]
        ]
        return bool(pairs) and all(c in added for c, added in pairs)

    def shares_result(
        self, choice: Sequence[Label | KeepPartial | None], shardings: dict[Label, LabelSharding]
    ) -> bool:
        """Return whether every axis shards a dim of the result, with elements for every rank."""
        return all(
            x in self.out_labels
            and not isinstance(x, KeepPartial)
            and all(min(shard_sizes_of(f)) for f in shardings[x])
            for x in choice
        )

    def expands_partial(self, choice: Sequence[Label | KeepPartial | None], size: float) -> bool:
        """Return whether an operand that stays Partial becomes a larger result, or by a constant one as large.

        The sum over ranks is then sent while it is small.
        """
        return any(
            isinstance(c, KeepPartial)
            and (size > self._local_bytes(c.term) or (self.constant_labels[axis] and size == self._local_bytes(c.term)))
            for axis, c in zip(self.axes, choice, strict=True)
        )

    def _local_bytes(self, i: int) -> float:
        """Return the bytes of this rank's shard of an operand."""
        layout = self.terms[i].layout
        sizes = [n * max_local_fraction(sharding) for n, sharding in zip(layout.shape, layout.dims, strict=True)]
        return self.terms[i].itemsize * math.prod(sizes)

    def _may_scatter(self, term: Term) -> bool:
        """Return whether a Partial operand may be reduce-scattered, so that its axis shards the result.

        A small one, with a result of about its size, is all-reduced: later calls would gather it again.
        """
        grown = math.prod(self.sizes[x] for x in self.out_labels) > MAX_PARTIAL_GROWTH * term.layout.numel
        return grown or not self.linear or term.layout.numel >= runtime.active.min_scattered

    def _may_shard(self, label: Label) -> bool:
        return label not in self.unsharded and (self.allow_partial or label in self.out_labels)

    def _labels_of(self, term: Term) -> Iterator[tuple[Label, int]]:
        """Yield the labels of a term and their dims, without dims of size 1 that broadcast."""
        for dim, (label, size) in enumerate(zip(term.labels, term.layout.shape, strict=True)):
            if label is not None and size == self.sizes[label]:
                yield label, dim

    def label_shardings(self, choice: dict[int, Label | KeepPartial | None]) -> dict[Label, LabelSharding] | None:
        """Return the sharding of every label for these choices, or None if they have no valid sharding."""
        shardings: dict[Label, LabelSharding] = {}
        for label, size in self.sizes.items():
            axes = [a for a, chosen in choice.items() if chosen == label and not isinstance(chosen, KeepPartial)]
            sharding = self._label_sharding(label, axes) if axes else (DimSharding(size),)
            if sharding is None or (len(sharding) > 1 and label in self.repeated):
                return None
            shardings[label] = sharding
        return shardings

    def _label_sharding(self, label: Label, axes: Sequence[int]) -> LabelSharding | None:
        """Return the sharding of a label by `axes`: as in the largest operand that some of them shard, else chunks."""
        for i in self.by_size:
            for term_label, dim in self._labels_of(self.terms[i]):
                layout = self.terms[i].layout
                if term_label == label and set(axes) & set(layout.axes_of(dim)):
                    return shard_further(restrict_axes(layout.dims[dim], axes, self.mesh), axes, self.mesh)
        if len(axes) == 1:
            for i, (dim, sharding) in self._former(axes[0]):
                if self.terms[i].labels[dim] == label and sharding.size == self.sizes[label]:
                    return (sharding,)
        return shard_further((DimSharding(self.sizes[label]),), axes, self.mesh)

    def _former(self, axis: int) -> list[tuple[int, tuple[int, DimSharding]]]:
        """Return the operands, and the dim and sharding that each had on `axis` before an op moved it."""
        shardings = [(i, self.terms[i].layout.former_shardings.get(frozenset([axis]))) for i in self.by_size]
        return [(i, found) for i, found in shardings if found is not None]

    def with_origins(self, label: Label, sharding: LabelSharding, more: Sequence[Origin]) -> LabelSharding:
        """Return the sharding of a label with `more` origins and those that any operand has along it."""
        if len(sharding) > 1:
            return sharding
        held = [t.layout.origins(dim) for t in self.terms for held, dim in self._labels_of(t) if held == label]
        return (sharding[0].with_origins(*held, more),)

    def dims(self, i: int, shardings: dict[Label, LabelSharding]) -> list[LabelSharding]:
        """Return the dims of an operand; of several dims with one label, only one is sharded."""
        term = self.terms[i]
        dims: list[LabelSharding] = [(DimSharding(n),) for n in term.layout.shape]
        best: dict[Label, int] = {}
        for label, dim in self._labels_of(term):
            axes = {a for f in shardings[label] for a in f.axes}
            if label not in best or len(axes & set(term.layout.axes_of(dim))) > len(
                axes & set(term.layout.axes_of(best[label]))
            ):
                best[label] = dim
        for label, dim in best.items():
            dims[dim] = shardings[label]
        return dims

    def target(self, i: int, shardings: dict[Label, LabelSharding], kept_partial: Sequence[int]) -> Layout:
        """Return the layout to redistribute an operand to: its own, if they differ on axes of one rank only."""
        source = self.terms[i].layout
        dims = self.dims(i, shardings)
        partial = [(a, "sum") for a in kept_partial]
        axes = set(source.nontrivial_axes(range(self.mesh.ndim)))
        same = all(
            restrict_axes(a, axes, self.mesh) == restrict_axes(b, axes, self.mesh)
            for a, b in zip(source.dims, dims, strict=True)
        )
        if same and {p for p in source.partial if p[0] in axes} == {p for p in partial if p[0] in axes}:
            return source
        return Layout.make(self.mesh, dims, partial)

    def cost(
        self, shardings: dict[Label, LabelSharding], choice: Sequence[Label | KeepPartial | None]
    ) -> tuple[float, float, float]:
        """Return the bytes sent to redistribute operands, to reduce the result, and the bytes of the local result."""
        redistribute_bytes = 0.0
        for i in range(len(self.terms)):
            kept_partial = [
                a for a, c in zip(self.axes, choice, strict=True) if c == KeepPartial(i) and isinstance(c, KeepPartial)
            ]
            redistribute_bytes += self._redistribute_bytes(i, self.dims(i, shardings), kept_partial)
        size = self.itemsize * math.prod(self.sizes[x] * max_local_fraction(shardings[x]) for x in self.out_labels)
        reduce_bytes = 0.0
        for axis, chosen in zip(self.axes, choice, strict=True):
            fraction = 1 - 1 / self.mesh.size(axis)
            if isinstance(chosen, KeepPartial):
                reduce_bytes += 2 * fraction * size
            elif chosen is not None and chosen not in self.out_labels:
                reduce_bytes += fraction * size
        return redistribute_bytes, reduce_bytes, size

    def _redistribute_bytes(self, i: int, dims: Sequence[LabelSharding], kept_partial: Sequence[int]) -> float:
        """Return the approximate bytes that a rank sends to redistribute an operand to `dims`."""
        layout, nbytes = self.terms[i].layout, float(self.bytes[i])
        source_dim = {a: d for d in range(layout.ndim) for a in layout.axes_of(d)}
        target_dim = {a: d for d, sharding in enumerate(dims) for f in sharding for a in f.axes}
        parts = {a: self.mesh.size(a) for a in range(self.mesh.ndim)}
        unchanged = set()
        for dim, sharding in enumerate(dims):
            common = [a for a in source_dim if source_dim[a] == dim and target_dim.get(a) == dim]
            if restrict_axes(layout.dims[dim], common, self.mesh) == restrict_axes(sharding, common, self.mesh):
                unchanged |= set(common)
        nbytes /= math.prod(parts[a] for a in unchanged)
        total = 0.0
        for axis, size in parts.items():
            fraction = 1 - 1 / size
            if axis in layout.partial_axes:
                total += 0 if axis in kept_partial else fraction * nbytes * (1 if axis in target_dim else 2)
            elif axis in unchanged or axis not in source_dim:
                continue
            elif axis not in target_dim:
                total += fraction * nbytes
            elif target_dim[axis] != source_dim[axis]:
                by_axis = restrict_axes(dims[target_dim[axis]], [axis], self.mesh)
                total += fraction * nbytes * max_local_fraction(by_axis)
            else:
                total += nbytes * moved_fraction(layout.dims[source_dim[axis]], dims[source_dim[axis]], fraction)
        return total
