"""Windows that end at the edge of the field, for ops that treat the edge in their own way.

The op gets the cells of its rank with the neighbors' cells around them, and the field's edge where the field ends. Its
outputs at the neighbors' cells are dropped. Zero padding, one-sided differences and windows that shift inward are then
those of one device, and the plan need not know which of them the op uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...layout import Span


class ClippedWindow(NamedTuple):
    """Output `o` reads the cells from `o - before` to `o + after` that are in the field.

    at_least: the number of cells that the op needs around any of its outputs, as a window of `at_least` cells that
    shifts inward at the edge does.
    """

    size: int
    before: int
    after: int
    at_least: int = 1

    @property
    def out(self) -> int:
        return self.size

    def owned(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs that each shard owns: as many as it has cells."""
        return tuple(shard_sizes)

    def receptive_field(self, first: int, stop: int) -> Span:
        """Return the cells that outputs `first` to `stop` read; ranges increase with `first`.

        >>> ClippedWindow(10, 1, 1, at_least=3).receptive_field(9, 10)
        Span(start=7, stop=10)
        """
        begin, end = max(first - self.before, 0), min(stop + self.after, self.size)
        end = min(max(end, begin + self.at_least), self.size)
        return Span(max(min(begin, end - self.at_least), 0), end)
