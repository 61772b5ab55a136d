"""Run the programs of several ranks in one process: one thread per rank, of which exactly one runs at a time.

A rank runs until it waits for a message that has not been sent; then another rank runs. A thread per rank keeps what
torch keeps per thread (grad mode, autocast, the state of a backward pass). Which rank runs next depends on messages
alone, so that every run of a program has the same schedule.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..comm.stalls import where
from ..errors import ShardfieldError, WorldError
from .links import Links


class RankContext(Protocol):
    """The state of the process that belongs to one rank: `enter` when it begins to run, `leave` when it stops."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Aborted(WorldError):
    """Raised in a rank that waits for a message that will not come."""


class Failures(ShardfieldError):
    """Some virtual ranks raised; `errors` has the error of each, by rank."""

    def __init__(self, errors: dict[int, BaseException], size: int):
        self.errors = errors
        own = {r: e for r, e in errors.items() if not isinstance(e, Aborted)} or errors
        lines = [f"rank {r}: {type(e).__name__}: {e}" for r, e in own.items()]
        super().__init__("\n  ".join([f"{len(own)} of {size} virtual ranks failed", *lines]))


class _Rank(threading.Thread):
    """One rank: a thread that waits for its turn, and calls one job after the other."""

    def __init__(self, scheduler: Scheduler, number: int, context: RankContext):
        super().__init__(name=f"virtual-rank-{number}", daemon=True)
        self.scheduler, self.number, self.context = scheduler, number, context
        self.turn = _closed()
        self.job: Callable[[], Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ready: Callable[[], bool] | None = None  # of the message that it waits for

    def run(self) -> None:
        while True:
            self.turn.acquire()
            if self.job is None:
                return
            self.context.enter()
            try:
                self.result = self.job()
            except BaseException as error:  # noqa: BLE001 - reported by the caller's thread
                self.error = error
            finally:
                self.job = None
                self.context.leave()
                self.scheduler._switch(None)


class Scheduler:
    """The threads of the ranks of one world. `run` calls a function on each rank and returns when all have returned."""

    def __init__(self, contexts: Sequence[RankContext], first: int = 0):
        self.ranks = [_Rank(self, i, context) for i, context in enumerate(contexts, first)]
        self._process = os.getpid()
        self._parked: list[_Rank] = []  # the one that parked last is at the end
        self._finished = threading.Event()
        self._abort: str | None = None
        self._current: _Rank | None = None
        self.switches = 0
        self.poll: Callable[[], None] | None = None  # takes in messages of other processes
        self.links: Links | None = None
        self.at_end: Callable[[list[BaseException]], None] | None = None  # called with the errors of the ranks
        self._end_error: BaseException | None = None
        for rank in self.ranks:
            rank.start()

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call `jobs[i]` on rank i and return the results. Raise what the ranks raised."""
        if not all(rank.is_alive() for rank in self.ranks) and os.getpid() == self._process:
            raise WorldError("the virtual ranks were closed: make a new world, or a new step")
        if os.getpid() != self._process:
            raise WorldError("virtual ranks cannot run in a process that was forked from theirs: make a world there")
        for rank, job in zip(self.ranks, jobs, strict=True):
            rank.job, rank.result, rank.error, rank.ready = job, None, None, _always
        self._parked = list(reversed(self.ranks))  # rank 0 begins
        self._abort = self._end_error = None
        self._finished.clear()
        interrupted: BaseException | None = None
        while not self._finished.is_set():  # an interrupt may be raised at the end of a wait that has succeeded
            try:
                if self._current is None and self._parked:
                    self._switch(None)
                self._finished.wait()
            except BaseException as error:  # KeyboardInterrupt: the ranks end first, each at its next wait
                interrupted = interrupted or error
                self._abort = f"the program was interrupted by {type(error).__name__}"
        if interrupted is not None:
            for rank in self.ranks:
                rank.result = rank.error = None
            raise interrupted
        self._raise_errors()
        if self._end_error is not None:
            raise self._end_error
        results = [rank.result for rank in self.ranks]
        for rank in self.ranks:
            rank.result = None
        return results

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()`: other ranks run until then. Called by the running rank."""
        while not ready():
            if self.poll is not None:
                self.poll()
                if ready():
                    return
            me = self._current
            if me is None or threading.current_thread() is not me:
                raise WorldError("a message of a virtual rank was sent outside its program, or by another thread")
            self._check_abort(ready)
            me.ready = ready
            self._parked.append(me)
            me.context.leave()
            self._switch(me)
            me.turn.acquire()
            me.context.enter()
            self._check_abort(ready)

    def _check_abort(self, ready: Callable[[], bool]) -> None:
        if self._abort is not None and not ready():
            raise Aborted(self._abort)

    def close(self) -> None:
        """End the threads."""
        for rank in self.ranks:
            if rank.is_alive():
                rank.turn.release()
                rank.join()

    def _switch(self, me: _Rank | None) -> None:
        """Run the rank that was parked last among those that can continue: its memory was used most recently."""
        chosen = self._next()
        while chosen is None and self._parked:
            if not self._await_others():
                self._abort = self._abort or self._describe_deadlock()
            chosen = self._next()
        if chosen is None:
            self._current = None
            self._end()
            return
        self._parked.remove(chosen)
        self.switches += 1
        self._current = chosen
        chosen.turn.release()

    def _end(self) -> None:
        """Call `at_end` in the thread of the last rank, where no interrupt is raised, and let the caller go on."""
        try:
            if self.at_end is not None:
                self.at_end([rank.error for rank in self.ranks if rank.error is not None])
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._end_error = error
        finally:
            self._finished.set()

    def _await_others(self) -> bool:
        """Wait for a message of another process; return False if none will come."""
        if self.links is None:
            return False
        failed = [str(rank.number) for rank in self.ranks if rank.error is not None]
        if failed:  # the others may wait for it, here and in other processes
            self._abort = self._abort or f"rank {', '.join(failed)} has failed"
            return False
        try:
            return self.links.wait()
        except WorldError as error:
            self._abort = str(error)
            return False

    def _next(self) -> _Rank | None:
        if self.links is not None and self.poll is not None:
            self.poll()
            if self.links.failed and self._abort is None:
                self._abort = f"another process failed: {self.links.failed}"
        if self._abort is not None:
            return self._parked[-1] if self._parked else None
        for rank in reversed(self._parked):
            if rank.ready is not None and rank.ready():
                return rank
        return None

    def _describe_deadlock(self) -> str:
        frames = sys._current_frames()
        ended = [str(r.number) for r in self.ranks if r.job is None]
        lines = [f"rank {r.number}: {where(frames.get(r.ident or 0))}" for r in self.ranks if r.job is not None]
        if ended:
            lines.append(f"ended before: rank {', '.join(ended)}")
        return "\n  ".join(["every virtual rank waits for a message of another one", *lines])

    def _raise_errors(self) -> None:
        errors = {rank.number: rank.error for rank in self.ranks if rank.error is not None}
        if not errors:
            return
        for rank in self.ranks:
            rank.error = rank.result = None
        first = next((e for e in errors.values() if not isinstance(e, Aborted)), next(iter(errors.values())))
        if all(type(e) is type(first) and str(e) == str(first) for e in errors.values()):
            raise first
        if not isinstance(first, Exception):  # KeyboardInterrupt, SystemExit
            raise first
        raise Failures(errors, len(self.ranks)) from first


def _closed() -> threading.Lock:
    """Return a lock that is held: `acquire` waits until another thread calls `release`. Faster than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _always() -> bool:
    return True
