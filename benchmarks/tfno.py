"""A layer of neuraloperator's TFNO, unmodified, forward and backward: how much faster and smaller it gets on ranks.

    python benchmarks/tfno.py [--ranks 1 2 4] [--grid 512 512] [--channels 32] [--modes 32 32] [--json FILE]

On one rank it is also run on plain tensors, in turn with ShardTensors. Worlds take turns, so that a busy machine slows
them alike; where there are fewer cores than ranks, CPU seconds tell more than those on the clock. Memory is the most
that tensors take at a time, by torch's own count. It needs the packages of the development set-up.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor
from shardfield.comm import wire
from shardfield.layout import chunk
from shardfield.testing import run_on_ranks


def peak(step: Callable[[], None]) -> int:
    """The most bytes that tensors made in a step take at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    events = watched.profiler.kineto_results.events()
    held = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += nbytes
        most = max(most, held)
    return most


def measure(
    grid: tuple[int, int], channels: int, modes: tuple[int, int], rounds: int, memory: bool
) -> dict[str, dict[str, float]]:
    """On a rank: seconds, CPU seconds, bytes sent and held by a step, on ShardTensors and, if alone, on plain ones."""
    from neuralop.layers.fno_block import FNOBlocks

    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("h",))
    torch.manual_seed(0)
    layer = FNOBlocks(channels, channels, modes, factorization="tucker", rank=0.1, implementation="factorized")
    shape = (1, channels, *grid)
    local = torch.randn(shape).split(chunk(grid[0], ranks), 2)[mesh.get_local_rank()].clone().requires_grad_()
    fields: dict[str, Tensor] = {"sharded": ShardTensor.from_local(local, mesh, [Shard(2)], "chunk", shape)}
    if ranks == 1:
        fields["plain"] = local.detach().clone().requires_grad_()

    def step(x: Tensor) -> tuple[float, float]:
        x.grad = None
        layer.zero_grad()
        dist.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        layer(x).square().sum().backward()
        return time.perf_counter() - begun, time.process_time() - worked

    found: dict[str, dict[str, Any]] = {}
    count = [0]
    for way, x in fields.items():
        step(x)
        wire.meter = lambda kind, messages, nbytes: count.__setitem__(0, count[0] + nbytes)
        held = peak(lambda x=x: step(x)) + local.nbytes if memory else 0
        wire.meter = None
        found[way] = {"seconds": [], "cpu": [], "memory": held, "sent": count[0]}
    for _ in range(rounds):
        for way, x in fields.items():
            seconds, cpu = step(x)
            found[way]["seconds"].append(seconds)
            found[way]["cpu"].append(cpu)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--grid", type=int, nargs=2, default=[512, 512])
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--modes", type=int, nargs=2, default=[32, 32])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for turn in range(args.turns):
        for ranks in args.ranks:
            how = (tuple(args.grid), args.channels, tuple(args.modes), args.rounds, turn == 0)
            rows = run_on_ranks(measure, ranks, *how, timeout=600)
            for way in rows[0]:
                row = found.setdefault(f"{way} {ranks}", {"seconds": [], "cpu": [], "memory": 0, "sent": 0})
                # a step takes as long as its slowest rank
                for name in ("seconds", "cpu"):
                    row[name] += [max(times) for times in zip(*(r[way][name] for r in rows), strict=True)]
                for name in ("memory", "sent"):
                    row[name] = max(row[name], *(r[way][name] for r in rows))
    for row in found.values():
        row["seconds"], row["cpu"] = statistics.median(row["seconds"]), statistics.median(row["cpu"])
    base = found.get("plain 1") or next(iter(found.values()))
    print(f"{args.grid[0]} x {args.grid[1]}, {args.channels} channels, {args.modes} modes, one thread a rank")
    print(
        "             ms   CPU ms      MB  sent kB | against the first column of one plain process: time, CPU, memory"
    )
    for name, row in found.items():
        against = "  ".join(f"{row[k] / base[k]:5.2f}" for k in ("seconds", "cpu", "memory"))
        print(
            f"{name:9} {row['seconds'] * 1e3:6.0f} {row['cpu'] * 1e3:8.0f} {row['memory'] / 1e6:7.1f} "
            f"{row['sent'] / 1e3:8.1f} | {against}"
        )
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
