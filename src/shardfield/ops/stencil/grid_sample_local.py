"""Sampling at arbitrary places, as torch's grid_sampler does it, put together from gathers.

torch's kernel wants the whole input. Here places are turned into cells and weights in the frame of the whole field, in
the kernel's own arithmetic, and the cells are read from whatever block holds them. Every step is differentiable, as
often as one likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import function_apply
from .resample_weights import cubic_weights

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


class Tap(NamedTuple):
    """One of the cells along a dim that every point looks at: its index, whether it is in the field, its weight."""

    cell: Tensor
    in_bounds: Tensor
    weight: Tensor | None


class GridAxis(NamedTuple):
    """How coordinates from -1 to 1 lie on a dim of `size` cells.

    `cpu_2d` is how torch's 2-D kernel on the CPU computes; its others round otherwise and leave out what is outside.
    `nan_index`: the cell that a place which is no number is at, where places outside are brought inside.
    """

    size: int
    mode: int
    padding: int
    align_corners: bool
    cpu_2d: bool
    nan_index: int

    def taps(self, coordinate: Tensor) -> list[Tap]:
        """The cells that points look at."""
        place, slope = self._unnormalize(coordinate)
        if self.mode == BICUBIC:
            low = place.detach().floor()
            part = _WithSlope.apply((place.detach() - low), coordinate, slope)
            weights = cubic_weights(part, -0.75).unbind(-1)
            return [self._tap(self._apply_padding(low + i - 1)[0], w) for i, w in enumerate(weights)]
        place, turned = self._apply_padding(place)
        if self.mode == NEAREST:
            still = coordinate.requires_grad and torch.is_grad_enabled()
            weight = _WithSlope.apply(torch.ones_like(place), coordinate, slope * 0) if still else None
            return [self._tap(place.round(), weight)]
        low = place.floor()
        part = _WithSlope.apply(place - low, coordinate, slope * turned)
        return [self._tap(low, 1 - part), self._tap(low + 1, part)]

    def _tap(self, place: Tensor, weight: Tensor | None) -> Tap:
        there = (place > -1) & (place < self.size)
        return Tap(place.clamp(0, self.size - 1).nan_to_num(0).long(), there, weight)

    def _unnormalize(self, coordinate: Tensor) -> tuple[Tensor, float]:
        """Where coordinates lie, in cells, and how fast that changes with them."""
        at, n = coordinate.detach(), self.size
        if self.align_corners:
            return ((at + 1) * ((n - 1) / 2) if self.cpu_2d else (at + 1) / 2 * (n - 1)), (n - 1) / 2
        return ((at + 1) * (n / 2) - 0.5 if self.cpu_2d else ((at + 1) * n - 1) / 2), n / 2

    def _apply_padding(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Places outside the field brought inside, as the padding says, and how that turns what changes."""
        turned = torch.ones_like(place)
        if self.padding == REFLECTION:
            place, turned = self._reflect(place)
        if self.padding == ZEROS:
            return place, turned
        last = self.size - 1
        turned = torch.where((place > 0) & (place < last), turned, 0)  # an edge counts as outside
        return place.nan_to_num(self.nan_index).clamp(0, last), turned

    def _reflect(self, place: Tensor) -> tuple[Tensor, Tensor]:
        low, span = (0.0, self.size - 1.0) if self.align_corners else (-0.5, float(self.size))
        if not span:
            return torch.zeros_like(place), torch.zeros_like(place)
        away = (place - low).abs()
        if self.cpu_2d:
            over = away - (away / (2 * span)).trunc() * (2 * span)
            back = over > 2 * span - over
            found = torch.minimum(over, 2 * span - over) + low
        else:
            over = torch.fmod(away, span)
            back = (away / span).floor() % 2 != 0
            found = torch.where(back, span - over + low, over + low)
        return found, torch.where(back ^ (place < low), -1.0, 1.0).to(place.dtype)


def gather_samples(block: Tensor, begins: Sequence[int], taps: Sequence[Sequence[Tap]], nan_outside: bool) -> Tensor:
    """Values at points, `(batch, channels, *points)`, from a block of the field that begins at `begins`.

    `taps` are those of every spatial dim; all cells that are there lie in the block. With `nan_outside`, a weight
    that is no number counts for cells outside the field too.
    """
    if 0 in block.shape[2:]:  # no point looks at the field: all get zeros, but stay in the graph
        block = F.pad(block, [n for length in reversed(block.shape[2:]) for n in (0, int(not length))])
    flat = block.flatten(2)
    points = taps[0][0].cell.shape[1:]
    total: Any = 0
    for chosen in product(*taps):
        index: Any = 0
        there: Any = True
        weight: Any = None
        for tap, begin, length in zip(chosen, begins, block.shape[2:], strict=True):
            index = index * length + (tap.cell - begin).clamp(0, max(length - 1, 0))
            there = there & tap.in_bounds
            weight = tap.weight if weight is None or tap.weight is None else weight * tap.weight
        value = flat.gather(2, index.flatten(1).unsqueeze(1).expand(-1, flat.shape[1], -1))
        absent = ~there.flatten(1).unsqueeze(1)
        value = value.masked_fill(absent, 0)
        if weight is not None:
            value = value * weight.flatten(1).unsqueeze(1)
            value = value if nan_outside else value.masked_fill(absent, 0)
        total = total + value
    return total.unflatten(2, points)


class _WithSlope(torch.autograd.Function):
    """A value that changes with a coordinate at a known rate, however it was computed."""

    apply = function_apply

    @staticmethod
    def forward(ctx, value, coordinate, rate):
        ctx.rate = rate
        return value

    @staticmethod
    def backward(ctx, grad):
        return None, grad * ctx.rate, None
