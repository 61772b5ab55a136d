"""Plots of benchmark results for docs/performance.md: {file name: SVG}."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from .charts import Dot, Panel, bars, dots, panels
from .table import Table
from .virtual_plots import VIRTUAL, plot_virtual

SCALING = "perf-scaling-speed"
BARS = "perf-bars"
HISTORY_PLOT = "perf-before-and-after"


def scaling_points(table: Table) -> dict[str, dict[str, dict[int, float]]]:
    """Return {model: {"measured" or "predicted": {ranks: shortest milliseconds}}} of a result of `bench scaling`."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in table.rows:
        case = re.fullmatch(r"(.*), (\d+) ranks?", row.case)
        if case and row.median is not None and row.candidate in ("measured", "predicted"):
            found.setdefault(case[1], {}).setdefault(row.candidate, {})[int(case[2])] = row.median
    return found


def plot_scaling(table: Table) -> str:
    """Plot the speed on P ranks over that on one rank, measured and predicted, with the ideal line."""
    plots = []
    for model, curves in scaling_points(table).items():
        ranks = sorted(curves["measured"])
        lines = {"ideal": [(float(n), float(n)) for n in ranks]}
        for kind in ("measured", "predicted"):
            lines[kind] = [(float(n), curves["measured"][ranks[0]] / curves[kind][n]) for n in ranks]
        ticks = [float(n) for n in ranks]
        plots.append(
            Panel(
                model.split(", ")[0],
                lines,
                f"ranks ({', '.join(model.split(', ')[1:])})",
                "times the speed of one rank",
                log_x=True,
                log_y=True,
                x_ticks=ticks,
                y_ticks=ticks,
                dashed=["ideal"],
            )
        )
    return panels("Speed by number of ranks, measured and predicted", plots, columns=2)


def plot_ratios(name: str, tables: Sequence[Table]) -> str | None:
    """Plot every ratio of a benchmark, with quartiles and limits; a color per machine."""
    rows: dict[str, list[Dot]] = {}
    for table in tables:
        for row in table.rows:
            if row.ratio is not None:
                label = f"{row.case}: {row.candidate} / {row.against}"
                dot = Dot(table.label, row.ratio, row.ratio_low, row.ratio_high, row.bar)
                rows.setdefault(label, []).append(dot)
    return dots(f"Ratios of the benchmark {name}", rows, "ratio, less is better", mark=1.0) if rows else None


def plot_values(name: str, tables: Sequence[Table]) -> dict[str, str]:
    """Plot every median of a benchmark: a plot per machine and unit, a color per candidate."""
    found: dict[tuple[str, str], dict[str, list[Dot]]] = {}
    for table in tables:
        for row in table.rows:
            if row.median is not None and row.unit:
                rows = found.setdefault((table.label, row.unit), {})
                rows.setdefault(row.case, []).append(Dot(row.candidate, row.median, row.low, row.high))
    return {
        f"perf-{name}-{slug(label)}-{slug(unit)}": dots(f"{name} on {label}", rows, f"{unit}, {label}")
        for (label, unit), rows in found.items()
    }


def plot_bars(tables: Sequence[Table]) -> str:
    """Plot how many limits of each benchmark are met."""
    groups: dict[str, dict[str, float]] = {}
    for table in tables:
        for row in table.rows:
            if row.met is not None:
                group = groups.setdefault(table.name, {"met": 0, "not met": 0})
                group["met" if row.met else "not met"] += 1
    return bars("Limits that are met and not met", groups, "limits")


def slug(text: str) -> str:
    """Return a text as part of a file name.

    >>> slug("Intel Xeon 2.80GHz, 2 cores")
    'intel-xeon-2-80ghz-2-cores'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def plots_of(name: str, tables: Sequence[Table]) -> dict[str, str]:
    """Return all plots of a benchmark, the ratios first."""
    ratios = plot_ratios(name, tables)
    found = {} if ratios is None else {f"perf-{name}": ratios}
    if name == "scaling":
        found |= {SCALING: plot_scaling(tables[0])}
    if name == "virtual":
        found |= {VIRTUAL: plot_virtual(tables[0])}
    return found | plot_values(name, tables)


def plot_history(path: Path) -> str | None:
    """Plot what is left of each number of an optimization: after over before, by the machine that measured both."""
    changes = tomllib.loads(path.read_text())["change"] if path.exists() else []
    rows = {
        name: [Dot(change["where"].replace("`", ""), after / before)]
        for change in changes
        for name, before, after in change.get("values", ())
    }
    return (
        dots("Time or traffic after an optimization over that before", rows, "after / before", mark=1.0)
        if rows
        else None
    )
