"""Compare the step times that `shardfield plan` predicts with measured ones, for gloo ranks on this machine.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--json FILE] [--rounds 7]

The predicted time has two parts. Computation is timed in processes that do not communicate; as many run at a time as
there are ranks, so that they share cores and caches as ranks do. Messages are timed by collectives of each kind, among
all ranks and among pairs of ranks at the same time, with few and with many bytes. gloo uses the same cores, so no
overlap is assumed. A round takes as long as its slowest rank, and the shortest of several rounds is compared, since
other load on the machine only adds time. On a busy machine, ranks wait for a core; then use --cpu, which compares
CPU seconds of a rank.
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
from torch.distributed.device_mesh import init_device_mesh

from shardfield.bench.links import measure_links, network_of, shortest
from shardfield.planning import DEVICES, Subject, count, predict
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


def subject(name: str) -> Subject:
    kind, outline = PLANNABLE[name]
    config = kind(**SIZES[name])
    return Subject(name, lambda: outline(config), config.batch_size)


def time_real_step(name: str, shape: tuple[int, ...], rounds: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a step with communication. Runs on every rank."""
    warnings.simplefilter("ignore")
    clear_caches()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", *DOMAIN_AXES[: len(shape) - 1]))
    return shortest(Step(subject(name), mesh).run, rounds, clock)


def time_local_step(
    name: str, shape: tuple[int, ...], rank: int, rounds: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of a rank's step without communication, by round. Runs in its own process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return time_step(subject(name), shape, rank, rounds, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds instead of wall-clock seconds")
    parser.add_argument("--models", nargs="*", default=list(SIZES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    clock = time.process_time if options.cpu else time.perf_counter
    pool = ProcessPoolExecutor(max(MESHES), get_context("spawn"))
    cores = len(os.sched_getaffinity(0))
    rows = []
    print(f"{'model':<11} {'mesh':<10} {'computes':>10} {'messages':>9} {'predicted':>10} {'measured':>10}  ratio")
    for ranks, shapes in MESHES.items():
        links = run_on_ranks(measure_links, ranks, options.rounds, clock, timeout=600)[0]
        network = network_of(links)
        for name in options.models:
            for shape in shapes:
                rank = representative_ranks(shape)[0]
                measured, local = [], []
                for _ in range(options.turns):  # interleaved, so that other load affects both
                    times = run_on_ranks(time_real_step, ranks, name, shape, options.rounds, clock, timeout=600)
                    measured.append(times[0])
                    futures = [
                        pool.submit(time_local_step, name, shape, r, options.rounds, clock) for r in range(ranks)
                    ]
                    local += map(max, zip(*(f.result() for f in futures), strict=True))  # the slowest rank of a round
                cost = predict(count(subject(name), shape, rank), DEVICES["h200"], network, min(local))
                row = {
                    "model": name,
                    "mesh": shape,
                    "predicted": cost.seconds,
                    "measured": min(measured),
                    "computes": cost.compute,
                }
                rows.append({**row, "load": os.getloadavg()[0]})
                mesh = " x ".join(map(str, shape))
                print(
                    f"{name:<11} {mesh:<10} {cost.compute * 1e3:8.1f}ms {(cost.seconds - cost.compute) * 1e3:7.1f}ms "
                    f"{cost.seconds * 1e3:8.1f}ms {min(measured) * 1e3:8.1f}ms  {cost.seconds / min(measured):.2f}",
                    flush=True,
                )
    within = sum(0.8 <= r["predicted"] / r["measured"] <= 1.2 for r in rows)
    print(f"{within} of {len(rows)} within 20%; load {os.getloadavg()[0]:.1f} on {cores} cores")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
