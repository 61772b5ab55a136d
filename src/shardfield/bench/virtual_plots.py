"""The plot of `bench virtual`: memory and time of a step by the number of virtual ranks."""

from __future__ import annotations

import re

from .charts import Panel, panels
from .table import Table

VIRTUAL = "perf-virtual-ranks"


def virtual_points(table: Table, quantity: str) -> dict[str, dict[int, float]]:
    """Return {policy: {virtual ranks: median}} of `quantity` ("time" or "peak memory") in a result of `bench virtual`.

    Plain torch has 0 virtual ranks.
    """
    found: dict[str, dict[int, float]] = {}
    for row in table.rows:
        if row.case.startswith(quantity) and row.median is not None:
            named = re.fullmatch(r"(\d+) virtual, (.*)", row.candidate)
            policy, ranks = (named[2], int(named[1])) if named else (row.candidate, 0)
            found.setdefault(policy, {})[ranks] = row.median
    return found


def plot_virtual(table: Table) -> str:
    """Plot the memory and the time of a step against the number of virtual ranks, with plain torch as a line."""
    plots = []
    for quantity, unit in (("peak memory", "MB"), ("time", "seconds per step")):
        points = virtual_points(table, quantity)
        ticks = sorted({float(n) for of in points.values() for n in of if n})
        lines = {
            policy: [(n, of[0]) for n in ticks] if 0 in of else [(float(n), of[n]) for n in sorted(of)]
            for policy, of in points.items()
        }
        constant = [policy for policy, of in points.items() if 0 in of]
        plots.append(Panel(quantity, lines, "virtual ranks", unit, log_x=True, x_ticks=ticks, dashed=constant))
    return panels("Memory and time by the number of virtual ranks", plots, columns=2)
