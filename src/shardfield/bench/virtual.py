"""Virtual ranks: a field larger than the memory, in one process.

A UNet (8 channels, 2 levels) computes loss and gradients on a field of points x points. Plain torch keeps all
activations. With virtual ranks, tensors above a budget are written to disk, or the blocks of the model are recomputed.
Memory is the peak of the process beyond what it had before the step. The last rows run under a limit of the data
segment (RLIMIT_DATA): plain torch does not fit, virtual ranks train.

On a GPU: the largest 3-D UNet, 3-D FNO and ViT that compute a step in `device_memory` GiB, in plain torch, with all
blocks recomputed (torch's checkpoint), and on virtual ranks, which recompute and move tensors to pinned host memory. A
limit below the memory of the GPU keeps the runs short, and leaves more host memory per byte of the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .measure import spread
from .table import Table

PLAIN = "plain torch"


@dataclass(frozen=True)
class Settings:
    points: int = 512
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    budget: int = 32  # MB
    rounds: int = 2
    large: int = 3200  # points of the field under a limit
    limit: int = 2048  # MB
    large_ranks: int = 16
    models: tuple[str, ...] = ("unet3d", "fno3d", "vit")  # on a GPU
    device_memory: int = 8  # GiB of a GPU
    seconds: int = 200  # for each model on a GPU

    quick: ClassVar[dict[str, Any]] = {
        "points": 128,
        "ranks": (2,),
        "budget": 2,
        "rounds": 1,
        "large": 256,
        "limit": 32,
        "large_ranks": 8,
    }


def run_step(**options: Any) -> dict[str, Any] | None:
    """Run one process of `virtual_step`; return its figures, or None if it runs out of memory."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # Large blocks come from the system and go back to it: what is released counts no longer.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardfield.bench.virtual_step", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode == 0:
        return json.loads(done.stdout)
    if any(text in done.stderr for text in ("allocate memory", "MemoryError", "bad_alloc", "could not create")):
        return None
    raise RuntimeError(done.stderr[-2000:])


def run(settings: Settings, device: str, table: Table) -> None:
    if device == "cuda":
        largest(settings, table)
        return
    if device != "cpu" or not Path("/proc/self/clear_refs").exists():
        table.add_skipped("virtual ranks", "tensors are moved on CPUs with Linux only")
        return
    candidates: dict[str, dict[str, Any]] = {PLAIN: {"ranks": 0}}
    for ranks in settings.ranks:
        candidates[f"{ranks} virtual, kept"] = {"ranks": ranks, "memory": "keep"}
        candidates[f"{ranks} virtual, {settings.budget} MB"] = {"ranks": ranks, "budget": settings.budget}
        candidates[f"{ranks} virtual, recomputed"] = {"ranks": ranks, "memory": "recompute"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in candidates}
    for _ in range(settings.rounds):  # interleaved: each round has every candidate
        for name, options in candidates.items():
            figures = run_step(points=settings.points, **options)
            assert figures is not None
            found[name].append(figures)
    field = f"{settings.points} x {settings.points}"
    table.add_times(f"time, {field}", {n: [min(f["seconds"]) for f in fs] for n, fs in found.items()}, PLAIN, "s")
    peaks = {n: spread([f["peak"] for f in fs]).median for n, fs in found.items()}
    table.add_counts(f"peak memory, {field}", peaks, "MB", PLAIN)
    moved = {n: fs[-1]["moved"] for n, fs in found.items() if "moved" in fs[-1]}
    table.add_counts(f"written to disk, {field}", moved, "MB")
    limited(settings, table)


def largest(settings: Settings, table: Table) -> None:
    """Add the largest fields that fit the memory of a GPU, and the time of virtual ranks where plain torch fits."""
    for model in settings.models:
        found = _run_on_gpu(model, settings, table)
        sizes = {name: found[name][-1] for name in ("plain", "checkpointed", "virtual") if name in found}
        if "plain" not in sizes:
            continue
        case, plain = f"{model} in {settings.device_memory} GiB", sizes["plain"]
        for name, figures in sizes.items():
            moved = f", {figures['moved'] / 1e9:.1f} GB moved out" if "moved" in figures else ""
            peak = f"{figures['peak'] / (1 << 30):.2f} GiB"
            table.add_text(case, name, f"{figures['voxels']:,} voxels, {figures['seconds']:.3f} s, {peak}{moved}")
        for name, times in (("plain", 16), ("checkpointed", 4)) if "virtual" in sizes else ():
            share = times * sizes[name]["voxels"] / sizes["virtual"]["voxels"]
            table.add_ratio(f"{case}: {times} x the voxels", "virtual", [1 / share * times], name, None)
            table.add_ratio(f"{case}: {times} x {name} over virtual", "virtual", [share], name, 1.0)
        for figures in found.get("same size", ()):
            ratio = figures["seconds"] / plain["seconds"]
            table.add_ratio(f"{case}: time, {plain['n']}", f"{figures['ranks']} virtual", [ratio], PLAIN, 1.6)


def _run_on_gpu(model: str, settings: Settings, table: Table) -> dict[str, list[dict[str, Any]]]:
    """Return what a process of `virtual_gpu` has found by the end of its time, by the name of each result."""
    options = ["--model", model, "--memory", str(settings.device_memory)]
    command = [sys.executable, "-m", "shardfield.bench.virtual_gpu", *options]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as problems:
        try:
            code = subprocess.run(command, stdout=out, stderr=problems, env=env, timeout=settings.seconds).returncode
        except subprocess.TimeoutExpired:
            code = 0
            table.add_skipped(model, f"the runs did not end in {settings.seconds} s")
        out.seek(0)
        problems.seek(0)
        if code:
            table.add_skipped(model, problems.read()[-600:])
        found: dict[str, list[dict[str, Any]]] = {}
        for line in out:
            figures = json.loads(line)
            print(model, line.strip(), file=sys.stderr, flush=True)
            found.setdefault(figures.pop("what"), []).append(figures)
        return found


def limited(settings: Settings, table: Table) -> None:
    """Add the rows of a field whose step exceeds a limit of memory."""
    case = f"{settings.large} x {settings.large} in {settings.limit} MB"
    free = run_step(points=settings.large, ranks=0)
    table.add_text(case, f"{PLAIN}, no limit", _outcome(free))
    options = {"points": settings.large, "limit": settings.limit}
    table.add_text(case, PLAIN, _outcome(run_step(ranks=0, **options)))
    for memory in ("auto", "recompute"):
        virtual = run_step(ranks=settings.large_ranks, memory=memory, budget=settings.limit / 2, **options)
        table.add_text(case, f"{settings.large_ranks} virtual, {memory}, {settings.limit // 2} MB", _outcome(virtual))


def _outcome(found: dict[str, Any] | None) -> str:
    if found is None:
        return "does not fit"
    moved = f", {found['moved'] / 1e6:.0f} MB moved out" if "moved" in found else ""
    times = f"{found['seconds'][0]:.1f} s, {found['cpu'][0]:.1f} s of the processor"
    return f"trains: {found['peak'] / 1e6:.0f} MB, {times}{moved}, loss {found['loss']:.7f}"
