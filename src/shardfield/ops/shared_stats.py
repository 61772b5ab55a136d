"""Which elements share a mean and a variance, and which ranks they lie on. Pure, made while planning.

A `Scheme` looks at this rank's part of a tensor through `view`, where statistics and parameters broadcast:

    Rows      (rows, elements)      a mean for each row                 layer_norm, rms_norm
    Batch     (N, C, ...)           a mean for each channel             batch_norm
    Instances (N, C, ...)           for each channel of each sample     instance_norm
    Groups    (N, C, ...)           for each run of channels            group_norm

`fold` adds up what shares a statistic, `spread` lays statistics out again where they broadcast.
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

from ..layout import Factor, Layout, Span, starts
from .across import cutting
from .affine import alike


class Scheme:
    """What shares statistics, and how many elements of it lie where.

    inner: the dims of the view that are summed to begin with.
    count: how many elements of this rank share a statistic (a tensor where that differs from one to another).
    total: how many do on all ranks.
    axes: the mesh axes, of more than one rank, over which they are spread.
    merges: for each of `axes`, its group and how many elements each coord brings, the earlier axes merged.
    """

    inner: tuple[int, ...]
    # True if a statistic times a parameter is small against the tensor
    small = True

    def __init__(self, layout: Layout, dims: Sequence[int], axes: Sequence[int] | None = None):
        self.layout = layout
        self.shape = tuple(layout.local_shape)
        self.axes = cutting(layout, dims) if axes is None else tuple(axes)
        self.dims = tuple(dims)
        self.count: Any = self.held(layout.coords)
        self.total = math.prod(layout.shape[d] for d in dims)

    def held(self, coords: Sequence[int]) -> Any:
        """How many elements the rank at `coords` has of each statistic."""
        shape = self.layout.local_shape_at(coords)
        return math.prod(shape[d] for d in self.dims)

    def merges(self, device: torch.device) -> list[tuple[ProcessGroup, Tensor]]:
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
                parts.append(torch.as_tensor(self.held(coords), dtype=torch.float64))
            found.append(torch.stack(parts).sum(0))
        weights = torch.stack(found).to(device)
        return weights.view(-1, *[1] * self.rank) if weights.ndim == 1 else weights

    @property
    def rank(self) -> int:
        """How many dims the view has."""
        return len(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        return tensor

    def inside(self, tensor: Tensor) -> Tensor:
        """Sums over `inner`."""
        return tensor.sum(self.inner, keepdim=True) if self.inner else tensor

    def outside(self, sums: Tensor) -> Tensor:
        """From sums over `inner` to those of each statistic."""
        return sums

    def fold(self, tensor: Tensor) -> Tensor:
        """Sums of what shares a statistic, on this rank."""
        return self.outside(self.inside(tensor))

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        """The tensor as (samples, channels, ...) where a channel is what `inner` sums, if its memory allows it."""
        whole = self.inner and tensor.is_contiguous()
        return tensor.view(1, self.shape[0] * self.shape[1], -1) if whole and tensor.numel() else None

    def sums(self, grad: Tensor, off: Tensor, shift: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Over `inner`, the sums of `grad` and of `grad * (off - shift) * rstd`; statistics are spread already."""
        seen = self.as_channels(grad), self.as_channels(off)
        # on a device the kernel below wants a weight, and torch's own sums are as fast
        if seen[0] is None or seen[1] is None or grad.device.type != "cpu":
            level = self.inside(grad)
            return level, (self.inside(grad * off) - shift * level) * rstd
        grad, off = alike(*seen), seen[1]
        given = (grad, off, None, None, None, shift.flatten(), rstd.flatten(), True, 0.0, [False, True, True])
        _, slope, level = torch.ops.aten.native_batch_norm_backward(*given)
        return level.view(rstd.shape), slope.view(rstd.shape)

    def moments(self, off: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of what shares a statistic and of its squares, on this rank."""
        shape = [1 if d in self.inner else n for d, n in enumerate(off.shape)]
        level, slope = self.sums(off, off, off.new_zeros(shape), off.new_ones(shape))
        return self.outside(level), self.outside(slope)

    def spread(self, statistic: Tensor) -> Tensor:
        """A statistic where it broadcasts against the view."""
        return statistic

    def lift(self, parameter: Tensor) -> Tensor:
        """A parameter where it broadcasts against the view: one for each channel."""
        return parameter.reshape(-1, *[1] * (self.rank - 2))

    def over_parameters(self, sums: Tensor) -> Tensor:
        """Sums for each parameter, from sums over `inner`."""
        return sums.sum(0).reshape(-1)


class Rows(Scheme):
    """The last `number` dims share."""

    inner = (1,)
    small = False

    def __init__(self, layout: Layout, number: int):
        dims = range(layout.ndim - number, layout.ndim)
        super().__init__(layout, dims)
        local = layout.local_shape
        self.shape = (math.prod(local[: dims.start]), math.prod(local[dims.start :]))

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape)

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        return tensor.reshape(1, *self.shape) if tensor.numel() else None

    def lift(self, parameter: Tensor) -> Tensor:
        return parameter.reshape(-1)


class Batch(Scheme):
    """All samples and places of a channel share."""

    def __init__(self, layout: Layout):
        self.inner = (0, *range(2, layout.ndim))
        super().__init__(layout, self.inner)

    def as_channels(self, tensor: Tensor) -> Tensor | None:
        return tensor if tensor.numel() else None


class Instances(Scheme):
    """All places of a channel of a sample share."""

    def __init__(self, layout: Layout):
        self.inner = tuple(range(2, layout.ndim))
        super().__init__(layout, self.inner)


class Groups(Scheme):
    """Channels share in runs of `each`, which a cut may go through: then every rank has statistics for all groups."""

    def __init__(self, layout: Layout, groups: int):
        self.inner = tuple(range(2, layout.ndim))
        self.groups, self.each = groups, layout.shape[1] // groups
        places = cutting(layout, self.inner)
        self.straddles = any(start % self.each for start in starts(layout.lengths(1))) and layout.is_cut(1)
        channels = layout.wide(layout.axes_of(1)) if self.straddles else ()
        self.span = layout.span(1)
        self.first = 0 if self.straddles else self.span.start // self.each  # the first group that statistics are of
        self.held_groups = groups if self.straddles else (self.span.stop - self.span.start) // self.each
        super().__init__(layout, (1, *self.inner), (*places, *channels))
        self.total = self.each * math.prod(layout.shape[2:])
        self.runs = list(self._runs())

    def _runs(self):
        """(first channel, one past the last, first group, number of groups) of runs of equal parts of groups."""
        at, (start, stop) = self.span.start, self.span
        while at < stop:
            group = at // self.each
            whole = (stop - at) // self.each if at % self.each == 0 else 0
            end = at + whole * self.each if whole else min((group + 1) * self.each, stop)
            yield at - start, end - start, group - self.first, max(whole, 1)
            at = end

    def statistics(self) -> Layout:
        """Where a number for each group of each sample lies."""
        (channels,) = self.layout.dims[1]
        if self.straddles or not channels.axes:
            cut = Factor(self.groups)
        else:
            cut = Factor(self.groups, channels.axes, tuple(n // self.each for n in channels.lengths))
        return self.layout.with_dims([self.layout.dims[0], (cut,)])

    def held(self, coords: Sequence[int]) -> Any:
        shape = self.layout.local_shape_at(coords)
        places = math.prod(shape[d] for d in self.inner)
        if not self.straddles:
            return self.each * places
        lo, hi = self.layout.span(1, coords)
        spans = [Span(g * self.each, (g + 1) * self.each) for g in range(self.groups)]
        held = [places * max(0, min(hi, b) - max(lo, a)) for a, b in spans]
        return torch.tensor(held, dtype=torch.float64).view(1, -1, *[1] * len(self.inner))

    def outside(self, sums: Tensor) -> Tensor:
        parts = [sums[:, a:b].unflatten(1, (n, -1)).sum(2) for a, b, _, n in self.runs]
        held = torch.cat(parts, 1) if parts else sums[:, :0]
        before = self.runs[0][2] if self.runs else 0
        after = self.held_groups - before - held.shape[1]
        # padded, not put into zeros: where there are no channels the graph must be the other ranks' all the same
        return F.pad(held, [0, 0] * len(self.inner) + [before, after]) if before or after else held

    def spread(self, statistic: Tensor) -> Tensor:
        parts = []
        for a, b, group, n in self.runs:
            part = statistic[:, group : group + n].unsqueeze(2)
            parts.append(part.expand(-1, -1, (b - a) // n, *statistic.shape[2:]).flatten(1, 2))
        return torch.cat(parts, 1) if parts else statistic[:, :0]
