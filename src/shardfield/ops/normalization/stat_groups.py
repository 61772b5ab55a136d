"""Groups of elements that share a mean and a variance, and the ranks that hold them. Pure, made while planning.

A `StatGrouping` has a `view` of the local tensor against which statistics and parameters broadcast:

    RowStats      (rows, elements)      one mean per row                    layer_norm, rms_norm
    BatchStats    (N, C, ...)           one mean per channel                batch_norm
    InstanceStats (N, C, ...)           one per channel of each sample      instance_norm
    GroupStats    (N, C, ...)           one per group of channels           group_norm

`stat_sums` sums the elements that share a statistic; `expand_stat` expands statistics to broadcast against the view.
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
    """The elements that share a statistic, and how many of them each rank holds.

    sum_dims: the dims of the view that are summed first.
    count: elements of this rank per statistic (a tensor if the statistics differ in it).
    total: elements of all ranks per statistic.
    axes: the mesh axes, of more than one rank, that shard these elements.
    merge_steps: for each of `axes`, its group and the element count of each coord, with the earlier axes merged.
    """

    sum_dims: tuple[int, ...]
    # True if the product of a statistic and a parameter is much smaller than the tensor
    stats_are_small = True

    def __init__(self, layout: Layout, dims: Sequence[int], axes: Sequence[int] | None = None):
        self.layout = layout
        self.shape = tuple(layout.local_shape)
        self.axes = sharding_axes(layout, dims) if axes is None else tuple(axes)
        self.dims = tuple(dims)
        self.count: Any = self.element_count(layout.coords)
        self.total = math.prod(layout.shape[d] for d in dims)

    def element_count(self, coords: Sequence[int]) -> Any:
        """Return the element count per statistic of the rank at `coords`."""
        shape = self.layout.local_shape_at(coords)
        return math.prod(shape[d] for d in self.dims)

    def merge_steps(self, device: torch.device) -> list[tuple[ProcessGroup, Tensor]]:
        return [(self.layout.mesh.get_group(a), self._weights(i, device)) for i, a in enumerate(self.axes)]

    def _weights(self, at: int, device: torch.device) -> Tensor:
        """Return the element count of each coord of axis number `at`, with the earlier axes merged."""
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
        """The number of dims of the view."""
        return len(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_inner(self, tensor: Tensor) -> Tensor:
        """Sum over `sum_dims`."""
        return tensor.sum(self.sum_dims, keepdim=True) if self.sum_dims else tensor

    def sum_to_stats(self, sums: Tensor) -> Tensor:
        """Reduce sums over `sum_dims` to one sum per statistic."""
        return sums

    def stat_sums(self, tensor: Tensor) -> Tensor:
        """Return this rank's sum per statistic."""
        return self.sum_to_stats(self.sum_inner(tensor))

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        """View the tensor as (samples, channels, ...) with one channel per sum over `sum_dims`; None if impossible."""
        contiguous = self.sum_dims and tensor.is_contiguous()
        return tensor.view(1, self.shape[0] * self.shape[1], -1) if contiguous and tensor.numel() else None

    def grad_sums(self, grad: Tensor, off: Tensor, shift: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of `grad` and of `grad * (off - shift) * rstd` over `sum_dims`; statistics are expanded."""
        views = self.as_channels(grad), self.as_channels(off)
        # On other devices the kernel below needs a weight, and torch's sums are as fast.
        if views[0] is None or views[1] is None or grad.device.type != "cpu":
            level = self.sum_inner(grad)
            return level, (self.sum_inner(grad * off) - shift * level) * rstd
        grad, off = match_memory_format(*views), views[1]
        args = (grad, off, None, None, None, shift.flatten(), rstd.flatten(), True, 0.0, [False, True, True])
        _, slope, level = torch.ops.aten.native_batch_norm_backward(*args)
        return level.view(rstd.shape), slope.view(rstd.shape)

    def moments(self, off: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's sum and sum of squares per statistic."""
        shape = [1 if d in self.sum_dims else n for d, n in enumerate(off.shape)]
        level, slope = self.grad_sums(off, off, off.new_zeros(shape), off.new_ones(shape))
        return self.sum_to_stats(level), self.sum_to_stats(slope)

    def expand_stat(self, statistic: Tensor) -> Tensor:
        """Expand a statistic to broadcast against the view."""
        return statistic

    def expand_param(self, parameter: Tensor) -> Tensor:
        """Reshape a parameter, one element per channel, to broadcast against the view."""
        return parameter.reshape(-1, *[1] * (self.view_ndim - 2))

    def param_sums(self, sums: Tensor) -> Tensor:
        """Reduce sums over `sum_dims` to one sum per parameter."""
        return sums.sum(0).reshape(-1)


class RowStats(StatGrouping):
    """One statistic per row of the last `number` dims."""

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
    """One statistic per channel, over all samples and spatial dims."""

    def __init__(self, layout: Layout):
        self.sum_dims = (0, *range(2, layout.ndim))
        super().__init__(layout, self.sum_dims)

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        return tensor if tensor.numel() else None


class InstanceStats(StatGrouping):
    """One statistic per channel of each sample, over the spatial dims."""

    def __init__(self, layout: Layout):
        self.sum_dims = tuple(range(2, layout.ndim))
        super().__init__(layout, self.sum_dims)


class GroupStats(StatGrouping):
    """One statistic per `group_size` channels of each sample.

    If a group is split between ranks (`splits_groups`), every rank has statistics of all groups.
    """

    def __init__(self, layout: Layout, groups: int):
        self.sum_dims = tuple(range(2, layout.ndim))
        self.groups, self.group_size = groups, layout.shape[1] // groups
        places = sharding_axes(layout, self.sum_dims)
        self.splits_groups = any(
            start % self.group_size for start in starts(layout.shard_sizes(1))
        ) and layout.is_sharded(1)
        channels = layout.nontrivial_axes(layout.axes_of(1)) if self.splits_groups else ()
        self.span = layout.span(1)
        # the first group that this rank has statistics of
        self.first = 0 if self.splits_groups else self.span.start // self.group_size
        self.local_groups = groups if self.splits_groups else (self.span.stop - self.span.start) // self.group_size
        super().__init__(layout, (1, *self.sum_dims), (*places, *channels))
        self.total = self.group_size * math.prod(layout.shape[2:])
        self.runs = list(self._runs())

    def _runs(self):
        """Yield (first channel, one past the last, first group, group count) of full groups or of one partial group."""
        at, (start, stop) = self.span.start, self.span
        while at < stop:
            group = at // self.group_size
            full = (stop - at) // self.group_size if at % self.group_size == 0 else 0
            end = at + full * self.group_size if full else min((group + 1) * self.group_size, stop)
            yield at - start, end - start, group - self.first, max(full, 1)
            at = end

    def statistics(self) -> Layout:
        """Return the layout of one number per group of each sample."""
        (channels,) = self.layout.dims[1]
        if self.splits_groups or not channels.axes:
            groups = DimSharding(self.groups)
        else:
            groups = DimSharding(self.groups, channels.axes, tuple(n // self.group_size for n in channels.shard_sizes))
        return self.layout.with_dims([self.layout.dims[0], (groups,)])

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
        # Padded, not copied into zeros: a rank without channels must have the same graph as the others, so that it
        # sends the messages of backward.
        return F.pad(held, [0, 0] * len(self.sum_dims) + [before, after]) if before or after else held

    def expand_stat(self, statistic: Tensor) -> Tensor:
        parts = []
        for a, b, group, n in self.runs:
            part = statistic[:, group : group + n].unsqueeze(2)
            parts.append(part.expand(-1, -1, (b - a) // n, *statistic.shape[2:]).flatten(1, 2))
        return torch.cat(parts, 1) if parts else statistic[:, :0]
