"""torch.distributed.checkpoint saves and loads ShardTensors: uneven and empty shards, 2x2 meshes, other meshes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardfield import ShardTensor
from shardfield.testing import run_on_ranks

FULL = torch.arange(7 * 6 * 4.0).reshape(7, 6, 4)
R, S = Replicate, Shard


def made(full, shape, placements, sizes=None):
    """Shard a tensor that every rank has; `sizes`: shard sizes by mesh axis, else those of torch.chunk."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    full = ShardTensor.from_local(full.clone(), mesh, [R()] * len(shape), "chunk", tuple(full.shape))
    return full.redistribute(placements=placements, sharding_shapes=sizes)


def fields(shape, change=lambda t: t):
    """Return tensors in many layouts; on the same mesh shape, every rank calls it."""
    one = len(shape) == 1
    by_ranks = {0: [0, 5, 2, 0][: shape[0] - 1] + [7 - sum([0, 5, 2, 0][: shape[0] - 1])]}
    return {
        "uneven": made(change(FULL), shape, [S(0)] if one else [S(0), R()], by_ranks),
        "two dims": made(change(FULL), shape, [S(1)] if one else [S(1), S(2)]),
        "nested": made(change(FULL), shape, [S(0)] if one else [S(0), S(0)]),
        "replicated": made(change(FULL), shape, [R()] * len(shape)),
        "merged": made(change(FULL), shape, [S(1)] if one else [S(0), S(1)]).flatten(0, 1),
        "scalar": made(change(FULL)[0, 0, 0], shape, [R()] * len(shape)),
        "empty": made(change(FULL)[:, :0], shape, [S(0)] if one else [S(0), S(2)]),
        "complex": made(torch.complex(change(FULL), -FULL), shape, [S(2)] if one else [R(), S(2)]),
    }


def expected(name):
    found = {"merged": FULL.flatten(0, 1), "scalar": FULL[0, 0, 0], "empty": FULL[:, :0]}
    return torch.complex(FULL, -FULL) if name == "complex" else found.get(name, FULL)


def quietly(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return call(*args, **kwargs)


def saves(folder, shape):
    quietly(dcp.save, {"net": fields(shape), "note": "kept"}, checkpoint_id=folder)


def loads(folder, shape):
    """Load into other values in another layout, into DTensors and into plain tensors."""
    state = {"net": fields(shape, lambda t: t - 1000), "note": ""}
    kept = {name: tensor._local_tensor for name, tensor in state["net"].items()}
    quietly(dcp.load, state, checkpoint_id=folder)
    assert state["note"] == "kept"
    for name, tensor in state["net"].items():
        assert tensor._local_tensor is kept[name], "loaded in place"
        assert torch.equal(tensor.full_tensor(), expected(name)), name
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    other = {"net": {"uneven": distribute_tensor(FULL * 0, mesh, [S(1)]), "merged": torch.zeros(42, 4)}}
    quietly(dcp.load, other, checkpoint_id=folder)
    assert torch.equal(other["net"]["uneven"].full_tensor(), FULL)
    assert torch.equal(other["net"]["merged"], FULL.flatten(0, 1))


def test_save_and_load_on_another_mesh(tmp_path):
    for world, shape in ((4, (2, 2)), (3, (3,))):
        folder = tmp_path / f"{world}"
        run_on_ranks(saves, world, folder, shape, timeout=90)
        for other, onto in ((1, (1,)), (2, (2,)), (3, (3,)), (4, (2, 2)), (4, (4,))):
            run_on_ranks(loads, other, folder, onto, timeout=90)


def observed(folder):
    """Check the neighbors of a load: a view of the source, a lazy spectrum, a DTensor's checkpoint, refusals."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    held = {"x": distribute_tensor(FULL, mesh, [S(0)]), "sum": FULL.sum(1)}
    quietly(dcp.save, held, checkpoint_id=folder / "dtensor")
    x = made(FULL * 0 + 1, (2,), [S(1)], {0: [1, 5]}).requires_grad_()
    spectrum, before = torch.fft.rfft(x.detach(), dim=1), torch.fft.rfft(FULL * 0 + 1, dim=1)
    quietly(dcp.load, {"x": x}, checkpoint_id=folder / "dtensor")
    assert torch.equal(x.full_tensor(), FULL) and x.requires_grad
    torch.testing.assert_close(spectrum.full_tensor(), before)
    results = []
    partial = made(FULL, (2,), [S(1)]).sum(1)
    for call in (dcp.save, dcp.load):
        with pytest.raises(BaseException) as caught:  # CheckpointException is no Exception
            quietly(call, {"sum": partial}, checkpoint_id=folder / "dtensor")
        results.append(str(caught.value))
    short = made(FULL[:4], (2,), [S(0)])
    with pytest.raises(BaseException, match="Size mismatch|size mismatch"):
        quietly(dcp.load, {"x": short}, checkpoint_id=folder / "dtensor")
    return results


def test_what_a_load_must_not_disturb(tmp_path):
    for results in run_on_ranks(observed, 2, tmp_path):
        assert all("is a pending sum; redistribute()" in text for text in results), results
