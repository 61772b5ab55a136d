"""Resampling along one dim as torch does it: which inputs an output is made of, and with what weights. Pure.

Every mode of `F.interpolate` is linear and works dim by dim: output `o` is the sum over j of `weights[o, j]` times the
input `cells[o, j]`. The tables below follow torch's kernels, in the precision in which they compute positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout import Span, starts
from .weighted_sum import WeightedSum


class Taps(NamedTuple):
    """One dim of `size` inputs and `out` outputs; `weights` is None where each output is one of the inputs.

    cells may then have two columns: for fields that lie in memory as their dims say, and with their channels last.
    centre: where an output lies among the inputs; it belongs to whoever has that cell. ratio: inputs to outputs, if
    `ratio[0]` inputs further on the same happens `ratio[1]` outputs further on.
    """

    size: int
    out: int
    cells: Tensor
    weights: Tensor | None
    center: Tensor
    ratio: tuple[int, int] | None

    def owned(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """How many outputs each piece of the input owns."""
        edges = torch.tensor(starts(lengths)[1:], dtype=torch.float64) - 0.5
        inner = torch.searchsorted(self.center, edges).tolist()
        ends = [
            0 if s == 0 else self.out if s == self.size else n for s, n in zip(starts(lengths)[1:], inner, strict=True)
        ]
        return tuple(b - a for a, b in pairwise([0, *ends, self.out]))

    def input_range(self, first: int, stop: int) -> Span:
        """The inputs that outputs `first` to `stop` are made of."""
        if first >= stop:
            return Span(0, 0)
        low, high = self.cells[first:stop].aminmax()
        return Span(int(low), int(high) + 1)

    def weighted_sums(self, dim: int, held: Span, owned: Span, device: torch.device) -> list[WeightedSum]:
        """What makes the outputs `owned` along a dim of blocks that hold the inputs `held`; one for each column that
        may be chosen."""
        cells = (self.cells[owned.start : owned.stop] - held.start).to(device)
        if self.weights is None:
            return [WeightedSum(dim, held.stop - held.start, column[:, None], None) for column in cells.unbind(1)]
        return [WeightedSum(dim, held.stop - held.start, cells, self.weights[owned.start : owned.stop].to(device))]


# (size, out, scale factor or None, align_corners, dtype) -> the taps of a mode
TapsBuilder = Callable[[int, int, float | None, bool, torch.dtype], Taps]


def ratio_of(size: int, out: int, factor: float | None) -> tuple[int, int] | None:
    """The ratio of inputs to outputs in lowest terms, unless the scale that torch works with is another."""
    common = math.gcd(size, out)
    p, q = size // common, out // common
    return (p, q) if factor is None or factor * p == q else None


def scale_of(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """Inputs to an output, as torch computes it in `dtype`."""
    if align_corners:
        return torch.tensor(size - 1, dtype=dtype) / (out - 1) if out > 1 else torch.zeros((), dtype=dtype)
    if factor is not None and factor > 0:
        return torch.tensor(1.0 / factor, dtype=dtype)
    return torch.tensor(size, dtype=dtype) / out


def linear(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
    """Two neighbours."""
    at = torch.arange(out, dtype=dtype)
    same = size == out and factor in (None, 1.0)
    if same:
        place = at
    else:
        scale = scale_of(size, out, factor, align_corners, dtype)
        place = at * scale if align_corners else ((at + 0.5) * scale - 0.5).clamp(min=0)
    low = place.long().clamp(max=size - 1)
    part = (place - low).clamp(0, 1)
    high = low if same else (low + 1).clamp(max=size - 1)
    ratio = None if align_corners and not same else ratio_of(size, out, factor)
    return Taps(size, out, torch.stack([low, high], 1), torch.stack([1 - part, part], 1), place.double(), ratio)


def cubic(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
    """Four neighbours; those outside the field are the cells at its ends."""
    at = torch.arange(out, dtype=dtype)
    scale = scale_of(size, out, factor, align_corners, dtype)
    place = at * scale if align_corners else (at + 0.5) * scale - 0.5
    low = place.floor().long().clamp(max=size - 1)
    part = (place - low).clamp(0, 1)
    index = (low[:, None] + torch.arange(-1, 3)).clamp(0, size - 1)
    ratio = None if align_corners else ratio_of(size, out, factor)
    return Taps(size, out, index, cubic_weights(part, -0.75), place.double().clamp(0, size - 1), ratio)


def cubic_weights(part: Tensor, a: float) -> Tensor:
    """The weights of cubic convolution, of the cells at -1, 0, 1 and 2 for a place `part` behind cell 0."""

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return torch.stack([far(part + 1), near(part), near(1 - part), far(2 - part)], -1)


def windowed_taps(
    begin: Tensor,
    length: Tensor,
    centre: Tensor,
    ratio: tuple[int, int] | None,
    size: int,
    weigh: Callable[[Tensor], Tensor],
) -> Taps:
    """Outputs made of `length` inputs each from `begin`; a weight past the end of a window is NaN."""
    step = torch.arange(int(length.max()) if len(length) else 1)
    inside = step < length[:, None]
    weights = torch.where(inside, weigh(step), 0)
    weights = torch.where(inside, weights / weights.sum(1, keepdim=True), math.nan)
    index = begin[:, None] + torch.minimum(step, length[:, None] - 1)
    return Taps(size, len(begin), index, weights, centre.double().clamp(0, size - 1), ratio)


def area(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
    """The mean of the cells that an output touches."""
    at = torch.arange(out)
    begin, end = at * size // max(out, 1), -(-(at + 1) * size // max(out, 1))
    ratio = ratio_of(size, out, None) if out else None
    return windowed_taps(
        begin, end - begin, (begin + end - 1) / 2, ratio, size, lambda step: torch.ones(out, len(step), dtype=dtype)
    )


def triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def cubic_filter(x: Tensor, a: float = -0.5) -> Tensor:
    x = x.abs()
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0)


def antialiased_taps(reach: int, shape: Callable[[Tensor], Tensor]) -> TapsBuilder:
    """A filter of some shape that reaches so many cells to each side, times the scale where that is more than 1."""

    def make(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
        if size == out and factor in (None, 1.0):
            at = torch.arange(out)
            return windowed_taps(
                at, torch.ones_like(at), at, (1, 1), size, lambda step: torch.ones(out, 1, dtype=dtype)
            )
        scale = scale_of(size, out, factor, align_corners, dtype)
        wider = scale.clamp(min=1)
        centre = scale * (torch.arange(out, dtype=dtype) + 0.5)
        begin = (centre - reach * wider + 0.5).long().clamp(min=0)
        end = (centre + reach * wider + 0.5).long().clamp(max=size)

        def weigh(step: Tensor) -> Tensor:
            return shape((begin[:, None] + step - centre[:, None] + 0.5) / wider)

        ratio = None if align_corners else ratio_of(size, out, factor)
        return windowed_taps(begin, end - begin, centre - 0.5, ratio, size, weigh)

    return make


def nearest(
    size: int, out: int, factor: float | None, mode: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Taps:
    """One input each: which, torch itself says, since its kernels round in several ways.

    `shape` is that of the result, of which (in torch 2.11-2.15) the number of dims, more than 3 channels and, in 2-D,
    the sum of height and width decide which kernel runs.
    """
    nd = len(shape) - 2
    beside = max(129 - out, 1) if nd == 2 and sum(shape[2:]) > 128 else 1
    more = [beside, *[1] * (nd - 2)][: nd - 1]
    how = {"size": [out, *more]} if factor is None else {"scale_factor": [factor, *map(float, more)]}
    at = torch.arange(size, device=device)
    digits = torch.stack([at >> 8 * i & 255 for i in range(4)])  # which every dtype can hold
    ramp = digits.to(dtype).view(1, 4, size, *[1] * (nd - 1))

    def chosen(ramp: Tensor) -> Tensor:
        found = F.interpolate(ramp, mode=mode, **how).reshape(4, out, -1)[:, :, 0].long().cpu()
        return sum(found[i] << 8 * i for i in range(4))

    columns = [chosen(ramp)]
    if shape[1] > 3 and nd > 1:
        last = chosen(ramp.contiguous(memory_format=CHANNELS_LAST[nd]))
        if not last.equal(columns[0]):
            columns.append(last)
    return Taps(size, out, torch.stack(columns, 1), None, columns[0].double(), ratio_of(size, out, factor))


CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


# ---------------------------------------------------------------------- by name
TAPS: dict[str, TapsBuilder] = {
    "linear": linear,
    "bilinear": linear,
    "trilinear": linear,
    "bicubic": cubic,
    "area": area,
}
ANTIALIASED_TAPS: dict[str, TapsBuilder] = {
    "bilinear": antialiased_taps(1, triangle),
    "bicubic": antialiased_taps(2, cubic_filter),
    "lanczos": antialiased_taps(3, lanczos),
}
