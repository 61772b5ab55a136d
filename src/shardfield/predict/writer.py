"""Write the blocks of a forecast in a thread while the next steps are computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..comm import consensus


class BackgroundWriter:
    """Write at most `depth` blocks behind the computation; a failure of one rank is raised on all.

    `write(index, block)` runs in a thread that sends no messages. A block counts as written when all ranks have written
    theirs: `done(index)` is then called on every rank, in the order of the blocks. `waited` is the time in seconds
    that the computation was blocked.
    """

    def __init__(
        self, what: str, write: Callable[[int, Any], None], done: Callable[[int], None], over: Any, depth: int
    ):
        self._what, self._write, self._done, self._over, self._depth = what, write, done, over, depth
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self.waited = 0.0

    def submit(self, index: int, block: Tensor) -> None:
        """Start to write a block, as it is now; waits for older blocks if there are too many."""
        while len(self._pending) >= self._depth:
            self._finish_one()
        copy, ready = _to_host(block)
        self._pending.append((index, self._thread.submit(self._run, index, copy, ready)))

    def close(self, failed: bool = False) -> None:
        """Wait for all blocks. failed: an error is on its way, and no other rank takes part in a check."""
        try:
            while self._pending and not failed:
                self._finish_one()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, index: int, block: Tensor, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        self._write(index, block.numpy())

    def _finish_one(self) -> None:
        index, writing = self._pending.popleft()
        begun = time.perf_counter()
        error = writing.exception()
        problem = None if error is None else f"{type(error).__name__}: {error}"
        if self._over is None:
            if error is not None:
                raise consensus.ShardingError(f"{self._what}: {problem}") from error
        else:
            consensus.raise_together(self._what, self._over, problem, error)
        self.waited += time.perf_counter() - begun
        self._done(index)


def _to_host(block: Tensor) -> tuple[Tensor, Any]:
    """Copy a block to host memory; return the copy and an event after which it is complete."""
    if block.device.type == "cpu":
        return block.detach().clone(), None
    copy = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
    copy.copy_(block.detach(), non_blocking=True)
    event = torch.get_device_module(block.device.type).Event()
    event.record()
    return copy, event
