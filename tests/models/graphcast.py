"""An encoder, processor and decoder as GraphCast's, on a grid of latitudes and longitudes and an icosahedral mesh."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from shardfield import knn, partition_points

LAYERS = 16


def icosahedral_levels(refinements: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the points of a refined icosahedron and the edges (2, number) of each level, in both directions."""
    golden = (1 + 5**0.5) / 2
    corners = [(0, a, b) for a in (-1, 1) for b in (-golden, golden)]
    points = torch.tensor([tuple(c[(i - turn) % 3] for i in range(3)) for turn in range(3) for c in corners]).double()
    points = nn.functional.normalize(points, dim=1)
    near = torch.cdist(points, points) < 1.1
    faces = [
        f for f in itertools.combinations(range(12), 3) if all(near[i, j] for i, j in itertools.combinations(f, 2))
    ]
    levels = []
    for level in range(refinements + 1):
        pairs = {pair for f in faces for pair in itertools.permutations(f, 2)}
        levels.append(torch.tensor(sorted(pairs)).T)
        if level < refinements:
            points, faces = _refine(points, faces)
    return points, levels


def _refine(points, faces):
    middle, found = {}, list(points)
    for f in faces:
        for pair in itertools.combinations(sorted(f), 2):
            if pair not in middle:
                middle[pair] = len(found)
                found.append(nn.functional.normalize(found[pair[0]] + found[pair[1]], dim=0))
    smaller = []
    for a, b, c in (sorted(f) for f in faces):
        ab, bc, ac = middle[a, b], middle[b, c], middle[a, c]
        smaller += [(a, ab, ac), (b, ab, bc), (c, ac, bc), (ab, bc, ac)]
    return torch.stack(found), smaller


def grid_points(rows: int, columns: int) -> torch.Tensor:
    lat, lon = torch.meshgrid(
        torch.linspace(-1.5, 1.5, rows).double(), torch.arange(columns).double() * 2 * torch.pi / columns, indexing="ij"
    )
    return torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], -1).reshape(-1, 3)


def mlp(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))


class Interaction(nn.Module):
    """Messages of edges from one point set to another, summed at the targets; edges and targets are updated."""

    def __init__(self, width: int):
        super().__init__()
        self.edge, self.node = mlp(3 * width, width), mlp(2 * width, width)

    def forward(self, source_nodes, target_nodes, edge_features, source, target):
        edges = self.edge(torch.cat([edge_features, source_nodes[source], target_nodes[target]], 1))
        summed = torch.zeros_like(target_nodes).index_add(0, target, edges)
        return edge_features + edges, target_nodes + self.node(torch.cat([target_nodes, summed], 1))


class GraphCast(nn.Module):
    def __init__(self, features: int, width: int):
        super().__init__()
        self.embed_grid, self.embed_mesh = mlp(features, width), mlp(3, width)
        self.embed_edges = nn.ModuleList(mlp(3, width) for _ in range(3))
        self.encoder, self.decoder = Interaction(width), Interaction(width)
        self.processor = nn.ModuleList(Interaction(width) for _ in range(LAYERS))
        self.out = nn.Linear(width, features)

    def forward(self, state, grid, mesh, to_mesh, on_mesh, to_grid):
        x, nodes = self.embed_grid(state), self.embed_mesh(mesh)
        pairs = ((grid, mesh, to_mesh), (mesh, mesh, on_mesh), (mesh, grid, to_grid))
        up, inner, down = (
            embed(a[edges[0]] - b[edges[1]]) for embed, (a, b, edges) in zip(self.embed_edges, pairs, strict=True)
        )
        nodes = self.encoder(x, nodes, up, *to_mesh)[1]
        for layer in self.processor:
            inner, nodes = layer(nodes, nodes, inner, *on_mesh)
        return state + self.out(self.decoder(nodes, x, down, *to_grid)[1])


def edges_to(points, targets, k):
    """Return edges (2, number) from the k nearest points to each target."""
    source = knn(points, targets, k)[0]
    return torch.stack([source.reshape(-1), torch.arange(len(targets)).repeat_interleave(k)])


def build_tensors(refinements: int, rows: int, columns: int, features: int) -> dict[str, torch.Tensor]:
    """Return the arguments of the model; edges are in the order of their targets."""
    nodes, levels = icosahedral_levels(refinements)
    order, nodes = partition_points(nodes)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    on_mesh = number[torch.cat(levels, 1)]  # the multi-mesh: edges of all levels
    grid = grid_points(rows, columns)
    to_mesh = edges_to(nodes, grid, 2).flip(0)  # each grid point to its two nearest nodes
    tensors = {"grid": grid, "mesh": nodes}
    edges = {"to_mesh": to_mesh, "on_mesh": on_mesh, "to_grid": edges_to(nodes, grid, 3)}
    for name, index in edges.items():
        tensors[name] = index[:, index[1].argsort(stable=True)]
    state = torch.randn(len(grid), features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"state": state, **tensors}
