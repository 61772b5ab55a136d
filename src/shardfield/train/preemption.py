"""Preemption: SIGTERM lets a run finish its step, save its state and end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Preempted(Exception):
    """The run received SIGTERM, and its state is saved."""


@contextmanager
def catch_sigterm() -> Iterator[list[int]]:
    """Collect SIGTERM in a list instead of ending the process."""
    received: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    except ValueError:  # not in the main thread
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
