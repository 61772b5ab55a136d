"""Writes into tensors that share memory: observers of writes, and whether a reshaped tensor is a view of its source.

On one device, strides decide whether a reshaped tensor is a view or a copy. On a shard, strides may decide differently:
an empty shard, a shard of size 1 along a dim, and a shard that is entirely inside a slice allow views that the global
tensor does not allow. A write would then reach the source on some ranks only. Ranks reach a consensus at the first
write, with one small message: all ranks write, or all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import runtime
from .._compat.storage import storage_of
from ..comm.consensus import any_rank
from ..layout import Layout
from ..trace_state import same_memory


class WriteObserver:
    """An object that still needs a tensor which others may write: a deferred value, a tensor saved for backward.

    Both methods let it take a snapshot. Neither may communicate: ranks may differ in which observers are alive.
    """

    def before_write(self, target: Tensor) -> None:
        """Take a snapshot if `target`, a local tensor that is about to be written, shares the observed memory."""

    def before_export(self, target: Tensor) -> None:
        """Take a snapshot if `target`, a local tensor that is returned to the user, shares the observed memory.

        Later writes into an exported tensor cannot be observed.
        """


class SavedTensor(WriteObserver):
    """A tensor that backward needs, with a snapshot before a write.

    One device saves a copy here, or nothing: there the tensor itself may be written.
    """

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version
        runtime.active.write_observers.add(self)

    def before_write(self, target: Tensor) -> None:
        if same_memory(target, self.tensor):
            self.tensor = self.checked_tensor().clone()
            self.version = self.tensor._version

    def checked_tensor(self) -> Tensor:
        """Return the saved tensor; raise if it was written since, bypassing `before_write`."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "the local tensor of a field that backward needs has been modified by an inplace operation"
            )
        return self.tensor


INCOMPLETE_GRAD = (
    "the gradient of this tensor is incomplete: its consumers were fused with its source, so gradients do not flow "
    "through it. Call retain_grad() on it before it is used"
)


def note_write(local: Tensor, mesh: DeviceMesh) -> None:
    """Record a write into a tensor that backward may need; ranks then agree before backward (`saved_tensors.py`)."""
    rt = runtime.active
    if mesh.size() > 1 and rt.tracer is None and not local.is_inference():
        rt.written_meshes[runtime.mesh_state(mesh).mesh] = True
        rt.written_storages.add(storage_of(local))


def expose_local(local: Tensor) -> Tensor:
    """Return `local` to the caller; deferred values that alias it take a snapshot first."""
    rt = runtime.active
    for observer in list(rt.write_observers) if rt.write_observers else ():
        observer.before_export(local)
    if local.is_inference():
        rt.exposed_storages.add(storage_of(local))
    return local


def dims_are_nested(tensor: Tensor, groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the dims of each group are contiguous with one another, so that they can become one dim.

    Unlike torch's own test, it compares the strides of dims of size 1 too: the dim may be larger on other ranks.
    """
    shape, strides = tensor.shape, tensor.stride()
    return all(
        strides[a] == strides[b] * max(shape[b], 1) for dims in groups for a, b in zip(dims, dims[1:], strict=False)
    )


class ViewConsensus:
    """A reshaped tensor on ranks that may differ on whether it is a view of its source.

    strict: torch returns a view or raises (`view`), else it returns a view or a copy (`reshape`).
    local_is_view: whether it is a view on this rank; None if the local tensor is empty, so that either is possible.
    source: whether a write into the source is lost: a bool, or the source's own ViewConsensus.
    of_slice: the source is a slice along a sharded dim, so a local view does not prove that the global one exists.
    """

    __slots__ = ("layout", "strict", "local_is_view", "source", "of_slice", "result")

    def __init__(
        self, layout: Layout, strict: bool, local_is_view: bool | None, source: bool | ViewConsensus, of_slice: bool
    ):
        self.layout, self.strict, self.local_is_view = layout, strict, local_is_view
        self.source, self.of_slice = source, of_slice
        self.result: bool | None = None

    def write_is_lost(self) -> bool:
        """Return whether a write would be lost, or reach the source on some ranks only.

        Communicates: all ranks must call it, and all get the same answer.
        """
        if self.result is None:
            mesh = self.layout.mesh
            groups = [mesh.get_group(axis) for axis in self.layout.nontrivial_axes(range(mesh.ndim))]
            viewed, copied = any_rank([self.local_is_view is True, self.local_is_view is False], groups)
            if copied:
                self.result = self.strict or viewed
            else:
                self.result = write_is_lost(self.source) or (self.of_slice and not self.strict)
        return self.result

    def add_view(self, tensor: Any) -> None:
        """Register `tensor` with its source, as a view of it."""
        if not isinstance(self.source, bool):
            self.source.add_view(tensor)


def set_copied_view(tensor: Any, copied: bool | ViewConsensus) -> None:
    """Set `_copied_view` of a result, and register the result with a source that tracks its views."""
    tensor._copied_view = copied
    if not isinstance(copied, bool):
        copied.add_view(tensor)


def write_is_lost(copied: bool | ViewConsensus) -> bool:
    """Return whether a write into a tensor with this `_copied_view` would be lost."""
    return copied if isinstance(copied, bool) else copied.write_is_lost()
