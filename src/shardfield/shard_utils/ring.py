"""Pass blocks around a ring of ranks: visit every rank's block with the memory of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import autograd_collectives
from ..errors import ShardingError


@dataclass(frozen=True)
class RingPassingConfig:
    """The mesh axis, the size and the direction of a ring.

    "forward" sends to the next coordinate. `communication_method` ("p2p", "a2a") is accepted for compatibility; blocks
    are always sent point to point.
    """

    mesh_dim: int
    mesh_size: int
    ring_direction: str = "forward"
    communication_method: str = "p2p"

    def __post_init__(self) -> None:
        if self.ring_direction not in ("forward", "backward"):
            raise ShardingError(f'ring_direction must be "forward" or "backward", not {self.ring_direction!r}')
        if self.communication_method not in ("p2p", "a2a"):
            raise ShardingError(f'communication_method must be "p2p" or "a2a", not {self.communication_method!r}')


def perform_ring_iteration(
    tensor: Tensor, mesh: DeviceMesh, ring_config: RingPassingConfig, recv_shape: Sequence[int] | None = None
) -> Tensor:
    """Send this rank's block to its neighbor and return the other neighbor's block, of shape `recv_shape`.

    Without `recv_shape` all blocks must have one shape. Adjoint: the gradient is sent in the opposite direction.

        blocks = perform_ring_iteration(block, mesh, RingPassingConfig(mesh_dim=0, mesh_size=mesh.size(0)))
    """
    axis = ring_config.mesh_dim
    if ring_config.mesh_size != mesh.size(axis):
        raise ShardingError(f"the ring has {ring_config.mesh_size} ranks, mesh axis {axis} has {mesh.size(axis)}")
    step = 1 if ring_config.ring_direction == "forward" else -1
    shape = tuple(tensor.shape if recv_shape is None else recv_shape)
    return autograd_collectives.shift(tensor, shape, step, mesh.get_group(axis))
