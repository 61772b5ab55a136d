"""Points that change: steps with another number of points and edges each, against steps of a fixed number.

A step is forward and backward of two Transolver blocks and a graph layer, on points that are sharded over ranks, with
new edges in every step. The candidates differ in one thing: the number of points and edges is new in every step, or
always the same, so that the ratio is the cost of planning. Numbers differ by less than 1 %, and CPU time is compared.
"memory" is how much the memory of a rank grows between a tenth of `steps` small steps and the end, all of them of new
sizes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..layout import chunk, starts
from ..tensor import ShardTensor
from ..train.recipes.aero_transolver import SliceAttention
from .measure import rank_times
from .ranks import domain_mesh, measure_on_ranks, rank_label
from .table import Table

DEGREE = 6  # edges of a point


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2,)
    points: int = 20_000
    width: int = 32
    slices: int = 32
    steps: int = 2_000
    small: int = 200
    rounds: int = 15

    quick: ClassVar[dict[str, Any]] = {"points": 500, "steps": 20, "rounds": 3}


class GraphTransolver(nn.Module):
    """Two Transolver blocks, then messages along edges that are summed at their targets."""

    def __init__(self, width: int, slices: int):
        super().__init__()
        self.blocks = nn.Sequential(*(SliceAttention(width, slices) for _ in range(2)))
        self.message = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.blocks(x[None])[0]
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], 1)).relu()
        return x + torch.zeros_like(x).index_add(0, target, messages)


def make_cloud(mesh: DeviceMesh, points: int, width: int) -> tuple[Tensor, Tensor]:
    """Return this rank's random features of points, and edges to them from points with near numbers."""
    sizes = chunk(points, mesh.size())
    rows, begin = sizes[mesh.get_local_rank()], starts(sizes)[mesh.get_local_rank()]
    target = torch.arange(begin, begin + rows).repeat_interleave(DEGREE)
    source = (target + torch.arange(1, DEGREE + 1).repeat(rows)) % points
    x = ShardTensor.from_local(torch.randn(rows, width), mesh, [Shard(0)], "chunk", (points, width))
    shapes = {0: [(2, n * DEGREE) for n in sizes]}
    edges = ShardTensor.from_local(torch.stack([source, target]), mesh, [Shard(1)], shapes, (2, points * DEGREE))
    return x, edges


def new_sizes(points: int) -> Iterator[int]:
    """Return numbers of points that all differ, by less than 1 % where that many exist."""
    return (points + (-1) ** i * (i // 2) for i in itertools.count(1))


def measure_steps(device: str, settings: Settings) -> dict[str, list[float]]:
    """Return CPU seconds of a step by round, of new numbers of points and of one number."""
    mesh, sizes = domain_mesh(device), new_sizes(settings.points)
    torch.manual_seed(0)
    model = GraphTransolver(settings.width, settings.slices)

    def step(points: int) -> float:
        x, edges = make_cloud(mesh, points, settings.width)
        model.zero_grad(set_to_none=True)
        return rank_times(lambda: model(x, edges).square().mean().backward(), device)[1]

    found: dict[str, list[float]] = {"new sizes": [], "one size": []}
    for turn in range(settings.rounds + 2):
        pair = {"new sizes": next(sizes), "one size": settings.points}
        for name in sorted(pair, reverse=bool(turn % 2)):
            seconds = step(pair[name])
            if turn >= 2:
                found[name].append(seconds)
    return found


def measure_growth(device: str, settings: Settings) -> dict[str, float]:
    """Return the bytes of this process after a tenth of the steps, and by how much they grow until the end."""
    mesh = domain_mesh(device)
    torch.manual_seed(0)
    model = GraphTransolver(settings.width, settings.slices)
    early = 0
    for at in range(settings.steps):
        points = settings.small + (7919 * at) % (10 * settings.small)
        x, edges = make_cloud(mesh, points, settings.width)
        model.zero_grad(set_to_none=True)
        model(x, edges).square().mean().backward()
        if at == settings.steps // 10:
            early = _resident()
    return {"early": early, "growth": _resident() - early}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        case = f"{settings.points:,} points, {settings.points * DEGREE:,} edges, {rank_label(ranks)}"
        by_rank = measure_on_ranks(measure_steps, ranks, device, settings)
        times = {name: [sum(t) for t in zip(*(r[name] for r in by_rank), strict=True)] for name in by_rank[0]}
        table.add_times(case, times, "one size")
        ratio = sum(times["new sizes"]) / sum(times["one size"])
        table.add_ratio(f"{case}: planning", "new sizes", [ratio], "one size", 1.1)
        memory = measure_on_ranks(measure_growth, ranks, device, settings)
        worst = max(memory, key=lambda found: found["growth"] / found["early"])
        grown = f"{settings.steps:,} steps of new sizes, {rank_label(ranks)}: memory"
        table.add_counts(grown, {"a tenth of the steps": worst["early"], "all": worst["early"] + worst["growth"]}, "MB")
        ratio = (worst["early"] + worst["growth"]) / worst["early"]
        table.add_ratio(f"{grown} at the end", "all", [ratio], "a tenth of the steps", 1.05)
