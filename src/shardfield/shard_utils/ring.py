"""Passing blocks around a ring of ranks: visit every rank's block while holding one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import autograd_collectives
from ..errors import ShardingError


@dataclass(frozen=True)
class RingPassingConfig:
    """Which mesh axis the ring runs along, how long it is, and which way blocks go.

    "forward" sends to the next coordinate. `communication_method` is accepted for scripts that state one ("p2p",
    "a2a"); blocks always go straight from one rank to the next.
    """

    mesh_dim: int
    mesh_size: int
    ring_direction: str = "forward"
    communication_method: str = "p2p"

    def __post_init__(self) -> None:
        if self.ring_direction not in ("forward", "backward"):
            raise ShardingError(f'ring_direction is "forward" or "backward", not {self.ring_direction!r}')
        if self.communication_method not in ("p2p", "a2a"):
            raise ShardingError(f'communication_method is "p2p" or "a2a", not {self.communication_method!r}')


def perform_ring_iteration(
    tensor: Tensor, mesh: DeviceMesh, ring_config: RingPassingConfig, recv_shape: Sequence[int] | None = None
) -> Tensor:
    """Hand this rank's block to its neighbour and take the other neighbour's, whose shape is `recv_shape`.

    Without `recv_shape` blocks are taken to be of one shape. Differentiable: the gradient goes the other way round.

        blocks = perform_ring_iteration(block, mesh, RingPassingConfig(mesh_dim=0, mesh_size=mesh.size(0)))
    """
    axis = ring_config.mesh_dim
    if ring_config.mesh_size != mesh.size(axis):
        raise ShardingError(f"the ring has {ring_config.mesh_size} ranks, mesh axis {axis} has {mesh.size(axis)}")
    step = 1 if ring_config.ring_direction == "forward" else -1
    shape = tuple(tensor.shape if recv_shape is None else recv_shape)
    return autograd_collectives.shift(tensor, shape, step, mesh.get_group(axis))
