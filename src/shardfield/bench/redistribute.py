"""Change of placements: bytes that a rank sends, and time, against DTensor's redistribute.

A float32 matrix is redistributed between Shard, Replicate and Partial, with a number of rows that is a multiple of the
ranks and with one that is not. "skewed" has shard sizes other than those of torch.chunk, which DTensor does not
support. Results are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ..layout import chunk, starts
from ..tensor import ShardTensor
from .measure import interleave, max_over_ranks, wall_seconds
from .ranks import domain_mesh, measure_on_ranks, rank_label
from .table import Table
from .traffic import CommCounter, checked_traffic

REDISTRIBUTIONS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Partial(), Shard(0)),
]
EVEN_REDISTRIBUTIONS: list[tuple[Placement, Placement]] = [
    *REDISTRIBUTIONS,
    (Partial(), Replicate()),
    (Replicate(), Shard(0)),
]


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2, 4)
    size: int = 2048
    rounds: int = 15

    quick: ClassVar[dict[str, Any]] = {"size": 256, "rounds": 3}


def skewed_sizes(size: int, ranks: int) -> list[int]:
    """Return shard sizes of which each is half of the preceding one."""
    halves = [size >> (i + 1) for i in range(ranks)]
    return [size - sum(halves[1:]), *halves[1:]]


def format_placement(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else type(placement).__name__.lstrip("_")


def make_shard_tensor(full: Tensor, placement: Placement, shard_sizes: Sequence[int]) -> ShardTensor:
    """Return a ShardTensor of a matrix that every rank holds; for Partial, each rank holds an equal fraction of it."""
    mesh, rank = domain_mesh(full.device.type), dist.get_rank()
    if isinstance(placement, Shard):
        local = full.narrow(0, starts(shard_sizes)[rank], shard_sizes[rank]).clone()
        shapes = {0: [(n, full.shape[1]) for n in shard_sizes]}
        return ShardTensor.from_local(local, mesh, [placement], shapes, tuple(full.shape))
    local = full / mesh.size() if isinstance(placement, Partial) else full.clone()
    return ShardTensor.from_local(local, mesh, [placement])


def make_dtensor(full: Tensor, placement: Placement) -> DTensor:
    mesh = domain_mesh(full.device.type)
    if isinstance(placement, Partial):
        return DTensor.from_local(full / mesh.size(), mesh, [placement])
    return distribute_tensor(full, mesh, [placement])


def compare_on_rank(device: str, size: int, rounds: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return seconds and bytes by case and library, on a rank."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for rows in (size, size - 1):
        full = torch.randn(rows, size).to(device)
        for before, after in EVEN_REDISTRIBUTIONS if rows == size else REDISTRIBUTIONS:
            a, b = make_shard_tensor(full, before, chunk(rows, ranks)), make_dtensor(full, before)
            calls: dict[str, Callable[[], Any]] = {
                "DTensor": partial(b.redistribute, placements=[after]),
                "shardfield": partial(a.redistribute, placements=[after]),
            }
            torch.testing.assert_close(calls["shardfield"]().to_local(), calls["DTensor"]().to_local())
            case = f"{format_placement(before)} to {format_placement(after)}, {rows} x {size}"
            results[case] = time_calls(calls, rounds, device)
    full = torch.randn(size, size).to(device)
    uneven = make_shard_tensor(full, Shard(0), skewed_sizes(size, ranks))
    for after in (Shard(1), Replicate()):
        case = f"skewed Shard(0) to {format_placement(after)}, {size} x {size}"
        redistribute = partial(uneven.redistribute, placements=[after])
        torch.testing.assert_close(redistribute().full_tensor(), full)
        results[case] = time_calls({"shardfield": redistribute}, rounds, device)
    return results


def time_calls(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, dict[str, Any]]:
    times = interleave(calls, rounds, partial(wall_seconds, device=device))
    sent = {"shardfield": checked_traffic(calls["shardfield"]).bytes}
    if "DTensor" in calls:
        with CommCounter() as mode:
            calls["DTensor"]()
        sent["DTensor"] = mode.bytes
    return {"times": times, "sent": {name: sent[name] for name in calls}}


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings.size, settings.rounds)
        for case in by_rank[0]:
            of_case = [t[case] for t in by_rank]
            against = "DTensor" if "DTensor" in of_case[0]["times"] else None
            name = f"{rank_label(ranks)}, {case}"
            table.add_times(name, max_over_ranks([s["times"] for s in of_case]), against)
            sent = {library: max(s["sent"][library] for s in of_case) for library in of_case[0]["sent"]}
            if ranks > 1:
                table.add_counts(f"{name}: sent", sent, "kB", against)
        table.add_skipped("DTensor", "supports the shard sizes of torch.chunk only", f"{rank_label(ranks)}, skewed")
