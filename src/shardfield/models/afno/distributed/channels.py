"""Channels that the ranks of a group share, and parameters that are slices of the one-process model's."""

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
    """The ranks that share the channels. A name and two numbers, so that a model can be copied and pickled.

    What a local tensor holds is one of: all channels (the same on each rank), its own channels (a slice), or an
    addend of all channels. The methods go from one to the other; with one rank all three are the same.
    """

    name: str
    size: int
    coord: int

    @classmethod
    def of(cls, name: str) -> ChannelGroup:
        """The group of that name; a single rank if there is none."""
        if not DistributedManager.is_initialized() or name not in DistributedManager().group_names:
            return cls(name, 1, 0)
        manager = DistributedManager()
        return cls(name, manager.group_size(name), manager.group_rank(name))

    @property
    def group(self) -> ProcessGroup:
        return DistributedManager().group(self.name)

    def replicate_in(self, x: Tensor) -> Tensor:
        """All channels, for work that differs between ranks. Backward: the sum of the gradients."""
        return autograd_collectives.replicate_in([x], (self.group,))[0] if self.size > 1 else x

    def gather(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Own channels -> all, for work that differs between ranks. Backward: own part of the sum of the gradients."""
        return autograd_collectives.gather_replicate_in(x, dim, lengths, self.group) if self.size > 1 else x

    def reduce(self, x: Tensor) -> Tensor:
        """Addends -> all channels."""
        return autograd_collectives.reduce(x, (self.group,)) if self.size > 1 else x

    def reduce_scatter(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Addends -> own channels."""
        return autograd_collectives.reduce_scatter(x, dim, lengths, self.group) if self.size > 1 else x


class ParamSharding(NamedTuple):
    """How a parameter is cut: along `dim` into `lengths`, one for each rank."""

    dim: int
    lengths: tuple[int, ...]

    def of(self, full: Tensor, coord: int) -> Tensor:
        """The slice at a position."""
        return full.narrow(self.dim, starts(self.lengths)[coord], self.lengths[coord])

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole, of which `local` is a slice's."""
        return (*local[: self.dim], sum(self.lengths), *local[self.dim + 1 :])


class ChannelParallel(nn.Module):
    """A module whose parameters are slices, cut from whole ones: the same seed gives the same model on any ranks."""

    def __init__(self, ranks: ChannelGroup):
        super().__init__()
        self.ranks = ranks
        self.param_shardings: dict[str, ParamSharding] = {}

    def shard_param(self, full: Tensor, dim: int, lengths: Sequence[int], name: str) -> nn.Parameter:
        """This rank's slice of a parameter."""
        self.param_shardings[name] = ParamSharding(dim, tuple(lengths))
        return nn.Parameter(self.param_shardings[name].of(full, self.ranks.coord).detach().clone())


def param_shardings_of(model: nn.Module) -> dict[str, ParamSharding]:
    """The cut of every parameter of a model, by its name in the state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: cut
        for prefix, module in model.named_modules()
        if isinstance(module, ChannelParallel)
        for name, cut in module.param_shardings.items()
    }


def random_weight(*shape: int) -> Tensor:
    """The first values of a weight: normal, a few hundredths large."""
    return nn.init.trunc_normal_(torch.empty(shape), std=0.02)
