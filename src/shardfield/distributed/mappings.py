"""Enter and leave tensor-parallel regions.

Outside, every rank of the group has the same value and the same gradient; inside, each has its shard. `group` is the
name of a group of `DistributedManager`. A group of one rank returns the input unchanged.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm import autograd_collectives
from .manager import DistributedManager
from .splits import compute_split_shapes
from .vcollective_args import Sizes, resolve_group, validate_shards


def copy_to_parallel_region(input: Tensor, group: str | None) -> Tensor:
    """Return a replicated value for work that differs between ranks. Backward: the sum of their gradients."""
    found, size, _ = _resolve_group(group)
    return autograd_collectives.replicate_in([input], (found,))[0] if found is not None and size > 1 else input


def reduce_from_parallel_region(input: Tensor, group: str | None) -> Tensor:
    """Return the sum over ranks, on all of them. Backward: the identity."""
    found, size, _ = _resolve_group(group)
    return autograd_collectives.reduce(input, (found,)) if found is not None and size > 1 else input


def scatter_to_parallel_region(input: Tensor, dim: int, group: str | None) -> Tensor:
    """Return this rank's shard of a replicated value along `dim`, as a copy. Backward: gather the gradients.

    The shard sizes are those of `compute_split_shapes`.
    """
    if not -input.dim() <= dim < input.dim():
        raise ValueError(f"scatter_to_parallel_region: a tensor of shape {tuple(input.shape)} has no dim {dim}")
    found, size, _ = _resolve_group(group)
    if found is None or size == 1:
        return input
    dim %= input.dim()
    return autograd_collectives.split(input, dim, compute_split_shapes(input.shape[dim], size), found).clone()


def gather_from_parallel_region(input: Tensor, dim: int, shapes: Sizes, group: str | None) -> Tensor:
    """Gather the shards along `dim` on all ranks. Backward: this rank's shard of the gradient.

    `shapes` are the shard sizes. If ranks do not agree on them, all raise the same `ShardingError`.
    """
    given = validate_shards("gather_from_parallel_region", input, shapes, dim, _resolve_group(group)[0])
    if given.group is None:
        return given.tensor
    return autograd_collectives.gather(given.tensor, given.dim, given.sizes, given.group)


def _resolve_group(name: str | None) -> tuple[ProcessGroup | None, int, int]:
    return resolve_group(DistributedManager().group(name))
