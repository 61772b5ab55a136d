"""Draw the inputs of a case: values, meshes, placements and shard sizes. The draw is the same on all ranks."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardfield import ShardTensor, runtime
from shardfield.layout import Layout
from shardfield.redistribute import redistribute

from .cases import Case, T

# The device of the rows: `SHARDFIELD_DEVICE=cuda pytest tests/ops/test_case_tables.py` runs the tables on a GPU, which
# all ranks share.
DEVICE = os.environ.get("SHARDFIELD_DEVICE", "cpu")
MESHES = [(1,), (2,), (3,), (4,), (2, 2)] if DEVICE == "cpu" else [(1,), (1, 1), (2,), (4,), (2, 2)]
_MESHES: WeakKeyDictionary[runtime.Runtime, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def world_mesh(shape: tuple[int, ...]):
    """Return a mesh over all ranks. A single rank uses its device's own backend; several on one GPU cannot."""
    meshes = _MESHES.setdefault(runtime.active, {})  # virtual ranks share this module
    if shape not in meshes:
        meshes[shape] = _make_world_mesh(shape)
    return meshes[shape]


def _make_world_mesh(shape: tuple[int, ...]):
    names = ("h", "w", "d")[: len(shape)]
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).set_device(dist.get_rank() % torch.get_device_module(DEVICE).device_count())
    if DEVICE == "cpu" or math.prod(shape) > 1:
        return init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    groups = [dist.new_group(backend=dist.get_default_backend_for_device(DEVICE)) for _ in shape]
    group: Any = groups if len(shape) > 1 else groups[0]
    return DeviceMesh.from_group(group, DEVICE, torch.zeros(shape, dtype=torch.int), mesh_dim_names=names)


def draw_values(case: Case) -> list[torch.Tensor]:
    """Draw the global tensors of a case, on the CPU."""
    generator = torch.Generator().manual_seed(1234)
    return [t.make(generator) for t in case.tensors]


def draw_shard_sizes(size: int, parts: int, rng: random.Random) -> list[int]:
    """Draw shard sizes: even chunks, everything on one rank, or uneven with empty shards."""
    kind = rng.randrange(4)
    if kind == 0:
        step = -(-size // parts)
        return [max(0, min(step, size - i * step)) for i in range(parts)]
    if kind == 1:
        owner = rng.randrange(parts)
        return [size if i == owner else 0 for i in range(parts)]
    marks = sorted(rng.randint(0, size) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, size], strict=True)]


def draw_layout(mesh, t: T, rng: random.Random, try_partial: bool) -> Layout:
    """Draw placements and shard sizes of a tensor argument."""
    placements: list[Placement] = []
    dims = list(range(len(t.shape))) if t.shard_dims is None else list(t.shard_dims)
    for _ in range(mesh.ndim):
        choice = rng.random()
        if try_partial and choice < 0.15 and t.fill in ("normal", "positive", "unit", "distinct"):
            placements.append(Partial())
        elif dims and choice < 0.9:
            placements.append(Shard(rng.choice(dims)))
        else:
            placements.append(Replicate())
    chunked = Layout.of(mesh, placements, t.shape)
    sizes = {
        d: draw_shard_sizes(t.shape[d], len(chunked.shard_sizes(d)), rng)
        for d in range(len(t.shape))
        if chunked.axes_of(d)
    }
    return Layout.of(mesh, placements, t.shape, sizes)


def local_shard(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return this rank's shard of a global tensor; a Partial is split into unequal partial sums."""
    summed = layout.with_partial(())
    local = redistribute(full, Layout.replicate(layout.mesh, full.shape), summed).clone()
    for axis in layout.partial_axes:
        size, coord = layout.mesh.size(axis), layout.coords[axis]
        # Partial sums differ between ranks: a rule that treats them as equal shares of the value then fails.
        local = local * (coord + 1) / (size * (size + 1) / 2)
    return local


@dataclass(frozen=True)
class Operands:
    """Hold one draw for a case: the global values, and a layout for each tensor that is sharded."""

    case: Case
    values: list[torch.Tensor]
    layouts: list[Layout | None]
    label: str

    def plain(self, device: str = DEVICE) -> list[torch.Tensor]:
        """Return fresh global leaves for one device."""
        return [
            v.clone().to(device).requires_grad_(self.case.grad and t.requires_grad(v))
            for t, v in zip(self.case.tensors, self.values, strict=True)
        ]

    def sharded(self) -> list[Any]:
        """Return fresh leaves with their drawn layouts; operands without a layout stay plain."""
        out: list[Any] = []
        for plain, layout in zip(self.plain(), self.layouts, strict=True):
            if layout is None:
                out.append(plain)
                continue
            local = local_shard(plain.detach(), layout).requires_grad_(plain.requires_grad)
            out.append(ShardTensor(local, layout))
        return out


def draw_operands(case: Case, mesh, rng: random.Random, index: int) -> Operands:
    """Draw values and layouts; an even index may shard several operands, an odd one shards a single operand."""
    tensors = case.tensors
    shardable = [i for i, t in enumerate(tensors) if t.shard_dims != ()]
    first = rng.choice(shardable) if shardable else 0
    layouts: list[Layout | None] = []
    for i, t in enumerate(tensors):
        use = i == first or (index % 2 == 0 and i in shardable and rng.random() < 0.8)
        layouts.append(draw_layout(mesh, t, rng, case.try_partial) if use else None)
    label = f"{case.name} on {tuple(mesh.shape)} with {[repr(x) if x else 'plain' for x in layouts]}"
    return Operands(case, draw_values(case), layouts, label)
