"""Run a check of the harness on virtual ranks: all ranks in this process, without the cost of starting a call on them.

Ranks that wait for each other are found at once, and reported as a failure of the check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfield.virtual import VirtualWorld


class VirtualRanks:
    """Hold one world of virtual ranks for each number of ranks, and call checks on them."""

    def __init__(self) -> None:
        self._worlds: dict[int, VirtualWorld] = {}

    def run(self, size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on `size` ranks and return their results. After an error the next call has new ranks."""
        if size not in self._worlds:
            self._worlds[size] = VirtualWorld(size)
        try:
            return self._worlds[size].run(function, *args, **kwargs)
        except Exception:
            self._worlds.pop(size).close()
            raise

    def check(self, size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
        """Call a check on `size` ranks and return the failures of all of them. An error of a rank is a failure."""
        try:
            found = self.run(size, function, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - of the ranks
            return [f"a rank raised or all wait: {type(error).__name__}: {error}"]
        return [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]

    def close(self) -> None:
        """End the ranks."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    def __enter__(self) -> VirtualRanks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
