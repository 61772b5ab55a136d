"""Track the memory of a rank's tensors by their storages, with or without data."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..tensor import ShardTensor


class Memory:
    """Count the bytes of all live storages (`now`) and their maximum so far (`peak`).

    A storage counts from the call that created it until it is freed. Workspace that a kernel allocates inside a call is
    not counted. `waits` has the memory at each wait for a message: the peak since the wait before it, and then.
    """

    def __init__(self) -> None:
        self.now = self.peak = self._peak_since_wait = 0
        self.waits: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._resize: Any = None

    def restart(self) -> None:
        """Forget peaks and waits. Live memory still counts."""
        self.peak = self._peak_since_wait = self.now
        self.waits.clear()

    def wait(self) -> None:
        """Note that the rank waits here."""
        self.waits.append((self._peak_since_wait, self.now))
        self._peak_since_wait = self.now

    def track(self, value: Any) -> None:
        """Count the storages of the tensors in a result, each once."""
        if isinstance(value, Tensor):
            if isinstance(value, (ShardTensor, DTensor)):
                self.track(value._local_tensor)
            else:
                self._add(value.untyped_storage())
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.track(item)

    def _add(self, storage: Any) -> None:
        key = id(storage)
        if key in self._refs:
            return
        size = storage.nbytes()

        def on_free(_: Any) -> None:
            self._refs.pop(key, None)
            self.now -= self._sizes.pop(key, 0)

        self._refs[key], self._sizes[key] = weakref.ref(storage, on_free), size
        self._add_bytes(size)

    def _add_bytes(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self._peak_since_wait = max(self._peak_since_wait, self.now)

    # FSDP frees gathered parameters with `resize_` of their storage, which does not go through torch's dispatcher.

    def start(self) -> None:
        """Track `UntypedStorage.resize_` until `stop()`."""
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
