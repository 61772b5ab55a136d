"""Messages between ranks of one process; a collective completes when all its ranks have started it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import WorldError
from .paged_operators import PagedOperators
from .paging import Pager
from .scheduler import Scheduler

RING_SEGMENT = 1 << 20  # bytes of a segment of gloo's ring


class Message:
    """A message in flight, for one of its ends."""

    __slots__ = ("done", "error", "tensor")

    def __init__(self, tensor: Tensor | None = None):
        self.done, self.error, self.tensor = False, "", tensor


class PendingCollective:
    """A collective that some ranks of a group have started, with the arguments of each of them, by coord."""

    def __init__(self, what: str, size: int):
        self.what, self.size = what, size
        self.passed: dict[int, Any] = {}
        self.done, self.error = False, ""


class Exchange:
    """All messages of the ranks of one process. A name identifies a group, and a number a collective of the group."""

    def __init__(self, pager: Pager | None = None) -> None:
        self._pager = pager
        self.scheduler: Scheduler | None = None
        self._sent: dict[tuple, deque[Message]] = {}
        self._awaited: dict[tuple, deque[Message]] = {}
        self._collectives: dict[tuple[str, int], PendingCollective] = {}

    def clear(self) -> None:
        """Drop the messages of a program that failed."""
        for table in (self._sent, self._awaited, self._collectives):
            table.clear()

    def unfinished(self) -> list[str]:
        """Describe the messages that only one end has started."""
        found = [f"a send from {k[1]} to {k[2]} in group {k[0]}" for k, q in self._sent.items() if q]
        found += [f"a receive on {k[2]} from {k[1]} in group {k[0]}" for k, q in self._awaited.items() if q]
        return found + [f"{m.what} in group {name}" for (name, _), m in self._collectives.items()]

    def wait(self, message: Message | PendingCollective) -> None:
        """Return once a message is complete; other ranks run until then."""
        if not message.done:
            assert self.scheduler is not None
            self.scheduler.wait_until(lambda: message.done)
        if message.error:
            raise WorldError(message.error)

    def send(self, group: str, source: int, target: int, tag: int, tensor: Tensor) -> Message:
        """Pass a tensor to its receive, now or when the receive is started."""
        return self._post(self._sent, self._awaited, (group, source, target, tag), tensor, lambda me, it: (me, it))

    def receive(self, group: str, source: int, target: int, tag: int, into: Tensor) -> Message:
        """Copy the tensor of a send, now or when the send is started."""
        return self._post(self._awaited, self._sent, (group, source, target, tag), into, lambda me, it: (it, me))

    def _post(self, mine: dict, theirs: dict, key: tuple, tensor: Tensor, order: Callable) -> Message:
        message = Message(tensor)
        waiting = theirs.get(key)
        if not waiting:
            mine.setdefault(key, deque()).append(message)
            return message
        other = waiting.popleft()
        sent, received = order(message, other)
        error = ""
        if sent.tensor.numel() != received.tensor.numel() or sent.tensor.dtype != received.tensor.dtype:
            error = (
                f"rank {key[1]} of group {key[0]} sends {_describe(sent.tensor)}, "
                f"and rank {key[2]} receives {_describe(received.tensor)}"
            )
        else:
            with self._copying():
                received.tensor.view(-1).copy_(sent.tensor.reshape(-1))
        for end in (message, other):
            end.done, end.error, end.tensor = True, error, None
        return message

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy tensors of several ranks, which may be paged out. Operators inside another one pass no mode."""
        with torch.no_grad(), nullcontext() if self._pager is None else PagedOperators(self._pager, -1):
            yield

    def take_part(
        self,
        group: str,
        number: int,
        size: int,
        coord: int,
        what: str,
        passed: Any,
        finish: Callable[[list[Any]], None],
    ) -> PendingCollective:
        """Take part in a collective; the last rank to start it calls `finish` with the arguments of all, by coord."""
        pending = self._collectives.get((group, number))
        if pending is None:
            pending = self._collectives[group, number] = PendingCollective(what, size)
        if pending.what != what and not pending.error:
            pending.error = (
                f"the ranks of group {group} make different calls: {pending.what} on coord "
                f"{next(iter(pending.passed))}, {what} on coord {coord}"
            )
        pending.passed[coord] = passed
        if len(pending.passed) == size:
            del self._collectives[group, number]
            if not pending.error:
                with self._copying():
                    finish([pending.passed[c] for c in range(size)])
            pending.passed = {}
            pending.done = True
        return pending


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


_BINARY: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}


def reduce(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Return the reduction of flat tensors, by coord, in the order in which gloo's ring adds them.

    The ring divides the tensors into one chunk per rank. Chunk c begins at coord c - 1, and those of c - 2
    and so on around the ring are added to it.
    """
    kind = next((k for k in _BINARY if op == k), None)
    if kind is None:
        raise WorldError(f"virtual ranks cannot reduce with {op}")
    combine, size = _BINARY[kind], len(tensors)
    total = torch.empty_like(tensors[0])
    for chunk, (start, stop) in enumerate(ring_chunks(total.numel(), total.element_size(), size)):
        if start == stop:
            continue
        first = (chunk - 1) % size
        part = tensors[first][start:stop].clone()
        for step in range(1, size):
            combine(part, tensors[(first - step) % size][start:stop])
        total[start:stop] = part
    if kind == ReduceOp.AVG:
        total.div_(size)
    return total


def ring_chunks(numel: int, element_size: int, size: int) -> list[tuple[int, int]]:
    """Return the element ranges of the chunks into which gloo's ring splits a tensor."""
    nbytes = numel * element_size
    segments = max(-(-nbytes // RING_SEGMENT), 2 * size)
    segments = -(-segments // size) * size
    segment = -(-nbytes // segments)
    segment = -(-segment // element_size) * element_size
    chunk = segments // size * segment // element_size
    return [(min(c * chunk, numel), min((c + 1) * chunk, numel)) for c in range(size)]
