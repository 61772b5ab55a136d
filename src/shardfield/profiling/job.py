"""Run some steps of a recipe or of a model under the profiler, on this rank."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from ..bench.links import measure_links, network_of
from ..comm import collectives
from ..data import ShardedLoader
from ..debug.explain import Report
from ..planning import DEVICES, Cost, predict, watch
from ..planning.cli import mean_square
from ..train.config import TrainConfig
from ..train.loop import Trainer
from ..train.task import Task
from .spans import Spans, annotate
from .trace import RankProfile, read_rank


class RandomFields:
    """Random samples of one shape, for a model without data."""

    def __init__(self, shape: tuple[int, ...], n: int, dtype: torch.dtype):
        self.shapes, self.n, self.dtype = {"x": shape}, n, dtype

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        return {"x": torch.randn(self.shapes["x"], generator=generator).to(self.dtype)}


def model_task(
    factory: Callable[[], Any], shape: tuple[int, ...], dims: tuple[int, ...], config: TrainConfig, mesh: DeviceMesh
) -> Task:
    """Return the task of a model: random fields of `shape` (batch dim first), sharded along `dims` of the input.

    The loss is the mean square of the outputs.
    """
    torch.manual_seed(config.seed)
    made = factory()
    each = config.batch_size // mesh.size(0) // config.accumulate
    placements = {"x": [Shard(d - 1) for d in dims[: len(config.domain)]]}
    dataset = RandomFields(shape[1:], 4 * config.batch_size, config.dtype)
    loader = ShardedLoader(dataset, each, mesh, domain=config.axes, placements=placements, drop_last=True)
    return Task(model=made[0] if isinstance(made, tuple) else made, train=loader, loss=mean_square)


class ProfiledTrainer(Trainer):
    """A trainer whose optimizer step is a span of the profile, while there is one."""

    spans: Spans | None = None

    def _step_optimizer(self) -> None:
        if self.spans is None:
            return super()._step_optimizer()
        with self.spans.open("phase", module="(optimizer)", op="step"):
            super()._step_optimizer()

    def batches(self) -> Iterator[list[Any]]:
        """Yield the micro-batches of a step, over and over."""
        while True:
            parts: list[Any] = []
            for batch in self.task.train:
                parts.append(batch)
                if len(parts) == self.config.accumulate:
                    yield parts
                    parts = []

    def run_step(self, parts: list[Any]) -> None:
        """Run one step as training does, without recording its loss."""
        self._seed(self.step)
        self.model.train()
        self.rate.fill_(self.config.rate(self.step, self.steps))
        self._run_update(parts, self.config.rollout_length(self.step, self.steps))
        self.step = min(self.step + 1, self.steps - 1)


@dataclass
class Measured:
    """What one rank measures: steps without the profiler, the profile, the prediction, and the calls."""

    seconds: list[float]
    profile: RankProfile
    predicted: Cost | None  # None on accelerators, whose links are not measured
    report: Report


def measure(trainer: ProfiledTrainer, steps: int, warmup: int) -> Measured:
    """Run steps without and with the profiler. All ranks call it."""
    batches = trainer.batches()
    for _ in range(warmup):
        trainer.run_step(next(batches))
    seconds = [_timed(lambda: trainer.run_step(next(batches)), trainer.device) for _ in range(steps)]
    made, report = _profiled(trainer, batches, steps)
    predicted = None
    if trainer.device.type == "cpu" and dist.get_world_size() > 1:
        parts = next(batches)
        with watch() as seen:
            trainer.run_step(parts)
        # A step takes as long as the rank with the most work of its own; its share of the profiled steps is applied to
        # the median step without the profiler, with which the prediction is compared.
        share = torch.tensor((1 - made.waiting / made.seconds) * statistics.median(seconds))
        own = collectives.all_reduce(share, dist.group.WORLD, "max")
        # The device only distributes the measured seconds over the calls.
        predicted = predict(seen, DEVICES["h200"], network_of(measure_links(2)), own.item())
    return Measured(seconds, made, predicted, report)


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    _barrier(device)
    begun = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begun


def _barrier(device: torch.device) -> None:
    world = dist.group.WORLD
    assert world is not None
    collectives.all_reduce(torch.zeros(1, device=device), world)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _profiled(trainer: ProfiledTrainer, batches: Iterator[list[Any]], steps: int) -> tuple[RankProfile, Report]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
    with annotate(trainer.model) as report, profile(activities=activities, profile_memory=True) as profiler:
        spans = trainer.spans = report.spans
        try:
            with spans.open("barrier"):
                _barrier(trainer.device)
            for number in range(steps):
                with spans.open("step", number=number):
                    with spans.open("data"):
                        parts = next(batches)
                    trainer.run_step(parts)
        finally:
            trainer.spans = None
    path = Path(tempfile.mkdtemp(prefix="shardfield-")) / "trace.json"
    try:
        profiler.export_chrome_trace(str(path))
        return read_rank(json.loads(path.read_text()), spans.table, dist.get_rank()), report
    finally:
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()
