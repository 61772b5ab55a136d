"""A world of any size in one process: this rank's work is done, the other ranks are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .. import runtime
from .._compat.fake import fake_tensor_mode as _without_data
from .._compat.fake import fast_fsdp_chunks, start_fake_world
from .._compat.world import clear_dtensor_caches
from ..comm import transport
from ..errors import ShardfieldError


@contextmanager
def simulated(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one rank of a world of `world_size`, and nothing it sends goes anywhere.

    Make meshes and ShardTensors as always. Every other rank is taken to hold what this one holds, so that shapes,
    messages and memory are those of the rank, and numbers mean nothing. A process that is a rank of a real world
    cannot be one of a simulated one at the same time, and is refused.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> with simulated(1024, rank=700):
    ...     mesh = init_device_mesh("cpu", (32, 32), mesh_dim_names=("h", "w"))
    ...     tuple(mesh.get_coordinate())
    (21, 28)
    """
    if dist.is_initialized():
        raise ShardfieldError(
            "simulated: this process is already a rank of a world; simulate in a process of its own, "
            "or destroy_process_group() first"
        )
    if not 0 <= rank < world_size:
        raise ShardfieldError(f"simulated: there is no rank {rank} in a world of {world_size}")
    clear_dtensor_caches()
    hook = sys.excepthook  # torch replaces it for good by one that names the rank
    start_fake_world(rank, world_size)
    try:
        with runtime.fresh(transport_override=transport.NullTransport()):
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        clear_dtensor_caches()


@contextmanager
def without_data() -> Iterator[None]:
    """Inside, tensors are made without data: shapes and memory count, no number is ever computed.

    A model of any size runs on them in moments. What hangs on numbers (`item()`, `nonzero`, indexing by a mask) raises.
    Make meshes before, outside.
    """
    with runtime.observing(fake_tensors=True), fast_fsdp_chunks(), _without_data():
        yield
