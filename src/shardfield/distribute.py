"""Distribute data over a mesh: scatter one rank's tensor, broadcast one rank's module."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor import distribute_module as distribute_as_dtensors

from .comm import collectives
from .errors import ShardingError
from .layout import Layout
from .redistribute import slice_shard
from .spec import DTYPES, MAX_DIMS
from .tensor import ShardTensor, wrap


def scatter_tensor(
    tensor: Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Return the tensor of rank `global_src`, sharded over the mesh; the other ranks may pass None.

    Each rank receives its own shard only, so only the source needs memory for the full tensor. Shape and dtype are
    broadcast first in one small message; `global_shape` and `dtype` are checked against them.
    """
    ranks = mesh.mesh.flatten().tolist()
    if global_src not in ranks:
        raise ShardingError(f"scatter_tensor: rank {global_src} is not on the mesh {mesh}")
    if any(isinstance(p, Partial) for p in placements):
        raise ShardingError("scatter_tensor: placements must be Shard or Replicate, not Partial")
    source = ranks.index(global_src)
    device = collectives.device_of(mesh)
    here = mesh.get_rank() == global_src
    meta = [-1] * (2 + MAX_DIMS)
    if here and tensor is not None:
        meta[: 2 + tensor.ndim] = [tensor.ndim, DTYPES.index(tensor.dtype), *tensor.shape]
    meta = collectives.broadcast_over(torch.tensor(meta, device=device), mesh, source).tolist()
    if meta[0] < 0:
        raise ShardingError(f"scatter_tensor: rank {global_src} is the source and passed no tensor")
    shape, kind = tuple(meta[2 : 2 + meta[0]]), DTYPES[meta[1]]
    if global_shape is not None and tuple(global_shape) != shape:
        raise ShardingError(f"scatter_tensor: global_shape says {tuple(global_shape)}, the source holds {shape}")
    if dtype is not None and dtype != kind:
        raise ShardingError(f"scatter_tensor: dtype says {dtype}, the source holds {kind}")
    layout = Layout.of(mesh, placements, shape)
    shards = None
    if here:
        assert tensor is not None
        coords = [collectives.coords_of(mesh, i) for i in range(len(ranks))]
        shards = {r: slice_shard(tensor.detach(), layout, c) for r, c in zip(ranks, coords, strict=True)}
    local = collectives.scatter_from(shards, layout.local_shape, kind, device, global_src)
    return wrap(local.requires_grad_(requires_grad), layout)


def sync_module_over_mesh(
    module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False
) -> nn.Module:
    """Broadcast the parameters and buffers of the rank at position `src_mesh_rank` of the mesh to all its ranks.

    ShardTensors and DTensors are not changed, and a module of nothing else is refused: call this before `fully_shard`.
    With `verify`, ranks compare names, shapes and dtypes before and values afterwards, and all raise if they differ.
    A mesh may have any number of axes.
    """
    if not 0 <= src_mesh_rank < mesh.size():
        raise ShardingError(f"sync_module_over_mesh: {src_mesh_rank=} is not on a mesh of {mesh.size()} ranks")
    named = [*module.named_parameters(), *module.named_buffers()]
    held = [(n, t) for n, t in named if not isinstance(t, (ShardTensor, DTensor))]
    away = any(t.device.type != mesh.device_type for _, t in held)
    if _max_over([bool(named) and not held], mesh).item():
        raise ShardingError(
            "sync_module_over_mesh: the module has parameters or buffers, but none of it is plain: every one is a "
            "ShardTensor or DTensor already. Call it before they are distributed"
        )
    if _max_over([away], mesh).item():
        raise ShardingError(f"sync_module_over_mesh: parameters or buffers are not on a {mesh.device_type!r} device")
    if verify:
        lines = "\n".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in held)
        if _differing([_digest(lines.encode())], mesh, src_mesh_rank):
            raise ShardingError("sync_module_over_mesh: metadata differs between ranks: names, shapes or dtypes")
    with torch.no_grad():
        for _, tensor in held:
            tensor.copy_(collectives.broadcast_over(tensor, mesh, src_mesh_rank))
    if verify:
        digests = [_digest(_bytes_of(tensor)) for _, tensor in held]
        if found := [held[i][0] for i in _differing(digests, mesh, src_mesh_rank)]:
            raise ShardingError(f"sync_module_over_mesh: after the broadcast, ranks hold other values of {found}")
    return module


def distribute_module(module: nn.Module, device_mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any) -> nn.Module:
    """Replicate a module over a mesh, as torch's `distribute_module` does, with parameters that stay plain tensors.

    Calls on ShardTensors sum the gradients of plain parameters over the mesh. torch's own function makes DTensors of
    them, which FSDP cannot wrap where its mesh axis has one rank. With a `partition_fn`, `input_fn` or `output_fn`,
    torch's function is called.
    """
    if device_mesh is None or args or any(value is not None for value in kwargs.values()):
        return distribute_as_dtensors(module, device_mesh, *args, **kwargs)
    return sync_module_over_mesh(module, device_mesh)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _differing(digests: list[int], mesh: DeviceMesh, source: int) -> list[int]:
    """Return the positions at which some rank has another number than the source, the same list on all ranks."""
    mine = torch.tensor(digests, dtype=torch.int64, device=collectives.device_of(mesh))
    differs = collectives.broadcast_over(mine, mesh, source) != mine
    return _max_over(differs.tolist(), mesh).nonzero().flatten().tolist()


def _max_over(values: list[bool], mesh: DeviceMesh) -> Tensor:
    """Return the maxima over all ranks of the mesh."""
    found = torch.tensor(values, dtype=torch.int64, device=collectives.device_of(mesh))
    for axis in range(mesh.ndim):
        found = collectives.all_reduce(found, mesh.get_group(axis), "max")
    return found
