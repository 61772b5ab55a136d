"""Plots of benchmark results for docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path

from .table import Table

SCALING_SVG = "scaling.svg"


def scaling_points(table: Table) -> dict[str, dict[str, dict[int, float]]]:
    """Return {model: {"measured" or "predicted": {ranks: shortest milliseconds}}} of a result of `bench scaling`."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in table.rows:
        case = re.fullmatch(r"(.*), (\d+) ranks?", row.case)
        if case and row.median is not None and row.candidate in ("measured", "predicted"):
            found.setdefault(case[1], {}).setdefault(row.candidate, {})[int(case[2])] = row.median
    return found


def plot_scaling(table: Table, path: Path) -> None:
    """Plot the speed on P ranks over that on one rank, measured and predicted, with the ideal line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    import matplotlib.pyplot as plt

    models = scaling_points(table)
    figure, axes = plt.subplots(1, len(models), figsize=(2.7 * len(models), 2.8), sharey=True, squeeze=False)
    for axis, (name, curves) in zip(axes[0], models.items(), strict=True):
        ranks = sorted(curves["measured"])
        axis.loglog(ranks, ranks, color="gray", linestyle=":", label="ideal")
        for kind, style in (("measured", "o-"), ("predicted", "x--")):
            speeds = [curves["measured"][ranks[0]] / curves[kind][n] for n in ranks]
            axis.loglog(ranks, speeds, style, label=kind, markersize=4)
        axis.set_title(name.replace(", ", "\n", 1), fontsize=8)
        axis.set_xticks(ranks, [str(n) for n in ranks])
        axis.set_yticks(ranks, [str(n) for n in ranks])
        axis.minorticks_off()
        axis.set_xlabel("ranks")
    axes[0][0].set_ylabel("times the speed of one rank")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
