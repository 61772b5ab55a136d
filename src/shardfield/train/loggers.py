"""Loggers of a run: TensorBoard, Weights & Biases, MLflow. Rank 0 alone writes to them, from threads of their own.

A logger that fails or blocks is warned about once and dropped; training neither ends nor waits for it.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ..comm.consensus import ask_first_rank
from .config import UsageError

WAITING = 256  # calls that may wait for a slow logger
CLOSE_SECONDS = 20.0  # for the calls that still wait at the end of a run

Values = Sequence[tuple[int, Mapping[str, float]]]  # (step, name -> value)


class Logger(Protocol):
    """What a logger does. It is made and called by one thread."""

    def scalars(self, values: Values) -> None: ...

    def image(self, name: str, path: Path, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Write event files to the folder `tensorboard` of a run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)

    def scalars(self, values: Values) -> None:
        for step, row in values:
            for name, value in row.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def image(self, name: str, path: Path, step: int) -> None:
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Write to the folder `wandb` of a run; WANDB_MODE=online sends it to a server as well."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int):
        import wandb

        self._wandb = wandb
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        project = os.environ.get("WANDB_PROJECT", "shardfield")
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings), mode=mode)

    def scalars(self, values: Values) -> None:
        for step, row in values:
            self._run.log(dict(row), step=step)

    def image(self, name: str, path: Path, step: int) -> None:
        self._run.log({name: self._wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowLogger:
    """Write to MLFLOW_TRACKING_URI, by default the folder `mlruns` of a run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (folder.resolve() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for a database otherwise
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shardfield")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in settings.items()]
        self._client.log_batch(self._run, params=params)

    def scalars(self, values: Values) -> None:
        rows = [self._metric(name, value, 0, step) for step, row in values for name, value in row.items()]
        for at in range(0, len(rows), 1000):  # the most that a server takes
            self._client.log_batch(self._run, metrics=rows[at : at + 1000])

    def image(self, name: str, path: Path, step: int) -> None:
        self._client.log_artifact(self._run, str(path), f"step-{step}")

    def close(self) -> None:
        self._client.set_terminated(self._run)


# Name of --logger -> (class, the package it imports, which is also the extra).
LOGGERS: dict[str, tuple[Callable[[Path, Mapping[str, Any], int], Logger], str]] = {
    "tensorboard": (TensorBoardLogger, "tensorboard"),
    "wandb": (WandbLogger, "wandb"),
    "mlflow": (MLflowLogger, "mlflow"),
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise a UsageError on all ranks if rank 0 has no package for one of the loggers."""
    if names:
        world = dist.group.WORLD if dist.is_initialized() else None
        ask_first_rank(lambda: _check_packages(names), world, UsageError)


def _check_packages(names: Sequence[str]) -> None:
    for name in names:
        if name not in LOGGERS:
            raise UsageError(f"--logger {name}: valid are {', '.join(LOGGERS)}")
        package = LOGGERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"--logger {name} needs the package {package}: pip install 'shardfield[{package}]'")


class LoggerThread(threading.Thread):
    """One logger and its thread. The first error is passed to `warn`, after which calls do nothing."""

    def __init__(self, name: str, make: Callable[[], Logger], warn: Callable[[str], None]):
        super().__init__(name=f"shardfield-{name}", daemon=True)
        self._name, self._make, self._warn = name, make, warn
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self.failed = False
        self.start()

    def put(self, method: str, *args: Any) -> None:
        """Call a method of the logger later. Never blocks."""
        if not self.failed:
            try:
                self._calls.put_nowait((method, args))
            except queue.Full:
                self._fail(f"is {WAITING} calls behind")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the logger finish its calls, for so long at most."""
        if not self.failed:
            try:
                self._calls.put(None, timeout=seconds)
            except queue.Full:
                self._fail(f"is {WAITING} calls behind")
            self.join(seconds)
            if self.is_alive():
                self._fail(f"has not finished after {seconds:g} s")

    def run(self) -> None:
        try:
            logger = self._make()
            while (call := self._calls.get()) is not None:
                if self.failed:
                    return
                getattr(logger, call[0])(*call[1])
            logger.close()
        except (Exception, SystemExit) as error:  # another package's, of any kind
            self._fail(f"failed with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _fail(self, why: str) -> None:
        with self._lock:
            first, self.failed = not self.failed, True
        if first:
            self._warn(f"the logger {self._name} {why}; the run goes on without it")
