"""Simulate one rank of a world of any size in one process, with or without tensor data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import runtime
from .._compat.fake import fake_tensor_mode as _without_data
from .._compat.fake import fast_fsdp_chunks, real_tensors, start_fake_world
from .._compat.world import clear_dtensor_caches
from ..comm import transport
from ..errors import ShardfieldError


@contextmanager
def simulated(world_size: int, rank: int = 0) -> Iterator[None]:
    """Simulate one rank of a world of `world_size` ranks inside the context, without communication.

    Create meshes and ShardTensors as usual. Every receive returns data of this rank, so that shapes, messages and
    memory are those of the simulated rank, and values are meaningless. Raise if this process is a rank of a real world.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> with simulated(1024, rank=700):
    ...     mesh = init_device_mesh("cpu", (32, 32), mesh_dim_names=("h", "w"))
    ...     tuple(mesh.get_coordinate())
    (21, 28)
    """
    if dist.is_initialized():
        raise ShardfieldError(
            "simulated: this process is already a rank of a world; simulate in another process, "
            "or call destroy_process_group() first"
        )
    if not 0 <= rank < world_size:
        raise ShardfieldError(f"simulated: there is no rank {rank} in a world of {world_size}")
    clear_dtensor_caches()
    hook = sys.excepthook  # init_process_group replaces it by one that names the rank, and never restores it
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
    """Create tensors without data inside the context: shapes and memory are tracked, and nothing is computed.

    A model of any size runs within seconds. An operation that depends on values (`item()`, `nonzero`, indexing with a
    mask) raises. Create meshes outside the context.
    """
    with runtime.observing(fake_tensors=True), fast_fsdp_chunks(), _without_data():
        yield


def build_with_data(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model inside `without_data` whose `__init__` reads values, then replace its tensors by ones without data.

    While it is built, the whole model needs memory. Tensors that are neither parameters nor buffers keep their data.

    >>> def build():
    ...     rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
    ...     return nn.Sequential(nn.Linear(8, 2), nn.Dropout(rates[-1]))
    >>> with without_data():
    ...     tuple(build_with_data(build)[0].weight.shape)
    (2, 8)
    """
    with real_tensors():
        model = build()
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = made.setdefault(id(tensor), _drop_data(tensor))  # type: ignore[assignment]
    return model


def _drop_data(tensor: Tensor) -> Tensor:
    bare: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, nn.Parameter):
        bare = nn.Parameter(bare, requires_grad=tensor.requires_grad)
    bare.__dict__.update(tensor.__dict__)  # marks that the model sets on its parameters
    return bare
