"""Nearest neighbors: `shardfield.knn` against brute force, one rank, and scipy's k-d tree.

Points and queries are sharded in random order, and again after `partition_points` has placed near points on the same
rank. "brute force": every rank has all points and computes all distances to its own queries. "one rank": one rank has
all points and queries and calls the same `knn` on plain tensors while the others wait. On a single rank, scipy's tree
is measured too. On a device, the memory of a call beyond its inputs is also measured.
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

TUTORIAL = (234_567, 12_345, 17)  # the sizes for which the bars on a device are set


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
    """Compute all distances, as the tutorial does."""
    displacement = points[None, :, :] - queries[:, None, :]
    return torch.topk(torch.sqrt(torch.sum(displacement**2, dim=2)), k=k, dim=1, largest=False)


def compare_on_rank(device: str, settings: Settings, tree: bool) -> dict[str, Any]:
    """Return seconds and memory of each candidate, and bytes that the searches send, on a rank."""
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
        except torch.OutOfMemoryError:  # of brute force; it fails on all ranks, since they hold equally many pairs
            failed[name] = "out of memory"
            del calls[name]
    times = interleave(calls, settings.rounds, partial(rank_seconds, device=device))
    ours = [name for name in calls if name.startswith("knn")]
    return {
        "times": times,
        "sent": {name: checked_traffic(calls[name]).bytes for name in ours},
        "peaks": {name: peak_memory(call, device) for name, call in calls.items()} if device != "cpu" else {},
        "failed": failed,
    }


def run(settings: Settings, device: str, table: Table) -> None:
    tree = device == "cpu" and "scipy" in table.versions
    if device == "cpu" and not tree:
        table.add_skipped("scipy's tree", "scipy is not installed")
    problem = f"{settings.points} points, {settings.queries} queries, k = {settings.k}"
    for ranks in settings.ranks:
        by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings, tree)
        case = f"{rank_label(ranks)}, {problem}"
        base = "brute force" if "brute force" in by_rank[0]["times"] else None
        table.add_times(case, max_over_ranks([t["times"] for t in by_rank]), base)
        if ranks > 1:
            sent = {name: max(t["sent"][name] for t in by_rank) for name in by_rank[0]["sent"]}
            table.add_counts(f"{case}: sent", sent, "kB")
        if by_rank[0]["peaks"]:
            peaks = {name: max(t["peaks"][name] for t in by_rank) for name in by_rank[0]["peaks"]}
            table.add_counts(f"{case}: memory", peaks, "MB", base)
        if device != "cpu" and ranks == 1 and (settings.points, settings.queries, settings.k) == TUTORIAL:
            seconds = by_rank[0]["times"]["knn"]
            table.add_ratio(f"{case}: time limit", "knn", [s / 0.005 for s in seconds], "5 ms", 1.0)
            table.add_ratio(f"{case}: memory limit", "knn", [by_rank[0]["peaks"]["knn"] / 200e6], "200 MB", 1.0)
        for name, why in by_rank[0]["failed"].items():
            table.add_skipped(name, why, case)
