"""Killed ranks: how much of a run's time they cost, whether the losses stay the same, and how long a checkpoint blocks.

A run of small steps is killed at random: SIGKILL to a random rank, at random steps, also while a checkpoint is written
or while the ranks start. All ranks are then ended and started again, from a process that has torch loaded, as a warm
standby; under torchrun, the import of torch comes on top. The time lost is all but the steps that were not repeated:
start-up, restarts, and steps since the last checkpoint. A run that is not killed runs at the same time, and the losses
of every step are compared with its losses, to the last bit. A checkpoint blocks a rank while it copies the state; the
files are written in the background. `seconds_between_kills` counts the time of steps alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ShardfieldError
from ..train.log import read_curves
from .supervised import Job
from .table import Table

OPTIONS = {"height": 16, "width": 16, "channels": 8, "n_train": 4096, "n_test": 8, "batch_size": 8, "evaluate_every": 0}


@dataclass(frozen=True)
class Settings:
    ranks: int = 2
    kills: int = 100
    seconds_between_kills: float = 10.0
    seconds_between_checkpoints: float = 2.0
    seed: int = 1

    quick: ClassVar[dict[str, Any]] = {"kills": 2, "seconds_between_kills": 1.0, "seconds_between_checkpoints": 0.3}


@dataclass
class Trace:
    """What one rank did: each start with its first step, and each checkpoint, on one clock."""

    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Trace:
        events = []
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:  # truncated by a kill
                continue
        return cls(events)

    def attempts(self) -> list[list[dict[str, Any]]]:
        """Return the events of each start, the first of which has the step that it began with."""
        starts = [i for i, event in enumerate(self.events) if "begin" in event]
        return [self.events[a:b] for a, b in pairwise([*starts, len(self.events)])]

    def useful_seconds(self) -> float:
        """Return the time of the steps that were not repeated."""
        attempts = self.attempts()
        total = 0.0
        for events, after in zip(attempts, [*attempts[1:], None], strict=True):
            kept = [e["at"] for e in events if "step" in e and (after is None or e["step"] <= after[0]["begin"])]
            total += max(kept, default=events[0]["at"]) - events[0]["at"]
        return total

    def step_seconds(self) -> float:
        """Return the mean time of a step of the first start."""
        first = [e for e in self.attempts()[0] if "save" not in e]
        return (first[-1]["at"] - first[0]["at"]) / (first[-1]["step"] - first[0]["begin"])

    def stalls(self) -> list[float]:
        """Return for each checkpoint how long it blocked, as a fraction of the time since the one before."""
        found = []
        for events in self.attempts():
            saves = [e for e in events if "save" in e]
            found += [b["seconds"] / (b["at"] - a["at"]) for a, b in pairwise(saves)]
        return found


def run_job(job: Job) -> float:
    """Run a job in a new process, and return its seconds."""
    Path(job.out).mkdir(parents=True)
    process = subprocess.run(
        [sys.executable, "-m", "shardfield.bench.supervised"],
        input=job.dumps(),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if process.returncode:
        logs = [path.read_text()[-2000:] for path in sorted(Path(job.out).glob("rank-*.log"))]
        raise ShardfieldError("\n".join(["faults: the run failed", process.stderr[-2000:], *logs]))
    return float(process.stdout.split()[-1])


def run_together(*jobs: Job) -> list[float]:
    """Run jobs at the same time, so that both see the same load, and return the seconds of each."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run_job, jobs))


def plan_kills(settings: Settings, steps: int) -> list[tuple[int, float, int]]:
    """Draw the step, the delay and the rank of each kill; no kill after the last step."""
    draw = random.Random(settings.seed)
    at = sorted(draw.sample(range(1, max(int(0.98 * steps), settings.kills + 1)), settings.kills))
    return [
        (step, draw.uniform(0, settings.seconds_between_checkpoints), draw.randrange(settings.ranks)) for step in at
    ]


def run(settings: Settings, device: str, table: Table) -> None:
    if device != "cpu":
        table.add_skipped("all cases", "the ranks of this benchmark are on the CPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        short, other = (
            Job(f"{folder}/{name}", settings.ranks, OPTIONS | {"max_steps": 200, "save_every": 0})
            for name in ("short", "other")
        )
        run_together(short, other)
        seconds = Trace.read(Path(short.out) / "trace-0.jsonl").step_seconds()
        steps = max(10 * settings.kills, round(settings.kills * settings.seconds_between_kills / seconds))
        every = max(1, round(settings.seconds_between_checkpoints / seconds))
        options = OPTIONS | {"max_steps": steps, "epochs": 1 + steps // 500, "save_every": every, "log_every": every}
        undisturbed = Job(f"{folder}/undisturbed", settings.ranks, options)
        killed = Job(f"{folder}/killed", settings.ranks, options, plan_kills(settings, steps))
        _, took = run_together(undisturbed, killed)
        measure(table, settings, steps, Path(undisturbed.out), Path(killed.out), took)


def measure(table: Table, settings: Settings, steps: int, undisturbed: Path, killed: Path, took: float) -> None:
    """Add the rows of an undisturbed and a killed run."""
    case = f"{settings.kills} kills in {steps:,} steps on {settings.ranks} ranks"
    first = Trace.read(killed / "trace-0.jsonl")
    starts = [events[0]["at"] for events in first.attempts()]
    useful = first.useful_seconds()
    table.add_counts(case, {"the run": took, "steps that were not repeated": useful}, "s")
    table.add_ratio(case, "time lost", [1 - useful / took], "the run", bar=0.2)
    expected, found = (dict(read_curves(folder / "metrics.jsonl")[0]) for folder in (undisturbed, killed))
    same = sum(found.get(step) == loss for step, loss in expected.items())
    table.add_ratio(case, "losses that differ", [1 - same / steps], "all losses", bar=0.0)
    table.add_text(case, "equal losses", f"{same:,} of {steps:,}, to the last bit")
    table.add_text(case, "starts", f"{len(starts):,}")
    for name, folder in (("undisturbed", undisturbed), ("with kills", killed)):
        by_rank = [Trace.read(folder / f"trace-{rank}.jsonl").stalls() for rank in range(settings.ranks)]
        slowest = max(by_rank, key=lambda stalls: sum(stalls) / max(len(stalls), 1))
        if slowest:
            table.add_ratio(f"a checkpoint, {name}", "blocked", slowest, "the time between checkpoints", bar=0.01)
