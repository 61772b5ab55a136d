"""`shardfield bench`: run benchmarks by name, keep what they find, and make the page of it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import os
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..distributed.launch import detect
from ..errors import ShardfieldError
from . import BENCHMARKS
from .table import Table

USAGE = "shardfield bench [NAME ...] [--list] [--quick] [--out DIR] [--device cpu|cuda] [--page FILE]"
EPILOG = """Without names all are run. A benchmark's own settings are options too, where it is named: shardfield bench
halo --ranks 2 4 --rounds 9. `shardfield bench --list` shows them."""

# torch's profiler, which counts memory, says on every rank when it starts and stops. Read when torch is loaded there.
QUIET_ENV = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def load_benchmark(name: str) -> ModuleType:
    """The module of a benchmark."""
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, 1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(BENCHMARKS)}"
        raise ShardfieldError(f"unknown benchmark {name!r}{meant}")
    return importlib.import_module(f".{name}", __package__)


def run_benchmark(name: str, device: str = "cpu", quick: bool = False, **given: Any) -> Table:
    """Run one benchmark with the settings that are given, and those of its own for a quick run or a device."""
    kind = load_benchmark(name).Settings
    fields: dict[str, Any] = {f.name: f for f in dataclasses.fields(kind)}
    for key in given:
        if key not in fields:
            raise ShardfieldError(f"{name} has no setting {key!r}; it has {', '.join(fields)}")
    devices = 1 if device == "cpu" else torch.get_device_module(device).device_count()
    values: dict[str, Any] = {}
    if device != "cpu":
        values |= getattr(kind, device, {})
        if "ranks" in fields:
            values["ranks"] = tuple(r for r in fields["ranks"].default if r <= devices) or (1,)
    values |= (kind.quick if quick else {}) | given
    settings = kind(**values)
    for key, value in dataclasses.asdict(settings).items():
        if any(isinstance(v, int) and v < 1 for v in (value if isinstance(value, tuple) else [value])):
            raise ShardfieldError(f"{name}: --{key} {value} should be 1 or more")
    table = Table(name, dataclasses.asdict(settings), device, quick)
    load_benchmark(name).run(settings, device, table)
    return table


def command(words: list[str]) -> int:
    """Run `shardfield bench ...`; returns its exit code."""
    parser = argparse.ArgumentParser("shardfield bench", USAGE, __doc__, EPILOG, allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="show what there is")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run?")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a JSON file for each benchmark there")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="a CUDA device where there is one")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the page of the files in --out and run nothing"
    )
    given, rest = parser.parse_known_args(words)
    asked_for = list(takewhile(lambda word: not word.startswith("-"), rest))
    rest = rest[len(asked_for) :]
    if given.list:
        print(list_benchmarks())
        return 0
    if given.page:
        from .page import page

        if given.out is None or asked_for or rest:
            raise ShardfieldError("bench --page FILE --out DIR makes the page of what is in DIR, and runs nothing")
        given.page.write_text(page(given.out))
        return 0
    names = asked_for or list(BENCHMARKS)
    asked = {name: parse_settings(name, rest) for name in names}  # all are refused before any is run
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ShardfieldError("bench --device cuda: there is no CUDA device here")
    if detect(dict(os.environ)).world_size > 1:
        raise ShardfieldError("bench starts ranks of its own: call it without a launcher")
    for name, value in QUIET_ENV.items():
        os.environ.setdefault(name, value)
    for name in names:
        table = run_benchmark(name, device, given.quick, **asked[name])
        print(table, end="\n\n", flush=True)
        if given.out is not None:
            table.write(given.out)
    return 0


def parse_settings(name: str, words: list[str]) -> dict[str, Any]:
    """The words that are settings of a benchmark, as it wants them."""
    kind = load_benchmark(name).Settings
    parser = argparse.ArgumentParser(f"shardfield bench {name}", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    for field in dataclasses.fields(kind):
        default: Any = field.default
        many = isinstance(default, tuple)
        one = type(default[0] if many else default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=one, nargs="+" if many else None)
    found = vars(parser.parse_args(words))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def list_benchmarks() -> str:
    """Every benchmark, what it asks, and its settings."""
    lines = []
    for name, asks in BENCHMARKS.items():
        lines.append(f"{name:13} {asks}")
        fields = dataclasses.fields(load_benchmark(name).Settings)
        shown = [(f.name, f.default if isinstance(f.default, tuple) else (f.default,)) for f in fields]
        options = " ".join(f"[--{key.replace('_', '-')} {' '.join(map(str, values))}]" for key, values in shown)
        lines.append(f"{'':13} {options}")
    return "\n".join(lines)
