"""What a call costs before any arithmetic: plain torch, DTensor and shardfield on tiny tensors at one rank, grad on.

    python benchmarks/overhead.py [--rounds 30] [--json FILE]

Every round times the three one after the other, so that a busy machine slows all of them. Time is that of this thread
on its core, and the lower quartile over rounds is kept, since what else runs only ever adds. DTensor's numbers for
spatial ops are the cost of its calls, not of right answers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardfield import ShardTensor

OPS = {
    "relu": lambda t: torch.relu(t.x),
    "gelu": lambda t: F.gelu(t.x),
    "add": lambda t: t.x + t.y,
    "mul": lambda t: t.x * t.y,
    "mul scalar": lambda t: t.x * 2.0,
    "add bias": lambda t: t.x + t.b,
    "where": lambda t: torch.where(t.m, t.x, t.y),
    "sum": lambda t: t.x.sum(),
    "mean dim": lambda t: t.x.mean(-1),
    "softmax": lambda t: torch.softmax(t.x, -1),
    "view": lambda t: t.x.view(2, 4, 8),
    "transpose": lambda t: t.x.transpose(0, 1),
    "slice": lambda t: t.x[:, 2:6],
    "cat": lambda t: torch.cat([t.x, t.y], -1),
    "linear": lambda t: F.linear(t.x, t.w, t.b),
    "matmul": lambda t: t.x @ t.w,
}
POINTWISE = ["relu", "gelu", "add", "mul", "mul scalar", "add bias", "where"]
DEEP = "the same, forward + backward"


class Operands:
    """x, y: a (8, 8) field cut on dim 0; w, b: parameters; m: a mask."""

    def __init__(self, place, parameter):
        torch.manual_seed(0)
        self.x, self.y = (place(torch.randn(8, 8)).requires_grad_() for _ in range(2))
        self.w, self.b = parameter(torch.randn(8, 8)), parameter(torch.randn(8))
        self.m = place(torch.rand(8, 8) > 0.5)
        self.layers = [(parameter(torch.randn(8, 8)), parameter(torch.randn(8))) for _ in range(10)]


def deep(t, backward: bool):
    """Ten (linear, relu)."""
    h = t.x
    for w, b in t.layers:
        h = torch.relu(F.linear(h, w, b))
    if backward:
        h.sum().backward()


def microseconds(call, repeats: int) -> float:
    call()  # not timed: it finds the caches full of what ran before
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - start) / repeats * 1e6


def measure(systems, calls, rounds: int, repeats: int) -> dict:
    table = {}
    for name, call in calls.items():
        bound = {system: partial(call, operands) for system, operands in systems.items()}
        times: dict[str, list[float]] = {system: [] for system in systems}
        for warm in bound.values():
            microseconds(warm, 5)
        for _ in range(rounds):
            for system, run in bound.items():
                times[system].append(microseconds(run, repeats))
        table[name] = {system: statistics.quantiles(found, n=4)[0] for system, found in times.items()}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("domain",))
    systems = {
        "plain": Operands(lambda t: t, lambda t: t.requires_grad_()),
        "dtensor": Operands(
            lambda t: distribute_tensor(t, mesh, [Shard(0)]),
            lambda t: distribute_tensor(t, mesh, [Replicate()]).requires_grad_(),
        ),
        "shardfield": Operands(lambda t: ShardTensor.from_local(t, mesh, [Shard(0)]), lambda t: t.requires_grad_()),
    }
    assert isinstance(systems["dtensor"].x, DTensor)
    table = measure(systems, OPS, args.rounds, 20)
    table |= measure(systems, {"10 x (linear, relu) forward": lambda t: deep(t, False)}, args.rounds, 5)
    table |= measure(systems, {DEEP: lambda t: deep(t, True)}, args.rounds, 5)
    attributes = {a: (lambda t, a=a: getattr(t.x, a)) for a in ("shape", "ndim", "dtype", "device")}
    table |= measure({k: systems[k] for k in systems if k != "dtensor"}, attributes, args.rounds, 200)
    print(f"{'us per call':32s} {'plain':>8s} {'DTensor':>8s} {'ours':>8s} {'/plain':>7s} {'/DTensor':>8s}")
    for name, row in table.items():
        d, s, p = row.get("dtensor", math.nan), row["shardfield"], row["plain"]
        print(f"{name:32s} {p:8.2f} {d:8.2f} {s:8.2f} {s / p:7.2f} {s / d:8.2f}")
    ratios = [table[n]["shardfield"] / table[n]["dtensor"] for n in OPS]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(
        f"geometric mean over {len(OPS)} ops: {mean:.2f} of DTensor's time; worst pointwise: "
        f"{max(table[n]['shardfield'] / table[n]['dtensor'] for n in POINTWISE):.2f}; "
        f"ten (linear, relu), both ways: {table[DEEP]['shardfield'] / table[DEEP]['plain']:.2f} of plain torch's"
    )
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "us": table, "geomean": mean}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
