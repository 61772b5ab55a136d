"""Messages between virtual ranks; a collective completes when all its ranks have started it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from .._compat import without_functions
from ..errors import WorldError
from .links import Links
from .paged_operators import IN_MESSAGES, PagedOperators
from .paging import Pager
from .scheduler import Scheduler

Key = tuple[str, int, int, int]  # of a message: name of the group, coords of source and target, tag


class Message:
    """A message in flight, for one of its ends."""

    __slots__ = ("done", "error", "tensor")

    def __init__(self, tensor: Tensor | None = None, done: bool = False):
        self.done, self.error, self.tensor = done, "", tensor


class Part:
    """What one rank passes to a collective: tensors that it sends, and those that receive. None: it is elsewhere."""

    __slots__ = ("sends", "receives")

    def __init__(self, sends: Sequence[Tensor], receives: Sequence[Tensor] | None):
        self.sends, self.receives = sends, receives

    def receive(self, at: int, tensor: Tensor) -> None:
        """Copy a tensor of as many elements into a tensor that receives, if the rank is in this process."""
        if self.receives is not None:
            target = self.receives[at]
            target.copy_(tensor.reshape(target.shape))


class PendingCollective:
    """A collective that some ranks of a group have started, with the part of each of them, by coord."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.parts: dict[int, Part] = {}
        self.finish: Callable[[Sequence[Part]], None] | None = None  # None until a rank of this process has started
        self.size = 0
        self.done, self.error = False, ""


class Exchange:
    """All messages of the ranks of one process. A name identifies a group, and a number a collective of the group.

    `links` connect the process to others with virtual ranks, if there are any.
    """

    def __init__(self, pager: Pager | None = None, links: Links | None = None) -> None:
        self.pager, self.links = pager, links
        self.copying = False  # the operators that run now are those of a message
        self.scheduler: Scheduler | None = None
        self._sent: dict[Key, deque[Message]] = {}
        self._awaited: dict[Key, deque[Message]] = {}
        self._collectives: dict[tuple[str, int], PendingCollective] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # group and coord -> collectives that it has started

    @property
    def moves_tensors(self) -> bool:
        """Whether tensors of ranks are moved out of memory."""
        return self.pager is not None

    @contextmanager
    def in_memory(self, *tensors: Tensor) -> Iterator[None]:
        """Have tensors in memory for a kernel that is launched by their addresses."""
        if self.pager is None:
            yield
            return
        self.pager.use(tensors)
        self.pager.will_write(tensors)
        with without_functions():  # or else reading the address would keep the tensors in memory
            yield

    def clear(self) -> None:
        """Drop the messages of a program that failed."""
        for table in (self._sent, self._awaited, self._collectives, self._numbers):
            table.clear()

    def next_number(self, group: str, coord: int) -> int:
        """Return the number of a collective that a rank starts. Ranks of a failed program count from 0 again."""
        number = self._numbers.get((group, coord), 0)
        self._numbers[group, coord] = number + 1
        return number

    def unfinished(self) -> list[str]:
        """Describe the messages that only one end has started."""
        found = [f"a send from {k[1]} to {k[2]} in group {k[0]}" for k, q in self._sent.items() if q]
        found += [f"a receive on {k[2]} from {k[1]} in group {k[0]}" for k, q in self._awaited.items() if q]
        return found + [f"{next(iter(m.calls.values()))} in group {name}" for (name, _), m in self._collectives.items()]

    def wait(self, message: Message | PendingCollective) -> None:
        """Return once a message is complete; other ranks run until then."""
        if not message.done:
            assert self.scheduler is not None
            self.scheduler.wait_until(lambda: message.done)
        if message.error:
            raise WorldError(message.error)

    def send(self, key: Key, tensor: Tensor, target: int) -> Message:
        """Pass a tensor to its receive, now or when the receive is started. `target`: the global rank."""
        if self.links is None or self.links.is_here(target):
            return self._post(self._sent, self._awaited, key, tensor, lambda me, it: (me, it))
        self.links.send(self.links.process_of(target), ("message", key), [self._pack(tensor)])
        return Message(done=True)

    def receive(self, key: Key, into: Tensor) -> Message:
        """Copy the tensor of a send, now or when the send is started."""
        return self._post(self._awaited, self._sent, key, into, lambda me, it: (it, me))

    def _post(self, mine: dict, theirs: dict, key: Key, tensor: Tensor, order: Callable) -> Message:
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
        before, self.copying = self.copying, True
        try:
            with torch.no_grad(), nullcontext() if self.pager is None else PagedOperators(self.pager, IN_MESSAGES):
                yield
        finally:
            self.copying = before

    def take_part(
        self,
        key: tuple[str, int],
        ranks: Sequence[int],
        coord: int,
        what: str,
        part: Part,
        finish: Callable[[Sequence[Part]], None],
    ) -> PendingCollective:
        """Take part in a collective over global `ranks`; the last to start it calls `finish` with all parts."""
        pending = self._collectives.setdefault(key, PendingCollective())
        pending.size, pending.finish = len(ranks), finish
        self._add_part(key, coord, what, part)
        if self.links is not None:
            here = [c for c, rank in enumerate(ranks) if self.links.is_here(rank)]
            if len(here) < len(ranks) and all(c in pending.parts for c in here):
                sends = [(c, pending.calls[c], len(pending.parts[c].sends)) for c in here]
                packed = [self._pack(t) for c in here for t in pending.parts[c].sends]
                for process in sorted({self.links.process_of(rank) for rank in ranks}):
                    self.links.send(process, ("collective", key, sends), packed)
        self._finish(key)
        return pending

    def _add_part(self, key: tuple[str, int], coord: int, what: str, part: Part) -> None:
        pending = self._collectives[key]
        for other, call in pending.calls.items():
            if call != what and not pending.error:
                where = f"{call} on coord {other}, {what} on coord {coord}"
                pending.error = f"the ranks of group {key[0]} make different calls: {where}"
        pending.calls[coord], pending.parts[coord] = what, part

    def _finish(self, key: tuple[str, int]) -> None:
        """Finish a collective whose parts are all there."""
        pending = self._collectives[key]
        if pending.finish is None or len(pending.parts) < pending.size:
            return
        del self._collectives[key]
        if not pending.error:
            with self._copying():
                pending.finish([pending.parts[c] for c in range(pending.size)])
        pending.parts, pending.finish, pending.done = {}, None, True

    # Several processes.

    def poll(self) -> None:
        """Take in what other processes have sent."""
        for header, tensors in self.links.received() if self.links is not None else ():
            if header[0] == "message":
                self._post(self._sent, self._awaited, header[1], tensors[0], lambda me, it: (me, it))
                continue
            _, key, sends = header
            self._collectives.setdefault(key, PendingCollective())
            rest = iter(tensors)
            for coord, what, count in sends:
                self._add_part(key, coord, what, Part([next(rest) for _ in range(count)], None))
            self._finish(key)

    def _pack(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that stays in memory until it is sent."""
        if tensor.device.type != "cpu":
            raise WorldError(
                f"virtual ranks of several processes exchange CPU tensors, and this one is on {tensor.device}: "
                "messages between GPUs were not tested"
            )
        with self._copying():
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.pager is not None:
            self.pager.expose(copy)
        return copy


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
