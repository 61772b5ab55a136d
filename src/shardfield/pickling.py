"""Plain values from which a ShardTensor is rebuilt, for pickle and torch.save.

A file holds one rank's shard, its coordinates, and the layout as strings and integers. The only global that it names is
`rebuild` of `tensor/`, which `_compat/patches.py` adds to torch's safe globals: `torch.load` reads the file with
`weights_only=True`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import runtime
from .errors import ShardingError
from .layout import DimSharding, Layout


def layout_values(layout: Layout) -> tuple[Any, ...]:
    """Return (device type, ranks, axis names, dims, partial, coords of this rank) of a layout as plain values."""
    mesh = layout.mesh
    dims = tuple(tuple((f.size, tuple(f.axes), tuple(f.shard_sizes)) for f in d) for d in layout.dims)
    return mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names, dims, tuple(layout.partial), layout.coords


def rebuild_layout(device_type: str, ranks: Any, names: Any, dims: Any, partial: Any, coords: Any) -> Layout:
    """Return the layout of `layout_values`, on the mesh of this world that has these ranks and names.

    Raises unless this rank has the coordinates of the saved shard.
    """
    mesh = _find_mesh(device_type, ranks, names)
    layout = Layout.make(mesh, [[DimSharding(*f) for f in d] for d in dims], [tuple(p) for p in partial])
    axes = [*layout.shard_axes, *layout.partial_axes]
    if any(layout.coords[axis] != coords[axis] for axis in axes):
        raise ShardingError(
            f"this is the shard at {tuple(coords)} of {layout}, and this rank is at {layout.coords}: each rank loads "
            "the file that it saved"
        )
    return layout


def _find_mesh(device_type: str, ranks: Any, names: Any) -> DeviceMesh:
    """Return the mesh in use that has these ranks and names, or create it if it spans the world."""
    wanted = torch.tensor(ranks)
    saved = f"a {device_type} mesh of shape {tuple(wanted.shape)} with axes {names}"
    if not dist.is_initialized():
        raise ShardingError(f"a ShardTensor was saved on {saved}: create that mesh before loading it")
    for mesh in runtime.active.mesh_states:
        if mesh.device_type == device_type and mesh.mesh_dim_names == names and mesh.mesh.equal(wanted):
            return mesh
    world = dist.get_world_size()
    if sorted(wanted.flatten().tolist()) != list(range(world)):
        raise ShardingError(
            f"a ShardTensor was saved on {saved}, ranks {ranks}, and this world has {world} ranks. Create that mesh "
            "and a ShardTensor on it before loading; to load on other ranks save full_tensor() or a checkpoint"
        )
    return DeviceMesh(device_type, wanted, mesh_dim_names=names)
