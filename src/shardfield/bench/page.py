"""docs/performance.md, made of the JSON files of benchmarks: machines side by side, and how to repeat each."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable
from pathlib import Path

from . import BENCHMARKS
from .command import load_benchmark
from .table import Table, format_number, format_settings, format_skip, read_table

HISTORY = "history.toml"
HEAD = """<!-- Made by `make performance` of the files in benchmarks/results; do not edit. -->

# Performance

What shardfield costs beside what you would use instead. Candidates take turns within one run (A, B, B, A, ...), so
that a busy machine slows all of them; a ratio is taken in each round. Shown are medians and, in brackets, the quartiles
around them. A ratio below 1 is less time, memory or traffic than what it is taken against; a bar is what the project
asks of itself. Ranks have one thread each. What is sent is counted by shardfield's own meter, and a benchmark fails
where torch was seen to send something else; DTensor's traffic is what torch was seen to send.

Repeat any of them on your machine, and make this page of what you find:

```bash
python -m shardfield bench --list
python -m shardfield bench halo attention --out results
python -m shardfield bench --page performance.md --out results
```
"""


def page(folder: Path) -> str:
    """The page of all results in a folder."""
    tables = [read_table(path) for path in sorted(folder.glob("*.json"))]
    labels = sorted({t.label for t in tables})
    parts = [HEAD, "## Machines\n", machines(tables), "## What is asked\n", bars_table(tables, labels)]
    for name in BENCHMARKS:
        found = sorted((t for t in tables if t.name == name), key=lambda t: labels.index(t.label))
        if found:
            parts += [f"## {name}\n", benchmark_intro(name), results(found)]
    history = folder / HISTORY
    if history.exists():
        parts += ["## Before and after\n", before_and_after(history)]
    return "\n".join(parts)


def machines(tables: list[Table]) -> str:
    head = ["", "CPU", "cores", "memory", "device", "torch", "Python"]
    rows = {}
    for t in tables:
        m, gpu = t.machine, t.machine["gpu"]
        device = f"{gpu['count']} x {gpu['name']}, {gpu['memory_gb']} GB" if gpu else ""
        cells = [
            t.label,
            m["cpu"],
            m["cores"],
            f"{m['memory_gb']} GB",
            device,
            t.versions["torch"],
            t.versions["python"],
        ]
        rows[t.label] = [str(c) for c in cells]
    return markdown_table(head, (rows[label] for label in sorted(rows)))


def bars_table(tables: list[Table], labels: list[str]) -> str:
    """Every bar, and where it is met. A quick run has none."""
    body: dict[tuple[str, ...], list[str]] = {}
    for name in BENCHMARKS:
        for t in (t for t in tables if t.name == name):
            for row in t.rows:
                if row.bar is None or row.ratio is None:
                    continue
                key = (name, row.case, f"{row.candidate} over {row.against}", f"at most {format_number(row.bar)}")
                line = body.setdefault(key, [""] * len(labels))
                line[labels.index(t.label)] = (
                    format_number(row.ratio) if row.met else f"**{format_number(row.ratio)}**, not met"
                )
    return markdown_table(["benchmark", "case", "ratio", "bar", *labels], ([*key, *line] for key, line in body.items()))


def benchmark_intro(name: str) -> str:
    """A benchmark's docstring, and the command that repeats it."""
    text = inspect.getdoc(load_benchmark(name)) or ""
    return f"{text}\n\n```bash\npython -m shardfield bench {name}\n```\n"


def results(tables: list[Table]) -> str:
    """One table for all machines, and what each was told."""
    several = len(tables) > 1
    head = ["case", "candidate"]
    for t in tables:
        head += [t.label, "ratio"] if several else ["median", "ratio"]
    body: dict[tuple[str, str], list[str]] = {}
    for i, t in enumerate(tables):
        for row in t.rows:
            line = body.setdefault((row.case, row.candidate), [""] * (2 * len(tables)))
            against = f" of {row.against}" if row.ratio is not None else ""
            line[2 * i : 2 * i + 2] = [row.format_value(), row.format_ratio().replace(";", f"{against};", 1)]
            if row.ratio is not None and row.bar is None:
                line[2 * i + 1] += against
    lines, before = [], None
    for case, candidate in ordered_cases(tables):
        lines.append(["" if case == before else case, candidate, *body[case, candidate]])
        before = case
    told = []
    for t in tables:
        commit = f", commit {t.commit}" if t.commit else ""
        load = f", load {t.machine['load']:g} when it began" if "load" in t.machine else ""
        told.append(f"{t.label}: {format_settings(t)}; {t.date}{commit}{load}.")
        told += [f"Not measured there: {format_skip(skip)}." for skip in t.skipped]
    return markdown_table(head, lines) + "\n" + "\n".join(f"- {line}" for line in told) + "\n"


def ordered_cases(tables: list[Table]) -> list[tuple[str, str]]:
    """All rows' cases and candidates, those of one case together, in the order of their first table."""
    cases: dict[str, dict[str, None]] = {}
    for t in tables:
        for row in t.rows:
            cases.setdefault(row.case, {})[row.candidate] = None
    return [(case, candidate) for case, candidates in cases.items() for candidate in candidates]


def before_and_after(path: Path) -> str:
    """What was made faster, from a file that is kept by hand."""
    changes = tomllib.loads(path.read_text())["change"]
    rows = ([c["what"], c["before"], c["after"], c["by"], c["where"]] for c in changes)
    return "What measurements showed to be slow, and what became of it.\n\n" + markdown_table(
        ["", "before", "after", "by", "measured on"], rows
    )


def markdown_table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
