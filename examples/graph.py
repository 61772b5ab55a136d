"""Train a graph network on a sharded graph: each rank has some nodes, and the edges that end at them.

torchrun --nproc-per-node 2 examples/graph.py
"""

import torch
from torch import nn

from shardfield import explain, knn, partition_points
from shardfield.distributed import DistributedManager


class Block(nn.Module):
    """Update edges from their two nodes, and nodes from the sum of their edges: plain torch, no distributed code."""

    def __init__(self, width):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))

    def forward(self, nodes, edge_index, edges):
        source, target = edge_index
        edges = edges + self.edge(torch.cat([nodes[source], nodes[target], edges], -1))
        summed = torch.zeros_like(nodes).index_add(0, target, edges)
        return nodes + self.node(torch.cat([nodes, summed], -1)), edges


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.nodes, self.edges, self.out = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, points, edge_index):
        source, target = edge_index
        nodes, edges = self.nodes(points), self.edges(points[source] - points[target])
        for block in self.blocks:
            nodes, edges = block(nodes, edge_index, edges)
        return self.out(nodes)


def main():
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])
    torch.manual_seed(0)
    cloud = torch.rand(1501, 3, device=dm.device)
    _, points = partition_points(cloud, mesh)  # compact shards: most neighbors are on the same rank
    source, _ = knn(points, points, 6)  # sharded like the points
    target = torch.arange(points.shape[0] * 6, device=dm.device) // 6
    edge_index = torch.stack([source.reshape(-1), target])  # (2, edges): an edge is on the rank of its target
    labels = (points * 6).sin().sum(1, keepdim=True)

    model, losses = Net().to(dm.device), []
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(10):
        with explain() as report:
            loss = (model(points, edge_index) - labels).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = model(points.full_tensor(), edge_index.full_tensor())
        agrees = torch.allclose(model(points, edge_index).full_tensor(), expected, atol=1e-4)
    cached = [r for r in report.rows if "cached lists" in r.ending]
    fraction = max(r.bytes for r in cached) / (points.shape[0] * 16 * 4)
    if dm.rank == 0:
        print(f"{mesh.size()} ranks, {edge_index.shape[1]} edges: loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"{len(cached)} calls use cached lists; each sends at most {fraction:.0%} of the nodes; agrees: {agrees}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
