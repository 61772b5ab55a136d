"""`grid_sampler` on a local block of the field, composed of gathers.

torch's kernel needs the full field. Here coordinates are converted to global cell indices and weights, in the kernel's
own arithmetic, and the cells are gathered from a block that contains them. Every step is differentiable, also twice.
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
    """One cell along a dim for every point: its global index, whether it is in the field, and its weight."""

    cell: Tensor
    in_bounds: Tensor
    weight: Tensor | None


class GridAxis(NamedTuple):
    """Map of coordinates in [-1, 1] to a dim of `size` cells.

    cpu_2d: use the arithmetic of torch's 2-D CPU kernel; the other kernels round differently and skip cells outside.
    nan_index: the cell of a NaN coordinate, if the padding mode moves points into the field.
    """

    size: int
    mode: int
    padding: int
    align_corners: bool
    cpu_2d: bool
    nan_index: int

    def taps(self, coordinate: Tensor) -> list[Tap]:
        """Return the cells that points read."""
        position, slope = self._unnormalize(coordinate)
        if self.mode == BICUBIC:
            low = position.detach().floor()
            fraction = _WithSlope.apply((position.detach() - low), coordinate, slope)
            weights = cubic_weights(fraction, -0.75).unbind(-1)
            return [self._tap(self._apply_padding(low + i - 1)[0], w) for i, w in enumerate(weights)]
        position, sign = self._apply_padding(position)
        if self.mode == NEAREST:
            needs_grad = coordinate.requires_grad and torch.is_grad_enabled()
            weight = _WithSlope.apply(torch.ones_like(position), coordinate, slope * 0) if needs_grad else None
            return [self._tap(position.round(), weight)]
        low = position.floor()
        fraction = _WithSlope.apply(position - low, coordinate, slope * sign)
        return [self._tap(low, 1 - fraction), self._tap(low + 1, fraction)]

    def _tap(self, position: Tensor, weight: Tensor | None) -> Tap:
        in_bounds = (position > -1) & (position < self.size)
        return Tap(position.clamp(0, self.size - 1).nan_to_num(0).long(), in_bounds, weight)

    def _unnormalize(self, coordinate: Tensor) -> tuple[Tensor, float]:
        """Return the positions of coordinates in units of cells, and the derivative of position by coordinate."""
        x, n = coordinate.detach(), self.size
        if self.align_corners:
            return ((x + 1) * ((n - 1) / 2) if self.cpu_2d else (x + 1) / 2 * (n - 1)), (n - 1) / 2
        return ((x + 1) * (n / 2) - 0.5 if self.cpu_2d else ((x + 1) * n - 1) / 2), n / 2

    def _apply_padding(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Move positions outside the field into it by the padding mode; return them and the sign of the derivative."""
        sign = torch.ones_like(position)
        if self.padding == REFLECTION:
            position, sign = self._reflect(position)
        if self.padding == ZEROS:
            return position, sign
        last = self.size - 1
        sign = torch.where((position > 0) & (position < last), sign, 0)  # torch counts the edge as outside
        return position.nan_to_num(self.nan_index).clamp(0, last), sign

    def _reflect(self, position: Tensor) -> tuple[Tensor, Tensor]:
        low, span = (0.0, self.size - 1.0) if self.align_corners else (-0.5, float(self.size))
        if not span:
            return torch.zeros_like(position), torch.zeros_like(position)
        distance = (position - low).abs()
        if self.cpu_2d:
            remainder = distance - (distance / (2 * span)).trunc() * (2 * span)
            reversed_ = remainder > 2 * span - remainder
            reflected = torch.minimum(remainder, 2 * span - remainder) + low
        else:
            remainder = torch.fmod(distance, span)
            reversed_ = (distance / span).floor() % 2 != 0
            reflected = torch.where(reversed_, span - remainder + low, remainder + low)
        return reflected, torch.where(reversed_ ^ (position < low), -1.0, 1.0).to(position.dtype)


def gather_samples(
    block: Tensor, block_start: Sequence[int], taps: Sequence[Sequence[Tap]], nan_outside: bool
) -> Tensor:
    """Return the values at points, `(batch, channels, *points)`, from a block of the field.

    block_start: global index of the first cell of the block.
    taps: the taps of every spatial dim. The block contains all their cells that are in the field.
    nan_outside: a NaN weight of a cell outside the field gives NaN, not 0.
    """
    if 0 in block.shape[2:]:  # no point reads the field: the values are 0, but must stay in the autograd graph
        block = F.pad(block, [n for length in reversed(block.shape[2:]) for n in (0, int(not length))])
    flat = block.flatten(2)
    points = taps[0][0].cell.shape[1:]
    total: Any = 0
    for corner in product(*taps):
        index: Any = 0
        in_bounds: Any = True
        weight: Any = None
        for tap, start, length in zip(corner, block_start, block.shape[2:], strict=True):
            index = index * length + (tap.cell - start).clamp(0, max(length - 1, 0))
            in_bounds = in_bounds & tap.in_bounds
            weight = tap.weight if weight is None or tap.weight is None else weight * tap.weight
        value = flat.gather(2, index.flatten(1).unsqueeze(1).expand(-1, flat.shape[1], -1))
        absent = ~in_bounds.flatten(1).unsqueeze(1)
        value = value.masked_fill(absent, 0)
        if weight is not None:
            value = value * weight.flatten(1).unsqueeze(1)
            value = value if nan_outside else value.masked_fill(absent, 0)
        total = total + value
    return total.unflatten(2, points)


class _WithSlope(torch.autograd.Function):
    """Return `value` with derivative `rate` with respect to `coordinate`, however `value` was computed."""

    apply = function_apply

    @staticmethod
    def forward(ctx, value, coordinate, rate):
        ctx.rate = rate
        return value

    @staticmethod
    def backward(ctx, grad):
        return None, grad * ctx.rate, None
