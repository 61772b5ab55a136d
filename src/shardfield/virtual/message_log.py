"""What a rank receives in a segment of its program, so that the segment can be computed again without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import runtime
from ..errors import WorldError


class LoggedCall:
    """A call that receives tensors: what it is, and copies of what it has received, None until it has ended."""

    __slots__ = ("call", "received")

    def __init__(self, call: Any):
        self.call = call
        self.received: list[Tensor] | None = None

    def store(self, tensors: Sequence[Tensor]) -> None:
        """Store what the call has received, at its first wait: the receiver may overwrite it."""
        if self.received is None:
            with torch.no_grad():
                self.received = [t.clone() for t in tensors]


class MessageLog:
    """The calls of one rank in one segment, in their order. `replaying`: they are answered from the log."""

    def __init__(self) -> None:
        self._calls: list[LoggedCall] = []
        self._next = 0
        self.replaying = False

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Begin to answer calls, from the first one on."""
        self._next, self.replaying = 0, True

    def record(self, call: Any) -> LoggedCall:
        """Add a call."""
        self._calls.append(LoggedCall(call))
        return self._calls[-1]

    def receive(self, call: Any, into: Sequence[Tensor]) -> None:
        """Copy what a call had received into tensors."""
        with torch.no_grad():
            for target, source in zip(into, self._answer(call), strict=True):
                target.copy_(source)

    def compute(self, call: Any, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the tensors of a function that exchanges messages; its results are logged instead of the messages."""
        if self.replaying:
            return [t.clone() for t in self._answer(call)]
        entry = self.record(call)
        runtime.active.message_log = None
        try:
            out = function()
        finally:
            runtime.active.message_log = self
        entry.store(out)
        return out

    def _answer(self, call: Any) -> list[Tensor]:
        entry = self._calls[self._next] if self._next < len(self._calls) else LoggedCall("no call")
        if entry.call != call or entry.received is None:
            raise WorldError(
                f"virtual ranks: recomputing a segment of the model makes the call {call}, and its forward made "
                f'{entry.call}: use another memory= than "recompute" and "auto"'
            )
        self._next += 1
        return entry.received
