"""Message passing on a sharded graph: bytes sent and time, against gathering all nodes on every rank.

The graph has side x side points in a plane, each connected to its eight neighbors, in the order of `partition_points`.
Nodes are sharded evenly, and an edge is on the rank of its target node. One MeshGraphNet block runs a training step:
edges are updated from their two nodes, nodes from the sum of their edges. "halo" exchanges the rows of nodes that other
ranks need; the first call ("lists made") also exchanges the index lists, which are then cached. "all gathered"
all_gathers the nodes and reduce_scatters the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..comm import autograd_collectives, collectives
from ..layout import balanced, starts
from ..neighbors import partition_points
from ..tensor import ShardTensor
from .measure import count_traffic, interleave, max_over_ranks, rank_seconds
from .ranks import domain_mesh, measure_on_ranks, rank_label
from .table import Table
from .traffic import checked_traffic


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (4,)
    side: int = 160
    width: int = 64
    rounds: int = 7

    quick: ClassVar[dict[str, Any]] = {"side": 24, "width": 16, "rounds": 3}


def mlp(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))


class Block(nn.Module):
    """A MeshGraphNet block. `take(nodes)` and `add(edges, index, nodes)` are the steps in which the methods differ."""

    def __init__(self, width: int):
        super().__init__()
        self.edge, self.node = mlp(3 * width, width), mlp(2 * width, width)

    def forward(self, nodes: Tensor, edge_index: Tensor, edges: Tensor, take: Callable, add: Callable) -> Any:
        source, target = edge_index
        taken = take(nodes)
        edges = edges + self.edge(torch.cat([taken[source], taken[target], edges], -1))
        return nodes + self.node(torch.cat([nodes, add(edges, target, nodes)], -1)), edges


def mesh_graph(side: int) -> Tensor:
    """Return the edges between neighbors as (2, edges), in Morton numbering, sorted by target node."""
    coords = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).view(-1, 2)
    order, _ = partition_points(coords.double())
    number = torch.empty(len(coords), dtype=torch.int64)
    number[order] = torch.arange(len(coords))
    grid = number.view(side, side)
    pairs = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        a = grid[: side - down, max(0, -right) : side - max(0, right)]
        b = grid[down:, max(0, right) : side + min(0, right)]
        pairs += [torch.stack([a.flatten(), b.flatten()]), torch.stack([b.flatten(), a.flatten()])]
    edges = torch.cat(pairs, 1)
    return edges[:, edges[1].argsort(stable=True)]


def compare_on_rank(device: str, side: int, width: int, rounds: int) -> dict[str, Any]:
    """Return seconds and bytes of both methods, on a rank."""
    torch.manual_seed(0)
    mesh = domain_mesh(device)
    group, rank = mesh.get_group(), mesh.get_local_rank()
    count, full_index = side * side, mesh_graph(side)
    shard_sizes = balanced(count, mesh.size())
    first, stop = starts(shard_sizes)[rank], starts(shard_sizes)[rank] + shard_sizes[rank]
    local_index = full_index[:, (full_index[1] >= first) & (full_index[1] < stop)].contiguous().to(device)
    block = Block(width).to(device)
    nodes, edges = (torch.randn(n, width).to(device) for n in (shard_sizes[rank], local_index.shape[1]))
    sharded = [ShardTensor.from_local(t, mesh, [Shard(d)]) for t, d in ((nodes, 0), (local_index, 1), (edges, 0))]

    def halo() -> None:
        def add(messages: Tensor, target: Tensor, like: Tensor) -> Tensor:
            return torch.zeros(like.shape, device=device).index_add_(0, target, messages)

        block.zero_grad(set_to_none=True)
        out, new = block(sharded[0].detach().requires_grad_(), *sharded[1:], lambda x: x, add)
        (out.square().sum() + new.square().sum()).backward()

    def gathered() -> None:
        def take(x: Tensor) -> Tensor:
            return autograd_collectives.gather_replicate_in(x, 0, shard_sizes, group)

        def add(messages: Tensor, target: Tensor, like: Tensor) -> Tensor:
            summed = messages.new_zeros(count, width).index_add(0, target, messages)
            return autograd_collectives.reduce_scatter(summed, 0, shard_sizes, group)

        block.zero_grad(set_to_none=True)
        out, new = block(nodes.detach().requires_grad_(), local_index, edges, take, add)
        (out.square().sum() + new.square().sum()).backward()
        collectives.all_reduce(torch.cat([p.grad.flatten() for p in block.parameters() if p.grad is not None]), group)

    with count_traffic() as first_call:
        halo()
    times = interleave({"all gathered": gathered, "halo": halo}, rounds, partial(rank_seconds, device=device))
    sent = {
        "all gathered": checked_traffic(gathered).bytes,
        "halo, lists made": first_call.bytes,
        "halo": checked_traffic(halo).bytes,
    }
    return {"times": times, "sent": sent}


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings.side, settings.width, settings.rounds)
        case = f"{rank_label(ranks)}, {settings.side} x {settings.side} nodes of {settings.width} features"
        table.add_times(case, max_over_ranks([t["times"] for t in by_rank]), "all gathered")
        sent = {method: max(t["sent"][method] for t in by_rank) for method in by_rank[0]["sent"]}
        if ranks > 1:
            table.add_counts(f"{case}: sent", sent, "kB", "all gathered")
