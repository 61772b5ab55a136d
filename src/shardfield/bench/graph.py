"""Message passing on a mesh in pieces: what is sent and how long it takes, against gathering all nodes on every rank.

A graph of side x side points in a plane, each joined to its eight neighbours, in the order of `partition_points`: cut
into even pieces, edges where they end. One MeshGraphNet block takes a training step: edges learn from the nodes at
their ends, nodes from the sum of their edges. The halo sends the rows along borders, first with the lists of who needs
which, which are then kept; the other way all-gathers the nodes and reduce-scatters the sums.
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
    """`take(nodes)` and `add(edges, index, nodes)` are what the two ways differ in."""

    def __init__(self, width: int):
        super().__init__()
        self.edge, self.node = mlp(3 * width, width), mlp(2 * width, width)

    def forward(self, nodes: Tensor, edge_index: Tensor, edges: Tensor, take: Callable, add: Callable) -> Any:
        source, target = edge_index
        found = take(nodes)
        edges = edges + self.edge(torch.cat([found[source], found[target], edges], -1))
        return nodes + self.node(torch.cat([nodes, add(edges, target, nodes)], -1)), edges


def mesh_graph(side: int) -> Tensor:
    """Edges between neighbours, by the points' places in Morton order, sorted by where they end: (2, edges)."""
    at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).view(-1, 2)
    order, _ = partition_points(at.double())
    number = torch.empty(len(at), dtype=torch.int64)
    number[order] = torch.arange(len(at))
    grid = number.view(side, side)
    ends = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        a = grid[: side - down, max(0, -right) : side - max(0, right)]
        b = grid[down:, max(0, right) : side + min(0, right)]
        ends += [torch.stack([a.flatten(), b.flatten()]), torch.stack([b.flatten(), a.flatten()])]
    edges = torch.cat(ends, 1)
    return edges[:, edges[1].argsort(stable=True)]


def compare_on_rank(device: str, side: int, width: int, rounds: int) -> dict[str, Any]:
    """On a rank: seconds and bytes of both ways."""
    torch.manual_seed(0)
    mesh = domain_mesh(device)
    group, rank = mesh.get_group(), mesh.get_local_rank()
    count, everything = side * side, mesh_graph(side)
    cut = balanced(count, mesh.size())
    first = starts(cut)[rank]
    mine = everything[:, (everything[1] >= first) & (everything[1] < first + cut[rank])].contiguous().to(device)
    block = Block(width).to(device)
    nodes, edges = (torch.randn(n, width).to(device) for n in (cut[rank], mine.shape[1]))
    sharded = [ShardTensor.from_local(t, mesh, [Shard(d)]) for t, d in ((nodes, 0), (mine, 1), (edges, 0))]

    def halo() -> None:
        def add(messages: Tensor, target: Tensor, like: Tensor) -> Tensor:
            return torch.zeros(like.shape, device=device).index_add_(0, target, messages)

        block.zero_grad(set_to_none=True)
        out, new = block(sharded[0].detach().requires_grad_(), *sharded[1:], lambda x: x, add)
        (out.square().sum() + new.square().sum()).backward()

    def gathered() -> None:
        def take(x: Tensor) -> Tensor:
            return autograd_collectives.gather_replicate_in(x, 0, cut, group)

        def add(messages: Tensor, target: Tensor, like: Tensor) -> Tensor:
            summed = messages.new_zeros(count, width).index_add(0, target, messages)
            return autograd_collectives.reduce_scatter(summed, 0, cut, group)

        block.zero_grad(set_to_none=True)
        out, new = block(nodes.detach().requires_grad_(), mine, edges, take, add)
        (out.square().sum() + new.square().sum()).backward()
        collectives.all_reduce(torch.cat([p.grad.flatten() for p in block.parameters() if p.grad is not None]), group)

    with count_traffic() as once:
        halo()
    times = interleave({"all gathered": gathered, "halo": halo}, rounds, partial(rank_seconds, device=device))
    sent = {
        "all gathered": checked_traffic(gathered).bytes,
        "halo, lists made": once.bytes,
        "halo": checked_traffic(halo).bytes,
    }
    return {"times": times, "sent": sent}


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        told = measure_on_ranks(compare_on_rank, ranks, device, settings.side, settings.width, settings.rounds)
        case = f"{rank_label(ranks)}, {settings.side} x {settings.side} nodes of {settings.width} features"
        table.add_times(case, max_over_ranks([t["times"] for t in told]), "all gathered")
        sent = {way: max(t["sent"][way] for t in told) for way in told[0]["sent"]}  # of the rank with most
        if ranks > 1:
            table.add_counts(f"{case}: sent", sent, "kB", "all gathered")
