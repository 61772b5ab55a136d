"""Nearest neighbours: `shardfield.knn` against brute force, which a user would write instead.

    python benchmarks/knn.py [--ranks 1 2 4] [--points 20000] [--queries 2000] [--k 17] [--rounds 3] [--json FILE]
    python benchmarks/knn.py --device cuda            # one device, the tutorial's sizes

Every round times all systems one after the other on the same ranks (gloo, one thread each), so that a busy machine
slows all of them; ratios are of medians over rounds, of the slowest rank. Systems:

- `knn`: points and queries in pieces, as they come, and once more after `partition_points` has put near ones together;
- `brute`: every rank has all points and looks at all pairs with its own queries, as the tutorial's code does;
- `alone`: one rank has all points and all queries and calls the same `knn` on plain tensors, the others wait.

Printed with them: the most bytes a rank sends, and on a CUDA device the memory that a call takes beyond its inputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, knn, partition_points
from shardfield.comm import wire
from shardfield.layout import Layout
from shardfield.redistribute import redistribute
from shardfield.testing import run_on_ranks

TUTORIAL = (234_567, 12_345, 17)


def brute(points, queries, k):
    """The tutorial's function."""
    displacement = points[None, :, :] - queries[:, None, :]
    return torch.topk(torch.sqrt(torch.sum(displacement**2, dim=2)), k=k, dim=1, largest=False)


def clouds(n: int, m: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, 3, generator=generator).to(device) for size in (n, m))  # type: ignore[return-value]


def cut(x: torch.Tensor, mesh) -> ShardTensor:
    layout = Layout.of(mesh, [Shard(0)], x.shape)
    return ShardTensor(redistribute(x, Layout.replicate(mesh, x.shape), layout).clone(), layout)


def clock(call: Callable) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def measure(n: int, m: int, k: int, rounds: int) -> dict:
    """On a rank: median seconds of each system, and what the searches send."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    points, queries = clouds(n, m)
    p, q = cut(points, mesh), cut(queries, mesh)
    near_p, near_q = (partition_points(x)[1] for x in (p, q))
    systems = {
        "knn": lambda: knn(p, q, k),
        "knn, partitioned": lambda: knn(near_p, near_q, k),
        "brute": lambda: brute(points, q.to_local(), k),
        "alone": lambda: knn(points, queries, k) if dist.get_rank() == 0 else None,
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    sent: dict[str, int] = dict.fromkeys(systems, 0)
    for turn in range(rounds + 1):  # the first warms up and counts
        for name, call in systems.items():
            if not turn:
                wire.meter = lambda kind, messages, nbytes, name=name: sent.__setitem__(name, sent[name] + nbytes)
            seconds = clock(call)
            wire.meter = None
            if turn:
                times[name].append(seconds)
    return {name: (statistics.median(times[name]), sent[name]) for name in systems}


def on_device(n: int, m: int, k: int, rounds: int) -> dict[str, dict[str, float]]:
    """One CUDA device: milliseconds and megabytes beyond the inputs."""
    points, queries = clouds(n, m, "cuda")
    found = {}
    for name, call in (("knn", knn), ("brute", brute)):
        try:
            call(points, queries, k)  # compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                call(points, queries, k)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) * 1e3)
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
            found[name] = {"ms": statistics.median(times), "MB": peak}
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--points", type=int)
    parser.add_argument("--queries", type=int)
    parser.add_argument("--k", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    usual = TUTORIAL if args.device == "cuda" else (20_000, 2_000)
    problem = (args.points or usual[0], args.queries or usual[1], args.k)
    report: dict = {"about": {"machine": platform.machine(), "torch": torch.__version__, "problem": problem}}
    print(f"{problem[0]} points, {problem[1]} queries, k = {problem[2]}, fp32")
    if args.device == "cuda":
        report["cuda"] = on_device(*problem, args.rounds)
        for name, row in report["cuda"].items():
            print(f"{name:8s} {row['ms']:9.2f} ms {row['MB']:10.1f} MB beyond the inputs")
    else:
        for ranks in args.ranks:
            told = run_on_ranks(measure, ranks, *problem, args.rounds, timeout=900)
            rows = {name: [max(t[name][i] for t in told) for i in (0, 1)] for name in told[0]}
            report[f"{ranks} ranks"] = rows
            print(f"\n{f'{ranks} ranks':18s} {'seconds':>9s} {'/brute':>8s} {'/alone':>8s} {'sent kB':>9s}")
            for name, (seconds, nbytes) in rows.items():
                ratios = [seconds / rows[other][0] for other in ("brute", "alone")]
                print(f"{name:18s} {seconds:9.4f} {ratios[0]:8.3f} {ratios[1]:8.2f} {nbytes / 1e3:9.1f}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
