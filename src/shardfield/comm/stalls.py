"""Name the rank that did not take part in a message within the time limit, with the call and the line of every rank.

A backend reports a time-out without the rank that caused it (gloo), or aborts the process (NCCL). A thread of each rank
looks in the store of the world every few seconds: if another rank has requested positions, it publishes where its own
program is. A rank that is stopped does not answer, and one that is busy elsewhere answers with its line. Counting its
messages is all that a rank does before a time-out.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat.world import group_timeout, store_client, world_store
from ..errors import WorldError

PREFIX = "shardfield/stalls"
SHOWN = 8  # ranks in an error

# Parts of the texts of a backend whose message failed because a rank did not take part, and because a rank closed its
# connection: that rank may have died, or its own message with a third rank may have timed out.
_TIMED_OUT = ("timed out", "timeout")
_CLOSED = ("connection closed", "connection reset", "broken pipe", "closed by peer", "pair closure")
CLOSED_SECONDS = 0.5  # until a rank whose message has timed out has requested positions

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class StallMonitor(threading.Thread):
    """Publishes this rank's position on request, and requests those of all ranks if the device makes no progress."""

    def __init__(
        self, store: Any, rank: int, size: int, limit: float, device_is_busy: Callable[[], bool] | None = None
    ):
        super().__init__(name="shardfield-stalls", daemon=True)
        self.store, self.rank, self.size, self.limit = store, rank, size, limit
        self.period = min(max(limit / 20, 0.2), 15.0)
        self._program = threading.get_ident()  # the thread that communicates, whose line is reported
        self._device_is_busy = device_is_busy
        self._stopped = threading.Event()
        self._answered = 0
        self._progress = (-1, time.monotonic())  # number of messages, and when it was reached
        self._reported = -1

    def stop(self) -> None:
        """End the thread. A store that does not answer is not waited for."""
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(1.0)

    def run(self) -> None:
        while not self._stopped.wait(self.period):
            try:
                self.answer()
                self.look_at_device()
            except RuntimeError:  # the store has ended, and with it the world
                return

    def answer(self) -> None:
        """Publish the position of this rank if another one has requested it since the last answer."""
        request = self.store.add(f"{PREFIX}/requests", 0)
        if request > self._answered:
            self._answered = request
            self.store.set(f"{PREFIX}/{self.rank}", json.dumps([request, *self.position()]))

    def position(self) -> tuple[int, str]:
        """Return the number of messages of this rank, and its call and line."""
        return runtime.active.messages, where(sys._current_frames().get(self._program))

    def request_positions(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[int, str]]:
        """Return the positions of the ranks that answer."""
        request = self.store.add(f"{PREFIX}/requests", 1)
        self._answered = request
        mine, here = self.position()
        self.store.set(f"{PREFIX}/{self.rank}", json.dumps([request, mine, here]))
        found: dict[int, tuple[int, str]] = {}
        end = time.monotonic() + seconds
        while len(found) < len(ranks) and time.monotonic() < end:
            for rank in ranks:
                key = f"{PREFIX}/{rank}"
                if rank not in found and self.store.check([key]):
                    answered, messages, line = json.loads(self.store.get(key))
                    # A rank that took part in this message may have ended since.
                    if answered >= request or messages == mine:
                        found[rank] = messages, line
            time.sleep(min(0.05, self.period))
        return found

    def diagnose(self, ranks: Sequence[int]) -> str:
        """Describe which of `ranks` did not take part in the message. Waits for their answers, two periods at most."""
        seconds = 2 * self.period + 1.0
        result: list[dict[int, tuple[int, str]]] = []
        # In a thread: the store does not answer if the rank that serves it is stopped.
        caller = threading.Thread(target=lambda: result.append(self.request_positions(ranks, seconds)), daemon=True)
        caller.start()
        caller.join(seconds + 2.0)
        return describe(runtime.active.messages, self.rank, ranks, result[0] if result else None)

    def look_at_device(self) -> None:
        """Print which rank did not take part, before the watchdog of an asynchronous backend (NCCL) ends this rank."""
        if self._device_is_busy is None:
            return
        now, messages = time.monotonic(), runtime.active.messages
        if messages != self._progress[0]:
            self._progress = messages, now
        stalled = now - self._progress[1]
        # A stream must not be queried while a CUDA graph is captured, which never takes half of the limit.
        if stalled < self.limit / 2 or self._reported == messages or not self._device_is_busy():
            return
        self._reported = messages
        why = self.diagnose(range(self.size))
        line = self.position()[1]
        sys.stderr.write(f"shardfield, rank {self.rank}: no progress for {stalled:.0f} s at {line}: {why}\n")
        sys.stderr.flush()


def start_monitor(rt: runtime.Runtime) -> None:
    """Start the thread that publishes this rank's position, if the world has a store and several ranks."""
    store = world_store()
    if rt.stalls is not None or store is None or rt.transport_override is not None or dist.get_world_size() == 1:
        return
    world = dist.group.WORLD
    assert world is not None
    busy = _cuda_is_busy if "cuda" in dist.get_backend_config(world) and torch.cuda.is_available() else None
    rt.stalls = StallMonitor(store_client(store), dist.get_rank(), dist.get_world_size(), group_timeout(world), busy)
    rt.stalls.start()


def _cuda_is_busy() -> bool:
    return not torch.cuda.default_stream().query()


def reraise(error: RuntimeError, group: ProcessGroup | None) -> NoReturn:
    """Raise the error of a message that failed, or one that names the rank that did not take part in it."""
    why = _cause(error, group)
    if why is None:
        raise error
    limit = runtime.active.stalls.limit
    raise WorldError(f"{where(sys._getframe(1))}: {why}. The limit is {limit:g} s (SHARDFIELD_TIMEOUT)") from error


def _cause(error: RuntimeError, group: ProcessGroup | None) -> str | None:
    monitor: StallMonitor | None = runtime.active.stalls
    text = str(error).lower()
    closed = any(part in text for part in _CLOSED)
    if monitor is None or isinstance(error, WorldError) or not (closed or any(part in text for part in _TIMED_OUT)):
        return None
    try:
        if closed and not _positions_were_requested(monitor):
            return None  # a rank has died
        return monitor.diagnose(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError):  # the store, or the group, is gone too
        return None


def _positions_were_requested(monitor: StallMonitor) -> bool:
    """Return whether a message of another rank has timed out: that rank then closes its connections too."""
    end = time.monotonic() + CLOSED_SECONDS
    while monitor.store.add(f"{PREFIX}/requests", 0) == 0:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def describe(mine: int, rank: int, ranks: Sequence[int], found: dict[int, tuple[int, str]] | None) -> str:
    """Describe which of `ranks` did not take part in message number `mine` of this rank."""
    if found is None:
        return "rank 0 did not take part, or its store of the world cannot be reached: it is stopped"
    silent = [r for r in ranks if r != rank and r not in found]
    behind = {r: f for r, f in found.items() if r != rank and f[0] < mine}
    ahead = {r: f for r, f in found.items() if r != rank and f[0] > mine}
    parts = []
    if silent:
        names = ", ".join(map(str, silent[:SHOWN])) + (", ..." if len(silent) > SHOWN else "")
        many = "s" if len(silent) > 1 else ""
        parts.append(f"rank{many} {names} did not take part and did not answer: stopped, or unreachable")
    for r, (messages, line) in list(behind.items())[:SHOWN]:
        parts.append(f"rank {r} did not take part: it is at {line}, {mine - messages} messages behind")
    for r, (messages, line) in list(ahead.items())[:SHOWN]:
        parts.append(f"rank {r} is past this message: it is at {line}, {messages - mine} messages ahead")
    if not parts:
        places = ", ".join(f"rank {r} at {f[1]}" for r, f in list(found.items())[:SHOWN] if r != rank)
        parts.append(f"all ranks took part ({places}), and the messages between them did not arrive")
    return "; ".join(parts)


def where(frame: FrameType | None) -> str:
    """Return the call and the line of a program in its own files: "mean at train.py:14"."""
    call, last, site = "", "", ""
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path.startswith((_HERE, _TORCH, "<")) or (path.startswith(_PYTHON) and _PACKAGES not in path):
            if code.co_name == "torch_function":
                call = getattr(frame.f_locals.get("func"), "__name__", "")
            elif not call and code.co_name in ("run_backward", "_engine_run_backward"):
                call = "backward"
            last = code.co_name
        else:
            found = f"{call or last or code.co_name} at {os.path.basename(path)}:{frame.f_lineno}"
            if _PACKAGES not in path:
                return found
            site = site or found
        frame = frame.f_back
    return site or call or last or "an unknown line"
