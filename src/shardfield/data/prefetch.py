"""Work done a few items ahead of its consumer, by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any


def prefetch_map(work: Callable[[Any], Any], items: Sequence[Any], depth: int) -> Generator[Any, None, None]:
    """`work(item)` for each item in turn, at most `depth` of them done before they are asked for; 0 takes no thread.

    What work raises is raised where its result is asked for. Closing the generator ends the thread.
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
