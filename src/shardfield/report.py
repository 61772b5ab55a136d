"""`explain()` and `strict()`: what each call did and what it sent. Both cost nothing when off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

active: Any = None
strict_depth = 0


def ending(kind: str) -> None:
    """Note how the current call ends."""
    if active is not None:
        active.ending(kind)


@contextmanager
def strict() -> Iterator[None]:
    """Inside, a call that would gather its operands raises a ShardingError on every rank instead."""
    global strict_depth
    strict_depth += 1
    try:
        yield
    finally:
        strict_depth -= 1
