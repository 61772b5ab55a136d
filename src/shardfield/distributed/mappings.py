"""Into and out of work that the ranks of a group share, as tensor-parallel layers use it.

Outside, every rank of the group holds the same value and the same gradient; inside, each holds its part. `group`
is a name known to `DistributedManager`. A group of one rank leaves the input as it is.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm import autograd_collectives
from .manager import DistributedManager
from .splits import compute_split_shapes
from .vcollective_args import Sizes, resolve_group, validate_shards


def copy_to_parallel_region(input: Tensor, group: str | None) -> Tensor:
    """A value that all ranks hold enters work that differs between them. Backward: the sum of their gradients."""
    found, size, _ = _resolve_group(group)
    return autograd_collectives.replicate_in([input], (found,))[0] if found is not None and size > 1 else input


def reduce_from_parallel_region(input: Tensor, group: str | None) -> Tensor:
    """The sum of what the ranks hold, on all of them. Backward: the gradient, as it is."""
    found, size, _ = _resolve_group(group)
    return autograd_collectives.reduce(input, (found,)) if found is not None and size > 1 else input


def scatter_to_parallel_region(input: Tensor, dim: int, group: str | None) -> Tensor:
    """Of a value that all ranks hold, each keeps its piece along `dim`. Backward: the pieces' gradients, joined.

    The pieces are as long as `compute_split_shapes` says, and a rank's is a copy.
    """
    if not -input.dim() <= dim < input.dim():
        raise ValueError(f"scatter_to_parallel_region: a tensor of shape {tuple(input.shape)} has no dim {dim}")
    found, size, _ = _resolve_group(group)
    if found is None or size == 1:
        return input
    dim %= input.dim()
    return autograd_collectives.split(input, dim, compute_split_shapes(input.shape[dim], size), found).clone()


def gather_from_parallel_region(input: Tensor, dim: int, shapes: Sizes, group: str | None) -> Tensor:
    """The ranks' pieces, joined along `dim`, on all of them. Backward: this rank's piece of the gradient.

    `shapes` says how long each piece is. Ranks that do not agree all raise the same `ShardingError`.
    """
    given = validate_shards("gather_from_parallel_region", input, shapes, dim, _resolve_group(group)[0])
    if given.group is None:
        return given.tensor
    return autograd_collectives.gather(given.tensor, given.dim, given.sizes, given.group)


def _resolve_group(name: str | None) -> tuple[ProcessGroup | None, int, int]:
    return resolve_group(DistributedManager().group(name))
