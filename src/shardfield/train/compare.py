"""Compare two runs: the first step, and the first module, in which they differ, and by how much."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import UsageError
from .log import read_curves
from .record import FILE

# Largest accepted relative difference by precision, unless --tolerance says otherwise.
TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 1e-2}
NOISE = 1e-6  # fraction of the largest gradient; smaller gradients are compared relative to this
NOT_SETTINGS = ("out", "resume", "record", "picture", "log_every", "save_every", "keep")


@dataclass
class Gap:
    """A difference between two runs: where, both values, and the relative difference."""

    where: str
    first: float
    second: float
    error: float

    def __str__(self) -> str:
        return f"{self.where}: {self.first:.10g} and {self.second:.10g}, relative difference {self.error:.1e}"


def compare_losses(first: Path, second: Path) -> list[Gap]:
    """Return the gap of the loss at every step that both runs have recorded."""
    curves = [dict(read_curves(folder / "metrics.jsonl")[0]) for folder in (first, second)]
    for folder, curve in zip((first, second), curves, strict=True):
        if not curve:
            raise UsageError(f"{folder}: no losses in metrics.jsonl; expected the folder of a training run")
    common = sorted(curves[0].keys() & curves[1].keys())
    if not common:
        raise UsageError(f"{first} and {second} have no step in common")
    return [Gap(f"step {s}", curves[0][s], curves[1][s], _relative(curves[0][s], curves[1][s], 0.0)) for s in common]


def compare_modules(first: Path, second: Path, tolerance: float) -> tuple[Gap | None, Gap]:
    """Return the first gap beyond the tolerance, if any, and the largest gap, over modules and then gradients."""
    runs = [_read_modules(folder) for folder in (first, second)]
    common = sorted(runs[0].keys() & runs[1].keys())
    if not common:
        raise UsageError(f"{first} and {second} have no recorded step in common")
    gaps: list[Gap] = []
    for step in common:
        gaps += _step_gaps(step, runs[0][step], runs[1][step])
    beyond = next((gap for gap in gaps if not gap.error <= tolerance), None)
    return beyond, max(gaps, key=lambda gap: gap.error)


def _read_modules(folder: Path) -> dict[int, dict[str, Any]]:
    path = folder / FILE
    if not path.exists():
        raise UsageError(
            f"{path} does not exist: run `shardfield train ... --record 3` to record the first three steps"
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines}  # the last line of a step that was run again


def _step_gaps(step: int, first: dict[str, Any], second: dict[str, Any]) -> list[Gap]:
    gaps = []
    for i, (a, b) in enumerate(zip(first["outputs"], second["outputs"], strict=False)):
        if a[0] != b[0]:
            raise UsageError(f"step {step}: call {i} is {a[0]} in one run and {b[0]} in the other: other models")
        gaps.append(_fingerprint_gap(f"step {step}, output of {a[0]}", a[1], b[1], 0.0))
    if len(first["outputs"]) != len(second["outputs"]):
        raise UsageError(f"step {step}: {len(first['outputs'])} and {len(second['outputs'])} calls: other models")
    if first["gradients"].keys() != second["gradients"].keys():
        names = sorted(first["gradients"].keys() ^ second["gradients"].keys())
        raise UsageError(f"step {step}: parameters of one run only: {', '.join(names[:5])}")
    largest = max((_rms(f) for f in first["gradients"].values()), default=0.0)
    for name, a in first["gradients"].items():
        gaps.append(_fingerprint_gap(f"step {step}, gradient of {name}", a, second["gradients"][name], NOISE * largest))
    return gaps


def _rms(fingerprint: list[float]) -> float:
    _, squares, count = fingerprint
    return math.sqrt(squares / count) if count else 0.0


def _fingerprint_gap(where: str, a: list[float], b: list[float], floor: float) -> Gap:
    """Compare root mean square and mean, both relative to the root mean square (at least `floor`)."""
    if a[2] != b[2]:
        return Gap(f"{where} (number of elements)", a[2], b[2], math.inf)
    size = max(_rms(a), _rms(b), floor)
    mean = abs(a[0] - b[0]) / max(a[2], 1)
    error = max(_relative(_rms(a), _rms(b), floor), mean / size if size else 0.0)
    return Gap(where, _rms(a), _rms(b), error)


def _relative(a: float, b: float, floor: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    size = max(abs(a), abs(b), floor)
    error = abs(a - b) / size
    return error if math.isfinite(error) else math.inf


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def report(first: Path, second: Path, modules: bool, tolerance: float | None) -> tuple[str, bool]:
    """Return the text of a comparison, and whether the runs agree within the tolerance."""
    settings = _settings(first), _settings(second)
    if tolerance is None:
        tolerance = max(TOLERANCES.get(s.get("precision", "fp32"), 1e-4) for s in settings)
    lines = [f"{first} and {second}"]
    changed = sorted(k for k in settings[0].keys() | settings[1].keys() if settings[0].get(k) != settings[1].get(k))
    for key in (k for k in changed if k not in NOT_SETTINGS):
        lines.append(f"  {key}: {settings[0].get(key)} and {settings[1].get(key)}")
    gaps = compare_losses(first, second)
    differing = next((g for g in gaps if g.error > 0), None)
    beyond = next((g for g in gaps if not g.error <= tolerance), None)
    worst = max(gaps, key=lambda g: g.error)
    lines.append(f"loss: {len(gaps)} steps in both runs")
    if differing is None:
        lines.append("  bit-identical at every step")
    else:
        lines.append(f"  first difference at {differing}")
        lines.append(f"  largest at {worst}")
        lines.append(f"  last at {gaps[-1]}")
        lines.append(f"  first beyond {tolerance:g} at {beyond}" if beyond else f"  all within {tolerance:g}")
    same = beyond is None
    if modules:
        found, largest = compare_modules(first, second, tolerance)
        lines.append(
            f"modules: first beyond {tolerance:g} at {found}" if found else f"modules: all within {tolerance:g}"
        )
        lines.append(f"  largest at {largest}")
        same = same and found is None
    return "\n".join([*lines, "the runs agree" if same else "the runs DIFFER"]), same


def command(words: list[str]) -> int:
    """Run `shardfield compare RUN RUN [--modules] [--tolerance T]`; the exit code is 1 if the runs differ."""
    parser = argparse.ArgumentParser(prog="shardfield compare", description=__doc__)
    parser.add_argument("first", type=Path, help="folder of a run (its --out)")
    parser.add_argument("second", type=Path, help="folder of the other run")
    parser.add_argument(
        "--modules", action="store_true", help="compare the modules of steps recorded by train --record"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that passes; default by precision: "
        + ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items()),
    )
    args = parser.parse_args(words)
    text, same = report(args.first, args.second, args.modules, args.tolerance)
    print(text)
    return 0 if same else 1
