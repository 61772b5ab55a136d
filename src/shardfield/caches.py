"""Bounded caches in which a hit costs one dict lookup."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref


class Cache(dict):
    """A bounded dict with two generations: `cache[key]` returns the entry or None.

    New and used entries are in the dict itself. When it is full it becomes the old generation, and the previous old
    generation is dropped. A lookup in the old generation moves the entry up. So entries in use stay, a hit costs one
    dict lookup, and memory is bounded when every key is new. Entries must be pure: a miss may not communicate.
    """

    __slots__ = ("size", "old")

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.old: dict = {}

    def __missing__(self, key: Hashable) -> Any:
        found = self.old.get(key)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= self.size:
            self.old = self.copy()
            self.clear()
        super().__setitem__(key, value)

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Remove all entries whose key is `unwanted`."""
        for table in (self, self.old):
            for key in [key for key in table if unwanted(key)]:
                del table[key]


class PlanCache(Cache):
    """The plan cache of a runtime, which counts the plans that were made."""

    __slots__ = ("_runtime",)

    def __init__(self, size: int, runtime: Any):
        super().__init__(size)
        self._runtime = ref(runtime)  # weak: the runtime owns this cache

    def __setitem__(self, key: Hashable, value: Any) -> None:
        runtime = self._runtime()
        if runtime is not None:
            runtime.plans_made += 1
        super().__setitem__(key, value)
