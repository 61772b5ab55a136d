"""Does a plan's step time hold on real ranks? Predicted and measured, for gloo ranks on this machine.

    OMP_NUM_THREADS=1 python benchmarks/dispatch/plan.py [--json FILE] [--rounds 7]

Predicted: the computation of a rank, measured in processes that send nothing, as many at a time as there are ranks,
which share cores and caches as ranks do; and what its messages cost, from the time that calls of each kind take among
as many ranks, and among pairs of them at once, with few and with many bytes. gloo's messages are carried by the same
cores, so nothing is taken to hide. The shortest of several rounds is compared, each as long as its slowest rank takes:
what else runs on a machine only ever adds. On a busy machine ranks wait for each other's turns; then --cpu tells more:
processor seconds of a rank, predicted from processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardfield.comm import collectives
from shardfield.planning import DEVICES, Link, Network, Subject, count, predict
from shardfield.planning.cli import PLANNABLE
from shardfield.planning.fake_world import clear_caches
from shardfield.planning.simulate import Step, representative_ranks, time_step
from shardfield.testing import run_on_ranks
from shardfield.train.config import DOMAIN_AXES

SIZES: dict[str, dict[str, Any]] = {
    "unet": {"resolution": 128, "width": 16, "levels": 3, "batch_size": 4},
    "vit": {"resolution": 128, "test_resolutions": (128,), "patch": 4, "width": 96, "layers": 2, "batch_size": 4},
    "darcy_tfno": {"resolution": 128, "width": 32, "modes": 16, "layers": 4, "batch_size": 4},
}
MESHES = {2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2), (1, 2, 2)]}
FEW, MANY = 64, 1 << 20  # numbers in a message


def subject(name: str) -> Subject:
    kind, outline = PLANNABLE[name]
    config = kind(**SIZES[name])
    return Subject(name, lambda: outline(config), config.batch_size)


def shortest(call: Callable[[], Any], rounds: int, clock: Callable[[], float]) -> float:
    """Seconds until the slowest rank is done, of the quickest round."""
    times = []
    for i in range(rounds + 2):
        dist.barrier()
        begun = clock()
        call()
        taken = torch.tensor(clock() - begun, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if i > 1:
            times.append(taken.item())
    return min(times)


Told = dict[str, dict[int, tuple[float, float]]]  # kind of call, how many take part: (latency, bandwidth)


def links(rounds: int, clock: Callable[[], float]) -> Told:
    """On a rank: what a call of each kind takes among all ranks and among pairs, as the bytes it sends are counted.

    An exchange goes by how many peers it has. Calls are made between two convolutions, and what these take by
    themselves is taken off: a rank that has waited finds its caches cold.
    """
    warnings.simplefilter("ignore")
    ranks = dist.get_world_size()
    pairs = [dist.new_group([a, a + 1]) for a in range(0, ranks, 2)]
    found = taken(pairs[dist.get_rank() // 2], rounds, clock)
    if ranks > 2:
        assert dist.group.WORLD is not None
        for kind, told in taken(dist.group.WORLD, rounds, clock).items():
            found[kind] |= told
    return found


def taken(group: dist.ProcessGroup, rounds: int, clock: Callable[[], float]) -> Told:
    size, rank = group.size(), group.rank()
    near = {(rank + 1) % size, (rank - 1) % size}

    def neighbours(n: int) -> tuple[Callable[[], Any], float]:
        sends = [torch.zeros(n if c in near else 0) for c in range(size)]
        return lambda: collectives.exchange(sends, [t.shape for t in sends], group), 4 * n * len(near)

    def all_reduce(n: int) -> tuple[Callable[[], Any], float]:
        x = torch.zeros(n)
        return lambda: collectives.all_reduce(x, group), 8 * n * (size - 1) / size

    def all_gather(n: int) -> tuple[Callable[[], Any], float]:
        x = torch.zeros(n // size)
        return lambda: collectives.all_gather(x, [x.shape] * size, group), 4 * (n // size) * (size - 1)

    def reduce_scatter(n: int) -> tuple[Callable[[], Any], float]:
        x, out = torch.zeros(n // size * size), torch.zeros(n // size)
        return lambda: dist.reduce_scatter_tensor(out, x, group=group), 4 * (n // size) * (size - 1)

    field, weight = torch.randn(1, 16, 64, 128), torch.randn(16, 16, 3, 3)

    def between(call: Callable[[], Any] | None) -> Callable[[], Any]:
        def run() -> None:
            torch.conv2d(field, weight, padding=1)
            if call is not None:
                call()
            torch.conv2d(field, weight, padding=1)

        return run

    found: Told = {}
    kinds = {"exchange": neighbours, "all_reduce": all_reduce, "all_gather": all_gather}
    kinds["reduce_scatter"] = reduce_scatter
    base = shortest(between(None), 4 * rounds, clock)
    for kind, make in kinds.items():
        (few, low), (many, high) = make(FEW), make(MANY)
        quick, slow = shortest(between(few), 4 * rounds, clock), shortest(between(many), rounds, clock)
        told = max(quick - base, 1e-6), (high - low) / max(slow - quick, 1e-9)
        found[kind] = {len(near) if kind == "exchange" else size: told}
    return found


def real(name: str, shape: tuple[int, ...], rounds: int, clock: Callable[[], float]) -> float:
    """On a rank: seconds of a step."""
    warnings.simplefilter("ignore")
    clear_caches()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", *DOMAIN_AXES[: len(shape) - 1]))
    return shortest(Step(subject(name), mesh).take, rounds, clock)


def silent(name: str, shape: tuple[int, ...], rank: int, rounds: int, clock: Callable[[], float]) -> list[float]:
    """In a process of its own: seconds of a rank's step that sends nothing, round by round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return time_step(subject(name), shape, rank, rounds, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="processor seconds, not those of the clock")
    parser.add_argument("--models", nargs="*", default=list(SIZES))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    clock = time.process_time if given.cpu else time.perf_counter
    pool = ProcessPoolExecutor(max(MESHES), get_context("spawn"))
    cores = len(os.sched_getaffinity(0))
    rows = []
    print(f"{'model':<11} {'mesh':<10} {'computes':>10} {'messages':>9} {'predicted':>10} {'measured':>10}  ratio")
    for ranks, shapes in MESHES.items():
        found = run_on_ranks(links, ranks, given.rounds, clock, timeout=600)[0]
        calls = {kind: {n: Link(*link) for n, link in by_count.items()} for kind, by_count in found.items()}
        network = Network(calls["exchange"][1], calls=calls, beside=False)
        for name in given.models:
            for shape in shapes:
                rank = representative_ranks(shape)[0]
                taken, alone = [], []
                for _ in range(given.turns):  # in turns, so that a busy machine slows both
                    taken.append(run_on_ranks(real, ranks, name, shape, given.rounds, clock, timeout=600)[0])
                    told = [pool.submit(silent, name, shape, r, given.rounds, clock) for r in range(ranks)]
                    alone += map(max, zip(*(t.result() for t in told), strict=True))  # the slowest rank ends a round
                cost = predict(count(subject(name), shape, rank), DEVICES["h200"], network, min(alone))
                row = {
                    "model": name,
                    "mesh": shape,
                    "predicted": cost.seconds,
                    "measured": min(taken),
                    "computes": cost.compute,
                }
                rows.append({**row, "load": os.getloadavg()[0]})
                mesh = " x ".join(map(str, shape))
                print(
                    f"{name:<11} {mesh:<10} {cost.compute * 1e3:8.1f}ms {(cost.seconds - cost.compute) * 1e3:7.1f}ms "
                    f"{cost.seconds * 1e3:8.1f}ms {min(taken) * 1e3:8.1f}ms  {cost.seconds / min(taken):.2f}",
                    flush=True,
                )
    within = sum(0.8 <= r["predicted"] / r["measured"] <= 1.2 for r in rows)
    print(f"{within} of {len(rows)} within 20%; load {os.getloadavg()[0]:.1f} on {cores} cores")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
