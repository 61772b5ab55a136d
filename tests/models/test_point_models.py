"""Models of meshes and point clouds, unmodified, on uneven shards: equal to one device, no gather, few bytes."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain, knn, radius_search, strict
from shardfield.layout import Layout
from shardfield.planning import simulated, without_data
from shardfield.testing import run_on_ranks
from shardfield.train.recipes.aero_transolver import SliceAttention, Transolver
from tests.harness import local_shard

POINTS, WIDTH = 37, 8
SHARDINGS = {2: (29, 8), 3: (20, 0, 17)}


@functools.cache
def pyg() -> Any:
    """Import torch_geometric, which imports deprecated parts of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_geometric.nn
    return torch_geometric.nn


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs))


def neighbor_edges(points, k):
    """Return edges (2, number) from the k nearest points to each point."""
    source = knn(points.detach(), points.detach(), k)[0]
    target = torch.arange(len(points))[:, None].expand(-1, k)
    return torch.stack([source.reshape(-1), (source * 0 + target).reshape(-1)])


class TransolverPlusPlus(nn.Module):
    """Slices with a temperature of each point, and reparameterized assignments, as in Transolver++."""

    def __init__(self, slices: int = 5):
        super().__init__()
        self.lift, self.assign, self.temperature = nn.Linear(3, WIDTH), nn.Linear(WIDTH, slices), nn.Linear(WIDTH, 1)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, points):
        x = self.lift(points)[None]
        noise = torch.sin(100 * points.sum(-1, keepdim=True)).abs().clamp_min(1e-3)  # no generator: equal on all ranks
        logits = self.assign(x) - torch.log(-torch.log(noise * 0.99))
        weights = torch.softmax(logits / (0.5 + torch.sigmoid(self.temperature(x))), -1)
        states = weights.transpose(1, 2) @ x / (weights.sum(1)[..., None] + 1e-5)
        q, k, v = self.qkv(states).chunk(3, -1)
        return self.out(x + weights @ F.scaled_dot_product_attention(q, k, v))[0]


class GeoTransolver(nn.Module):
    """Slices that also attend to a context of the geometry, pooled from the neighbors within two radii."""

    def __init__(self, slices: int = 4):
        super().__init__()
        self.local, self.context = mlp(8, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.assign, self.query, self.out = nn.Linear(WIDTH, slices), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, points):
        features = [points]
        for radius in (0.3, 0.5):
            index, distance, counts = radius_search(points, points, radius, 6)
            near = points[index.clamp_min(0)] - points[:, None]
            weight = torch.where(index >= 0, 1.0, 0.0).to(points.dtype)[..., None]
            mean = (near * weight).sum(1) / counts[:, None].to(points.dtype)
            features += [mean[:, :2], torch.where(index >= 0, distance, 0.0).sum(1, keepdim=True)]
        x = self.local(torch.cat([*features[:2], features[2][:, :1], features[3], features[4]], 1)[:, :8])[None]
        weights = torch.softmax(self.assign(x), -1)
        states = weights.transpose(1, 2) @ x / (weights.sum(1)[..., None] + 1e-5)
        k, v = self.context(x.mean(1, keepdim=True)).chunk(2, -1)
        states = states + F.scaled_dot_product_attention(self.query(states), k, v)
        return self.out(x + weights @ states)[0]


class Domino(nn.Module):
    """Ball queries of points around other points, an MLP of the neighbors, and a mean, as DoMINO's geometry encoder."""

    def __init__(self):
        super().__init__()
        self.near, self.solve = mlp(4, WIDTH), mlp(WIDTH + 3, 1)

    def forward(self, points):
        index, distance, counts = radius_search(points, points, 0.45, 9)
        inside = (index >= 0)[..., None]
        offset = points[index.clamp_min(0)] - points[:, None]
        offset = torch.cat([offset, torch.where(inside, distance[..., None], 0.0)], -1)
        encoded = torch.where(inside, self.near(offset), 0.0).sum(1) / counts[:, None]
        return self.solve(torch.cat([encoded, points], 1))


class PyG(nn.Module):
    """PointNet++'s and Point Transformer's layers of torch_geometric, on the neighbors of each point."""

    def __init__(self):
        super().__init__()
        self.pointnet = pyg().PointNetConv(mlp(3 + 3, WIDTH), mlp(WIDTH, WIDTH), add_self_loops=False)
        self.transformer = pyg().PointTransformerConv(
            WIDTH, 1, pos_nn=mlp(3, 1), attn_nn=mlp(1, 1), add_self_loops=False
        )

    def forward(self, points):
        edges = neighbor_edges(points, 4)
        return self.transformer(torch.relu(self.pointnet(points, points, edges)), points, edges)


class MeshGraphNet(nn.Module):
    """Encoder, 15 processor layers with residuals, decoder."""

    def __init__(self, layers: int = 15):
        super().__init__()
        self.node, self.edge, self.out = mlp(3, WIDTH), mlp(3, WIDTH), nn.Linear(WIDTH, 1)
        self.edges = nn.ModuleList(mlp(3 * WIDTH, WIDTH) for _ in range(layers))
        self.nodes = nn.ModuleList(mlp(2 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, points):
        index = neighbor_edges(points, 3)
        source, target = index
        x, e = self.node(points), self.edge(points[source] - points[target])
        for edge, node in zip(self.edges, self.nodes, strict=True):
            e = e + edge(torch.cat([e, x[source], x[target]], 1))
            x = x + node(torch.cat([x, torch.zeros_like(x).index_add(0, target, e)], 1))
        return self.out(x)


class PlainTransolver(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Transolver(3, 1, WIDTH, slices=5, heads=2, layers=2)

    def forward(self, points):
        return self.model(points[None])[0]


MODELS = [PlainTransolver, TransolverPlusPlus, GeoTransolver, Domino, PyG, MeshGraphNet]


def compare(names):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("points",))
    full = torch.rand(POINTS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = Layout.of(mesh, [Shard(0)], full.shape, {0: SHARDINGS[mesh.size()]})
    gathers = {}
    for kind in MODELS:
        if kind.__name__ not in names:
            continue
        torch.manual_seed(0)
        model = kind().double()
        alone = full.clone().requires_grad_()
        expected = model(alone)
        expected.square().sum().backward()
        want = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        points = ShardTensor.from_local(local_shard(full, layout).clone(), mesh, [Shard(0)], "infer").requires_grad_()
        with explain() as report:
            found = model(points)
            found.square().sum().backward()
        gathers[kind.__name__] = [row.op for row in report.gathers]
        torch.testing.assert_close(found.full_tensor(), expected.detach(), msg=lambda m, k=kind: f"{k}: {m}")
        torch.testing.assert_close(points.grad.full_tensor(), alone.grad, msg=lambda m, k=kind: f"{k}, points: {m}")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, want[name], msg=lambda m, k=kind, n=name: f"{k}.{n}: {m}")
    return gathers


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_equal_one_device(ranks):
    for gathers in run_on_ranks(compare, ranks, [m.__name__ for m in MODELS], timeout=90):
        assert gathers == {m.__name__: [] for m in MODELS}


def slice_bytes(model, local, mesh):
    """Return the bytes that a rank sends in the forward and in the backward of a block."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # their gradients are summed by data parallelism
    points = ShardTensor.from_local(local, mesh, [Shard(1)], "infer").requires_grad_()
    with explain() as report:
        (model(points) * 2.0).sum().backward()
    # the loss is no part of the block
    return sum(r.bytes for r in report.rows if r.op != "sum"), sum(r.back_bytes for r in report.rows)


def needed_bytes(ranks, slices, width, heads):
    """Return the bytes of a ring's all-reduce of S x C values and S weights of each head, in float32."""
    return 2 * (ranks - 1) / ranks * slices * (width + heads) * 4


def bytes_on_four_ranks(slices, width, heads):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("points",))
    torch.manual_seed(0)
    return slice_bytes(SliceAttention(width, slices, heads), torch.randn(1, 150 + 10 * mesh.get_rank(), width), mesh)


@pytest.mark.parametrize(("slices", "width"), [(16, 32), (64, 256)])
def test_bytes_of_a_transolver_block(slices, width):
    """A block sends the sums of its slices once forward and their gradients once backward, and nothing else.

    From 8,192 values on, the slices are reduce-scattered over the heads, which attend alone, and gathered again: as
    many bytes as one all-reduce. Backward does the same in reverse.
    """
    need = needed_bytes(4, slices, width, 4)
    for found in run_on_ranks(bytes_on_four_ranks, 4, slices, width, 4):
        assert found == (need, need), (found, need)


@pytest.mark.parametrize(("ranks", "slices", "width", "heads"), [(8, 64, 256, 8), (4, 128, 512, 8)])
def test_bytes_of_a_rank_among_many(ranks, slices, width, heads):
    """Ranks that divide the heads evenly send as many bytes, whatever their number."""
    with simulated(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("points",))
        with without_data():
            found = slice_bytes(SliceAttention(width, slices, heads), torch.empty(1, 600, width), mesh)
    need = needed_bytes(ranks, slices, width, heads)
    assert found == pytest.approx((need, need), abs=2)  # each call's bytes are whole numbers


def few_points_stay_sharded():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("points",))
    points = ShardTensor.from_local(torch.randn(1, 17, 256), mesh, [Shard(1)], "infer")
    with strict():
        return tuple(SliceAttention(256, 32, 4)(points).placements)


def test_slices_larger_than_the_points_of_a_rank_stay_sharded():
    """Three ranks do not divide four heads: slices on every rank would be more than a rank's share of the field."""
    assert run_on_ranks(few_points_stay_sharded, 3) == [(Shard(1),)] * 3
