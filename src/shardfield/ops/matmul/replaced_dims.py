"""Where a contraction replaces a dim of a field by another one, the new dim keeps the sharding of the old as a hint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ...dim_sharding import MOVED_SHARDING, DimSharding, Origin, rescale

if TYPE_CHECKING:
    from .contraction_strategy import Label, Term
    from .label_sharding import LabelSharding


def replaced_origins(
    terms: Sequence[Term], out: Collection[Label], shardings: Mapping[Label, LabelSharding]
) -> dict[Label, list[Origin]]:
    """Return the origins of the labels of the result that take the place of a summed label whose sharding was moved.

    In "mk,mlk->lm" of a field sharded along k and a matrix, l takes the place of k. If the plan moves the sharding to
    m, l gets k's sharding, in its proportions, as a former one, so that "ml,mkl->km" and the op behind it can move the
    sharding back to k. The resolution it had at first is kept too, so that the way back ends in the same shard sizes.
    """
    found: dict[Label, list[Origin]] = {}
    for i, term in enumerate(terms):
        others = [set(other.labels) for j, other in enumerate(terms) if j != i]
        for dim, label in enumerate(term.labels):
            if label is None or label in out or any(f.axes for f in shardings[label]):
                continue
            new = {x for labels in others if label in labels for x in labels - set(term.labels) if x in out}
            if len(new) == 1 and len(term.layout.dims[dim]) == 1:
                (x,) = new
                size = sum(f.size for f in shardings[x])
                if not any(f.axes for f in shardings[x]) and len(shardings[x]) == 1:
                    found.setdefault(x, []).extend(_moved_to(term.layout.dims[dim][0], size))
    return found


def _moved_to(old: DimSharding, size: int) -> list[Origin]:
    """Return the origins of a dim of `size` that takes the place of `old`, whose sharding is being or was moved."""
    if old.axes:
        field = old.field or Origin("field", *old)
        known = [field, Origin(MOVED_SHARDING, *old)]
    else:
        known = [o for o in old.origins if o.kind in (MOVED_SHARDING, "field")]
    if not any(o.kind == MOVED_SHARDING for o in known):
        return []
    finest = max(known, key=lambda o: o.size)
    same = next((o for o in known if o.size == size), None)
    shard_sizes = same.shard_sizes if same is not None else rescale(finest.shard_sizes, size)
    if not all(shard_sizes):
        return []
    return [*known, Origin(MOVED_SHARDING, size, finest.axes, tuple(shard_sizes))]
