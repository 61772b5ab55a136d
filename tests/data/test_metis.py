"""Points in METIS's order: one partition beside the file serves all numbers of ranks, with few edges between them."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardfield import ShardingError
from shardfield.data import open_mesh
from shardfield.data.metis import shard_sizes
from shardfield.testing import run_on_ranks

meshio = importlib.import_module("meshio")


@pytest.fixture
def disc(tmp_path):
    """A ring of quadrilaterals in shuffled order: a Morton curve crosses its hole."""
    rings, turns = 12, 60
    at = np.random.default_rng(0).permutation(rings * turns).reshape(rings, turns)
    r, phi = np.meshgrid(np.linspace(1, 2, rings), np.arange(turns) * 2 * np.pi / turns, indexing="ij")
    points = np.empty((rings * turns, 3))
    points[at.ravel()] = np.stack([r * np.cos(phi), r * np.sin(phi), 0 * r], -1).reshape(-1, 3)
    around = np.roll(at, -1, 1)
    quads = np.stack([at[:-1], at[1:], around[1:], around[:-1]], -1).reshape(-1, 4)
    path = tmp_path / "disc.vtu"
    meshio.Mesh(points, [("quad", quads)]).write(path)
    return path


def cut_edges(path, order):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("points",))
    opened = open_mesh(path, mesh, order=order)
    begin, end = opened.layout.span(0)
    source, target = opened["edges"].to_local()
    assert bool(((target >= begin) & (target < end)).all())
    for name in opened.fields:
        torch.testing.assert_close(opened[name].full_tensor(), open_mesh(path, order=order)[name])
    return end - begin, int(((source < begin) | (source >= end)).sum())


def test_fewer_edges_between_ranks_than_morton(disc):
    found = {order: run_on_ranks(cut_edges, 4, disc, order) for order in ("morton", "metis")}
    sizes = [n for n, _ in found["metis"]]
    assert sum(sizes) == 720 and max(sizes) <= 1.1 * 180, "parts of nearly equal size are not divided"
    edges = {order: sum(e for _, e in ranks) for order, ranks in found.items()}
    assert edges["metis"] < 0.8 * edges["morton"], edges
    three = run_on_ranks(cut_edges, 3, disc, "metis")  # 8 parts on 3 ranks: even shards in METIS's order
    assert [n for n, _ in three] == [240] * 3
    assert sorted(name for name in os.listdir(disc.parent)) == ["disc.vtu", "disc.vtu.metis", "disc.vtu.morton"]


def test_shard_sizes():
    assert shard_sizes([3, 4, 5, 6], 2) == [7, 11]
    assert shard_sizes([3, 4, 5, 6], 3) is None and shard_sizes([], 2) is None and shard_sizes([3, 4], 4) is None


def test_refused(disc, tmp_path, monkeypatch):
    cloud = tmp_path / "cloud.vtu"
    meshio.Mesh(np.random.default_rng(0).random((9, 3)), [("vertex", np.arange(9)[:, None])]).write(cloud)
    with pytest.raises(ShardingError, match="has no cells with edges"):
        open_mesh(cloud, order="metis")
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ShardingError, match=r"needs pymetis: pip install 'shardfield\[metis\]'"):
        open_mesh(disc, order="metis")
