"""Ranks trace a program together: all of them have it in the end, or none.

Rules send messages while they are traced too: what follows from layouts, or from integers that are part of the program,
is settled then, once. A rank whose trace fails would leave the others waiting there. So the ranks of a group meet
before each such message, and where all must come by (with a graph, with a program): a few numbers tell where each is,
and whether it has failed. One that has failed comes to one more meeting of each of its groups, to all of them at once,
for it cannot know where it is waited for first. Who hears of it fails as well, and goes to the last meetings of its
other groups. So all of a group's members part at the same meeting, and nobody waits for one who has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import tracing
from .._compat import without_modes
from ..comm import carrier, wire
from ..comm.agree import anyone, device_of
from ..errors import Untraceable

MESSAGE, GRAPH, PROGRAM, FAILED = range(4)  # where a rank is at a meeting
TOLD = 600  # bytes of a reason that others are told


class Together:
    """The ranks of some meshes while they trace a program."""

    def __init__(self, meshes: Sequence[DeviceMesh]):
        groups = [g for mesh in meshes for g in mesh.get_all_groups() if g.size() > 1]
        self.groups = self._groups = list(dict.fromkeys(groups))
        self._open = list(self._groups)  # those that still meet
        self.heard = False  # whether another rank has failed, or is elsewhere, and this one did not fail before
        # once failed: whether values would have had to be looked at, and whether all have errors of the step itself
        self.values = self.unanimous = False

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside, ranks meet before each message."""
        before, carrier.meeting = carrier.meeting, self._before_message
        try:
            yield
        finally:
            carrier.meeting = before

    def traced(self, fingerprint: int) -> bool:
        """This rank has its graph: whether all have the same one. Raises if a rank has none."""
        *_, high, low = self._all_meet(GRAPH, fingerprint)
        return high == -low

    def done(self) -> None:
        """This rank has its program. Raises if another has none."""
        self._all_meet(PROGRAM)

    def failed(self, values: bool, own: bool, reason: str) -> str:
        """This rank has no program: then no rank has one. Returns the first reason of those who were the first to fail.

        values: they would have had to be looked at. own: the error is one of the step itself, not of its trace.
        """
        with _aside():
            flying = [_start([FAILED, -FAILED, 0, 0], group) for group in self._open]
            for numbers in flying:
                numbers.wait()
            self._open = []
            # now all know, and all come here
            values, own, other = anyone([values, own, not own], self._groups)
            self.values, self.unanimous = values and not own, not other
            told = b"" if self.heard else f"rank {dist.get_rank()}: {reason}".encode()[:TOLD]
            for group in self._groups:
                told = _first(told, group)
        return told.decode(errors="replace") or "Ranks came to different places."

    def _before_message(self, group: ProcessGroup) -> None:
        if group not in self._groups:
            raise Untraceable(
                "compile: a message is sent over a mesh that none of the arguments and parameters lies on: pass a "
                "ShardTensor that does, or the mesh itself"
            )
        self._meet([MESSAGE, -MESSAGE, 0, 0], group)

    def _all_meet(self, where: int, fingerprint: int = 0) -> list[int]:
        numbers = [where, -where, fingerprint, -fingerprint]
        for group in self._groups:
            numbers = self._meet(numbers, group)
        return numbers

    def _meet(self, numbers: list[int], group: ProcessGroup) -> list[int]:
        """The largest of all members' numbers. Raises where a member has failed or is at another place."""
        if not self.heard:
            with _aside():
                numbers = _start(numbers, group).wait().tolist()
            self.heard = numbers[0] != -numbers[1]
            if self.heard:
                self._open.remove(group)
        if self.heard:
            raise Untraceable("compile: another rank could not trace it")
        return numbers


@contextmanager
def _aside() -> Iterator[None]:
    """Real tensors, and messages that no meeting comes before."""
    before, carrier.meeting = carrier.meeting, None
    try:
        with tracing.concrete(), without_modes():
            yield
    finally:
        carrier.meeting = before


def _start(numbers: list[int], group: ProcessGroup) -> wire.Pending[torch.Tensor]:
    return wire.start_all_reduce(torch.tensor(numbers, device=device_of(group)), group, "max")


def _first(text: bytes, group: ProcessGroup) -> bytes:
    """The text of the first member that has one."""
    device = device_of(group)
    longest = max(n for (n,) in wire.gather_ints([len(text)], group, device))
    heard = wire.gather_ints([*text, *[0] * (longest - len(text))], group, device) if longest else []
    return next((found for row in heard if (found := bytes(row).rstrip(b"\0"))), b"")
