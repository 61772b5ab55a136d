"""Point clouds with millions of points: a Transolver's step, and nearest neighbors on a sphere.

A step is forward and backward of two Transolver blocks on (1, points, channels), with the points sharded over ranks,
against one rank with all points. "sent" is what a rank sends in the forward of a block, over what its slices need: the
pooled values and the sums of weights of every head, all-reduced in a ring. "planned" counts the step of one of 8 ranks
without data. On a device the step runs under autocast to bf16. Nearest neighbors are those of points on a sphere, with
as many queries as points.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from ..layout import chunk
from ..neighbors import knn
from ..planning import simulated, watch, without_data
from ..tensor import ShardTensor
from ..train.recipes.aero_transolver import SliceAttention
from .measure import busy_seconds, count_traffic, max_over_ranks, peak_memory, rank_seconds
from .ranks import domain_mesh, measure_on_ranks, rank_label, train_step
from .table import Table

HEADS, BLOCKS = 4, 2


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    points: tuple[int, ...] = (1_000_000,)
    width: int = 32
    slices: int = 32
    neighbors: int = 100_000
    k: int = 8
    planned: int = 10_000_000
    rounds: int = 3

    quick: ClassVar[dict[str, Any]] = {
        "ranks": (1, 2),
        "points": (2_000,),
        "neighbors": 2_000,
        "planned": 10_000,
        "rounds": 2,
    }
    cuda: ClassVar[dict[str, Any]] = {"points": (1_000_000, 10_000_000), "neighbors": 2_000_000, "rounds": 10}


def make_model(settings: Settings) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(SliceAttention(settings.width, settings.slices, HEADS) for _ in range(BLOCKS)))


def make_points(device: str, settings: Settings, points: int) -> Tensor:
    """Return this rank's random points as a ShardTensor, without ever making all points on one rank."""
    mesh = domain_mesh(device)
    rows = chunk(points, mesh.size())[mesh.get_local_rank()]
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    local = torch.randn(1, rows, settings.width, generator=generator, device=device)
    return ShardTensor.from_local(local, mesh, [Shard(1)], "chunk", (1, points, settings.width))


def slice_bytes(settings: Settings, ranks: int, itemsize: int = 4) -> float:
    """Return the bytes that a rank sends to all-reduce the slices of a block: sums of values and of weights."""
    sums = settings.slices * (settings.width + HEADS)  # S x C values over all heads, and S weights of each head
    return 2 * (ranks - 1) / ranks * sums * itemsize


def measure_step(device: str, settings: Settings, points: int) -> dict[str, Any]:
    """Return the seconds of a step by round, the peak of its memory, and the bytes of a block's forward."""
    model, x = make_model(settings).to(device), make_points(device, settings, points)
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        step = partial(train_step, model, x)
        if settings.rounds > 1:
            step()  # a single round is for steps of minutes, in which planning does not show
        times = [rank_seconds(step, device) for _ in range(settings.rounds)]
        model.zero_grad(set_to_none=True)
        with count_traffic() as sent:
            if x.device_mesh.size() > 1:
                model(x)
        model.zero_grad(set_to_none=True)
        peak = peak_memory(step, device) if device != "cpu" or points <= 1_000_000 else None
    return {"times": {"step": times}, "peak": peak, "forward": sent.bytes / BLOCKS}


def measure_neighbors(device: str, settings: Settings) -> list[float]:
    """Return the seconds of a search by round, for points and other queries on a sphere."""
    generator = torch.Generator().manual_seed(0)
    points, queries = (
        nn.functional.normalize(torch.randn(settings.neighbors, 3, generator=generator), dim=1).to(device)
        for _ in range(2)
    )
    return [busy_seconds(lambda: knn(points, queries, settings.k), device) for _ in range(settings.rounds)]


def plan_step(settings: Settings, ranks: int = 8) -> tuple[float, float, float]:
    """Return the seconds that it takes to count a step of one of `ranks` ranks, its peak memory and its bytes."""
    start = time.perf_counter()
    with simulated(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
        with without_data(), watch() as seen:
            model = make_model(settings)
            rows = chunk(settings.planned, ranks)[0]
            local = torch.empty(1, rows, settings.width)
            x = ShardTensor.from_local(local, mesh, [Shard(1)], "chunk", (1, settings.planned, settings.width))
            train_step(model, x)
    return time.perf_counter() - start, seen.memory.peak, seen.bytes


def run(settings: Settings, device: str, table: Table) -> None:
    for points in settings.points:
        case = f"Transolver x {BLOCKS}, {settings.width} channels, {points:,} points"
        times, peaks, sent = {}, {}, {}
        for ranks in settings.ranks:
            by_rank = measure_on_ranks(measure_step, ranks, device, settings, points)
            name = rank_label(ranks)
            times[name] = max_over_ranks([found["times"] for found in by_rank])["step"]
            if by_rank[0]["peak"] is not None:
                peaks[name] = max(found["peak"] for found in by_rank)
            if ranks > 1:
                sent[name] = max(found["forward"] for found in by_rank) / slice_bytes(settings, ranks)
        first = rank_label(settings.ranks[0])
        table.add_times(case, times, first)
        table.add_counts(f"{case}: memory", peaks, "MB", first if first in peaks else None)
        for name, ratio in sent.items():
            table.add_ratio(f"{case}: sent forward by a block", name, [ratio], "what its slices need", 1.0)
    searched = f"kNN on a sphere, {settings.neighbors:,} points and queries, k = {settings.k}"
    seconds = measure_neighbors(device, settings)
    table.add_times(searched, {"knn": seconds})
    if device != "cpu" and settings.neighbors == 2_000_000:
        table.add_ratio(f"{searched}: time limit", "knn", [s / 0.060 for s in seconds], "60 ms", 1.0)
    took, peak, sent_bytes = plan_step(settings)
    planned = f"Transolver x {BLOCKS}, {settings.planned:,} points, a rank of 8, planned"
    table.add_counts(planned, {"time to plan": took}, "s")
    table.add_counts(f"{planned}: memory", {"a rank": peak}, "MB")
    table.add_counts(f"{planned}: sent", {"a rank": sent_bytes}, "kB")
