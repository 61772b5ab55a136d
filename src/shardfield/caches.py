"""Bounded caches in which a hit costs one dict lookup."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, overload
from weakref import ref

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801, as functools has it
    """An attribute that is computed when it is first read. That of functools takes a lock before Python 3.12."""

    def __init__(self, compute: Callable[[Any], T]):
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance, owner):
        if instance is None:
            return self
        found = instance.__dict__[self.name] = self.compute(instance)
        return found


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
