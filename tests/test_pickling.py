"""torch.save and torch.load of ShardTensors, with weights_only=True: in the same world, in a later one, and misuse."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardingError, ShardTensor, runtime
from shardfield.distributed import DistributedManager
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks

PLACEMENTS = {
    (2,): [[Shard(0)], [Shard(1)], [Partial()], [Replicate()]],
    (2, 2): [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Partial()]],
}


def tensors(mesh) -> list[ShardTensor]:
    """Return one tensor per placement: uneven, one of them with gradients, one with a merged dim."""
    made = []
    for placements in PLACEMENTS[tuple(mesh.mesh.shape)]:
        layout = Layout.of(mesh, placements, (5, 3))
        generator = torch.Generator().manual_seed(dist.get_rank() if layout.shard_axes or layout.partial else 0)
        made.append(ShardTensor(torch.randn(layout.local_shape, generator=generator), layout))
    made[0] = made[0].requires_grad_()
    return [*made, made[0].flatten()]


def save(folder: str, mesh_shape) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("h", "w")[: len(mesh_shape)])
    state = {"tensors": tensors(mesh), "step": 3}
    torch.save(state, f"{folder}/{dist.get_rank()}.pt")
    for loaded in (torch.load(f"{folder}/{dist.get_rank()}.pt"), pickle.loads(pickle.dumps(state)), copy.copy(state)):
        compare(loaded, state)


def load(folder: str, mesh_shape) -> None:
    """Load in a world whose meshes have other groups, and where no mesh like the saved one is in use."""
    with runtime.fresh():
        if mesh_shape == (2, 2):  # groups that a saved mesh would name, in another order
            dist.new_group([1, 3]), dist.new_group([0, 2])
        state = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=True)
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("h", "w")[: len(mesh_shape)])
        compare(state, {"tensors": tensors(mesh), "step": 3})


def compare(loaded: dict, state: dict) -> None:
    assert loaded["step"] == state["step"]
    for got, expected in zip(loaded["tensors"], state["tensors"], strict=True):
        assert got.placements == expected.placements and got.requires_grad == expected.requires_grad
        assert torch.equal(got.to_local(), expected.to_local())
        assert torch.equal(got.full_tensor(), expected.full_tensor())
        assert torch.equal((got.double() * 2).sum().full_tensor(), (expected.double() * 2).sum().full_tensor())


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_save_and_load(mesh_shape, tmp_path):
    ranks = torch.Size(mesh_shape).numel()
    run_on_ranks(save, ranks, str(tmp_path), mesh_shape)
    run_on_ranks(load, ranks, str(tmp_path), mesh_shape)


def misused(folder: str) -> list[str]:
    """Return the errors of loading another rank's file, and on a device that the mesh does not have."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    layout = Layout.of(mesh, [Shard(0)], (4, 3))
    torch.save(ShardTensor(torch.ones(2, 3), layout), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    found = []
    for options in ({"f": f"{folder}/{1 - dist.get_rank()}.pt"}, {"f": own(folder), "map_location": "meta"}):
        with pytest.raises(ShardingError) as error:
            torch.load(**options)
        found.append(str(error.value))
    return found


def own(folder: str) -> str:
    return f"{folder}/{dist.get_rank()}.pt"


def other_world(folder: str) -> str:
    DistributedManager.initialize()  # no ShardTensor was made here
    with pytest.raises(ShardingError) as error:
        torch.load(f"{folder}/0.pt")
    DistributedManager.cleanup()
    return str(error.value)


def test_misuse(tmp_path):
    for rank, (other, device) in enumerate(run_on_ranks(misused, 2, str(tmp_path))):
        assert f"the shard at ({1 - rank},)" in other and f"this rank is at ({rank},)" in other
        assert "meta" in device
    assert "saved on a cpu mesh of shape (2,)" in run_on_ranks(other_world, 1, str(tmp_path))[0]
    run = subprocess.run([sys.executable, "-c", IMPORTED, str(tmp_path / "0.pt")], capture_output=True, text=True)
    imported, initialized = run.stdout.splitlines()
    assert "UnpicklingError" in imported and "shardfield.tensor.rebuild" in imported, run.stderr
    assert "ShardingError" in initialized and "create that mesh" in initialized, run.stderr


# `import shardfield` changes nothing in torch, so that torch.load refuses the file; the manager allows it to be read.
IMPORTED = """
import sys
import torch, shardfield
from shardfield.distributed import DistributedManager
for prepare in (lambda: None, DistributedManager.initialize):
    prepare()
    try:
        torch.load(sys.argv[1], weights_only=True)
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""
