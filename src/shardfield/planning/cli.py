"""`shardfield plan`: its words, and its answer as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..debug.parity import load
from ..dispatch.arguments import map_tensors
from ..train.config import TrainConfig, UsageError, suggest_name
from ..train.recipes import RECIPES, TASK_SPECS
from ..train.task import TaskSpec
from .cost import DEVICES, Link, Network
from .mesh_search import MeshRanking, Option, Planner
from .simulate import Subject
from .unet import UNetConfig, unet_outline

PLANNABLE: dict[str, tuple[type[TrainConfig], Callable[[Any], TaskSpec]]] = {
    **{name: (RECIPES[name][0], TASK_SPECS[name]) for name in RECIPES},
    "unet": (UNetConfig, unet_outline),
}
BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def command(words: list[str]) -> int:
    """Answer what was asked on the command line; returns the exit code: 1 if no mesh fits."""
    given, rest = _parser().parse_known_args(words)
    subject = _make_subject(given, rest)
    device = None if given.device == "measured" else _find_device(given.device)
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = _parse_quantity("--memory", given.memory, BYTES) if given.memory else device.memory if device else here
    within = Link(
        _parse_quantity("--node-latency", given.node_latency, SECONDS),
        _parse_quantity("--node-bandwidth", given.node_bandwidth, BYTES),
    )
    between = Link(
        _parse_quantity("--latency", given.latency, SECONDS), _parse_quantity("--bandwidth", given.bandwidth, BYTES)
    )
    if given.node < 1:
        raise UsageError(f"--node {given.node}: a node has at least 1 GPU")
    network = Network(between, within, given.node)
    gpus = _parse_ints("--gpus", given.gpus)
    planner = Planner(subject, memory, device, network, DEVICES["h200"])
    say = (lambda text: None) if given.json or not sys.stderr.isatty() else _progress
    answers = [planner.rank_meshes(n, given.all, say) for n in gpus]
    say("")
    print(_json(subject, answers) if given.json else _table(subject, planner, answers, memory))
    return 0 if all(a.best.fits for a in answers) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardfield plan",
        description="Which mesh for a model, does it fit, what does a step cost, and where do the bytes go?",
        epilog="Other keys are those of the recipe, as `shardfield train RECIPE --help` shows them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", nargs="?", default="darcy_tfno", help=f"{', '.join(PLANNABLE)}, or package.module:function")
    add("--gpus", default="8", help="numbers of GPUs, e.g. 8,64,512")
    add("--memory", help="of a GPU, e.g. 80GB; by default the device's, or this machine's")
    add("--device", default="h200", help=f"{', '.join(DEVICES)}: published numbers; or measured: on this machine")
    add("--bandwidth", default="50GB", help="a second, of a GPU to other nodes")
    add("--latency", default="10us", help="of a message to another node")
    add("--node", type=int, default=8, help="GPUs in a node")
    add("--node-bandwidth", default="450GB", help="a second, of a GPU within its node")
    add("--node-latency", default="5us", help="of a message within a node")
    add("--shape", help="of the input of package.module:function, e.g. 8,3,1024,1024, samples first")
    add("--dims", help="dims of the input that may be cut, in the order they are cut in, e.g. 2,3")
    add("--batch", type=int, help="samples in a step, over all GPUs")
    add("--all", action="store_true", help="look at every mesh, not at the likely ones alone")
    add("--json", action="store_true", help="print the answer for programs")
    return parser


def _make_subject(given: argparse.Namespace, rest: list[str]) -> Subject:
    try:
        import tyro
    except ImportError as error:
        raise UsageError(f"planning needs more packages ({error}): pip install 'shardfield[recipes]'") from None
    dims = _parse_ints("--dims", given.dims) if given.dims else None
    own = ":" in given.name
    if not own and given.name not in PLANNABLE:
        raise UsageError(f"unknown recipe {given.name!r}{suggest_name(given.name, PLANNABLE)}")
    kind, outline = (TrainConfig, _model_outline(given)) if own else PLANNABLE[given.name]
    if given.shape and not own:
        raise UsageError(f"--shape is for package.module:function; {given.name} has keys for its sizes")
    config = tyro.cli(kind, args=rest, prog=f"shardfield plan {given.name}")
    if own and given.shape:
        config.batch_size = _parse_ints("--shape", given.shape)[0]
    if given.batch is not None:
        config.batch_size = given.batch
    config.check()
    if own and not given.shape:
        raise UsageError("--shape is needed: that of the model's input, samples first, e.g. 8,3,1024,1024")
    subject = Subject(
        given.name,
        lambda: outline(config),
        config.batch_size,
        strategy=config.strategy,
        dtype=config.dtype,
        mixed_precision=torch.bfloat16 if config.precision == "bf16" else None,
        recompute=config.recompute,
    )
    ndim = len(_parse_ints("--shape", given.shape)) if own else 4
    if dims is None:
        dims = [d for d in (2, 3) if d < ndim] or [1]
    if not dims or any(not 0 < d < ndim for d in dims) or len({*dims}) < len(dims) or len(dims) > 3:
        raise UsageError(f"--dims {given.dims}: one to three different dims of the input, from 1 to {ndim - 1}")
    subject.dims = tuple(d - 1 for d in dims)
    if not own:
        subject.outline()  # what cannot be is said before anything is counted
    return subject


def _model_outline(given: argparse.Namespace) -> Callable[[Any], TaskSpec]:
    sys.path.insert(0, os.getcwd())
    make = load(given.name, "plan")

    def outline(config: TrainConfig) -> TaskSpec:
        made = make()
        model = made[0] if isinstance(made, tuple) else made
        return TaskSpec(model, {"x": tuple(_parse_ints("--shape", given.shape)[1:])}, _mean_square)

    return outline


def _mean_square(output: Any, batch: Any) -> Tensor:
    """A loss where none is known: of all tensors that a model returns."""
    found: list[Tensor] = []
    output = list(output.to_tuple()) if hasattr(output, "to_tuple") else output
    map_tensors(output, lambda t: found.append(t.abs().square().mean()))
    return torch.stack(found).sum() if len(found) > 1 else found[0]


# ---------------------------------------------------------------------- words


def _find_device(name: str) -> Any:
    if name not in DEVICES:
        raise UsageError(f"--device {name!r}{suggest_name(name, [*DEVICES, 'measured'])}")
    return DEVICES[name]


def _parse_ints(key: str, text: str) -> list[int]:
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{key} {text}: whole numbers from 1 on, with commas between them")
    return found


def _parse_quantity(key: str, text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*([A-Za-z]*)", text)
    lower = {unit.lower(): size for unit, size in units.items()}
    try:
        value = float(match[1]) * lower[match[2].lower()] if match else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if not value > 0:
        raise UsageError(f"{key} {text}: a number and one of {', '.join(u for u in units if u)}, e.g. 80{[*units][4]}")
    return value


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- the answer


def _json(subject: Subject, answers: list[MeshRanking]) -> str:
    return json.dumps(
        {
            "name": subject.name,
            "batch": subject.batch,
            "strategy": subject.strategy,
            "answers": [
                {"gpus": a.gpus, "options": [{**dataclasses.asdict(o), "mesh": list(o.mesh)} for o in a.options]}
                for a in answers
            ],
        },
        indent=1,
    )


def _table(subject: Subject, planner: Planner, answers: list[MeshRanking], memory: float) -> str:
    alone = planner.single_gpu()
    device = "this machine" if planner.measured else planner.device.name
    told = [
        f"{subject.name}, {subject.batch} samples a step, {subject.strategy}, {device} with {_format_bytes(memory)}",
        f"one GPU would need {_format_bytes(alone.peak)} and {_format_seconds(alone.cost.seconds)} a step",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("GPUs", "data x domain", "fits", "memory", "step", "efficiency", "compute", "domain", "parameters", "sends")
    ]
    for answer in answers:
        rows += [(str(answer.gpus) if i == 0 else "", *_row(o)) for i, o in enumerate(answer.options)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    told += ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    for answer in answers:
        best = answer.best
        told += ["", f"{answer.gpus} GPUs, {best.label}: {'' if best.fits else 'DOES NOT FIT; '}{_by_kind(best)}"]
        told += [f"  {module:<40} {m:>6} messages {_format_bytes(b):>9}" for module, (m, b) in _top_modules(best)]
        if best.gathers:
            told.append(f"  gathered for want of a rule: {', '.join(best.gathers)}")
    return "\n".join(told)


def _row(option: Option) -> tuple[str, ...]:
    cost = option.cost
    shares = [f"{part / cost.seconds:.0%}" for part in (cost.compute, cost.domain, cost.parameters)]
    fits = "yes" if option.fits else "no"
    return (
        option.label,
        fits,
        _format_bytes(option.peak),
        _format_seconds(cost.seconds),
        f"{option.efficiency:.0%}",
        *shares,
        _format_bytes(option.bytes),
    )


def _by_kind(option: Option) -> str:
    kinds = sorted(option.kinds.items(), key=lambda item: -item[1][1])
    return "a rank sends " + (", ".join(f"{m} {kind} {_format_bytes(b)}" for kind, (m, b) in kinds) or "nothing")


def _top_modules(option: Option) -> list[tuple[str, list[int]]]:
    return sorted(option.modules.items(), key=lambda item: -item[1][1])[:5]


def _format_bytes(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def _format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
