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
from .measure import slowest, turns, wall
from .ranks import domain, measured, named
from .table import Table
from .watch import traffic, watched

MOVES: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Partial(), Shard(0)),
]
EVEN: list[tuple[Placement, Placement]] = [*MOVES, (Partial(), Replicate()), (Replicate(), Shard(0))]


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2, 4)
    size: int = 2048
    rounds: int = 15

    quick: ClassVar[dict[str, Any]] = {"size": 256, "rounds": 3}


def skewed(size: int, ranks: int) -> list[int]:
    """Pieces of which each is half of the one before."""
    cut = [size >> (i + 1) for i in range(ranks)]
    return [size - sum(cut[1:]), *cut[1:]]


def spell(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else type(placement).__name__.lstrip("_")


def ours(whole: Tensor, placement: Placement, lengths: Sequence[int]) -> ShardTensor:
    """A matrix that every rank has, as a ShardTensor; as addends, a share of it on each rank."""
    mesh, rank = domain(whole.device.type), dist.get_rank()
    if isinstance(placement, Shard):
        local = whole.narrow(0, starts(lengths)[rank], lengths[rank]).clone()
        shapes = {0: [(n, whole.shape[1]) for n in lengths]}
        return ShardTensor.from_local(local, mesh, [placement], shapes, tuple(whole.shape))
    local = whole / mesh.size() if isinstance(placement, Partial) else whole.clone()
    return ShardTensor.from_local(local, mesh, [placement])


def theirs(whole: Tensor, placement: Placement) -> DTensor:
    mesh = domain(whole.device.type)
    if isinstance(placement, Partial):
        return DTensor.from_local(whole / mesh.size(), mesh, [placement])
    return distribute_tensor(whole, mesh, [placement])


def compared(device: str, size: int, rounds: int) -> dict[str, dict[str, dict[str, Any]]]:
    """On a rank: seconds and bytes by case and system."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for rows in (size, size - 1):
        whole = torch.randn(rows, size).to(device)
        for before, after in EVEN if rows == size else MOVES:
            a, b = ours(whole, before, chunk(rows, ranks)), theirs(whole, before)
            calls: dict[str, Callable[[], Any]] = {
                "DTensor": partial(b.redistribute, placements=[after]),
                "shardfield": partial(a.redistribute, placements=[after]),
            }
            torch.testing.assert_close(calls["shardfield"]().to_local(), calls["DTensor"]().to_local())
            found[f"{spell(before)} to {spell(after)}, {rows} x {size}"] = timed(calls, rounds, device)
    whole = torch.randn(size, size).to(device)
    uneven = ours(whole, Shard(0), skewed(size, ranks))
    for after in (Shard(1), Replicate()):
        case = f"skewed Shard(0) to {spell(after)}, {size} x {size}"
        move = partial(uneven.redistribute, placements=[after])
        torch.testing.assert_close(move().full_tensor(), whole)
        found[case] = timed({"shardfield": move}, rounds, device)
    return found


def timed(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, dict[str, Any]]:
    times = turns(calls, rounds, partial(wall, device=device))
    sent = {"shardfield": traffic(calls["shardfield"]).bytes}
    if "DTensor" in calls:
        with watched() as mode:
            calls["DTensor"]()
        sent["DTensor"] = mode.bytes
    return {"times": times, "sent": {name: sent[name] for name in calls}}


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        told = measured(compared, ranks, device, settings.size, settings.rounds)
        for case in told[0]:
            sides = [t[case] for t in told]
            against = "DTensor" if "DTensor" in sides[0]["times"] else None
            name = f"{named(ranks)}, {case}"
            table.times(name, slowest([s["times"] for s in sides]), against)
            sent = {way: max(s["sent"][way] for s in sides) for way in sides[0]["sent"]}
            if ranks > 1:
                table.counts(f"{name}: sent", sent, "kB", against)
        table.skip("DTensor", "cuts as torch.chunk does only", f"{named(ranks)}, skewed")
