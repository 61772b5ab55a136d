"""Consensus of the ranks while they trace a program: either all of them obtain it, or none does.

Some rules communicate during the trace, to plan from layouts or from integer constants. A rank whose trace fails would
leave its peers blocked in such a collective. Therefore the ranks of a group run a check, a small all_reduce of status
numbers, before each collective of a rule, after each graph, and at the end of the program.

A rank that fails takes part in one more check of each of its groups. It starts these checks all at once, since it does
not know which group reaches its next check first. A peer that sees the failure fails too, and does the same for its
other groups. So all ranks of a group leave at the same check, and none blocks on a rank that has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import runtime, trace_state
from .._compat import without_modes
from ..comm.consensus import any_rank, gather_texts, start_max
from ..errors import Untraceable

COLLECTIVE, GRAPH, PROGRAM, FAILED = range(4)  # the status of a rank in a check
MAX_REASON_LENGTH = 600  # characters of a reason that the other ranks receive


class TraceConsensus:
    """Keep the ranks of some meshes in step while they trace a program."""

    def __init__(self, meshes: Sequence[DeviceMesh]):
        groups = [g for mesh in meshes for g in mesh.get_all_groups() if g.size() > 1]
        self.groups = self._groups = list(dict.fromkeys(groups))
        self._active_groups = list(self._groups)  # groups that still run checks
        self.peer_failed = False  # a peer failed or was at another check, and this rank had not failed before
        # Set by `report_failure`: a rank needed tensor values; all ranks raised errors of the user's code.
        self.needs_values = self.all_user_errors = False

    @contextmanager
    def checking_collectives(self) -> Iterator[None]:
        """Run a check before each collective inside the context."""
        with runtime.observing(before_collective=self._check_collective):
            yield

    def check_graphs(self, fingerprint: int) -> bool:
        """Return whether the fingerprint of this rank's graph is equal on all ranks. Raise if a rank has no graph."""
        *_, high, low = self._check_all_groups(GRAPH, fingerprint)
        return high == -low

    def check_programs(self) -> None:
        """Raise if a rank has no program although this one has."""
        self._check_all_groups(PROGRAM)

    def report_failure(self, needs_values: bool, user_error: bool, reason: str) -> str:
        """Notify all ranks that this rank has no program. Return a reason of one of the ranks that failed first.

        needs_values: the trace failed because it reads tensor values. user_error: the callable itself raised.
        """
        with _outside_trace():
            in_flight = [start_max([FAILED, -FAILED, 0, 0], group) for group in self._active_groups]
            for message in in_flight:
                message.wait()
            self._active_groups = []
            # All ranks have seen the failure and arrive here.
            flags = [needs_values, user_error, not user_error]
            any_needs_values, any_user_error, any_trace_error = any_rank(flags, self._groups)
            self.needs_values, self.all_user_errors = any_needs_values and not any_user_error, not any_trace_error
            first = "" if self.peer_failed else f"rank {dist.get_rank()}: {reason}"[:MAX_REASON_LENGTH]
            for group in self._groups:
                first = next(filter(None, gather_texts(first, group)), "")
        return first or "Ranks reached different checks of the trace."

    def _check_collective(self, group: ProcessGroup) -> None:
        if group not in self._groups:
            raise Untraceable(
                "compile: a collective runs over a mesh that none of the arguments and parameters uses: pass a "
                "ShardTensor on that mesh, or the mesh itself"
            )
        self._check_group([COLLECTIVE, -COLLECTIVE, 0, 0], group)

    def _check_all_groups(self, status: int, fingerprint: int = 0) -> list[int]:
        numbers = [status, -status, fingerprint, -fingerprint]
        for group in self._groups:
            numbers = self._check_group(numbers, group)
        return numbers

    def _check_group(self, numbers: list[int], group: ProcessGroup) -> list[int]:
        """Return the elementwise maximum of the numbers over a group. Raise if a rank has another status."""
        if not self.peer_failed:
            with _outside_trace():
                numbers = start_max(numbers, group).wait().tolist()
            self.peer_failed = numbers[0] != -numbers[1]
            if self.peer_failed:
                self._active_groups.remove(group)
        if self.peer_failed:
            raise Untraceable("compile: another rank could not trace the callable")
        return numbers


@contextmanager
def _outside_trace() -> Iterator[None]:
    """Use real tensors, and collectives without checks before them."""
    with runtime.observing(before_collective=None), trace_state.concrete(), without_modes():
        yield
