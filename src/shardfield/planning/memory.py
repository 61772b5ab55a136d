"""The memory of a rank's tensors, counted storage by storage, with or without data."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..tensor import ShardTensor


class Memory:
    """Bytes of all storages that were seen and are still alive, and the most there ever were.

    A storage counts from the call that made it until nobody holds it. What kernels take for their own work inside a
    call is not seen.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._resize: Any = None

    def track(self, value: Any) -> None:
        """Count the storages of the tensors in a result that are not counted yet."""
        if isinstance(value, Tensor):
            if isinstance(value, (ShardTensor, DTensor)):
                self.track(value._local_tensor)
            else:
                self._add(value.untyped_storage())
        elif isinstance(value, (list, tuple)):
            for part in value:
                self.track(part)

    def _add(self, storage: Any) -> None:
        key = id(storage)
        if key in self._refs:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self._refs.pop(key, None)
            self.now -= self._sizes.pop(key, 0)

        self._refs[key], self._sizes[key] = weakref.ref(storage, gone), size
        self._add_bytes(size)

    def _add_bytes(self, by: int) -> None:
        self.now += by
        self.peak = max(self.peak, self.now)

    # FSDP frees the parameters it has gathered by resizing their storage, which is no call of torch's dispatcher.

    def start(self) -> None:
        before, memory = torch.UntypedStorage.resize_, self
        self._resize = before

        def resize_(storage: Any, size: int) -> Any:
            out = before(storage, size)
            key = id(storage)
            if key in memory._refs:
                old, memory._sizes[key] = memory._sizes[key], size
                memory._add_bytes(size - old)
            return out

        torch.UntypedStorage.resize_ = resize_

    def stop(self) -> None:
        torch.UntypedStorage.resize_ = self._resize
