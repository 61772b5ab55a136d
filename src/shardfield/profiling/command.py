"""`shardfield profile`: parse the command line, profile on all ranks, merge their traces, print the summary."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.consensus import gather_texts, raise_together
from ..debug.parity import load
from ..distributed.session import process_world
from ..train.config import TrainConfig, UsageError, expand_flags, suggest_name
from ..train.log import Log
from ..train.recipes import RECIPES
from .job import Measured, ProfiledTrainer, measure, model_task
from .summary import Summary, format_summary
from .trace import RankProfile, merge


def command(words: list[str]) -> int:
    """Run `shardfield profile` with these arguments, on every rank. Return the exit code."""
    options, rest = _parser().parse_known_args(words)
    config = _config(options, rest)
    with process_world() as manager:
        profile_ranks(options, config, manager.device.type)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardfield profile",
        description="Profile some training steps on every rank: one trace, and a summary with what to change.",
        epilog="Further options are those of the recipe; see `shardfield train RECIPE --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", help=f"{', '.join(RECIPES)}, or package.module:function that returns a model")
    add("--steps", type=int, default=3, help="steps to profile")
    add("--warmup", type=int, default=3, help="steps before them")
    add("--out", type=Path, default=Path("runs/profile"), help="folder for trace.json, summary.json and modules.html")
    add("--shape", help="input shape of package.module:function, batch dim first, e.g. 8,3,256,256")
    add("--dims", help="dims of the input that --domain shards, e.g. 2,3")
    return parser


def _config(options: argparse.Namespace, rest: list[str]) -> TrainConfig:
    try:
        import tyro
    except ImportError as error:
        raise UsageError(f"profiling needs more packages ({error}): pip install 'shardfield[recipes]'") from None
    own_model = ":" in options.name
    if not own_model and options.name not in RECIPES:
        raise UsageError(f"unknown recipe {options.name!r}{suggest_name(options.name, RECIPES)}")
    if own_model and not options.shape:
        raise UsageError("--shape is needed: the input shape of the model, batch dim first, e.g. 8,3,256,256")
    if not own_model and (options.shape or options.dims):
        raise UsageError("--shape and --dims are for package.module:function; recipes have their own options")
    for name in ("steps", "warmup"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    kind = TrainConfig if own_model else RECIPES[options.name][0]
    config = tyro.cli(kind, args=expand_flags(rest), prog=f"shardfield profile {options.name}")
    config.out, config.resume, config.graphs = options.out, "never", False
    if own_model:
        options.shape = _ints("--shape", options.shape)
        options.dims = _ints("--dims", options.dims) if options.dims else tuple(range(2, len(options.shape))) or (1,)
        if any(not 0 < d < len(options.shape) for d in options.dims) or len(options.dims) < len(config.domain):
            raise UsageError(f"--dims {options.dims}: {len(config.domain)} dims of the input, without the batch dim")
        config.batch_size = options.shape[0]
    config.check()
    # Few samples: a profile reads some batches, and recipes generate all of their samples.
    batches = config.batch_size * config.accumulate
    limits = {"n_train": batches * (options.steps + options.warmup), "n_test": batches}
    fewer = {
        name: min(getattr(config, name), limit)
        for name, limit in limits.items()
        if hasattr(config, name) and f"--{name.replace('_', '-')}" not in rest
    }
    return replace(config, **fewer)


def _ints(key: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(n) for n in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{key} {text}: expected positive integers, separated by commas")
    return numbers


def profile_ranks(options: argparse.Namespace, config: TrainConfig, device: str) -> Summary | None:
    """Profile in a world that exists. Rank 0 writes the files, prints the summary and returns it."""
    config.check_ranks()
    mesh = config.mesh(device)
    log = Log(config.out, dist.get_rank() == 0, config.log_every)
    try:
        if ":" in options.name:
            sys.path.insert(0, os.getcwd())
            task = model_task(load(options.name, "profile"), options.shape, options.dims, config, mesh)
        else:
            task = RECIPES[options.name][1](config, mesh, log)
    except ValueError as error:  # an error of the data or the model about an option
        raise UsageError(str(error)) from error
    found = measure(ProfiledTrainer(task, config, mesh, log), options.steps, options.warmup)
    mine = config.out / f"rank-{dist.get_rank()}.json"
    problem = None
    try:
        mine.write_text(json.dumps(found.profile.as_json()))
    except OSError as error:
        problem = error.strerror or str(error)
    raise_together(f"--out {config.out}", dist.group.WORLD, problem)  # type: ignore[arg-type]
    times = [json.loads(text) for text in gather_texts(json.dumps(found.seconds), dist.group.WORLD)]  # type: ignore[arg-type]
    shape = " x ".join(map(str, mesh.shape))
    summary = None
    if dist.get_rank() == 0:
        try:
            summary = _write(options, config.out, found, times, f"{shape} ranks (data x domain)")
        except (UsageError, OSError) as error:
            problem = str(error)
    raise_together(f"--out {config.out}", dist.group.WORLD, problem)  # type: ignore[arg-type]
    return summary


def _write(options: argparse.Namespace, folder: Path, found: Measured, times: list[list[float]], mesh: str) -> Summary:
    """Merge the ranks' profiles, write the files and print the summary."""
    paths = [folder / f"rank-{rank}.json" for rank in range(dist.get_world_size())]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UsageError(f"rank 0 does not see {missing[0]}; choose a folder that all hosts share")
    profiles = [RankProfile.from_json(json.loads(path.read_text())) for path in paths]
    slowest = [max(step) for step in zip(*times, strict=True)]
    report = found.report
    summary = Summary(
        options.name,
        mesh,
        statistics.median(slowest),
        profiles,
        found.predicted,
        [f"{row.module} {row.op}" for row in report.gathers],
        [f"{row.module} {row.op}" for row in report.lost],
    )
    facts: dict[str, Any] = {"name": options.name, "mesh": mesh, "torch": torch.__version__, "named": summary.named}
    (folder / "trace.json").write_text(json.dumps(merge(profiles, facts)))
    (folder / "summary.json").write_text(json.dumps(summary.as_json(), indent=1) + "\n")
    report.html(folder / "modules.html")
    for path in paths:
        path.unlink()
    print(format_summary(summary))
    print(f"\n{folder / 'trace.json'} opens in ui.perfetto.dev; {folder / 'modules.html'} shows the messages by module")
    return summary
