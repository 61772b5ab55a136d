"""From layout to layout: bytes a rank sends, and time, against DTensor's redistribute.

A matrix of float32 is cut into rows or columns, gathered, and summed into pieces; with a number of rows that ranks do
not divide, and with rows cut in sizes that torch.chunk would not cut, which DTensor cannot hold. Results are compared
before anything is timed.
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
    """Pieces of which each is half of the one before."""
    cut = [size >> (i + 1) for i in range(ranks)]
    return [size - sum(cut[1:]), *cut[1:]]


def format_placement(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else type(placement).__name__.lstrip("_")


def make_shard_tensor(whole: Tensor, placement: Placement, lengths: Sequence[int]) -> ShardTensor:
    """A matrix that every rank has, as a ShardTensor; as addends, a share of it on each rank."""
    mesh, rank = domain_mesh(whole.device.type), dist.get_rank()
    if isinstance(placement, Shard):
        local = whole.narrow(0, starts(lengths)[rank], lengths[rank]).clone()
        shapes = {0: [(n, whole.shape[1]) for n in lengths]}
        return ShardTensor.from_local(local, mesh, [placement], shapes, tuple(whole.shape))
    local = whole / mesh.size() if isinstance(placement, Partial) else whole.clone()
    return ShardTensor.from_local(local, mesh, [placement])


def make_dtensor(whole: Tensor, placement: Placement) -> DTensor:
    mesh = domain_mesh(whole.device.type)
    if isinstance(placement, Partial):
        return DTensor.from_local(whole / mesh.size(), mesh, [placement])
    return distribute_tensor(whole, mesh, [placement])


def compare_on_rank(device: str, size: int, rounds: int) -> dict[str, dict[str, dict[str, Any]]]:
    """On a rank: seconds and bytes by case and system."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for rows in (size, size - 1):
        whole = torch.randn(rows, size).to(device)
        for before, after in EVEN_REDISTRIBUTIONS if rows == size else REDISTRIBUTIONS:
            a, b = make_shard_tensor(whole, before, chunk(rows, ranks)), make_dtensor(whole, before)
            calls: dict[str, Callable[[], Any]] = {
                "DTensor": partial(b.redistribute, placements=[after]),
                "shardfield": partial(a.redistribute, placements=[after]),
            }
            torch.testing.assert_close(calls["shardfield"]().to_local(), calls["DTensor"]().to_local())
            found[f"{format_placement(before)} to {format_placement(after)}, {rows} x {size}"] = time_calls(
                calls, rounds, device
            )
    whole = torch.randn(size, size).to(device)
    uneven = make_shard_tensor(whole, Shard(0), skewed_sizes(size, ranks))
    for after in (Shard(1), Replicate()):
        case = f"skewed Shard(0) to {format_placement(after)}, {size} x {size}"
        move = partial(uneven.redistribute, placements=[after])
        torch.testing.assert_close(move().full_tensor(), whole)
        found[case] = time_calls({"shardfield": move}, rounds, device)
    return found


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
        told = measure_on_ranks(compare_on_rank, ranks, device, settings.size, settings.rounds)
        for case in told[0]:
            sides = [t[case] for t in told]
            against = "DTensor" if "DTensor" in sides[0]["times"] else None
            name = f"{rank_label(ranks)}, {case}"
            table.add_times(name, max_over_ranks([s["times"] for s in sides]), against)
            sent = {way: max(s["sent"][way] for s in sides) for way in sides[0]["sent"]}
            if ranks > 1:
                table.add_counts(f"{name}: sent", sent, "kB", against)
        table.add_skipped("DTensor", "cuts as torch.chunk does only", f"{rank_label(ranks)}, skewed")
