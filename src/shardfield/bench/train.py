"""Training on a sharded field: the loop of `train`, scaling of a step, reading data, training under a memory limit.

Loop: a step of `shardfield train` (clipping, checks for finite numbers, logging; on one CUDA device as a CUDA graph)
against a loop of forward, loss, backward and AdamW on the same ranks: on one rank the plain model on plain tensors, on
several the parallelized model. Both read the same batches, 8 samples of 64 x 64, as the recipe does.

Scaling: a step of neuraloperator's TFNO (parallelize, H1 loss, AdamW) on 1 rank against several, one thread each,
interleaved; in wall-clock time, and in CPU time of the busiest rank, which other load does not change. Reading: the
fraction of a step spent waiting for a batch, which a thread reads from an HDF5 file. Memory: one sample, with the data
segment of each process limited to some megabytes above its size after a small step. The step does not fit into one
process with four times the limit, nor into one process with the limit and recomputed activations. It fits into four
processes with the limit and recomputed activations.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from ..data import ShardedLoader, UnitGaussian, open_field
from ..train import clip_grad_norm_
from ..train.config import TrainConfig
from ..train.log import Log
from ..train.loop import Trainer
from ..train.parallel import parallelize
from ..train.recipes.darcy import NormalizedModel
from ..train.task import Task
from . import models
from .measure import Times, interleave, max_over_ranks, rank_seconds, synchronize
from .ranks import measure_on_ranks, rank_label
from .table import Table

PLAIN_LOOP, OUR_LOOP = "plain loop", "shardfield train"
LIMIT = 60  # megabytes that a process may allocate in the step under a memory limit


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2)
    points: int = 256
    batch: int = 4
    rounds: int = 5
    loop_steps: int = 10  # steps of a round of the loop

    quick: ClassVar[dict[str, Any]] = {"points": 32, "rounds": 2, "loop_steps": 2}
    cuda: ClassVar[dict[str, Any]] = {"ranks": (1,), "loop_steps": 50}


def time_steps(device: str, path: str, batch: int, rounds: int) -> list[list[float]]:
    """Return wall-clock seconds, CPU seconds and seconds of waiting for data of each step but the first, on a rank."""
    from neuralop.losses import H1Loss

    mesh = init_device_mesh(device, (1, dist.get_world_size()), mesh_dim_names=("data", "spatial"))
    loader = ShardedLoader({name: open_field(path, name=name) for name in "xy"}, batch, mesh)
    unit = UnitGaussian(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    model = NormalizedModel(models.tfno(24, 16), unit, unit).to(device)
    model = parallelize(model, mesh)  # as in the recipe
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    criterion = H1Loss(d=2, reduction="mean")

    def now() -> list[float]:
        synchronize(device)
        return [time.perf_counter(), time.process_time(), loader.waited]

    batches: Any = iter(loader)
    steps = []
    for _ in range(rounds + 1):
        before = now()
        data = next(batches)
        optimizer.zero_grad()
        criterion(model(data["x"]), data["y"]).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        steps.append([after - start for after, start in zip(now(), before, strict=True)])
    batches.close()
    return steps[1:]


def measure_scaling(settings: Settings, device: str, table: Table) -> None:
    """Time steps in worlds of different sizes, interleaved, two steps each."""
    import h5py

    names = {rank_label(ranks): ranks for ranks in sorted({1, *settings.ranks})}
    clock: Times = {name: [] for name in names}
    processor: Times = {name: [] for name in names}
    waiting: Times = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "fields.h5")
        with h5py.File(path, "w") as file:
            for name in "xy":
                file[name] = torch.randn(
                    settings.batch * (2 * settings.rounds + 1), 1, settings.points, settings.points
                ).numpy()
        for _ in range(settings.rounds if len(names) > 1 else 1):
            for name, ranks in names.items():
                by_rank = measure_on_ranks(
                    time_steps, ranks, device, path, settings.batch, 2 if len(names) > 1 else 2 * settings.rounds
                )
                slowest = [[max(at) for at in zip(*step, strict=True)] for step in zip(*by_rank, strict=True)]
                for first, second in zip(slowest[::2], slowest[1::2], strict=True):
                    for i, times in enumerate((clock, processor, waiting)):
                        times[name].append((first[i] + second[i]) / 2)
    case = f"TFNO step, {settings.points} x {settings.points}, {settings.batch} samples"
    table.add_times(case, clock, "1 rank", bars={"2 ranks": 1 / 1.7} if device == "cpu" else {})
    if device == "cpu":
        table.add_times(f"{case}, processor time", processor, "1 rank", bars={"2 ranks": 1 / 1.7})
    for name in names:
        both = {"step": clock[name], "waiting for data": waiting[name]}
        table.add_times(f"{case}, {name}: reading", both, "step", bars={"waiting for data": 0.02})


def run_limited(ranks: int, megabytes: float, *more: str) -> str:
    """Run `bench.limited` in new processes, whose memory is unused, and return its outcome."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.run(
        [*command, "-m", "shardfield.bench.limited", str(megabytes), *more],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    output = process.stdout.strip()
    return output.rpartition(": ")[2] if output else f"failed: {process.stderr.strip().splitlines()[-1][:120]}"


def measure_fits(table: Table, points: int, cases: Sequence[tuple[int, int, bool]]) -> None:
    for ranks, megabytes, recompute in cases:
        outcome = run_limited(ranks, megabytes, "--points", str(points), *(["--recompute"] if recompute else []))
        candidate = f"{rank_label(ranks)}, {megabytes} MB each{', activations computed again' if recompute else ''}"
        table.add_text(f"one sample, {points} x {points}", candidate, outcome)


class RandomFields:
    """Random samples with the shapes of the recipe's."""

    shapes = {"x": (1, 64, 64), "y": (1, 64, 64)}

    def __len__(self) -> int:
        return 80

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": y}


def time_loops(device: str, folder: str, rounds: int, steps: int) -> Times:
    """Return the seconds of a step of both loops, in rounds of `steps` steps, on a rank."""
    from neuralop.losses import H1Loss

    config = TrainConfig(out=Path(folder), domain=(dist.get_world_size(),), epochs=10**6, save_every=0, log_every=20)
    mesh, criterion = config.mesh(device), H1Loss(d=2, reduction="mean")
    log = Log(config.out, dist.get_rank() == 0, config.log_every)

    def make_model() -> NormalizedModel:
        unit = UnitGaussian(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
        return NormalizedModel(models.tfno(32, 16), unit, unit).to(device)

    def make_loader() -> ShardedLoader:
        return ShardedLoader(RandomFields(), config.batch_size, mesh, domain=config.axes, placements=[Shard(1)])

    trainer = Trainer(
        Task(make_model(), make_loader(), lambda out, batch: criterion(out, batch["y"])), config, mesh, log
    )

    def run_trainer() -> None:
        trainer.steps = trainer.step + steps
        with contextlib.redirect_stdout(io.StringIO()), log.progress(trainer.step, trainer.steps):
            while trainer.step < trainer.steps:
                trainer._run_epoch([])
                trainer._read_steps([])

    alone = dist.get_world_size() == 1
    model = make_model() if alone else parallelize(make_model(), mesh, domain=config.axes)
    # Fused needs real parameters: those of `parallelize`.
    optimizer = torch.optim.AdamW(model.parameters(), **({} if alone else {"fused": True}))
    loader = make_loader()

    def run_plain() -> None:
        done = 0
        while done < steps:
            for batch in itertools.islice(loader, steps - done):
                x, y = (batch[name].to_local() if alone else batch[name] for name in "xy")
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                done += 1

    found = interleave(
        {PLAIN_LOOP: run_plain, OUR_LOOP: run_trainer}, rounds, partial(rank_seconds, device=device), warmup=2
    )
    return {name: [seconds / steps for seconds in times] for name, times in found.items()}


def measure_loops(settings: Settings, device: str, table: Table) -> None:
    for ranks in sorted({1, *settings.ranks}):
        with tempfile.TemporaryDirectory() as folder:
            by_rank = measure_on_ranks(time_loops, ranks, device, folder, 2 * settings.rounds, settings.loop_steps)
        table.add_times(
            f"step of the loop, {rank_label(ranks)}", max_over_ranks(by_rank), PLAIN_LOOP, bars={OUR_LOOP: 1 / 0.95}
        )


def run(settings: Settings, device: str, table: Table) -> None:
    missing = [name for name, package in (("neuraloperator", "neuralop"), ("h5py", "h5py")) if not find_spec(package)]
    if missing:
        table.add_skipped("TFNO step", f"{' and '.join(missing)} not installed")
    else:
        measure_loops(settings, device, table)
        measure_scaling(settings, device, table)
    if device == "cpu":
        measure_fits(table, 512, [(1, 4 * LIMIT, False), (1, LIMIT, True), (4, LIMIT, True)])
    else:
        table.add_skipped("limited memory", "a limit on the data segment does not limit the memory of a device")
