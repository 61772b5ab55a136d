"""The plot of docs/attention.md: speed, memory and bytes of attention by the number of ranks."""

from __future__ import annotations

import re
from typing import Any

from .charts import Panel, panels
from .table import Table

ATTENTION = "attention-by-ranks"


def attention_speeds(table: Table) -> dict[str, dict[int, float]]:
    """Return {candidate: {ranks: TFLOP/s of all ranks}}, forward and backward, of a result of `bench attention`."""
    settings: dict[str, Any] = table.settings
    flops = 3.5 * 4 * settings["heads"] * settings["width"] * settings["length"] ** 2
    names = {"shardfield": "ring"}  # of one rank
    found: dict[str, dict[int, float]] = {}
    for row in table.rows:
        case = re.fullmatch(r"(\d+) ranks?, forward \+ backward", row.case)
        if case and row.median is not None and row.candidate in ("shardfield", "ring", "gather"):
            found.setdefault(names.get(row.candidate, row.candidate), {})[int(case[1])] = flops / row.median / 1e9
    return found


def strategy_counts(table: Table, quantity: str) -> dict[str, dict[int, float]]:
    """Return {strategy: {ranks: MB}} of a result of `bench strategies`; `quantity` is "memory" or "sent"."""
    found: dict[str, dict[int, float]] = {}
    for row in table.rows:
        case = re.fullmatch(rf"(\d+) ranks?: {quantity}", row.case)
        if case and row.median is not None:
            found.setdefault(row.candidate, {})[int(case[1])] = row.median
    return found


def plot_attention(measured: Table, counted: Table) -> str:
    """Plot the speed of attention that was measured, and memory and bytes of a rank that were counted, by ranks."""
    quantities = [
        (f"TFLOP/s, {measured.machine['cores']} cores", "TFLOP/s of all ranks", attention_speeds(measured), 1.0),
        ("memory of a rank", "GB", strategy_counts(counted, "memory"), 1e-3),
        ("sent by a rank", "GB", strategy_counts(counted, "sent"), 1e-3),
    ]
    plots = []
    for title, unit, curves, factor in quantities:
        lines = {
            name: [(float(n), value * factor) for n, value in sorted(points.items()) if value > 0]
            for name, points in curves.items()
        }
        ticks = sorted({float(n) for points in curves.values() for n in points})
        plots.append(Panel(title, lines, "ranks", unit, log_x=True, log_y=True, x_ticks=ticks))
    return panels("Attention by the number of ranks", plots)
