"""Normalize with the statistics of a dataset that is distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..comm import collectives
from ..comm.consensus import check_arguments
from ..errors import ShardingError
from ..layout import DimSharding, Layout
from ..tensor import ShardTensor, wrap
from .loader import ShardedLoader


class UnitGaussian(nn.Module):
    """Shift and scale to mean 0 and standard deviation 1, and back.

    `UnitGaussian.fit` computes the statistics of data. They are buffers, so that they are part of checkpoints, and they
    apply to plain tensors and to ShardTensors of any layout.

    >>> norm = UnitGaussian.fit([torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])])
    >>> norm.mean, norm.std
    (tensor([3.], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    >>> norm.inverse_transform(norm.transform(torch.tensor([[7.0]])))
    tensor([[7.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, eps: float = 1e-7):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.eps = eps

    def transform(self, x: Tensor) -> Tensor:
        """Return (x - mean) / (std + eps), in the dtype of x."""
        return (x - self.mean.to(x.dtype)) / (self.std + self.eps).to(x.dtype)

    def inverse_transform(self, x: Tensor) -> Tensor:
        """Return x * (std + eps) + mean, in the dtype of x."""
        return x * (self.std + self.eps).to(x.dtype) + self.mean.to(x.dtype)

    forward = transform

    @classmethod
    def fit(
        cls,
        batches: Iterable[Any],
        key: Any = None,
        *,
        per: str = "channel",
        group: ProcessGroup | None = None,
        eps: float = 1e-7,
    ) -> UnitGaussian:
        """Compute the statistics of all samples of `batches`: tensors (sample, channel, ...), or containers with `key`.

        per="channel" has one mean and one deviation for each index of dim 1; "point" has one for each point of each
        channel (every rank then holds two fields of the global size of a sample); "all" has one in total. A
        `ShardedLoader` is swept: every sample counts once, without drop_last and shuffle. For other iterables, `group`
        contains the ranks with different samples. Deviations from the mean are summed in float64, so that a large mean
        costs no digits.
        """
        if per not in ("channel", "point", "all"):
            raise ValueError(f'UnitGaussian.fit: per is "channel", "point" or "all", not {per!r}')
        if isinstance(batches, ShardedLoader):
            group, batches = batches.data_group, batches.sweep()
        moments: Moments | None = None
        for batch in batches:
            x = batch if key is None else batch[key]
            moments = moments or Moments(x, per)
            moments.add(x)
        problem = None if moments is not None else "there are no batches"
        check_arguments("UnitGaussian.fit", group, {"shape": moments and moments.shape}, problem=problem)
        assert moments is not None
        return cls(*moments.finalize(group), eps=eps)


class Moments:
    """Count, mean and sum of squared deviations of this rank's data, merged batch by batch (Chan)."""

    def __init__(self, like: Tensor, per: str):
        if not isinstance(like, Tensor) or like.ndim < 2 or like.is_complex():
            shown = f"{like.dtype} {tuple(like.shape)}" if isinstance(like, Tensor) else type(like).__name__
            raise ShardingError(f"UnitGaussian.fit: a batch must be a real tensor (sample, channel, ...), not {shown}")
        kept = {"channel": {1}, "point": set(range(1, like.ndim)), "all": set()}[per]
        self.kept_dims, self.shape = kept, tuple(like.shape[1:])
        self.reduced_dims = [d for d in range(like.ndim) if d not in kept]
        self.layout: Layout | None = like._layout if isinstance(like, ShardTensor) else None
        self.count = 0.0
        self.mean = self.m2 = torch.zeros(())

    def add(self, x: Tensor) -> None:
        layout = x._layout if isinstance(x, ShardTensor) else None
        if (
            (self.layout is None) != (layout is None)
            or tuple(x.shape[1:]) != self.shape
            or _layouts_differ(self.layout, layout)
        ):
            raise ShardingError(
                f"UnitGaussian.fit: batches of different layouts: {self.layout or self.shape}, then {x}"
            )
        local = (x._local_tensor if isinstance(x, ShardTensor) else x).detach().double()
        n = torch.Size(local.shape[d] for d in self.reduced_dims).numel()
        mean = local.sum(self.reduced_dims, keepdim=True) / max(n, 1)
        m2 = (local - mean).square().sum(self.reduced_dims, keepdim=True)
        if self.count == 0:
            self.mean, self.m2 = torch.zeros_like(mean), torch.zeros_like(m2)
        both = max(self.count + n, 1)
        step = mean - self.mean
        self.mean = self.mean + step * (n / both)
        self.m2 = self.m2 + m2 + step.square() * (self.count * n / both)
        self.count += n

    def finalize(self, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation over all ranks, unsharded on each of them."""
        groups = [] if group is None or dist.get_world_size(group) == 1 else [group]
        if self.layout is not None:
            axes = self.layout.nontrivial_axes(a for d in self.reduced_dims for a in self.layout.axes_of(d))
            groups += [self.layout.mesh.get_group(axis) for axis in axes]
        count = torch.tensor(self.count, dtype=torch.float64, device=self.mean.device)
        total, weighted = count, count * self.mean
        for g in groups:
            total, weighted = collectives.all_reduce(total, g), collectives.all_reduce(weighted, g)
        if not total:
            raise ShardingError("UnitGaussian.fit: all batches are empty")
        mean = weighted / total
        m2 = self.m2 + count * (self.mean - mean).square()
        for g in groups:
            m2 = collectives.all_reduce(m2, g)
        std = (m2 / (total - 1).clamp(min=1)).sqrt()
        return self._to_full_stat(mean), self._to_full_stat(std)

    def _to_full_stat(self, value: Tensor) -> Tensor:
        """Return a statistic as a full plain tensor that broadcasts over samples."""
        if self.layout is not None:
            dims = [old if d in self.kept_dims else (DimSharding(1),) for d, old in enumerate(self.layout.dims)]
            value = wrap(value, Layout.make(self.layout.mesh, dims)).full_tensor()
        return value[0]


def _layouts_differ(one: Layout | None, other: Layout | None) -> bool:
    """Return whether two batches differ in more than their number of samples, or are Partial."""
    if one is None or other is None:
        return False
    return one.mesh != other.mesh or one.dims[1:] != other.dims[1:] or bool(one.partial or other.partial)
