"""Nearest neighbours: `shardfield.knn` against what a user would write or call instead.

Points and queries in pieces, as they come, and once more after `partition_points` has put near ones together. Brute
force: every rank has all points and looks at all pairs with its own queries. One rank: it has all points and queries
and calls the same `knn` on plain tensors while the others wait; on one rank scipy's tree is there to compare too. On a
device, the memory that a call takes beyond its inputs is told as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..neighbors import knn, partition_points
from .measure import interleave, max_over_ranks, peak_memory, rank_seconds
from .ranks import domain_mesh, measure_on_ranks, rank_label, shard_tensor
from .table import Table
from .traffic import checked_traffic

TUTORIAL = (234_567, 12_345, 17)  # what bars on a device are for


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4)
    points: int = 20_000
    queries: int = 2_000
    k: int = 17
    rounds: int = 5

    quick: ClassVar[dict[str, Any]] = {"points": 2_000, "queries": 200, "rounds": 2}
    cuda: ClassVar[dict[str, Any]] = {"points": 234_567, "queries": 12_345, "rounds": 20}


def brute_force(points: Tensor, queries: Tensor, k: int) -> Any:
    """All pairs, as a tutorial has it."""
    displacement = points[None, :, :] - queries[:, None, :]
    return torch.topk(torch.sqrt(torch.sum(displacement**2, dim=2)), k=k, dim=1, largest=False)


def compare_on_rank(device: str, settings: Settings, tree: bool) -> dict[str, Any]:
    """On a rank: seconds of each system, what the searches send, and the memory they take."""
    mesh, k = domain_mesh(device), settings.k
    generator = torch.Generator().manual_seed(0)
    sizes = (settings.points, settings.queries)
    points, queries = (torch.randn(size, 3, generator=generator).to(device) for size in sizes)
    p, q = shard_tensor(points, mesh, 0), shard_tensor(queries, mesh, 0)
    near_p, near_q = (partition_points(x)[1] for x in (p, q))
    calls: dict[str, Callable[[], Any]] = {
        "brute force": lambda: brute_force(points, q.to_local(), k),
        "knn": lambda: knn(p, q, k),
        "knn, partitioned": lambda: knn(near_p, near_q, k),
    }
    if mesh.size() == 1 and tree:
        from scipy.spatial import cKDTree

        calls["scipy's tree"] = lambda: cKDTree(points.numpy()).query(queries.numpy(), k)
    if mesh.size() > 1:
        calls["one rank"] = lambda: knn(points, queries, k) if dist.get_rank() == 0 else None
    failed = {}
    for name, call in list(calls.items()):
        try:
            call()
        except torch.OutOfMemoryError:  # all pairs are many; every rank has as many
            failed[name] = "out of memory"
            del calls[name]
    times = interleave(calls, settings.rounds, partial(rank_seconds, device=device))
    ours = [name for name in calls if name.startswith("knn")]
    return {
        "times": times,
        "sent": {name: checked_traffic(calls[name]).bytes for name in ours},
        "held": {name: peak_memory(call, device) for name, call in calls.items()} if device != "cpu" else {},
        "failed": failed,
    }


def run(settings: Settings, device: str, table: Table) -> None:
    tree = device == "cpu" and "scipy" in table.versions
    if device == "cpu" and not tree:
        table.add_skipped("scipy's tree", "scipy is not installed")
    what = f"{settings.points} points, {settings.queries} queries, k = {settings.k}"
    for ranks in settings.ranks:
        told = measure_on_ranks(compare_on_rank, ranks, device, settings, tree)
        case = f"{rank_label(ranks)}, {what}"
        base = "brute force" if "brute force" in told[0]["times"] else None
        table.add_times(case, max_over_ranks([t["times"] for t in told]), base)
        if ranks > 1:
            sent = {name: max(t["sent"][name] for t in told) for name in told[0]["sent"]}
            table.add_counts(f"{case}: sent", sent, "kB")
        if told[0]["held"]:
            held = {name: max(t["held"][name] for t in told) for name in told[0]["held"]}
            table.add_counts(f"{case}: memory", held, "MB", base)
        if device != "cpu" and ranks == 1 and (settings.points, settings.queries, settings.k) == TUTORIAL:
            seconds = told[0]["times"]["knn"]
            table.ratio(f"{case}: what is asked", "knn", [s / 0.005 for s in seconds], "5 ms", 1.0)
            table.ratio(f"{case}: memory that is asked", "knn", [told[0]["held"]["knn"] / 200e6], "200 MB", 1.0)
        for name, why in told[0]["failed"].items():
            table.add_skipped(name, why, case)
