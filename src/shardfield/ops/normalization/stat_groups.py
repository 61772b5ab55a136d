"""Which elements share a mean and a variance, and which ranks they lie on. Pure, made while planning.

A `StatGrouping` looks at this rank's part of a tensor through `view`, where statistics and parameters broadcast:

    Rows      (rows, elements)      a mean for each row                 layer_norm, rms_norm
    Batch     (N, C, ...)           a mean for each channel             batch_norm
    Instances (N, C, ...)           for each channel of each sample     instance_norm
    Groups    (N, C, ...)           for each run of channels            group_norm

`stat_sums` adds up what shares a statistic, `expand_stat` lays statistics out again where they broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...layout import DimSharding, Layout, Span, starts
from ..reduction.common import sharding_axes
from .affine_params import match_memory_format


class StatGrouping:
    """What shares statistics, and how many elements of it lie where.

    inner: the dims of the view that are summed to begin with.
    count: how many elements of this rank share a statistic (a tensor where that differs from one to another).
    total: how many do on all ranks.
    axes: the mesh axes, of more than one rank, over which they are spread.
    merges: for each of `axes`, its group and how many elements each coord brings, the earlier axes merged.
    """

    sum_dims: tuple[int, ...]
    # True if a statistic times a parameter is small against the tensor
    stats_are_small = True

    def __init__(self, layout: Layout, dims: Sequence[int], axes: Sequence[int] | None = None):
        self.layout = layout
        self.shape = tuple(layout.local_shape)
        self.axes = sharding_axes(layout, dims) if axes is None else tuple(axes)
        self.dims = tuple(dims)
        self.count: Any = self.element_count(layout.coords)
        self.total = math.prod(layout.shape[d] for d in dims)

    def element_count(self, coords: Sequence[int]) -> Any:
        """How many elements the rank at `coords` has of each statistic."""
        shape = self.layout.local_shape_at(coords)
        return math.prod(shape[d] for d in self.dims)

    def merge_steps(self, device: torch.device) -> list[tuple[ProcessGroup, Tensor]]:
        return [(self.layout.mesh.get_group(a), self._weights(i, device)) for i, a in enumerate(self.axes)]

    def _weights(self, at: int, device: torch.device) -> Tensor:
        """What each coord of the axis at `at` brings, after the axes before it were merged."""
        mesh = self.layout.mesh
        found = []
        for coord in range(mesh.size(self.axes[at])):
            coords = list(self.layout.coords)
            coords[self.axes[at]] = coord
            parts = []
            for earlier in product(*(range(mesh.size(a)) for a in self.axes[:at])):
                for axis, c in zip(self.axes[:at], earlier, strict=True):
                    coords[axis] = c
                parts.append(torch.as_tensor(self.element_count(coords), dtype=torch.float64))
            found.append(torch.stack(parts).sum(0))
        weights = torch.stack(found).to(device)
        return weights.view(-1, *[1] * self.view_ndim) if weights.ndim == 1 else weights

    @property
    def view_ndim(self) -> int:
        """How many dims the view has."""
        return len(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_inner(self, tensor: Tensor) -> Tensor:
        """Sums over `sum_dims`."""
        return tensor.sum(self.sum_dims, keepdim=True) if self.sum_dims else tensor

    def sum_to_stats(self, sums: Tensor) -> Tensor:
        """From sums over `sum_dims` to those of each statistic."""
        return sums

    def stat_sums(self, tensor: Tensor) -> Tensor:
        """Sums of what shares a statistic, on this rank."""
        return self.sum_to_stats(self.sum_inner(tensor))

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        """The tensor as (samples, channels, ...) where a channel is what `sum_dims` sums, if its memory allows it."""
        whole = self.sum_dims and tensor.is_contiguous()
        return tensor.view(1, self.shape[0] * self.shape[1], -1) if whole and tensor.numel() else None

    def grad_sums(self, grad: Tensor, off: Tensor, shift: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Over `sum_dims`, the sums of `grad` and of `grad * (off - shift) * rstd`; statistics are spread already."""
        seen = self.as_channels(grad), self.as_channels(off)
        # on a device the kernel below wants a weight, and torch's own sums are as fast
        if seen[0] is None or seen[1] is None or grad.device.type != "cpu":
            level = self.sum_inner(grad)
            return level, (self.sum_inner(grad * off) - shift * level) * rstd
        grad, off = match_memory_format(*seen), seen[1]
        given = (grad, off, None, None, None, shift.flatten(), rstd.flatten(), True, 0.0, [False, True, True])
        _, slope, level = torch.ops.aten.native_batch_norm_backward(*given)
        return level.view(rstd.shape), slope.view(rstd.shape)

    def moments(self, off: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of what shares a statistic and of its squares, on this rank."""
        shape = [1 if d in self.sum_dims else n for d, n in enumerate(off.shape)]
        level, slope = self.grad_sums(off, off, off.new_zeros(shape), off.new_ones(shape))
        return self.sum_to_stats(level), self.sum_to_stats(slope)

    def expand_stat(self, statistic: Tensor) -> Tensor:
        """A statistic where it broadcasts against the view."""
        return statistic

    def expand_param(self, parameter: Tensor) -> Tensor:
        """A parameter where it broadcasts against the view: one for each channel."""
        return parameter.reshape(-1, *[1] * (self.view_ndim - 2))

    def param_sums(self, sums: Tensor) -> Tensor:
        """Sums for each parameter, from sums over `sum_dims`."""
        return sums.sum(0).reshape(-1)


class RowStats(StatGrouping):
    """The last `number` dims share."""

    sum_dims = (1,)
    stats_are_small = False

    def __init__(self, layout: Layout, number: int):
        dims = range(layout.ndim - number, layout.ndim)
        super().__init__(layout, dims)
        local = layout.local_shape
        self.shape = (math.prod(local[: dims.start]), math.prod(local[dims.start :]))

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape)

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        return tensor.reshape(1, *self.shape) if tensor.numel() else None

    def expand_param(self, parameter: Tensor) -> Tensor:
        return parameter.reshape(-1)


class BatchStats(StatGrouping):
    """All samples and places of a channel share."""

    def __init__(self, layout: Layout):
        self.sum_dims = (0, *range(2, layout.ndim))
        super().__init__(layout, self.sum_dims)

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        return tensor if tensor.numel() else None


class InstanceStats(StatGrouping):
    """All places of a channel of a sample share."""

    def __init__(self, layout: Layout):
        self.sum_dims = tuple(range(2, layout.ndim))
        super().__init__(layout, self.sum_dims)


class GroupStats(StatGrouping):
    """Channels share in runs of `group_size`, which a cut may go through: then every rank has statistics for all
    groups."""

    def __init__(self, layout: Layout, groups: int):
        self.sum_dims = tuple(range(2, layout.ndim))
        self.groups, self.group_size = groups, layout.shape[1] // groups
        places = sharding_axes(layout, self.sum_dims)
        self.splits_groups = any(
            start % self.group_size for start in starts(layout.shard_sizes(1))
        ) and layout.is_sharded(1)
        channels = layout.nontrivial_axes(layout.axes_of(1)) if self.splits_groups else ()
        self.span = layout.span(1)
        self.first = (
            0 if self.splits_groups else self.span.start // self.group_size
        )  # the first group that statistics are of
        self.local_groups = groups if self.splits_groups else (self.span.stop - self.span.start) // self.group_size
        super().__init__(layout, (1, *self.sum_dims), (*places, *channels))
        self.total = self.group_size * math.prod(layout.shape[2:])
        self.runs = list(self._runs())

    def _runs(self):
        """(first channel, one past the last, first group, number of groups) of runs of equal parts of groups."""
        at, (start, stop) = self.span.start, self.span
        while at < stop:
            group = at // self.group_size
            whole = (stop - at) // self.group_size if at % self.group_size == 0 else 0
            end = at + whole * self.group_size if whole else min((group + 1) * self.group_size, stop)
            yield at - start, end - start, group - self.first, max(whole, 1)
            at = end

    def statistics(self) -> Layout:
        """Where a number for each group of each sample lies."""
        (channels,) = self.layout.dims[1]
        if self.splits_groups or not channels.axes:
            cut = DimSharding(self.groups)
        else:
            cut = DimSharding(self.groups, channels.axes, tuple(n // self.group_size for n in channels.shard_sizes))
        return self.layout.with_dims([self.layout.dims[0], (cut,)])

    def element_count(self, coords: Sequence[int]) -> Any:
        shape = self.layout.local_shape_at(coords)
        places = math.prod(shape[d] for d in self.sum_dims)
        if not self.splits_groups:
            return self.group_size * places
        lo, hi = self.layout.span(1, coords)
        spans = [Span(g * self.group_size, (g + 1) * self.group_size) for g in range(self.groups)]
        held = [places * max(0, min(hi, b) - max(lo, a)) for a, b in spans]
        return torch.tensor(held, dtype=torch.float64).view(1, -1, *[1] * len(self.sum_dims))

    def sum_to_stats(self, sums: Tensor) -> Tensor:
        parts = [sums[:, a:b].unflatten(1, (n, -1)).sum(2) for a, b, _, n in self.runs]
        held = torch.cat(parts, 1) if parts else sums[:, :0]
        before = self.runs[0][2] if self.runs else 0
        after = self.local_groups - before - held.shape[1]
        # padded, not put into zeros: where there are no channels the graph must be the other ranks' all the same
        return F.pad(held, [0, 0] * len(self.sum_dims) + [before, after]) if before or after else held

    def expand_stat(self, statistic: Tensor) -> Tensor:
        parts = []
        for a, b, group, n in self.runs:
            part = statistic[:, group : group + n].unsqueeze(2)
            parts.append(part.expand(-1, -1, (b - a) // n, *statistic.shape[2:]).flatten(1, 2))
        return torch.cat(parts, 1) if parts else statistic[:, :0]
