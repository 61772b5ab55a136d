"""`shardfield plan`: parse the command line, rank the meshes, and print a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..data import open_field
from ..data.sharding import align_to_chunks
from ..debug.parity import load
from ..dispatch.arguments import map_tensors
from ..train.config import TrainConfig, UsageError, suggest_name
from ..train.recipes import RECIPES, TASK_SPECS
from ..train.task import TaskSpec
from .cost import DEVICES, Link, Network
from .mesh_search import MeshRanking, Option, Planner
from .simulate import Subject
from .unet import UNetConfig, unet_outline
from .virtual_ranks import VirtualOption, count_virtual, smallest_that_fits

PLANNABLE: dict[str, tuple[type[TrainConfig], Callable[[Any], TaskSpec]]] = {
    **{name: (RECIPES[name][0], TASK_SPECS[name]) for name in RECIPES},
    "unet": (UNetConfig, unet_outline),
}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def command(words: list[str]) -> int:
    """Run `shardfield plan` with these arguments. Return the exit code, which is 1 if no mesh fits in memory."""
    options, rest = _parser().parse_known_args(words)
    subject = _make_subject(options, rest)
    device = None if options.device == "measured" else _find_device(options.device)
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    default_memory = device.memory if device else host_memory
    memory = _parse_quantity("--memory", options.memory, BYTES) if options.memory else default_memory
    if options.virtual:
        return _plan_virtual(options, subject, memory)
    within = Link(
        _parse_quantity("--node-latency", options.node_latency, SECONDS),
        _parse_quantity("--node-bandwidth", options.node_bandwidth, BYTES),
    )
    between = Link(
        _parse_quantity("--latency", options.latency, SECONDS),
        _parse_quantity("--bandwidth", options.bandwidth, BYTES),
    )
    if options.node < 1:
        raise UsageError(f"--node {options.node}: a node has at least 1 GPU")
    network = Network(between, within, options.node)
    gpus = _parse_ints("--gpus", options.gpus)
    planner = Planner(subject, memory, device, network, DEVICES["h200"])
    show = (lambda text: None) if options.json or not sys.stderr.isatty() else _progress
    rankings = [planner.rank_meshes(n, options.all, show) for n in gpus]
    show("")
    print(_json(subject, rankings) if options.json else _table(subject, planner, rankings, memory))
    if options.data and not options.json:
        print("\n".join(_aligned_shards(options.data, options.variable, subject, rankings)))
    return 0 if all(r.best.fits for r in rankings) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardfield plan",
        description="Rank the meshes for a model by memory and step time, and show what each module communicates.",
        epilog="Further options are those of the recipe; see `shardfield train RECIPE --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", nargs="?", default="darcy_tfno", help=f"{', '.join(PLANNABLE)}, or package.module:function")
    add("--gpus", default="8", help="numbers of GPUs, e.g. 8,64,512")
    add("--virtual", help="numbers of virtual ranks on one GPU, e.g. 8,16; auto: the smallest that fits")
    add("--memory", help="memory of a GPU, e.g. 80GB; default: that of the device, or of this machine")
    add(
        "--device",
        default="h200",
        help=f"{', '.join(DEVICES)} (published figures), or measured (time the computation on this machine)",
    )
    add("--bandwidth", default="50GB", help="bandwidth of a GPU to other nodes, per second")
    add("--latency", default="10us", help="latency of a message to another node")
    add("--node", type=int, default=8, help="GPUs per node")
    add("--node-bandwidth", default="450GB", help="bandwidth of a GPU within its node, per second")
    add("--node-latency", default="5us", help="latency of a message within a node")
    add("--shape", help="input shape of package.module:function, batch dim first, e.g. 8,3,1024,1024")
    add("--dims", help="dims of the input that may be sharded, in order of preference, e.g. 2,3")
    add("--batch", type=int, help="global batch size, over all GPUs")
    add("--data", help="zarr folder or NetCDF file of the field: show shard sizes at its chunk boundaries")
    add("--variable", help="the array in --data; its last dims are those of the field")
    add("--all", action="store_true", help="evaluate every mesh, not only the likely ones")
    add("--json", action="store_true", help="print JSON")
    return parser


def _make_subject(options: argparse.Namespace, rest: list[str]) -> Subject:
    try:
        import tyro
    except ImportError as error:
        raise UsageError(f"planning needs more packages ({error}): pip install 'shardfield[recipes]'") from None
    dims = _parse_ints("--dims", options.dims) if options.dims else None
    own_model = ":" in options.name
    if not own_model and options.name not in PLANNABLE:
        raise UsageError(f"unknown recipe {options.name!r}{suggest_name(options.name, PLANNABLE)}")
    kind, outline = (TrainConfig, _model_outline(options)) if own_model else PLANNABLE[options.name]
    if options.shape and not own_model:
        raise UsageError(f"--shape is for package.module:function; {options.name} has its own options for sizes")
    config = tyro.cli(kind, args=rest, prog=f"shardfield plan {options.name}")
    if own_model and options.shape:
        config.batch_size = _parse_ints("--shape", options.shape)[0]
    if options.batch is not None:
        config.batch_size = options.batch
    config.check()
    if own_model and not options.shape:
        raise UsageError("--shape is needed: the input shape of the model, batch dim first, e.g. 8,3,1024,1024")
    subject = Subject(
        options.name,
        lambda: outline(config),
        config.batch_size,
        strategy=config.strategy,
        dtype=config.dtype,
        mixed_precision=torch.bfloat16 if config.precision == "bf16" else None,
        recompute=config.recompute,
    )
    spec = None if own_model else subject.outline()  # raises errors of the configuration before a step is simulated
    field = next(iter(spec.sample_shapes.values())) if spec else _parse_ints("--shape", options.shape)[1:]
    ndim = 1 + len(field)
    if dims is None:
        dims = [d + 1 for d in spec.dims] if spec else [d for d in (2, 3) if d < ndim] or [1]
    if not dims or any(not 0 < d < ndim for d in dims) or len({*dims}) < len(dims) or len(dims) > 3:
        raise UsageError(f"--dims {options.dims}: one to three different dims of the input, from 1 to {ndim - 1}")
    subject.dims = tuple(d - 1 for d in dims)
    return subject


def _model_outline(options: argparse.Namespace) -> Callable[[Any], TaskSpec]:
    sys.path.insert(0, os.getcwd())
    make_model = load(options.name, "plan")

    def outline(config: TrainConfig) -> TaskSpec:
        result = make_model()
        model = result[0] if isinstance(result, tuple) else result
        return TaskSpec(model, {"x": tuple(_parse_ints("--shape", options.shape)[1:])}, mean_square)

    return outline


def mean_square(output: Any, batch: Any) -> Tensor:
    """Return a default loss: the mean square of each tensor that a model returns, summed."""
    losses: list[Tensor] = []
    output = list(output.to_tuple()) if hasattr(output, "to_tuple") else output
    map_tensors(output, lambda t: losses.append(t.abs().square().mean()))
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


# ---------------------------------------------------------------------- parsing


def _find_device(name: str) -> Any:
    if name not in DEVICES:
        raise UsageError(f"--device {name!r}{suggest_name(name, [*DEVICES, 'measured'])}")
    return DEVICES[name]


def _parse_ints(key: str, text: str) -> list[int]:
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{key} {text}: expected positive integers, separated by commas")
    return numbers


def _parse_quantity(key: str, text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*([A-Za-z]*)", text)
    lower = {unit.lower(): size for unit, size in units.items()}
    try:
        value = float(match[1]) * lower[match[2].lower()] if match else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if not value > 0:
        raise UsageError(
            f"{key} {text}: expected a number with one of the units {', '.join(units)}, e.g. 80{[*units][3]}"
        )
    return value


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- output


def _plan_virtual(options: argparse.Namespace, subject: Subject, memory: float) -> int:
    """Print what numbers of virtual ranks need on one device. Return the exit code, which is 1 if none fits."""
    device = None if options.device == "measured" else _find_device(options.device)
    if options.virtual == "auto":
        found = smallest_that_fits(subject, device, memory)
    else:
        found = [count_virtual(subject, n, device, memory) for n in _parse_ints("--virtual", options.virtual)]
    smallest = next((o.ranks for o in found if o.fits), None)
    if options.json:
        print(json.dumps({"name": subject.name, "options": [dataclasses.asdict(o) for o in found]}, indent=1))
        return 0 if smallest else 1
    name = "this machine" if device is None else device.name
    print(f"{subject.name}, {subject.batch} samples a step, {name} with {_format_bytes(memory)}\n")
    print("\n".join(_virtual_table(found)))
    print(f"\nvirtual ranks that fit, at least: {smallest}" if smallest else "\nno number of virtual ranks fits")
    return 0 if smallest else 1


def _virtual_table(options: Sequence[VirtualOption]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("ranks", "fits", "needs", "stays", "largest call", "all tensors", "recomputed", "moved at least", "computing")
    ]
    for o in options:
        sizes = [_format_bytes(n) for n in (o.memory, o.stays, o.operator, o.everything, o.recomputed, o.moved)]
        rows.append((str(o.ranks), "yes" if o.fits else "no", *sizes, _format_seconds(o.seconds)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def _json(subject: Subject, rankings: list[MeshRanking]) -> str:
    return json.dumps(
        {
            "name": subject.name,
            "batch": subject.batch,
            "strategy": subject.strategy,
            "answers": [
                {"gpus": r.gpus, "options": [{**dataclasses.asdict(o), "mesh": list(o.mesh)} for o in r.options]}
                for r in rankings
            ],
        },
        indent=1,
    )


def _table(subject: Subject, planner: Planner, rankings: list[MeshRanking], memory: float) -> str:
    single = planner.single_gpu()
    device = "this machine" if planner.measured else planner.device.name
    lines = [
        f"{subject.name}, {subject.batch} samples a step, {subject.strategy}, {device} with {_format_bytes(memory)}",
        f"one GPU would need {_format_bytes(single.peak)} and {_format_seconds(single.cost.seconds)} a step",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("GPUs", "data x domain", "fits", "memory", "step", "efficiency", "compute", "domain", "parameters", "sends")
    ]
    for ranking in rankings:
        rows += [(str(ranking.gpus) if i == 0 else "", *_row(o)) for i, o in enumerate(ranking.options)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    for ranking in rankings:
        best = ranking.best
        lines += ["", f"{ranking.gpus} GPUs, {best.label}: {'' if best.fits else 'DOES NOT FIT; '}{_by_kind(best)}"]
        lines += [f"  {module:<40} {m:>6} messages {_format_bytes(b):>9}" for module, (m, b) in _top_modules(best)]
        if best.gathers:
            lines.append(f"  fallback to gather, since there is no rule: {', '.join(best.gathers)}")
    return "\n".join(lines)


def _aligned_shards(path: str, name: str | None, subject: Subject, rankings: list[MeshRanking]) -> Iterator[str]:
    """Yield the shard sizes of the best meshes for which each chunk of the stored field is read by one rank."""
    field = open_field(path, name=name)
    ndim = max(map(len, subject.outline().sample_shapes.values()))
    if field.chunks is None:
        yield f"{path}: stored in one piece: ranks read their blocks whatever the shard sizes"
        return
    yield f'{path}: chunks of {" x ".join(map(str, field.chunks))}; with sizes="chunks" each is read by one rank:'
    for ranking in rankings:
        parts = []
        for dim, ranks in zip(subject.dims, ranking.best.mesh[1:], strict=False):
            at = dim - ndim
            sizes = align_to_chunks(field.shape[at], field.chunks[at], ranks)
            parts.append(f"dim {at} ({field.shape[at]}) as {_format_sizes(sizes)}")
        yield f"  {ranking.gpus} GPUs, {ranking.best.label}: {'; '.join(parts)}"


def _format_sizes(sizes: Sequence[int]) -> str:
    """Write runs of equal sizes once: (91, 91, 90) as 2 x 91 + 90."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs)


def _row(option: Option) -> tuple[str, ...]:
    cost = option.cost
    fractions = [f"{part / cost.seconds:.0%}" for part in (cost.compute, cost.domain, cost.parameters)]
    fits = "yes" if option.fits else "no"
    return (
        option.label,
        fits,
        _format_bytes(option.peak),
        _format_seconds(cost.seconds),
        f"{option.efficiency:.0%}",
        *fractions,
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
