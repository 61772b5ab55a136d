"""The small computations of a sharded norm between its messages: each would be several launches of torch ops.

Rows are channels, of each sample unless samples share a statistic. `group` consecutive rows share a statistic, and row
r has the parameters of channel `r % channels`. All tensors are contiguous, in the order of rows or statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .jit import jit, on_cuda

tl: Any = None  # see jit.py

BLOCK = 256
MAX_REDUCED = 4096  # channels of a group, samples


class Rows(NamedTuple):
    """The rows of a normalization: shapes that broadcast against the input, and their number per statistic.

    `total`: elements of a statistic on all ranks. `shared`: samples share statistics, which are then those of channels.
    """

    stat_shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    stats: int
    rows: int
    channels: int
    group: int
    total: int
    shared: bool


def supports(rows: Rows, values: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether the kernels support these tensors: fp32 values, contiguous parameters."""
    if not on_cuda(values):
        return False
    small = max(rows.group, rows.rows // max(rows.channels, 1)) <= MAX_REDUCED
    given = [p for p in parameters if p is not None]
    ready = values.dtype is torch.float32 and all(p.is_floating_point() and p.is_contiguous() for p in given)
    return small and ready and on_cuda(values, *(p.data for p in given)) and jit(_pack_moments_kernel) is not None


def pack_moments(rows: Rows, center: Tensor, variance: Tensor, count: int) -> Tensor:
    """Return this rank's share of the first and second moments, stacked, in fp64."""
    out = center.new_empty((2, *rows.stat_shape), dtype=torch.float64)
    center, variance = center.contiguous(), variance.contiguous()
    blocks = -(-rows.stats // BLOCK)
    _launch(_pack_moments_kernel, blocks, center, variance, out, rows.stats, count, rows.total, BLOCK=BLOCK)
    return out


def finish_moments(
    rows: Rows, sums: Tensor, center: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Return mean and variance (fp64), center - mean, 1 / std, and the factor and summand of `value - center`."""
    moments = sums.new_empty((2, *rows.stat_shape))
    stats, affine = (center.new_empty((2, *shape)) for shape in (rows.stat_shape, rows.row_shape))
    _launch(
        _finish_moments_kernel, -(-rows.rows // BLOCK), sums, center.contiguous(),
        weight if weight is not None else stats, bias if bias is not None else stats, moments, stats, affine, rows.rows,
        rows.stats, rows.group, rows.channels, eps, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        BLOCK=BLOCK,
    )  # fmt: skip
    return *moments.unbind(), *stats.unbind(), *affine.unbind()


def pack_sums(rows: Rows, level: Tensor, slope: Tensor, shift: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    """Return two sums for each statistic, then, unless these are the same, the gradients of bias and weight."""
    out = level.new_empty(2 * rows.stats + (0 if rows.shared else 2 * rows.channels))
    samples = rows.rows // rows.channels
    _launch(
        _pack_sums_kernel, rows.stats + (0 if rows.shared else rows.channels), level.contiguous(), slope.contiguous(),
        shift, rstd, weight if weight is not None else shift, out, rows.stats, rows.group, rows.channels, samples,
        HAS_WEIGHT=weight is not None and not rows.shared, GROUP=_power(rows.group), SAMPLES=_power(samples),
    )  # fmt: skip
    return out


def spread_sums(rows: Rows, sums: Tensor, shift: Tensor, rstd: Tensor, weight: Tensor | None) -> Sequence[Tensor]:
    """Return the factor of the gradient, the factor of `value - center` and the summand, from sums over all ranks."""
    out = sums.new_empty((3, *rows.row_shape))
    _launch(
        _spread_sums_kernel, -(-rows.rows // BLOCK), sums, shift, rstd, weight if weight is not None else shift, out,
        rows.rows, rows.stats, rows.group, rows.channels, rows.total, HAS_WEIGHT=weight is not None,
        SHARED=rows.shared, BLOCK=BLOCK,
    )  # fmt: skip
    return out.unbind()


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _launch(kernel: Any, programs: int, first: Tensor, *args: Any, **constants: Any) -> None:
    if not first.is_cuda or first.device.index == torch.cuda.current_device():  # the context takes host time
        jit(kernel)[(programs,)](first, *args, **constants)
        return
    with torch.cuda.device(first.device):
        jit(kernel)[(programs,)](first, *args, **constants)


def _pack_moments_kernel(center, variance, out, stats, count, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < stats
    mean = tl.load(center + at, mask=valid, other=0.0).to(tl.float64)
    second = tl.load(variance + at, mask=valid, other=0.0).to(tl.float64) + mean * mean
    tl.store(out + at, mean * count / total, mask=valid)
    tl.store(out + (stats + at), second * count / total, mask=valid)


def _finish_moments_kernel(
    sums, center, weight, bias, moments, out_stats, out_rows, rows, stats, group, channels, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    at, channel = row // group, row % channels
    mean = tl.load(sums + at, mask=valid, other=0.0)
    variance = tl.load(sums + (stats + at), mask=valid, other=0.0) - mean * mean
    variance = tl.where(variance < 0.0, 0.0, variance)  # keeps NaN
    rstd = 1.0 / tl.sqrt(variance + eps)
    shift = tl.load(center + at, mask=valid, other=0.0).to(tl.float64) - mean
    scale = rstd
    if HAS_WEIGHT:
        scale = rstd * tl.load(weight + channel, mask=valid, other=0.0).to(tl.float64)
    offset = shift * scale
    if HAS_BIAS:
        offset = offset + tl.load(bias + channel, mask=valid, other=0.0).to(tl.float64)
    tl.store(out_rows + row, scale.to(tl.float32), mask=valid)
    tl.store(out_rows + (rows + row), offset.to(tl.float32), mask=valid)
    first = valid & (row % group == 0)
    tl.store(moments + at, mean, mask=first)
    tl.store(moments + (stats + at), variance, mask=first)
    tl.store(out_stats + at, shift.to(tl.float32), mask=first)
    tl.store(out_stats + (stats + at), rstd.to(tl.float32), mask=first)


def _pack_sums_kernel(
    level, slope, shift, rstd, weight, out, stats, group, channels, samples,
    HAS_WEIGHT: tl.constexpr, GROUP: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < stats:  # a statistic: sum over the rows of its group
        index = tl.arange(0, GROUP)
        valid = index < group
        row = program * group + index
        of_bias = tl.load(level + row, mask=valid, other=0.0)
        off = tl.load(slope + row, mask=valid, other=0.0)
        of_weight = (off + of_bias * tl.load(shift + program)) * tl.load(rstd + program)
        if HAS_WEIGHT:
            by = tl.load(weight + row % channels, mask=valid, other=0.0).to(tl.float32)
            of_bias, of_weight = of_bias * by, of_weight * by
        tl.store(out + program, tl.sum(of_bias, 0))
        tl.store(out + (stats + program), tl.sum(of_weight, 0))
    else:  # a channel: sum over the samples. No name of the other branch, whose blocks have another shape.
        channel = program - stats
        sample = tl.arange(0, SAMPLES)
        used = sample < samples
        place = sample * channels + channel
        grad = tl.load(level + place, mask=used, other=0.0)
        near = tl.load(shift + place // group, mask=used, other=0.0)
        value = tl.load(slope + place, mask=used, other=0.0) + grad * near
        value = value * tl.load(rstd + place // group, mask=used, other=0.0)
        tl.store(out + (2 * stats + channel), tl.sum(grad, 0))
        tl.store(out + (2 * stats + channels + channel), tl.sum(value, 0))


def _spread_sums_kernel(
    sums, shift, rstd, weight, out, rows, stats, group, channels, total,
    HAS_WEIGHT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    at = row // group
    inverse = tl.load(rstd + at, mask=valid, other=0.0)
    scale = inverse
    if HAS_WEIGHT:
        scale = inverse * tl.load(weight + row % channels, mask=valid, other=0.0).to(tl.float32)
    by = inverse
    if SHARED:  # the sums are without the weight
        by = scale
    by = by / total
    slope = tl.load(sums + (stats + at), mask=valid, other=0.0) * inverse * by
    level = tl.load(sums + at, mask=valid, other=0.0) * by
    near = tl.load(shift + at, mask=valid, other=0.0)
    tl.store(out + row, scale, mask=valid)
    tl.store(out + (rows + row), -slope, mask=valid)
    tl.store(out + (2 * rows + row), -level - slope * near, mask=valid)
