"""Index arithmetic of a sliding window along one dim, for every stencil op. Pure: no data, no communication.

Output `o` reads the inputs `o * stride - padding + j * dilation` for `j < kernel`. A transposed window swaps input and
output in this formula. A rank owns the outputs whose windows are centered in its input shard. Input and output are
therefore sharded at the same relative positions, and halos are about half a window wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ...layout import Span, starts


class Window(NamedTuple):
    """A window along one dim of `size` inputs and `out` outputs. `padding` counts the cells before the first input."""

    size: int
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False

    @property
    def reach(self) -> int:
        """Distance between the first and the last cell of a window."""
        return (self.kernel - 1) * self.dilation

    def owned(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs that each shard of the input owns.

        >>> Window(10, 5, kernel=3, stride=2, padding=1).owned([5, 5])
        (3, 2)
        >>> Window(4, 8, kernel=3, stride=2, padding=1, transposed=True).owned([2, 2])
        (4, 4)
        """
        bounds = [0, *(self._first_owned(start) for start in starts(shard_sizes)[1:]), self.out]
        return tuple(b - a for a, b in pairwise(bounds))

    def _first_owned(self, start: int) -> int:
        if start in (0, self.size):  # outputs centered in the padding belong to the first and the last rank
            return 0 if start == 0 else self.out
        if self.transposed:  # the midpoint between the centers of two inputs, in units of half a cell
            midpoint = 2 * (start * self.stride - self.padding) + self.reach - self.stride
            return min(max(midpoint // 2 + 1, 0), self.out)
        return min(max(-(-(2 * (start + self.padding) - self.reach) // (2 * self.stride)), 0), self.out)

    def receptive_field(self, first: int, stop: int) -> Span:
        """Return the input range that outputs `first` to `stop` read, including padding cells.

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
        """Return the input range that outputs `first` to `stop` read, without padding cells.

        >>> Window(10, 5, kernel=3, stride=2, padding=1).input_range(3, 5)
        Span(start=5, stop=10)
        """
        begin, end = self.receptive_field(first, stop)
        begin, end = max(begin, 0), min(end, self.size)
        return Span(begin, end) if begin < end else Span(0, 0)

    def tile(self, start: int, length: int, first: int, stop: int) -> Tile | None:
        """Plan the local call that adds inputs `start` to `start + length` to outputs `first` to `stop`.

        Return None if these outputs read none of these inputs. torch pads both sides by the same amount. Where the
        input needs more padding after than before, the padding before is rounded up by a multiple of the stride, and
        `Tile.skip` drops the extra outputs. The input is never copied only to pad it.
        """
        if length <= 0:
            return None
        s, p, reach = self.stride, self.padding, self.reach
        if self.transposed:
            begin, end = start * s - p, (start + length - 1) * s - p + reach + 1
            out_start, out_stop = max(first, begin), min(stop, end)
            if out_start >= out_stop:
                return None
            pad = min(out_start - begin, end - out_stop)
            return Tile(0, length, pad, out_start - begin - pad, out_stop - out_start, out_start - first)
        out_start, out_stop = max(first, -(-(start + p - reach) // s)), min(stop, (start + length - 1 + p) // s + 1)
        if out_start >= out_stop:
            return None
        before = start - (out_start * s - p)
        after = (out_stop - 1) * s - p + reach + 1 - (start + length)
        crop = -before if before < 0 else 0
        kept = length - crop + (after if after <= -s else 0)
        before = max(before, 0)
        extra = max(-(-(max(after, 0) - before) // s), 0)
        return Tile(crop, kept, before + extra * s, extra, out_stop - out_start, out_start - first)

    def taps(self, start: int, length: int, first: int, stop: int) -> tuple[int, int]:
        """Return (first, number) of the taps through which outputs `first` to `stop` read `length` inputs from `start`.

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
        """Return the window restricted to `number` taps from tap `begin`."""
        return self._replace(kernel=number, padding=self.padding - begin * self.dilation)


class Tile(NamedTuple):
    """One dim of a local call: the input cells it reads, their padding, and the outputs it contributes to.

    The call reads `length` cells from `start` with `padding` on both sides. Of its results, the `number` results from
    `skip` are added to the rank's outputs from `out_start`.
    """

    start: int
    length: int
    padding: int
    skip: int
    number: int
    out_start: int


def shard_spans(shard_sizes: Sequence[int]) -> list[Span]:
    """Return the global index range of every shard."""
    return [Span(start, start + n) for start, n in zip(starts(shard_sizes), shard_sizes, strict=True)]
