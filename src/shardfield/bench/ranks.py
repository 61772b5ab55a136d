"""Run measurements on ranks, and create the sharded fields for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from ..layout import chunk, starts
from ..tensor import ShardTensor
from ..testing import run_on_ranks

T = TypeVar("T")
TIMEOUT_S = 900.0


def measure_on_ranks(fn: Callable[..., T], ranks: int, device: str, *args: Any) -> list[T]:
    """Call `fn(device, *args)` on every rank of a world, with one thread each: gloo on CPUs, NCCL on devices."""
    return run_on_ranks(_run_on_rank, ranks, fn, device, args, timeout=TIMEOUT_S)


def _run_on_rank(fn: Callable[..., T], device: str, args: Sequence[Any]) -> T:
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)  # DTensor would log its warnings on every rank
    try:
        return fn(device, *args) if device == "cpu" else _run_on_device(fn, device, args)
    finally:
        logger.setLevel(before)


def _run_on_device(fn: Callable[..., T], device: str, args: Sequence[Any]) -> T:
    """Replace the gloo world by an NCCL world if each rank has a device. NCCL does not allow ranks to share one."""
    module, rank = torch.get_device_module(device), int(os.environ["LOCAL_RANK"])
    devices = module.device_count()
    module.set_device(rank % devices)
    if dist.get_world_size() > devices:
        return fn(device, *args)
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        return fn(device, *args)
    finally:
        dist.destroy_process_group()


def domain_mesh(device: str) -> DeviceMesh:
    """Return a mesh of all ranks with one axis."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("domain",))


def make_sharded_field(mesh: DeviceMesh, shape: Sequence[int], dim: int = 2, seed: int = 0) -> ShardTensor:
    """Return a random field, sharded along `dim` like torch.chunk. Its values do not depend on the number of ranks."""
    full = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return shard_tensor(full.to(mesh.device_type), mesh, dim)


def shard_tensor(full: Tensor, mesh: DeviceMesh, dim: int) -> ShardTensor:
    """Shard a tensor that every rank holds in full, without communication."""
    shard_sizes = chunk(full.shape[dim], mesh.size())
    rank = mesh.get_local_rank()
    local = full.narrow(dim, starts(shard_sizes)[rank], shard_sizes[rank]).clone()
    return ShardTensor.from_local(local, mesh, [Shard(dim)], "chunk", tuple(full.shape))


def train_step(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward, with the mean square of the output as loss."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()


def rank_label(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
