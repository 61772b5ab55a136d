"""Run benchmarks by name (`shardfield bench`), write their results, and generate docs/performance.md from them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
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
EPILOG = """Without names, all benchmarks run. The settings of a benchmark are options after its name: shardfield bench
halo --ranks 2 4 --rounds 9. `shardfield bench --list` shows them."""

# Silence torch's profiler, which counts memory and logs its start and stop on every rank. Read when torch is loaded.
QUIET_ENV = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def load_benchmark(name: str) -> ModuleType:
    """Import and return the module of a benchmark."""
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the benchmarks are {', '.join(BENCHMARKS)}"
        raise ShardfieldError(f"unknown benchmark {name!r}{hint}")
    return importlib.import_module(f".{name}", __package__)


def run_benchmark(
    name: str, device: str = "cpu", quick: bool = False, on_row: Callable[[str], None] | None = None, **overrides: Any
) -> Table:
    """Run one benchmark. `overrides` take precedence over its settings for a quick run and for the device.

    on_row: called with the text of each row as soon as it is measured.
    """
    kind = load_benchmark(name).Settings
    fields: dict[str, Any] = {f.name: f for f in dataclasses.fields(kind)}
    for key in overrides:
        if key not in fields:
            raise ShardfieldError(f"{name} has no setting {key!r}; it has {', '.join(fields)}")
    devices = 1 if device == "cpu" else torch.get_device_module(device).device_count()
    values: dict[str, Any] = {}
    if device != "cpu":
        values |= getattr(kind, device, {})
        if "ranks" in fields:
            values["ranks"] = tuple(r for r in fields["ranks"].default if r <= devices) or (1,)
    values |= (kind.quick if quick else {}) | overrides
    settings = kind(**values)
    for key, value in dataclasses.asdict(settings).items():
        if any(isinstance(v, int) and v < 1 for v in (value if isinstance(value, tuple) else [value])):
            raise ShardfieldError(f"{name}: --{key} {value} should be 1 or more")
    table = Table(name, dataclasses.asdict(settings), device, quick, on_row=on_row)
    load_benchmark(name).run(settings, device, table)
    return table


def command(words: list[str]) -> int:
    """Run `shardfield bench ...` and return its exit code."""
    parser = argparse.ArgumentParser("shardfield bench", USAGE, __doc__, EPILOG, allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="list the benchmarks and their settings")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to check that they run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a JSON file for each benchmark to this folder")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if available")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page of the results in --out, and run nothing"
    )
    options, rest = parser.parse_known_args(words)
    named = list(takewhile(lambda word: not word.startswith("-"), rest))
    rest = rest[len(named) :]
    if options.list:
        print(list_benchmarks())
        return 0
    if options.page:
        from .page import write_page

        if options.out is None or named or rest:
            raise ShardfieldError("bench --page FILE needs --out DIR, and takes no benchmark names: it runs nothing")
        write_page(options.out, options.page)
        return 0
    names = named or list(BENCHMARKS)
    overrides = {name: parse_settings(name, rest) for name in names}  # wrong settings fail before any benchmark runs
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ShardfieldError("bench --device cuda: this machine has no CUDA device")
    if detect(dict(os.environ)).world_size > 1:
        raise ShardfieldError("bench starts its own ranks: run it without a launcher")
    for name, value in QUIET_ENV.items():
        os.environ.setdefault(name, value)
    for name in names:
        # Rows as they come go to stderr: a run that is stopped early has told what it measured.
        tell = partial(print, file=sys.stderr, flush=True)
        table = run_benchmark(name, device, options.quick, tell, **overrides[name])
        print(table, end="\n\n", flush=True)
        if options.out is not None:
            table.write(options.out)
    return 0


def parse_settings(name: str, words: list[str]) -> dict[str, Any]:
    """Parse command-line words as settings of a benchmark."""
    kind = load_benchmark(name).Settings
    parser = argparse.ArgumentParser(f"shardfield bench {name}", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    for field in dataclasses.fields(kind):
        default: Any = field.default
        many = isinstance(default, tuple)
        one = type(default[0] if many else default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=one, nargs="+" if many else None)
    values = vars(parser.parse_args(words))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def list_benchmarks() -> str:
    """Return a text that lists every benchmark with its description and settings."""
    lines = []
    for name, description in BENCHMARKS.items():
        lines.append(f"{name:13} {description}")
        fields = dataclasses.fields(load_benchmark(name).Settings)
        shown = [(f.name, f.default if isinstance(f.default, tuple) else (f.default,)) for f in fields]
        options = " ".join(f"[--{key.replace('_', '-')} {' '.join(map(str, values))}]" for key, values in shown)
        lines.append(f"{'':13} {options}")
    return "\n".join(lines)
