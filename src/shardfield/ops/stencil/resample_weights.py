"""Input cells and weights of each output of `F.interpolate` along one dim. Pure: no communication.

Every mode is linear and separable: along a dim, output `o` is the sum over j of `weights[o, j]` times the input cell
`cells[o, j]`. The functions follow torch's kernels, in the precision in which those compute positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout import Span, starts
from .weighted_sum import WeightedSum


class _TapsFields(NamedTuple):
    size: int
    out: int
    cells: Tensor
    weights: Tensor | None
    center: Tensor
    ratio: tuple[int, int] | None


class Taps(_TapsFields):
    """Taps of one dim of `size` inputs and `out` outputs.

    weights: None in the nearest modes, where each output copies one input. `cells` may then have two columns, the first
        for contiguous memory format, the second for channels_last.
    center: position of each output in units of input cells. The rank that holds this cell owns the output.
    ratio: (p, q) if the taps repeat, that is output `o + q` reads the inputs of output `o` shifted by `p`; else None.
    """

    @cached_property
    def _bounds(self) -> tuple[list[int], list[int]]:
        """The first and the last input of each output."""
        low, high = self.cells.aminmax(dim=1)
        return low.tolist(), high.tolist()

    def owned(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs that each shard of the input owns."""
        first_cells = starts(shard_sizes)[1:]
        boundaries = torch.tensor(first_cells, dtype=torch.float64) - 0.5
        inner = torch.searchsorted(self.center, boundaries).tolist()
        ends = [0 if s == 0 else self.out if s == self.size else n for s, n in zip(first_cells, inner, strict=True)]
        return tuple(b - a for a, b in pairwise([0, *ends, self.out]))

    def input_range(self, first: int, stop: int) -> Span:
        """Return the input range that outputs `first` to `stop` read."""
        if first >= stop:
            return Span(0, 0)
        low, high = self._bounds
        return Span(min(low[first:stop]), max(high[first:stop]) + 1)

    def weighted_sums(self, dim: int, held: Span, owned: Span, device: torch.device) -> list[WeightedSum]:
        """Return the weighted sums that compute the outputs `owned` along `dim` of a block of the inputs `held`.

        There is one per memory format if `cells` has two columns, else one.
        """
        cells = (self.cells[owned.start : owned.stop] - held.start).to(device)
        if self.weights is None:
            return [WeightedSum(dim, held.stop - held.start, column[:, None], None) for column in cells.unbind(1)]
        return [WeightedSum(dim, held.stop - held.start, cells, self.weights[owned.start : owned.stop].to(device))]


# (size, out, scale factor or None, align_corners, dtype) -> the taps of a mode
TapsBuilder = Callable[[int, int, float | None, bool, torch.dtype], Taps]


def ratio_of(size: int, out: int, factor: float | None) -> tuple[int, int] | None:
    """Return (inputs, outputs) in lowest terms; None if the kernel uses a scale factor that differs from out / size."""
    common = math.gcd(size, out)
    p, q = size // common, out // common
    return (p, q) if factor is None or factor * p == q else None


def scale_of(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """Return the number of inputs per output, computed in `dtype` as in torch."""
    if align_corners:
        return torch.tensor(size - 1, dtype=dtype) / (out - 1) if out > 1 else torch.zeros((), dtype=dtype)
    if factor is not None and factor > 0:
        return torch.tensor(1.0 / factor, dtype=dtype)
    return torch.tensor(size, dtype=dtype) / out


def linear(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
    """Build the taps of linear interpolation: two neighbors."""
    outputs = torch.arange(out, dtype=dtype)
    same = size == out and factor in (None, 1.0)
    if same:
        position = outputs
    else:
        scale = scale_of(size, out, factor, align_corners, dtype)
        position = outputs * scale if align_corners else ((outputs + 0.5) * scale - 0.5).clamp(min=0)
    low = position.long().clamp(max=size - 1)
    fraction = (position - low).clamp(0, 1)
    high = low if same else (low + 1).clamp(max=size - 1)
    ratio = None if align_corners and not same else ratio_of(size, out, factor)
    return Taps(
        size, out, torch.stack([low, high], 1), torch.stack([1 - fraction, fraction], 1), position.double(), ratio
    )


def cubic(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
    """Build the taps of cubic interpolation: four neighbors, clamped to the field."""
    outputs = torch.arange(out, dtype=dtype)
    scale = scale_of(size, out, factor, align_corners, dtype)
    position = outputs * scale if align_corners else (outputs + 0.5) * scale - 0.5
    low = position.floor().long().clamp(max=size - 1)
    fraction = (position - low).clamp(0, 1)
    index = (low[:, None] + torch.arange(-1, 3)).clamp(0, size - 1)
    ratio = None if align_corners else ratio_of(size, out, factor)
    return Taps(size, out, index, cubic_weights(fraction, -0.75), position.double().clamp(0, size - 1), ratio)


def cubic_weights(fraction: Tensor, a: float) -> Tensor:
    """Return the cubic convolution weights of the cells -1, 0, 1 and 2 for a point at `fraction` between 0 and 1."""

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return torch.stack([far(fraction + 1), near(fraction), near(1 - fraction), far(2 - fraction)], -1)


def windowed_taps(
    begin: Tensor,
    length: Tensor,
    center: Tensor,
    ratio: tuple[int, int] | None,
    size: int,
    weight_fn: Callable[[Tensor], Tensor],
) -> Taps:
    """Build taps of `length` inputs from `begin` each, with normalized weights. NaN marks a tap outside the window."""
    step = torch.arange(int(length.max()) if len(length) else 1)
    inside = step < length[:, None]
    weights = torch.where(inside, weight_fn(step), 0)
    weights = torch.where(inside, weights / weights.sum(1, keepdim=True), math.nan)
    index = begin[:, None] + torch.minimum(step, length[:, None] - 1)
    return Taps(size, len(begin), index, weights, center.double().clamp(0, size - 1), ratio)


def area(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
    """Build the taps of mode area: the mean of the cells that overlap the output."""
    outputs = torch.arange(out)
    begin, end = outputs * size // max(out, 1), -(-(outputs + 1) * size // max(out, 1))
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


def antialiased_taps(radius: int, filter: Callable[[Tensor], Tensor]) -> TapsBuilder:
    """Return a builder of antialiased taps: `filter` of `radius` cells, stretched by the scale if that exceeds 1."""

    def build(size: int, out: int, factor: float | None, align_corners: bool, dtype: torch.dtype) -> Taps:
        if size == out and factor in (None, 1.0):
            outputs = torch.arange(out)
            return windowed_taps(
                outputs, torch.ones_like(outputs), outputs, (1, 1), size, lambda step: torch.ones(out, 1, dtype=dtype)
            )
        scale = scale_of(size, out, factor, align_corners, dtype)
        filter_scale = scale.clamp(min=1)
        center = scale * (torch.arange(out, dtype=dtype) + 0.5)
        begin = (center - radius * filter_scale + 0.5).long().clamp(min=0)
        end = (center + radius * filter_scale + 0.5).long().clamp(max=size)

        def weight_fn(step: Tensor) -> Tensor:
            return filter((begin[:, None] + step - center[:, None] + 0.5) / filter_scale)

        ratio = None if align_corners else ratio_of(size, out, factor)
        return windowed_taps(begin, end - begin, center - 0.5, ratio, size, weight_fn)

    return build


def nearest(
    size: int, out: int, factor: float | None, mode: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Taps:
    """Build the taps of mode nearest by resampling an index ramp with torch, as its kernels differ in rounding.

    `shape` is the shape of the result. In torch 2.11-2.15 its number of dims, whether it has more than 3 channels and,
    in 2-D, the sum of height and width select the kernel.
    """
    nd = len(shape) - 2
    second_size = max(129 - out, 1) if nd == 2 and sum(shape[2:]) > 128 else 1
    other_sizes = [second_size, *[1] * (nd - 2)][: nd - 1]
    options = {"size": [out, *other_sizes]} if factor is None else {"scale_factor": [factor, *map(float, other_sizes)]}
    cells = torch.arange(size, device=device)
    digits = torch.stack([cells >> 8 * i & 255 for i in range(4)])  # base 256, exact in every dtype
    ramp = digits.to(dtype).view(1, 4, size, *[1] * (nd - 1))

    def selected_cells(ramp: Tensor) -> Tensor:
        resampled = F.interpolate(ramp, mode=mode, **options).reshape(4, out, -1)[:, :, 0].long().cpu()
        return sum(resampled[i] << 8 * i for i in range(4))

    columns = [selected_cells(ramp)]
    if shape[1] > 3 and nd > 1:
        channels_last = selected_cells(ramp.contiguous(memory_format=CHANNELS_LAST[nd]))
        if not channels_last.equal(columns[0]):
            columns.append(channels_last)
    return Taps(size, out, torch.stack(columns, 1), None, columns[0].double(), ratio_of(size, out, factor))


CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


# ---------------------------------------------------------------------- builders by mode
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
