"""Compute a few items ahead of their consumer in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any


def prefetch_map(work: Callable[[Any], Any], items: Sequence[Any], depth: int) -> Generator[Any, None, None]:
    """Yield `work(item)` for each item, computed at most `depth` items ahead; depth 0 uses no thread.

    An exception of `work` is raised when its result is consumed. Closing the generator ends the thread.
    """
    if depth == 0:
        yield from map(work, items)
        return
    done: queue.SimpleQueue = queue.SimpleQueue()
    room, stop = threading.Semaphore(depth), threading.Event()

    def run() -> None:
        for item in items:
            room.acquire()
            if stop.is_set():
                return
            try:
                done.put((work(item), None))
            except BaseException as error:
                done.put((None, error))
                return

    thread = threading.Thread(target=run, name="shardfield-ahead", daemon=True)
    thread.start()
    try:
        for _ in items:
            value, error = done.get()
            if error is not None:
                raise error
            room.release()
            yield value
    finally:
        stop.set()
        room.release()
        thread.join()
