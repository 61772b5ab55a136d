"""The output of a run: progress on the terminal, metrics.jsonl and loggers, all from rank 0."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .loggers import LOGGERS, LoggerThread


class Log:
    """Log of a run. If `is_main` is False, every call does nothing.

    loggers: names of `loggers.LOGGERS`, which get the same values, and images; settings: those of the run, for them.
    """

    def __init__(
        self,
        folder: Path,
        is_main: bool,
        log_every: int = 20,
        loggers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ):
        self.folder, self.is_main, self.log_every = folder, is_main, log_every
        self.path = folder / "metrics.jsonl"
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
        self.write_error: str | None = None  # the first error of a write
        self._progress_bar: Any = None
        self._names, self._settings = (tuple(loggers) if is_main else ()), dict(settings or {})
        self._loggers: list[LoggerThread] | None = None  # opened by the first record, after a resume
        self._first_step = 0
        self._start: tuple[float, int] | None = None

    def print_line(self, text: str) -> None:
        """Print a line."""
        if self.is_main:
            print(text, flush=True) if self._progress_bar is None else self._progress_bar.console.print(
                text, highlight=False
            )

    def resume(self, step: int) -> None:
        """Delete an earlier run's records of steps after `step`: they will be recorded again."""
        self._first_step = step + 1
        if not self.is_main or not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]
        temporary = self.path.with_suffix(".part")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(self.path)

    def record(self, *steps: tuple[int, dict[str, float]]) -> None:
        """Record values of some steps, a line of JSON each, and in the loggers."""
        if not self.is_main:
            return
        try:
            with open(self.path, "a") as file:
                file.writelines(json.dumps({"step": step} | values) + "\n" for step, values in steps)
        except OSError as error:  # the trainer's next message has the flag, so that all ranks raise together
            self.write_error = f"{self.path}: {error.strerror}"
            return
        for logger in self._open_loggers():
            logger.put("scalars", [(step, dict(values)) for step, values in steps])

    def image(self, name: str, path: Path, step: int) -> None:
        """Hand an image file to the loggers, if it exists."""
        if self.is_main and path.exists():
            for logger in self._open_loggers():
                logger.put("image", name, path, step)

    def close(self) -> None:
        """Let the loggers finish."""
        for logger in self._loggers or ():
            logger.close()
        self._loggers = None

    def _open_loggers(self) -> list[LoggerThread]:
        if self._loggers is None:
            self._loggers = [
                LoggerThread(
                    name, partial(LOGGERS[name][0], self.folder, self._settings, self._first_step), self.print_line
                )
                for name in self._names
            ]
        return self._loggers

    @contextmanager
    def progress(self, begin: int, steps: int):
        """Show a progress bar on a terminal; elsewhere `step` prints a line every `log_every` steps."""
        self._start, self._first = (time.monotonic(), begin), begin
        if self.is_main and sys.stdout.isatty():
            self._progress_bar, self._bar_task = _make_progress_bar(begin, steps)
        try:
            if self._progress_bar is not None:
                with self._progress_bar:
                    yield
            else:
                yield
        finally:
            self._progress_bar = None

    def steps(self, first: int, steps: int, losses: list[float], rates: list[float], samples: int) -> None:
        """Record the completed steps after step `first`, with `samples` samples each over all ranks."""
        if not self.is_main or not losses:
            return
        assert self._start is not None
        begun, since = self._start
        done = first + len(losses)
        took = (time.monotonic() - begun) / (done - since)
        speed = samples / took
        values = [
            {"loss": loss, "learning_rate": rate, "samples_per_s": speed}
            for loss, rate in zip(losses, rates, strict=True)
        ]
        self.record(*enumerate(values, first + 1))
        if self._progress_bar is not None:
            self._progress_bar.update(self._bar_task, completed=done, loss=f"{losses[-1]:.4f}", speed=f"{speed:.1f}")
        elif done % self.log_every == 0 or done == steps:
            left = _format_duration(took * (steps - done))
            print(f"step {done}/{steps}  loss {losses[-1]:.4f}  {speed:.1f} samples/s  {left} left", flush=True)


def read_curves(path: Path) -> tuple[list[tuple[int, float]], dict[str, list[tuple[int, float]]]]:
    """Read the training loss and each test metric by step from metrics.jsonl."""
    losses: list[tuple[int, float]] = []
    tests: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        values = json.loads(line)
        step = values.pop("step")
        if "loss" in values:
            losses.append((step, values["loss"]))
        for name, value in values.items():
            if "/" in name:
                tests.setdefault(name, []).append((step, value))
    return losses, tests


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line truncated by a kill
        return float("inf")


def _make_progress_bar(begin: int, steps: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]} samples/s"),
        TimeRemainingColumn(),
    )
    return bar, bar.add_task("", total=steps, completed=begin, loss="-", speed="-")


def _format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
