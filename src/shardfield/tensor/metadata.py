"""Shape, dtype, device and layout of a ShardTensor, read without dispatch."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from ..spec import ShardTensorSpec
from .deferred import LocalState


class Metadata(LocalState):
    """Methods of ShardTensor that describe the global tensor. None communicates, except `stride` of a deferred one."""

    shape: Any = property(attrgetter("_layout.shape"), doc="Global shape.")
    ndim: Any = property(attrgetter("_layout.ndim"))
    dtype: Any = property(attrgetter("_dtype"))
    device: Any = property(attrgetter("_device"), doc="Device of the local tensor.")
    device_mesh = property(attrgetter("_layout.mesh"))
    placements = property(attrgetter("_layout.placements"), doc="One placement per mesh axis.")

    @property
    def _spec(self) -> ShardTensorSpec:
        return ShardTensorSpec(self._layout, self)

    def size(self, dim: int | None = None):
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        return self._layout.ndim

    ndimension = dim

    def numel(self) -> int:
        return self._layout.numel

    nelement = numel

    def __len__(self) -> int:
        if not self._layout.ndim:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def stride(self, dim: int | None = None):
        """Return strides for the global tensor: contiguous, with its dims in the memory order of the local tensor's.

        Communicates if the tensor is deferred.
        """
        local = self._local_tensor
        in_order = local.is_contiguous()  # whatever the strides of dims of size 1, which may be larger on other ranks
        order = sorted(range(self.ndim), key=lambda d: (0 if in_order else -local.stride(d), d))
        strides, step = [0] * self.ndim, 1
        for d in reversed(order):
            strides[d], step = step, step * max(self.shape[d], 1)
        return tuple(strides) if dim is None else strides[dim]

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Return the global index of this rank's first element; with `mesh_dim`, along the dim sharded by that axis."""
        offsets = self._layout.offsets()
        if mesh_dim is None:
            return offsets
        placed = self.placements[mesh_dim]
        return offsets[placed.dim] if placed.is_shard() else 0

    def _metadata_local(self) -> Tensor:
        """Return a tensor with the metadata of the local one; a deferred value is not materialized for it."""
        if self._deferred is not None:
            return self._deferred.metadata_local(self._dtype, self._device)
        return self._local_tensor
