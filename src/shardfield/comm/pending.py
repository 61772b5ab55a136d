"""Messages in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch.distributed import ProcessGroup

from . import stalls

T = TypeVar("T")


class Pending(Generic[T]):
    """Messages in flight. `wait()` returns the received value, the same on every call.

    `recv_buffers`, if set, is the same value before it is complete: its contents are valid only after `wait()`. Without
    `finish`, they are the value.
    """

    __slots__ = ("_works", "_kept", "_finish", "recv_buffers", "_group", "_value")

    def __init__(
        self,
        works: Sequence[Any],
        kept: Any,
        finish: Callable[[], T] | None,
        recv_buffers: T | None = None,
        group: ProcessGroup | None = None,
    ):
        # `kept` holds the send buffers: the backend reads them until the messages are complete.
        self._works: Sequence[Any] | None = works
        self._kept, self._finish, self.recv_buffers, self._group = kept, finish, recv_buffers, group
        self._value: Any = None

    def wait(self) -> T:
        if self._works is not None:
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                stalls.reraise(error, self._group)
            self._value = self.recv_buffers if self._finish is None else self._finish()
            self._works = self._kept = self._finish = None
        return self._value
