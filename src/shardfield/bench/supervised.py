"""Start, kill and restart the ranks of a training run, for `bench faults`; a process with torch loaded forks them.

python -m shardfield.bench.supervised reads a Job as JSON from stdin, and prints the seconds of the run.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..distributed import DistributedManager
from ..train.log import Log
from ..train.loop import Trainer
from ..train.recipes.cnn import CNNConfig, cnn

POLL_SECONDS = 0.005


@dataclass
class Job:
    """A run of the recipe "cnn" with `options`, and the kills (step, seconds after it was reached, rank) in order."""

    out: str
    ranks: int
    options: dict[str, Any]
    kills: list[tuple[int, float, int]] = field(default_factory=list)

    def dumps(self) -> str:
        return json.dumps(asdict(self))


class TracedTrainer(Trainer):
    """Appends what happens when to `trace-<rank>.jsonl`, on a clock that all processes of the machine share."""

    def trace(self, **values: Any) -> None:
        with open(self.config.out / f"trace-{torch.distributed.get_rank()}.jsonl", "a") as file:
            file.write(json.dumps({"at": time.monotonic(), **values}) + "\n")

    def _resume(self, path: Path | None) -> None:
        super()._resume(path)
        self.trace(begin=self.step)

    def _save(self) -> None:
        begun = time.monotonic()
        super()._save()
        self.trace(save=self.step, seconds=time.monotonic() - begun)

    def _read_steps(self, stop_signals: list[int]) -> None:
        super()._read_steps(stop_signals)
        self.trace(step=self.step)


def run_rank(job: Job, rank: int, port: int, attempt: int) -> None:
    """Train as a rank that a launcher has started for the `attempt`-th time."""
    world = str(job.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": f"faults-{os.getppid()}", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    torch.set_num_threads(1)
    config = CNNConfig(**job.options, out=Path(job.out), domain=(job.ranks,), picture=False)
    DistributedManager.initialize()
    mesh, log = config.mesh("cpu"), Log(config.out, rank == 0, config.log_every)
    TracedTrainer(cnn(config, mesh, log), config, mesh, log).run()


def fork_ranks(job: Job, attempt: int) -> list[int]:
    """Fork all ranks, and return their processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(job.ranks):
        process = os.fork()
        if not process:
            code = 1
            try:
                log = os.open(Path(job.out) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                run_rank(job, rank, port, attempt)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # without the exit handlers of the process that was forked
        processes.append(process)
    return processes


def supervise(job: Job) -> float:
    """Run to the end, with a restart after each kill. Return the seconds; raise if a rank fails by itself."""
    begun, attempt, kills = time.monotonic(), 0, list(job.kills)
    trace, reached, killed = Path(job.out) / "trace-0.jsonl", 0, 0
    while True:
        processes = fork_ranks(job, attempt)
        due: float | None = None
        ended: dict[int, int] = {}
        while len(ended) < job.ranks:
            if trace.exists():
                reached = max(reached, _last_step(trace))
            if kills and due is None and reached >= kills[0][0]:
                due = time.monotonic() + kills[0][1]
            if due is not None and time.monotonic() >= due:
                os.kill(processes[kills.pop(0)[2]], signal.SIGKILL)
                killed, due = killed + 1, float("inf")
            for process in (p for p in processes if p not in ended):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    ended[process] = os.waitstatus_to_exitcode(status)
                    if ended[process]:  # no rank can go on without the others
                        for other in (p for p in processes if p not in ended):
                            os.kill(other, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if not any(ended.values()):
            return time.monotonic() - begun
        attempt += 1
        if attempt > killed:
            raise RuntimeError(f"a rank failed by itself: {ended}; see the logs in {job.out}")


def _last_step(trace: Path) -> int:
    """Return the last step in a trace, of which a kill may have truncated the last line."""
    with open(trace, "rb") as file:
        file.seek(max(0, trace.stat().st_size - 2000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if "step" in values or "begin" in values:
            return values.get("step", values.get("begin"))
    return 0


if __name__ == "__main__":
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports what every rank would import when it starts
    gc.collect()
    gc.freeze()  # a collection in a fork would copy these pages
    print(supervise(Job(**json.load(sys.stdin))))
