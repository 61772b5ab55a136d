"""The kernels of a sharded norm: three launches forward and three backward, with a message between the last two.

The values of a rank are rows of `length` contiguous elements, one row for each channel of each sample. A program takes
one chunk of a row. Chunks are summed to statistics by a second kernel, always in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .jit import Launch, jit, on_cuda

tl: Any = None  # see jit.py

CHUNK = 2048  # elements of a row per program
PARTS = 256  # chunks that are added at once
DTYPES = frozenset([torch.float16, torch.bfloat16, torch.float32])


class Rows(NamedTuple):
    """The rows of a rank: row r is channel `r % channels` of a sample.

    `group`: consecutive rows that share a statistic. `shared`: instead, all samples of a channel do. `total`: elements
    of a statistic on all ranks.
    """

    samples: int
    channels: int
    length: int
    group: int
    total: int
    shared: bool

    @property
    def stats(self) -> int:
        """The number of statistics."""
        return self.channels if self.shared else self.samples * self.channels // self.group


def on_device(values: Tensor) -> bool:
    """Return whether other ranks may use the kernels, whose messages this rank must send without them too."""
    return values.device.type == "cuda"


def supports(values: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether the kernels support these tensors: contiguous, not in double precision."""
    if not values.is_cuda or not on_cuda(values) or values.dtype not in DTYPES or not values.is_contiguous():
        return False
    for p in parameters:
        if p is not None and not (p.is_cuda and p.is_floating_point() and p.is_contiguous() and not p.is_neg()):
            return False
    return jit(_moments_kernel) is not None


class NormKernels:
    """The launches of one norm."""

    def __init__(self, rows: Rows, eps: float, has_weight: bool, has_bias: bool):
        self.rows = rows
        self.chunks = -(-rows.length // CHUNK)
        programs = self.programs = rows.samples * rows.channels * self.chunks
        self.stats = stats = rows.stats
        block = min(CHUNK, max(_power(rows.length), 128))
        # The chunks of a statistic are `segments` runs of `width`, `stride` apart.
        segments, width = (rows.samples, self.chunks) if rows.shared else (1, rows.group * self.chunks)
        stride = rows.channels * self.chunks
        parts = min(PARTS, _power(max(segments * width, rows.samples * self.chunks)))
        place = stats, rows.length, self.chunks, rows.group, rows.channels
        weighted: dict[str, Any] = {"HAS_WEIGHT": has_weight}
        chunked: dict[str, Any] = {"SHARED": rows.shared, "BLOCK": block}
        self._moments = Launch(_moments_kernel, (programs,), rows.length, self.chunks, BLOCK=block)
        self._pack_moments = Launch(
            _pack_moments_kernel, (stats,), stats, segments, width, stride, rows.total, BLOCK=parts
        )
        self._normalize = Launch(_normalize_kernel, (programs,), *place, eps, **weighted, HAS_BIAS=has_bias, **chunked)
        self._grad_sums = Launch(_grad_sums_kernel, (programs,), *place, **chunked)
        # If samples share statistics, the sums of a statistic without the weight are the gradients of its parameters.
        self.sums = 2 * stats + (0 if rows.shared else 2 * rows.channels)
        self._pack_sums = Launch(
            _pack_sums_kernel, (self.sums // 2,), stats, rows.samples, self.chunks, rows.group, rows.channels, segments,
            width, stride, HAS_WEIGHT=has_weight and not rows.shared, BLOCK=parts,
        )  # fmt: skip
        self._grad_input = Launch(_grad_input_kernel, (programs,), *place, rows.total, **weighted, **chunked)

    def moments(self, values: Tensor) -> Tensor:
        """Return this rank's share of the first and second moments of each statistic, in fp64."""
        parts, out = (values.new_empty(n, dtype=torch.float64) for n in (2 * self.programs, 2 * self.stats))
        self._moments(values, parts)
        self._pack_moments(parts, out)
        return out

    def normalize(
        self, values: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the result to `out`. Return the variances (fp64), and what backward needs of the statistics (fp32)."""
        variance, table = moments.new_empty(self.stats), values.new_empty(3 * self.stats, dtype=torch.float32)
        parameters = (moments if p is None else p for p in (weight, bias))
        self._normalize(values, moments, *parameters, out, table, variance)
        return variance, table

    def grad_sums(self, values: Tensor, grad: Tensor, table: Tensor, weight: Tensor | None) -> Tensor:
        """Return two sums for each statistic, then, unless these are the same, the gradients of bias and weight."""
        parts, out = table.new_empty(2 * self.programs), table.new_empty(self.sums)
        self._grad_sums(values, grad, table, parts)
        self._pack_sums(parts, table, table if weight is None else weight, out)
        return out

    def grad_input(self, values: Tensor, grad: Tensor, table: Tensor, sums: Tensor, weight: Tensor | None) -> Tensor:
        """Return the gradient of the values, from sums over all ranks."""
        out = torch.empty_like(values)
        self._grad_input(values, grad, table, sums, table if weight is None else weight, out)
        return out


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _moments_kernel(values, parts, length, chunks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, first = (program // chunks).to(tl.int64), program % chunks * BLOCK
    index = first + tl.arange(0, BLOCK)
    valid = index < length
    value = tl.load(values + (row * length + index), mask=valid, other=0.0).to(tl.float32)
    count = tl.minimum(length - first, BLOCK)
    mean = tl.sum(value, 0) / count
    off = tl.where(valid, value - mean, 0.0)  # from the mean of the chunk: squares keep their digits
    center, rest = mean.to(tl.float64), tl.sum(off, 0).to(tl.float64)
    squares = tl.sum(off * off, 0).to(tl.float64)
    tl.store(parts + 2 * program, center * count + rest)
    tl.store(parts + (2 * program + 1), squares + center * (center * count + 2 * rest))


def _pack_moments_kernel(parts, out, stats, segments, width, stride, total, BLOCK: tl.constexpr):
    stat = tl.program_id(0)
    first, second = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(0, segments * width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        valid = index < segments * width
        place = 2 * (index // width * stride + stat * width + index % width)
        first += tl.load(parts + place, mask=valid, other=0.0)
        second += tl.load(parts + (place + 1), mask=valid, other=0.0)
    tl.store(out + stat, tl.sum(first, 0) / total)
    tl.store(out + (stats + stat), tl.sum(second, 0) / total)


def _normalize_kernel(
    values, moments, weight, bias, out, table, variances, stats, length, chunks, group, channels, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, first = program // chunks, program % chunks * BLOCK
    stat = row // group
    if SHARED:
        stat = row % channels
    mean = tl.load(moments + stat)
    variance = tl.load(moments + (stats + stat)) - mean * mean
    variance = tl.where(variance < 0.0, 0.0, variance)  # keeps NaN
    rstd = 1.0 / tl.sqrt(variance + eps)
    center = mean.to(tl.float32)
    shift = center.to(tl.float64) - mean  # small, so it keeps its digits
    scale = rstd
    if HAS_WEIGHT:
        scale = rstd * tl.load(weight + row % channels).to(tl.float64)
    offset = shift * scale
    if HAS_BIAS:
        offset = offset + tl.load(bias + row % channels).to(tl.float64)
    if first == 0:  # all rows of a statistic store the same numbers
        tl.store(variances + stat, variance)
        tl.store(table + stat, center)
        tl.store(table + (stats + stat), shift.to(tl.float32))
        tl.store(table + (2 * stats + stat), rstd.to(tl.float32))
    index = first + tl.arange(0, BLOCK)
    valid = index < length
    place = row.to(tl.int64) * length + index
    value = tl.load(values + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + place, (value - center) * scale.to(tl.float32) + offset.to(tl.float32), mask=valid)


def _grad_sums_kernel(
    values, grad, table, parts, stats, length, chunks, group, channels, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, first = program // chunks, program % chunks * BLOCK
    stat = row // group
    if SHARED:
        stat = row % channels
    index = first + tl.arange(0, BLOCK)
    valid = index < length
    place = row.to(tl.int64) * length + index
    off = tl.load(values + place, mask=valid, other=0.0).to(tl.float32) - tl.load(table + stat)
    level = tl.load(grad + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(parts + 2 * program, tl.sum(level, 0))
    tl.store(parts + (2 * program + 1), tl.sum(level * off, 0))


def _pack_sums_kernel(
    parts, table, weight, out, stats, samples, chunks, group, channels, segments, width, stride,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first, second = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if program < stats:  # a statistic: the sum over its rows, times the weight
        for start in range(0, segments * width, BLOCK):
            index = start + tl.arange(0, BLOCK)
            valid = index < segments * width
            place = index // width * stride + program * width + index % width
            level = tl.load(parts + 2 * place, mask=valid, other=0.0)
            slope = tl.load(parts + (2 * place + 1), mask=valid, other=0.0)
            if HAS_WEIGHT:
                by = tl.load(weight + place // chunks % channels, mask=valid, other=0.0).to(tl.float32)
                level, slope = level * by, slope * by
            first += level
            second += slope
        of_bias = tl.sum(first, 0)
        of_weight = tl.sum(second, 0) + of_bias * tl.load(table + (stats + program))
        tl.store(out + program, of_bias)
        tl.store(out + (stats + program), of_weight * tl.load(table + (2 * stats + program)))
    else:  # a channel: the sum over the samples
        channel = program - stats
        for begin in range(0, samples * chunks, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            used = at < samples * chunks
            row = at // chunks * channels + channel
            here = row * chunks + at % chunks
            given = tl.load(parts + 2 * here, mask=used, other=0.0)
            off = tl.load(parts + (2 * here + 1), mask=used, other=0.0)
            off += given * tl.load(table + (stats + row // group), mask=used, other=0.0)
            first += given
            second += off * tl.load(table + (2 * stats + row // group), mask=used, other=0.0)
        tl.store(out + (2 * stats + channel), tl.sum(first, 0))
        tl.store(out + (2 * stats + channels + channel), tl.sum(second, 0))


def _grad_input_kernel(
    values, grad, table, sums, weight, out, stats, length, chunks, group, channels, total,
    HAS_WEIGHT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, first = program // chunks, program % chunks * BLOCK
    stat = row // group
    if SHARED:
        stat = row % channels
    inverse = tl.load(table + (2 * stats + stat))
    scale = inverse
    if HAS_WEIGHT:
        scale = inverse * tl.load(weight + row % channels).to(tl.float32)
    by = inverse
    if SHARED:  # the sums are without the weight
        by = scale
    by = by / total
    slope = tl.load(sums + (stats + stat)) * inverse * by
    level = tl.load(sums + stat) * by + slope * tl.load(table + (stats + stat))
    index = first + tl.arange(0, BLOCK)
    valid = index < length
    place = row.to(tl.int64) * length + index
    off = tl.load(values + place, mask=valid, other=0.0).to(tl.float32) - tl.load(table + stat)
    given = tl.load(grad + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + place, given * scale - off * slope - level, mask=valid)
