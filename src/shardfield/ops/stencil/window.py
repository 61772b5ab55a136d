"""What an output reads: the one arithmetic of convolutions, pools and everything else that looks at neighbours. Pure.

Along one dim, output `o` reads the inputs `o * stride - padding + j * dilation` for `j < kernel`; a transposed window
is the same with input and output changed over. A rank owns the outputs whose windows have their centre in its piece,
so that a field and what is made of it stay cut at the same places, and asks for the inputs that those outputs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ...layout import Span, starts


class Window(NamedTuple):
    """One dim: `size` inputs, `out` outputs, and which reads which. `padding` is the one before the first input."""

    size: int
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False

    @property
    def reach(self) -> int:
        """From the first to the last cell that a window covers."""
        return (self.kernel - 1) * self.dilation

    def owned(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """How many outputs each piece of the input owns.

        >>> Window(10, 5, kernel=3, stride=2, padding=1).owned([5, 5])
        (3, 2)
        >>> Window(4, 8, kernel=3, stride=2, padding=1, transposed=True).owned([2, 2])
        (4, 4)
        """
        marks = [0, *(self._first_owned(start) for start in starts(lengths)[1:]), self.out]
        return tuple(b - a for a, b in pairwise(marks))

    def _first_owned(self, start: int) -> int:
        if start in (0, self.size):  # what lies in the padding belongs to the ranks at the ends
            return 0 if start == 0 else self.out
        if self.transposed:  # half way between the centres of two inputs, in halves of a cell
            between = 2 * (start * self.stride - self.padding) + self.reach - self.stride
            return min(max(between // 2 + 1, 0), self.out)
        return min(max(-(-(2 * (start + self.padding) - self.reach) // (2 * self.stride)), 0), self.out)

    def receptive_field(self, first: int, stop: int) -> Span:
        """The cells that outputs `first` to `stop` look at, in the padding too; empty if there are none.

        >>> Window(10, 5, kernel=3, stride=2, padding=1).receptive_field(0, 2)
        Span(start=-1, stop=4)
        """
        if first >= stop:
            return Span(0, 0)
        if self.transposed:
            begin = -(-(first + self.padding - self.reach) // self.stride)
            return Span(begin, (stop - 1 + self.padding) // self.stride + 1)
        begin = first * self.stride - self.padding
        return Span(begin, (stop - 1) * self.stride - self.padding + self.reach + 1)

    def input_range(self, first: int, stop: int) -> Span:
        """The inputs that outputs `first` to `stop` read, inside the field; empty if there are none.

        >>> Window(10, 5, kernel=3, stride=2, padding=1).input_range(3, 5)
        Span(start=5, stop=10)
        """
        begin, end = self.receptive_field(first, stop)
        begin, end = max(begin, 0), min(end, self.size)
        return Span(begin, end) if begin < end else Span(0, 0)

    def tile(self, start: int, length: int, first: int, stop: int) -> Tile | None:
        """How the inputs `start` to `start + length` add to outputs `first` to `stop`; None if they do not.

        Padding is the same on both sides in torch. Where a piece needs more of it behind than before, it gets as much
        before, in whole strides, and what that makes is skipped: the piece itself is never copied to be padded.
        """
        if length <= 0:
            return None
        s, p, reach = self.stride, self.padding, self.reach
        if self.transposed:
            begin, end = start * s - p, (start + length - 1) * s - p + reach + 1
            to, upto = max(first, begin), min(stop, end)
            if to >= upto:
                return None
            pad = min(to - begin, end - upto)
            return Tile(0, length, pad, to - begin - pad, upto - to, to - first)
        to, upto = max(first, -(-(start + p - reach) // s)), min(stop, (start + length - 1 + p) // s + 1)
        if to >= upto:
            return None
        before = start - (to * s - p)
        after = (upto - 1) * s - p + reach + 1 - (start + length)
        crop = -before if before < 0 else 0
        left = length - crop + (after if after <= -s else 0)
        before = max(before, 0)
        more = max(-(-(max(after, 0) - before) // s), 0)
        return Tile(crop, left, before + more * s, more, upto - to, to - first)

    def taps(self, start: int, length: int, first: int, stop: int) -> tuple[int, int]:
        """Which cells of the window (first, how many) the inputs `start` to `start + length` meet in those outputs.

        >>> Window(10, 10, kernel=3, padding=1).taps(4, 1, 5, 10)
        (0, 1)
        """
        s, p, d = self.stride, self.padding, self.dilation
        if self.transposed:
            low, high = first - (start + length - 1) * s + p, stop - 1 - start * s + p
        else:
            low, high = start - (stop - 1) * s + p, start + length - 1 - first * s + p
        begin, end = max(-(-low // d), 0), min(high // d, self.kernel - 1)
        return begin, max(end - begin + 1, 0)

    def sub_window(self, begin: int, number: int) -> Window:
        """The window of some of its cells."""
        return self._replace(kernel=number, padding=self.padding - begin * self.dilation)


class Tile(NamedTuple):
    """One dim of a local call on a piece: which of its cells, padded how, and where the results go.

    `length` cells from `start`, `padding` on both sides; of the results, `number` from `skip` belong at `at`.
    """

    start: int
    length: int
    padding: int
    skip: int
    number: int
    at: int


def shard_spans(lengths: Sequence[int]) -> list[Span]:
    """The index range of every piece."""
    return [Span(start, start + n) for start, n in zip(starts(lengths), lengths, strict=True)]
