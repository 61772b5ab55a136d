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

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import trace_state
from .._compat import without_modes
from ..comm import transport
from ..comm.consensus import any_rank, gather_texts, start_max
from ..errors import Untraceable

COLLECTIVE, GRAPH, PROGRAM, FAILED = range(4)  # where a rank is at a meeting
MAX_REASON_LENGTH = 600  # characters of a reason that the other ranks receive


class TraceConsensus:
    """The ranks of some meshes while they trace a program."""

    def __init__(self, meshes: Sequence[DeviceMesh]):
        groups = [g for mesh in meshes for g in mesh.get_all_groups() if g.size() > 1]
        self.groups = self._groups = list(dict.fromkeys(groups))
        self._active_groups = list(self._groups)  # those that still meet
        self.peer_failed = False  # whether another rank has failed, or is elsewhere, and this one did not fail before
        # once failed: whether values would have had to be looked at, and whether all have errors of the step itself
        self.values = self.all_user_errors = False

    @contextmanager
    def checking_collectives(self) -> Iterator[None]:
        """Inside, ranks meet before each message."""
        before, transport.before_collective = transport.before_collective, self._check_collective
        try:
            yield
        finally:
            transport.before_collective = before

    def check_graphs(self, fingerprint: int) -> bool:
        """This rank has its graph: whether all have the same one. Raises if a rank has none."""
        *_, high, low = self._check_all_groups(GRAPH, fingerprint)
        return high == -low

    def check_programs(self) -> None:
        """This rank has its program. Raises if another has none."""
        self._check_all_groups(PROGRAM)

    def report_failure(self, values: bool, user_error: bool, reason: str) -> str:
        """This rank has no program: then no rank has one. Returns the first reason of those who were the first to fail.

        values: they would have had to be looked at. own: the error is one of the step itself, not of its trace.
        """
        with _outside_trace():
            in_flight = [start_max([FAILED, -FAILED, 0, 0], group) for group in self._active_groups]
            for message in in_flight:
                message.wait()
            self._active_groups = []
            # now all know, and all come here
            values, user_error, other = any_rank([values, user_error, not user_error], self._groups)
            self.values, self.all_user_errors = values and not user_error, not other
            first = "" if self.peer_failed else f"rank {dist.get_rank()}: {reason}"[:MAX_REASON_LENGTH]
            for group in self._groups:
                first = next(filter(None, gather_texts(first, group)), "")
        return first or "Ranks came to different places."

    def _check_collective(self, group: ProcessGroup) -> None:
        if group not in self._groups:
            raise Untraceable(
                "compile: a message is sent over a mesh that none of the arguments and parameters lies on: pass a "
                "ShardTensor that does, or the mesh itself"
            )
        self._check_group([COLLECTIVE, -COLLECTIVE, 0, 0], group)

    def _check_all_groups(self, where: int, fingerprint: int = 0) -> list[int]:
        numbers = [where, -where, fingerprint, -fingerprint]
        for group in self._groups:
            numbers = self._check_group(numbers, group)
        return numbers

    def _check_group(self, numbers: list[int], group: ProcessGroup) -> list[int]:
        """The largest of all members' numbers. Raises where a member has failed or is at another place."""
        if not self.peer_failed:
            with _outside_trace():
                numbers = start_max(numbers, group).wait().tolist()
            self.peer_failed = numbers[0] != -numbers[1]
            if self.peer_failed:
                self._active_groups.remove(group)
        if self.peer_failed:
            raise Untraceable("compile: another rank could not trace it")
        return numbers


@contextmanager
def _outside_trace() -> Iterator[None]:
    """Real tensors, and messages that no meeting comes before."""
    before, transport.before_collective = transport.before_collective, None
    try:
        with trace_state.concrete(), without_modes():
            yield
    finally:
        transport.before_collective = before
