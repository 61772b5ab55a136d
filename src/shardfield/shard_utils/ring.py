"""Pass blocks around a ring of ranks: visit every rank's block with the memory of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import autograd_collectives, collectives
from ..errors import ShardingError


@dataclass(frozen=True)
class RingPassingConfig:
    """The mesh axis, the size and the direction of a ring.

    "forward" sends to the next coordinate. `communication_method` is "p2p" or "a2a"; blocks are sent point to point for
    both.
    """

    mesh_dim: int
    mesh_size: int
    ring_direction: str = "forward"
    communication_method: str = "a2a"

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
    step = _ring_step(mesh, ring_config)
    shape = tuple(tensor.shape if recv_shape is None else recv_shape)
    return autograd_collectives.shift(tensor, shape, step, mesh.get_group(ring_config.mesh_dim))


def perform_ring_iteration_async(
    tensor: Tensor,
    mesh: DeviceMesh,
    ring_config: RingPassingConfig,
    recv_tensor: Tensor | None = None,
    recv_shape: Sequence[int] | None = None,
) -> tuple[Tensor, list[collectives.Pending]]:
    """Start a ring iteration: return the buffer of the neighbor's block, and handles whose `wait()` fills it.

    The buffer is `recv_tensor`, or a new one of `recv_shape`. Neither it nor `tensor` may be changed before `wait()`
    has returned. `tensor` must be contiguous, and the config's communication_method "p2p". Differentiable, as
    `perform_ring_iteration`.

        block, handles = perform_ring_iteration_async(block, mesh, RingPassingConfig(0, mesh.size(0), "forward", "p2p"))
    """
    if ring_config.communication_method != "p2p":
        raise ShardingError(
            f'perform_ring_iteration_async: communication_method is "p2p", not {ring_config.communication_method!r}'
        )
    if not tensor.is_contiguous():
        raise ShardingError("perform_ring_iteration_async: the tensor is not contiguous; pass tensor.contiguous()")
    step, group = _ring_step(mesh, ring_config), mesh.get_group(ring_config.mesh_dim)
    if recv_tensor is None:
        recv_tensor = tensor.new_empty(tuple(tensor.shape if recv_shape is None else recv_shape))
    elif recv_tensor.dtype != tensor.dtype or not recv_tensor.is_contiguous():
        raise ShardingError(f"perform_ring_iteration_async: recv_tensor must be contiguous and of {tensor.dtype}")
    received, pending = autograd_collectives.start_shift(tensor, recv_tensor, step, group)
    return received, [pending]


def _ring_step(mesh: DeviceMesh, config: RingPassingConfig) -> int:
    """Return how many coords ahead a block goes."""
    if config.mesh_size != mesh.size(config.mesh_dim):
        raise ShardingError(
            f"the ring has {config.mesh_size} ranks, mesh axis {config.mesh_dim} has {mesh.size(config.mesh_dim)}"
        )
    return 1 if config.ring_direction == "forward" else -1
