"""Channel parallelism: channels sharded over the ranks of a group, and parameters that are shards of a full model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....comm import autograd_collectives
from ....distributed.manager import DistributedManager
from ....layout import starts


class ChannelGroup(NamedTuple):
    """The ranks over which channels are sharded. Holds no process group, so that a model can be copied and pickled.

    A local tensor is replicated (all channels), sharded (this rank's channels) or a partial sum of all channels. The
    methods redistribute from one to another; with one rank all three are the same.
    """

    name: str
    size: int
    coord: int

    @classmethod
    def of(cls, name: str) -> ChannelGroup:
        """Return the process group `name`, or a group of one rank if there is none."""
        if not DistributedManager.is_initialized() or name not in DistributedManager().group_names:
            return cls(name, 1, 0)
        manager = DistributedManager()
        return cls(name, manager.group_size(name), manager.group_rank(name))

    @property
    def group(self) -> ProcessGroup:
        return DistributedManager().group(self.name)

    def replicate_in(self, x: Tensor) -> Tensor:
        """Use a replicated tensor in work that differs between ranks. Backward: all_reduce of the gradient."""
        return autograd_collectives.replicate_in([x], (self.group,))[0] if self.size > 1 else x

    def gather(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """All-gather sharded channels for work that differs between ranks. Backward: reduce_scatter of the gradient."""
        return autograd_collectives.gather_replicate_in(x, dim, shard_sizes, self.group) if self.size > 1 else x

    def reduce(self, x: Tensor) -> Tensor:
        """All-reduce partial sums to replicated channels."""
        return autograd_collectives.reduce(x, (self.group,)) if self.size > 1 else x

    def reduce_scatter(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """Reduce-scatter partial sums to sharded channels."""
        return autograd_collectives.reduce_scatter(x, dim, shard_sizes, self.group) if self.size > 1 else x


class ParamSharding(NamedTuple):
    """Sharding of a parameter along `dim`, with one shard size per rank."""

    dim: int
    shard_sizes: tuple[int, ...]

    def of(self, full: Tensor, coord: int) -> Tensor:
        """Return the shard of the rank at `coord`."""
        return full.narrow(self.dim, starts(self.shard_sizes)[coord], self.shard_sizes[coord])

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape of a parameter whose local shape is `local`."""
        return (*local[: self.dim], sum(self.shard_sizes), *local[self.dim + 1 :])


class ChannelParallel(nn.Module):
    """A module whose parameters are shards of full ones: the same seed gives the same model on any number of ranks."""

    def __init__(self, ranks: ChannelGroup):
        super().__init__()
        self.ranks = ranks
        self.param_shardings: dict[str, ParamSharding] = {}

    def shard_param(self, full: Tensor, dim: int, shard_sizes: Sequence[int], name: str) -> nn.Parameter:
        """Return this rank's shard of a parameter and record its sharding."""
        self.param_shardings[name] = ParamSharding(dim, tuple(shard_sizes))
        return nn.Parameter(self.param_shardings[name].of(full, self.ranks.coord).detach().clone())


def param_shardings_of(model: nn.Module) -> dict[str, ParamSharding]:
    """Return name in the state dict -> sharding of every parameter of a model."""
    return {
        f"{prefix}.{name}" if prefix else name: sharding
        for prefix, module in model.named_modules()
        if isinstance(module, ChannelParallel)
        for name, sharding in module.param_shardings.items()
    }


def random_weight(*shape: int) -> Tensor:
    """Return initial values of a weight: truncated normal with standard deviation 0.02."""
    return nn.init.trunc_normal_(torch.empty(shape), std=0.02)
