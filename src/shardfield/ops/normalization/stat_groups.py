"""Groups of elements that share a mean and a variance, and the ranks that hold them. Pure, made while planning.

A `StatGrouping` has a `view` of the local tensor against which statistics and parameters broadcast:

    RowStats         (rows, elements)                     one mean per row                 layer_norm, rms_norm
    BatchStats       (N, C, ...)                          one mean per channel             batch_norm
    InstanceStats    (N, C, ...)                          one per channel of each sample   instance_norm
    GroupStats       (N, groups, channels per group, ...) one per group of each sample     group_norm
    SplitGroupStats  (N, C, ...)                          the same, of groups that are split between ranks

Sums are taken over `sum_dims`, which leaves one number per parameter (and sample), and from there to one number per
statistic (`sum_to_stats`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import DimSharding, Layout, starts
from ...triton_kernels.norm import Rows
from ..reduction.common import sharding_axes

SMALL = 2048  # elements of a block on a CPU for which the cost of a call exceeds that of its work


class StatGrouping:
    """The elements that share a statistic, and how many of them there are.

    kernel_rows: the rows that share statistics, for `triton_kernels.norm`; None if it does not support them.
    sum_dims: the dims of the view that are summed first.
    moment_dims: the dims of the view over which a rank computes moments.
    stat_shape: the shape of statistics over `moment_dims`.
    total: elements of all ranks per statistic.
    axes: the mesh axes, of more than one rank, that shard these elements.
    count: elements of this rank over `moment_dims`.
    """

    sum_dims: tuple[int, ...]
    moment_dims: tuple[int, ...]

    def __init__(self, layout: Layout, total: int, axes: Sequence[int]):
        self.layout, self.total, self.axes = layout, total, tuple(axes)
        self.shape = self.view_shape(tuple(layout.local_shape))
        self.count = math.prod(self.shape[d] for d in self.moment_dims)
        self.is_empty = 0 in layout.local_shape
        self.stat_shape = torch.Size(1 if d in self.moment_dims else n for d, n in enumerate(self.shape))
        self.param_shape = self.shape[1], *[1] * (len(self.shape) - 2)
        self.kernel_rows: Rows | None = None

    def _rows(self, group: int = 1, shared: bool = False) -> Rows:
        samples, channels, *inner = self.layout.local_shape
        return Rows(samples, channels, math.prod(inner), group, self.total, shared)

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the view of a tensor of this shape."""
        return shape

    def view(self, tensor: Tensor) -> Tensor:
        return tensor

    def moments(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a center near the mean over `moment_dims`, `v` minus it, the mean in fp64, and the variance.

        The mean is the center plus the center's rounding error: without it, deviations from a mean of 1000 that is
        rounded to fp32 would have only four digits.
        """
        dims = self.moment_dims
        if not dims or self.is_empty:
            center = v if v.numel() else v.new_zeros([1 if d in dims else n for d, n in enumerate(v.shape)])
            return center, v - center, center.double(), torch.zeros_like(center, dtype=torch.float64)
        if v.device.type != "cpu":  # one launch; its mean is as accurate as those of torch's norms there
            variance, center = torch.var_mean(v, dims, correction=0, keepdim=True)
            return center, v - center, center.double(), variance.double()
        if v.numel() <= SMALL:
            variance, mean = torch.var_mean(v.double(), dims, correction=0, keepdim=True)
            center = mean.to(v.dtype)
            return center, v - center, mean, variance
        center = v.mean(dims, True)
        off = v - center
        error, squares = off.mean(dims, True), (off * off).mean(dims, True)
        return center, off, center.double() + error, torch.addcmul(squares, error, error, value=-1)

    def merge(self, moments: Tensor) -> Tensor:
        """Sum moments, stacked along a new first dim, to one number per statistic."""
        return moments

    def sum_inner(self, tensor: Tensor) -> Tensor:
        """Sum over `sum_dims`."""
        return tensor.sum(self.sum_dims, keepdim=True) if self.sum_dims else tensor

    def sum_to_stats(self, sums: Tensor) -> Tensor:
        """Reduce sums over `sum_dims`, stacked along a new first dim, to one number per statistic."""
        return sums

    def expand_stat(self, statistic: Tensor) -> Tensor:
        """Expand a statistic to broadcast against the view."""
        return statistic

    def expand_param(self, parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Reshape a parameter, one element per channel, to broadcast against the view."""
        if parameter is None:
            return None
        expanded = parameter.reshape(self.param_shape)
        return expanded if expanded.dtype is dtype else expanded.to(dtype)


class RowStats(StatGrouping):
    """One statistic per row of the last `number` dims."""

    sum_dims = moment_dims = (1,)

    def __init__(self, layout: Layout, number: int):
        self.first = layout.ndim - number
        dims = range(self.first, layout.ndim)
        super().__init__(layout, math.prod(layout.shape[d] for d in dims), sharding_axes(layout, dims))
        self.param_shape = self.shape[1:]

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return math.prod(shape[: self.first]), math.prod(shape[self.first :])

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape)


class BatchStats(StatGrouping):
    """One statistic per channel, over all samples and spatial dims."""

    def __init__(self, layout: Layout):
        self.sum_dims = self.moment_dims = (0, *range(2, layout.ndim))
        total = math.prod(layout.shape[d] for d in self.sum_dims)
        super().__init__(layout, total, sharding_axes(layout, self.sum_dims))
        self.kernel_rows = self._rows(shared=True)


class InstanceStats(StatGrouping):
    """One statistic per channel of each sample, over the spatial dims."""

    def __init__(self, layout: Layout):
        self.sum_dims = self.moment_dims = tuple(range(2, layout.ndim))
        super().__init__(layout, math.prod(layout.shape[2:]), sharding_axes(layout, self.sum_dims))
        self.kernel_rows = self._rows()


def group_stats(layout: Layout, groups: int) -> GroupStats | SplitGroupStats:
    """Return the grouping of group_norm: whether ranks share groups depends on the sharding of the channels."""
    size = layout.shape[1] // groups
    split = layout.is_sharded(1) and any(start % size for start in starts(layout.shard_sizes(1)))
    return (SplitGroupStats if split else GroupStats)(layout, groups)


class GroupStats(StatGrouping):
    """One statistic per group of channels of each sample; every group is on one rank or sharded along spatial dims."""

    def __init__(self, layout: Layout, groups: int):
        self.groups, self.group_size = groups, layout.shape[1] // groups
        self.local_groups = layout.local_shape[1] // self.group_size
        self.sum_dims, self.moment_dims = tuple(range(3, layout.ndim + 1)), tuple(range(2, layout.ndim + 1))
        places = sharding_axes(layout, range(2, layout.ndim))
        super().__init__(layout, self.group_size * math.prod(layout.shape[2:]), places)
        self.param_shape = self.local_groups, self.group_size, *[1] * len(self.sum_dims)
        self.kernel_rows = self._rows(self.group_size)

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], self.local_groups, self.group_size, *shape[2:]

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.shape)  # splits a dim: possible for any strides

    def statistics(self) -> Layout:
        """Return the layout of one number per group of each sample."""
        (channels,) = self.layout.dims[1]
        groups = DimSharding(self.groups)
        if channels.axes:
            groups = DimSharding(self.groups, channels.axes, tuple(n // self.group_size for n in channels.shard_sizes))
        return self.layout.with_dims([self.layout.dims[0], (groups,)])

    def sum_to_stats(self, sums: Tensor) -> Tensor:
        return sums.sum(3, keepdim=True)


class SplitGroupStats(StatGrouping):
    """One statistic per group of channels of each sample; every rank has the statistics of all groups."""

    def __init__(self, layout: Layout, groups: int):
        self.groups, self.group_size = groups, layout.shape[1] // groups
        self.sum_dims = self.moment_dims = tuple(range(2, layout.ndim))
        channels = layout.nontrivial_axes(layout.axes_of(1))
        axes = (*sharding_axes(layout, self.sum_dims), *channels)
        super().__init__(layout, self.group_size * math.prod(layout.shape[2:]), axes)
        start, stop = layout.span(1)
        self.group_of = torch.arange(start, stop) // self.group_size  # of each channel of this rank

    def statistics(self) -> Layout:
        """Return the layout of one number per group of each sample."""
        return self.layout.with_dims([self.layout.dims[0], (DimSharding(self.groups),)])

    def sum_to_stats(self, sums: Tensor) -> Tensor:
        """Sum over the channels of each group. A rank without channels has the same graph as the others."""
        shape = (*sums.shape[:2], self.groups, *sums.shape[3:])
        return sums.new_zeros(shape).index_add(2, self.group_of.to(sums.device), sums)

    def merge(self, moments: Tensor) -> Tensor:
        return self.sum_to_stats(moments)

    def expand_stat(self, statistic: Tensor) -> Tensor:
        return statistic.index_select(1, self.group_of.to(statistic.device))
