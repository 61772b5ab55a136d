"""Is a reshaped tensor a view, or a copy? On one device the strides tell; a piece's strides may tell otherwise.

A piece that is empty, or one long where the whole is not, can be viewed in ways in which the whole cannot, and so can a
piece that a slice happens to take in full. Then ranks may differ on what a write would reach. That is settled when
someone writes, by one small message: all ranks write, or all refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor

from ..comm.consensus import any_rank
from ..layout import Layout

# Those who still need a tensor that others may write into: `keep(local tensor)` is called before every write.
# `lend(local tensor)`, where they have it, when it is handed out, so that it may be written from outside.
WRITE_OBSERVERS: WeakSet[Any] = WeakSet()
# The memory of tensors made in inference mode, whose writes nobody counts, that is known outside.
EXPOSED_STORAGES: WeakSet[Any] = WeakSet()

INCOMPLETE_GRAD = (
    "this tensor's gradient is not known: ops have read it as part of what it was made from. Call retain_grad() on it "
    "before it is used"
)


def expose_local(local: Tensor) -> Tensor:
    """A local tensor that the caller may write into from now on, as those who still need it as it is are told."""
    if WRITE_OBSERVERS:
        for borrower in [b for b in WRITE_OBSERVERS if hasattr(b, "before_export")]:
            borrower.before_export(local)
    if local.is_inference():
        EXPOSED_STORAGES.add(local.untyped_storage())
    return local


def dims_are_nested(tensor: Tensor, joined: Sequence[Sequence[int]]) -> bool:
    """Whether the dims of each group lie one inside the other, so that they can be one dim of the same memory.

    Unlike torch's own test it looks at dims of size 1 too, which tell what lies around this piece.
    """
    shape, strides = tensor.shape, tensor.stride()
    return all(
        strides[a] == strides[b] * max(shape[b], 1) for dims in joined for a, b in zip(dims, dims[1:], strict=False)
    )


class ViewConsensus:
    """A reshaped tensor on ranks that may not agree on whether it is a view of its source.

    strict: torch makes a view or raises (`view`), else it makes a view or a copy (`reshape`). here: whether it is a
    view on this rank; None if there is nothing here to tell. source: what is known of the source itself: True if
    writing into it would be lost, False if not, or a doubt. narrowed: the source is a slice of a cut dim, and pieces
    that it takes in full say nothing of the whole.
    """

    __slots__ = ("layout", "strict", "local_is_view", "source", "of_slice", "result")

    def __init__(self, layout: Layout, strict: bool, here: bool | None, source: bool | ViewConsensus, narrowed: bool):
        self.layout, self.strict, self.local_is_view, self.source, self.of_slice = (
            layout,
            strict,
            here,
            source,
            narrowed,
        )
        self.result: bool | None = None

    def write_is_lost(self) -> bool:
        """Whether a write would be lost, or reach the source on some ranks only. All ranks ask, and get one answer."""
        if self.result is None:
            mesh = self.layout.mesh
            groups = [mesh.get_group(axis) for axis in self.layout.nontrivial_axes(range(mesh.ndim))]
            viewed, copied = any_rank([self.local_is_view is True, self.local_is_view is False], groups)
            if copied:
                self.result = self.strict or viewed
            else:
                self.result = write_is_lost(self.source) or (self.of_slice and not self.strict)
        return self.result


def write_is_lost(copied: bool | ViewConsensus) -> bool:
    """Whether writing into a tensor would be lost."""
    return copied if isinstance(copied, bool) else copied.write_is_lost()
