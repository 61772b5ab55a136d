"""A sharded normalization on a CPU by torch's batch norm kernels: few calls, and few passes over the block.

Every statistic is a channel of some view of the block: of itself (batch norm), samples x channels (instance norm),
samples x groups (group norm). `batch_norm_update_stats` computes mean and variance of this rank's elements, the ranks
merge them, and batch norm in evaluation mode applies the merged ones. Its backward returns the scaled gradient and the
sums of each channel. The terms of the statistics are again a batch norm in evaluation mode, with the sums of all ranks
as its parameters.

A rank whose block is empty or not contiguous computes without these kernels. Its messages are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import runtime
from .stat_groups import StatGrouping

if TYPE_CHECKING:
    from .sharded_norm import ShardedNorm


def viewed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor if tensor.shape == shape else tensor.view(shape)


class BatchNormKernels:
    """The views and the small computations of one planned norm.

    A row is a channel of a sample (of all samples, for batch norm): the elements that share weight and bias. `group`
    rows share a statistic.
    """

    def __init__(self, norm: ShardedNorm):
        scheme: StatGrouping = norm.scheme
        rows = scheme.kernel_rows
        self.norm, self.scheme, self.eps = norm, scheme, norm.eps
        self.is_planned = norm.centered and rows is not None and not scheme.is_empty
        if rows is None or scheme.is_empty:
            return
        self.group, self.samples, self.shared = rows.group, rows.rows // rows.channels, rows.shared
        self.stat_shape = rows.stat_shape
        self.stat_of_row = torch.arange(rows.rows) // rows.group
        block = tuple(scheme.layout.local_shape)
        width = math.prod(block) // rows.rows
        self.row_view = block if rows.shared or self.samples == 1 else (1, rows.rows, width)
        self.stat_view = self.row_view if rows.group == 1 else (1, rows.stats, width * rows.group)
        self.moment_dims = (0, *range(2, len(self.stat_view)))

    def supports(self, block: Tensor) -> bool:
        """Return whether the kernels run: eagerly, on a contiguous block of a CPU."""
        if not self.is_planned or block.device.type != "cpu" or not block.is_contiguous():
            return False
        return runtime.active.tracer is None and not runtime.active.fake_tensors

    def per_row(self, parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return a parameter, one element per channel, with one element per row."""
        if parameter is None:
            return None
        parameter = parameter if parameter.dtype is dtype else parameter.to(dtype)
        return parameter if self.samples == 1 else parameter.repeat(self.samples)

    def centered(self, block: Tensor, center: Tensor | None) -> Tensor:
        """Return the block minus a value near the mean of each statistic: small differences keep their digits."""
        block = viewed(block, self.stat_view)
        return block if center is None else block - center

    def merge_ranks(self, mean: Tensor, variance: Tensor, wide: bool) -> Tensor:
        """Return mean and variance of the elements of all ranks, stacked, in fp64 (see `sharded_norm`)."""
        share = self.scheme.count / self.scheme.total
        if wide:
            total = self.norm.sum_over_ranks(mean * share)
            distance = mean - total
            return torch.stack([total, self.norm.sum_over_ranks(torch.addcmul(variance, distance, distance) * share)])
        both = self.norm.sum_over_ranks(torch.cat([mean, torch.addcmul(variance, mean, mean)]).mul_(share)).view(2, -1)
        mean, second = both.unbind()
        second.addcmul_(mean, mean, value=-1).clamp_min_(0)
        return both

    def apply(self, block: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor) -> Tensor:
        """Return (block - mean) / std * weight + bias, with one element of each per channel."""
        return torch.batch_norm(block, weight, bias, mean, var, False, 0.0, self.eps, False)

    def forward(self, ctx: Any, input: Tensor, block: Tensor, weight: Tensor | None, bias: Tensor | None):
        """Return the normalized block, and the global mean and variance, stacked, in fp64."""
        dtype = block.dtype
        wide = dtype is torch.float64
        center = None if wide else viewed(block, self.stat_view).mean(self.moment_dims, True)
        off = self.centered(block, center)
        mean, variance = torch.batch_norm_update_stats(off, None, None, 0.0)
        if center is None:
            stats = both = self.merge_ranks(mean, variance, wide)
        else:
            origin = center.view(-1).double()
            both = self.merge_ranks(mean + origin, variance, wide)
            mean, variance = both.unbind()
            stats = torch.stack([mean - origin, variance]).to(dtype)
        mean, variance = of_stats = stats.unbind()
        if self.group > 1:
            mean, variance = stats.index_select(1, self.stat_of_row).unbind()
        ctx.save_for_backward(input, weight, center, *of_stats, mean, variance)
        weight, bias = self.per_row(weight, dtype), self.per_row(bias, dtype)
        return self.apply(viewed(off, self.row_view), weight, bias, mean, variance), both

    def backward(
        self, block: Tensor, grad: Tensor, weight: Tensor | None, saved: Sequence[Any], wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of the block, and of bias and weight, stacked; `wants`: of the block, of parameters."""
        center, stat_mean, stat_variance, mean, variance = saved
        off = self.centered(block, center)
        weight = self.per_row(weight, block.dtype)
        grad = viewed(grad.contiguous(), self.row_view)
        scaled, slope, level = torch.ops.aten.native_batch_norm_backward(
            grad, viewed(off, self.row_view), weight, mean, variance, None, None, False, self.eps,
            [wants[0], True, True],
        )  # fmt: skip
        sums = params = torch.stack([level, slope])
        if not self.shared:
            params = sums if self.samples == 1 else sums.view(2, self.samples, -1).sum(1)
            sums = sums.clone() if weight is None else sums * weight  # ranks sum it in place, apart from `params`
            sums = sums if self.group == 1 else sums.view(2, -1, self.group).sum(2)
        sums, params = self.norm.all_reduce_sums(sums, params, *wants)
        if not wants[0]:
            return None, params
        factor = (stat_variance + self.eps).rsqrt_().mul_(-1 / self.scheme.total)
        if self.shared and weight is not None:
            factor.mul_(weight)
        level, slope = (sums * factor).unbind()
        by_stats = self.apply(off, slope, level, stat_mean, stat_variance)
        viewed(scaled, self.stat_view).add_(by_stats)
        return scaled, params
