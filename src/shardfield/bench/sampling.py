"""Where the host spends its time, in all threads of a process: a profiler that samples."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERVAL = 0.002  # seconds
IDLE = frozenset(["acquire", "wait", "_worker"])  # functions in which a thread waits
SCHEDULER = "virtual/scheduler.py"  # a virtual rank whose innermost frame is there waits for its turn


@contextmanager
def sampled(active: bool = True) -> Iterator[Counter[str]]:
    """Yield a counter of `file:line function` of the threads that run, and of each function that is on their stack."""
    places: Counter[str] = Counter()
    if not active:
        yield places
        return
    ended, me = threading.Event(), threading.get_ident()

    def sample() -> None:
        while not ended.wait(INTERVAL):
            for thread, frame in sys._current_frames().items():
                if thread not in (me, threading.get_ident()) and not _is_idle(frame):
                    places.update(_places(frame))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield places
    finally:
        ended.set()
        sampler.join()


def _is_idle(frame: FrameType) -> bool:
    return frame.f_code.co_name in IDLE or frame.f_code.co_filename.endswith(SCHEDULER)


def _places(frame: FrameType) -> set[str]:
    """Return the line that runs, marked by an arrow, and the functions that called it."""
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    found = {f"-> {file}:{frame.f_lineno} {frame.f_code.co_name}"}
    at: FrameType | None = frame
    while at is not None:
        found.add("/".join(at.f_code.co_filename.split("/")[-2:]) + " " + at.f_code.co_name)
        at = at.f_back
    return found
