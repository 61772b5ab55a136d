"""Message passing on a mesh in pieces: what is sent and how long it takes, against gathering all nodes on every rank.

    python benchmarks/graph.py [--ranks 4] [--side 160] [--width 64] [--json FILE]

A graph of side x side points in a plane, each joined to its eight neighbours, in the order of `partition_points`: cut
into even pieces, edges where they end. One MeshGraphNet block takes a training step: edges learn from the nodes at
their ends, nodes from the sum of their edges. Each question is a ratio or a count of one run:

* sent: bytes of a rank for the step, first (lists of who needs what are made) and later (they are kept), against an
  all-gather of the nodes and a reduce-scatter of the sums, and their backward;
* time: the step against the same step done that way, interleaved.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, partition_points
from shardfield.comm import moves, wire
from shardfield.layout import balanced, starts
from shardfield.testing import run_on_ranks


def mlp(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))


class Block(nn.Module):
    """`take(nodes, index)` and `add(edges, index, nodes)` are what the two ways differ in."""

    def __init__(self, width: int):
        super().__init__()
        self.edge, self.node = mlp(3 * width, width), mlp(2 * width, width)

    def forward(self, nodes, edge_index, edges, take, add):
        source, target = edge_index
        found = take(nodes)
        edges = edges + self.edge(torch.cat([found[source], found[target], edges], -1))
        return nodes + self.node(torch.cat([nodes, add(edges, target, nodes)], -1)), edges


def mesh_graph(side: int) -> torch.Tensor:
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


def measured(side: int, width: int, rounds: int) -> dict[str, float]:
    """On a rank: seconds and bytes of both ways."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    group, rank = mesh.get_group(), mesh.get_local_rank()
    count, everything = side * side, mesh_graph(side)
    cut = balanced(count, mesh.size())
    first = starts(cut)[rank]
    mine = everything[:, (everything[1] >= first) & (everything[1] < first + cut[rank])].contiguous()
    block = Block(width)
    nodes, edges = torch.randn(cut[rank], width), torch.randn(mine.shape[1], width)
    sharded = [ShardTensor.from_local(t, mesh, [Shard(d)]) for t, d in ((nodes, 0), (mine, 1), (edges, 0))]
    sent = [0]

    def halo() -> None:
        def add(messages, target, like):
            return torch.zeros(like.shape).index_add_(0, target, messages)

        out, new = block(sharded[0].detach().requires_grad_(), *sharded[1:], lambda x: x, add)
        (out.square().sum() + new.square().sum()).backward()

    def whole() -> None:
        def take(x):
            return moves.gather_enter(x, 0, cut, group)

        def add(messages, target, like):
            summed = messages.new_zeros(count, width).index_add(0, target, messages)
            return moves.reduce_scatter(summed, 0, cut, group)

        out, new = block(nodes.detach().requires_grad_(), mine, edges, take, add)
        (out.square().sum() + new.square().sum()).backward()
        wire.all_reduce(torch.cat([p.grad.flatten() for p in block.parameters()]), group)

    def step(way) -> tuple[float, int]:
        block.zero_grad(set_to_none=True)
        dist.barrier()
        sent[0], start = 0, time.perf_counter()
        way()
        return time.perf_counter() - start, sent[0]

    wire.meter = lambda kind, messages, nbytes: sent.__setitem__(0, sent[0] + nbytes)
    _, once = step(halo)
    step(whole)
    taken = [(step(halo), step(whole)) for _ in range(rounds)]
    wire.meter = None
    (_, later), (_, gathered) = taken[-1]
    return {
        "bytes, lists made": once,
        "bytes, lists kept": later,
        "bytes, all gathered": gathered,
        "seconds": statistics.median(a[0] for a, _ in taken),
        "seconds, all gathered": statistics.median(b[0] for _, b in taken),
        "time ratio": statistics.median(a[0] / b[0] for a, b in taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--ranks", 4), ("--side", 160), ("--width", 64), ("--rounds", 7)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    told = run_on_ranks(measured, args.ranks, args.side, args.width, args.rounds, timeout=300)
    found = {name: max(t[name] for t in told) for name in told[0]}  # of the rank with most
    found["byte ratio"] = found["bytes, lists kept"] / found["bytes, all gathered"]
    print(f"{args.side}x{args.side} nodes of {args.width} features on {args.ranks} ranks, one training step:")
    for name, value in found.items():
        print(f"  {name}: {value:.3g}" if isinstance(value, float) else f"  {name}: {value}")
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, **vars(args)}
        args.json.write_text(json.dumps({**found, **{k: str(v) for k, v in about.items()}}, indent=1))


if __name__ == "__main__":
    main()
