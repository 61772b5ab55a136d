"""Meshes of different sizes, padded to buckets: few compiled programs, and the results of the meshes themselves."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardfield
from shardfield.data import MeshDataset, ShardedLoader, area_norm
from shardfield.testing import run_on_ranks
from shardfield.train.recipes.aero_transolver import Transolver

SIZES = (40, 41, 47, 52, 53)


def write_clouds(folder):
    h5py = importlib.import_module("h5py")
    for n in SIZES:
        random = np.random.default_rng(n)
        with h5py.File(folder / f"{n}.h5", "w") as file:
            file["points"], file["areas"] = random.random((n, 3)), random.random((n, 1))
    return [folder / f"{n}.h5" for n in SIZES]


def compiled(paths):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "points"))
    torch.manual_seed(0)
    model = Transolver(3, 1, width=8, slices=4, heads=2, layers=1).double()
    fast = shardfield.compile(model, backend="aot_eager")
    datasets = [MeshDataset(paths, ("points", "areas"), bucket=b).prepare(mesh) for b in (None, 1.3)]
    loaders = [ShardedLoader(data, 1, mesh, placements=[Shard(0)], shuffle=False) for data in datasets]
    seen = set()
    for plain, padded in zip(*(loader.sweep() for loader in loaders), strict=True):
        n = plain["points"].shape[1]
        seen.add(padded["points"].shape[1])
        results = []
        for net, batch in ((model, plain), (fast, padded)):
            net.zero_grad()
            out = net(batch["points"], batch["areas"])
            loss = area_norm(out, batch["areas"]).sum()
            loss.backward()
            results.append((out.full_tensor()[:, :n], loss.full_tensor(), [p.grad.clone() for p in model.parameters()]))
        torch.testing.assert_close(*results)
    return fast.forward.traces, sorted(seen)


def test_buckets_are_exact_and_traced_once(tmp_path):
    for traces, sizes in run_on_ranks(compiled, 2, write_clouds(tmp_path), timeout=120):
        assert sizes == [40, 52, 67] and traces == len(sizes), (traces, sizes)


def test_padded_rows(tmp_path):
    paths = write_clouds(tmp_path)
    meshes = MeshDataset(paths, ("points", "areas"), bucket=1.3)
    assert meshes.shapes_of(0) == {"points": (40, 3), "areas": (40, 1)}, "not padded if it fits"
    assert meshes.shapes_of(1) == {"points": (52, 3), "areas": (52, 1)}
    block = meshes.read(1, {"points": (slice(39, 42), slice(0, 3)), "areas": (slice(39, 42), slice(0, 1))})
    assert torch.equal(block["points"][2], block["points"][1]) and block["areas"][2] == 0 < block["areas"][1]
    beyond = meshes.read(1, {"points": (slice(50, 52), slice(0, 3)), "areas": (slice(50, 52), slice(0, 1))})
    assert torch.equal(beyond["points"], block["points"][1:2].expand(2, 3)) and not beyond["areas"].any()
    with pytest.raises(ValueError, match="bucket=1 must be more than 1"):
        MeshDataset(paths, ("areas",), bucket=1)
    with pytest.raises(ValueError, match="'areas' one of"):
        MeshDataset(paths, ("points",), bucket=2)
    with pytest.raises(ValueError, match="edges cannot be padded"):
        MeshDataset(paths, ("areas", "edges"), bucket=2)
