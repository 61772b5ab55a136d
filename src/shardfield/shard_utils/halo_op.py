"""Halo padding as one operator of torch.compile: the exchange runs inside it, and its shape follows from local sizes.

The traced program contains only this rank's sizes. Unless the shard sizes are stated, it assumes that every shard is as
wide as the halo; the operator exchanges the sizes when it runs, and raises on all ranks if one is narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat.world import process_group
from ..errors import ShardingError

if TYPE_CHECKING:
    from .halo import HaloConfig

# The groups of the halo's axis and (or "") of the longitudes' axis, then the parts of the config, then how many cells
# the block gets before and after it.
ARGS = (
    "str group, str pole_group, int dim, int halo, int edge, str boundary, int[]? lengths, int pole, SymInt front, "
    "SymInt back"
)


class GroupAxes:
    """The axes of a halo as a mesh: axis 0 is that of the halo, axis 1 that of the longitudes."""

    def __init__(self, names: Sequence[str]):
        self._groups = [process_group(name) for name in names]

    def get_group(self, axis: int) -> dist.ProcessGroup:
        return self._groups[axis]

    def get_local_rank(self, axis: int) -> int:
        return dist.get_rank(self._groups[axis])

    def size(self, axis: int) -> int:
        return dist.get_world_size(self._groups[axis])


def traced_padding(block: Tensor, mesh: Any, config: HaloConfig) -> Tensor:
    """Return the block, extended along the dim of one config, as a call of the operator."""
    group = mesh.get_group(config.mesh_dim).group_name
    pole_group = "" if config.pole_mesh_dim is None else mesh.get_group(config.pole_mesh_dim).group_name
    lengths = None if config.lengths is None else list(config.lengths)
    dim = config.tensor_dim % block.ndim
    pole = -1 if config.pole_dim is None else config.pole_dim % block.ndim
    coord, size = mesh.get_local_rank(config.mesh_dim), mesh.size(config.mesh_dim)
    front = config.edge if coord == 0 else config.halo_size
    back = config.edge if coord == size - 1 else config.halo_size
    if lengths is not None:
        low, high = config.ranges(lengths)[coord]
        start = sum(lengths[:coord])
        front, back = start - low, high - start - lengths[coord]
    boundary = config.boundary or ""
    return _pad(block, group, pole_group, dim, config.halo_size, config.edge, boundary, lengths, pole, front, back)


@torch.library.custom_op("shardfield::halo_padding", mutates_args=(), schema=f"(Tensor block, {ARGS}) -> Tensor")
def _pad(block, *how):
    from .halo import pad_dim  # imports this module

    axes, config, sizes = _resolve(block, *how)
    return pad_dim(block, axes, config, {(0, config.tensor_dim): sizes})


@_pad.register_fake
def _(block, *how):
    dim, front, back = how[2], *how[-2:]
    shape = list(block.shape)
    shape[dim] = front + shape[dim] + back
    return block.new_empty(shape)


@torch.library.custom_op("shardfield::halo_padding_adjoint", mutates_args=(), schema=f"(Tensor grad, {ARGS}) -> Tensor")
def _pad_adjoint(grad, *how):
    from .halo import padding_adjoint

    dim, front, back = how[2], *how[-2:]
    block = grad.narrow(dim, front, grad.shape[dim] - front - back)
    axes, config, sizes = _resolve(block, *how)
    return padding_adjoint(grad, axes, config, sizes)


@_pad_adjoint.register_fake
def _(grad, *how):
    dim, front, back = how[2], *how[-2:]
    shape = list(grad.shape)
    shape[dim] = shape[dim] - front - back
    return grad.new_empty(shape)


def _resolve(block, group, pole_group, dim, halo, edge, boundary, lengths, pole, front, back):
    """Return the axes, the config and the shard sizes; raise on all ranks if the traced shapes do not fit them."""
    from .halo import HaloConfig, shard_sizes

    axes = GroupAxes([group, pole_group] if pole_group else [group])
    config = HaloConfig(
        0,
        dim,
        halo,
        edge,
        boundary=boundary or None,
        lengths=None if lengths is None else tuple(lengths),
        pole_dim=None if pole < 0 else pole,
        pole_mesh_dim=1 if pole_group else None,
    )
    sizes = shard_sizes(block, axes, 0, dim, config.lengths)
    last = len(sizes) - 1
    for coord, (low, high) in enumerate(config.ranges(sizes) if lengths is None else ()):
        assumed = (edge if coord == 0 else halo) + sizes[coord] + (edge if coord == last else halo)
        if high - low != assumed:
            raise ShardingError(
                f"halo_padding under torch.compile: shards {sizes} of dim {dim} are narrower than the halo of {halo}; "
                "state the shard sizes in HaloConfig(lengths=...)"
            )
    return axes, config, sizes


def _setup_context(ctx, inputs, output) -> None:
    ctx.how = inputs[1:]


def _backward(ctx, grad):
    return _pad_adjoint(grad, *ctx.how), *([None] * 10)


def _double_backward(ctx, grad):
    return _pad(grad, *ctx.how), *([None] * 10)


_pad.register_autograd(_backward, setup_context=_setup_context)
_pad_adjoint.register_autograd(_double_backward, setup_context=_setup_context)
