"""Write the blocks of a forecast in a thread while the next steps are computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm import consensus
from ..errors import ShardingError


class BackgroundWriter:
    """Write at most `depth` blocks behind the computation; a failure of one rank is raised on all.

    `write(index, block)` runs in a thread that sends no messages. A block counts as written when all ranks of `group`
    have written theirs: `done(index)` is then called on every rank, in the order of the blocks. Ranks tell each other
    with a message that is in flight until the next block is written, so that no rank waits for another one's thread.
    `waited` is the time in seconds in which the computation was blocked by this rank's thread.
    """

    def __init__(
        self,
        what: str,
        write: Callable[[int, Any], None],
        done: Callable[[int], None],
        group: ProcessGroup | None,
        depth: int,
    ):
        self._what, self._write, self._done, self._group, self._depth = what, write, done, group, depth
        self._writing: deque[tuple[int, Future[None]]] = deque()
        self._written: deque[tuple[int, BaseException | None, Any]] = deque()  # in flight: whether any rank failed
        self._failed_done: OSError | None = None
        self._thread = ThreadPoolExecutor(1)
        self.waited = 0.0

    def submit(self, index: int, block: Tensor) -> None:
        """Start to write a block, as it is now; waits for older blocks if there are too many."""
        while len(self._writing) >= self._depth:
            self._finish_one()
        copy, ready = _to_host(block)
        self._writing.append((index, self._thread.submit(self._run, index, copy, ready)))

    def close(self, failed: bool = False) -> None:
        """Wait for all blocks. failed: an error is being raised, on all ranks; no rank takes part in a check."""
        try:
            while self._writing and not failed:
                self._finish_one()
            while self._written and not failed:
                self._confirm_one()
            if not failed:
                self._check_last()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _check_last(self) -> None:
        """Raise on all ranks if `done` failed on one of them after the last message."""
        problem = None if self._failed_done is None else f"{type(self._failed_done).__name__}: {self._failed_done}"
        if self._group is not None:
            consensus.raise_together(self._what, self._group, problem, self._failed_done)
        elif problem is not None:
            raise ShardingError(f"{self._what}: {problem}") from self._failed_done

    def _run(self, index: int, block: Tensor, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        self._write(index, block.numpy())

    def _finish_one(self) -> None:
        """Wait for the oldest block of this rank, and confirm the one before it on all ranks."""
        index, writing = self._writing.popleft()
        begun = time.perf_counter()
        error = writing.exception() or self._failed_done
        self.waited += time.perf_counter() - begun
        flag = None if self._group is None else consensus.start_max([int(error is not None)], self._group)
        while self._written:
            self._confirm_one()
        self._written.append((index, error, flag))

    def _confirm_one(self) -> None:
        index, error, flag = self._written.popleft()
        problem = None if error is None else f"{type(error).__name__}: {error}"
        if flag is None and problem is not None:
            raise ShardingError(f"{self._what}: {problem}") from error
        if flag is not None and flag.wait().item():
            consensus.raise_together(self._what, self._group, problem, error)
        try:
            self._done(index)
        except OSError as failure:  # of one rank: the next message tells the others
            self._failed_done = failure


def _to_host(block: Tensor) -> tuple[Tensor, Any]:
    """Copy a block to host memory; return the copy and an event after which it is complete."""
    if block.device.type == "cpu":
        return block.detach().clone(), None
    copy = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
    copy.copy_(block.detach(), non_blocking=True)
    event = torch.get_device_module(block.device.type).Event()
    event.record()
    return copy, event
