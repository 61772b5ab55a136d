"""Draw the two pictures of the front page: a sharded field beside its loss curves, and the cost of calls."""

import json
from math import exp, sin
from pathlib import Path

from shardfield.bench.charts import Panel, bars, panel_axes
from shardfield.bench.svg import COLORS, INK, Drawing

DOCS = Path(__file__).parent.parent
RESULTS = DOCS.parent / "benchmarks/results"
STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # from dark to bright
ROWS, COLUMNS, CELL = 20, 28, 11
MESHES = {"1": "1 rank", "2": "2 ranks", "4": "4 ranks", "2x2": "2 x 2 ranks"}


def color(value: float) -> str:
    """Return the color of a value between 0 and 1."""
    position = min(max(value, 0.0), 0.999) * (len(STOPS) - 1)
    i, part = int(position), position % 1
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(STOPS[i], STOPS[i + 1], strict=True))


def field(row: int, column: int) -> float:
    """Return a smooth field: two vortices in a stream."""
    x, y = column / COLUMNS, row / ROWS
    one = exp(-((x - 0.33) ** 2 + (y - 0.4) ** 2) / 0.03)
    two = exp(-((x - 0.72) ** 2 + (y - 0.64) ** 2) / 0.02)
    return 0.45 + 0.42 * one - 0.36 * two + 0.1 * sin(6 * y + 4 * x)


def tile(drawing: Drawing, rank: int, left: float, top: float) -> None:
    """Draw the shard of one of 2 x 2 ranks with the halo of width 1 that it receives."""
    rows = range(rank // 2 * ROWS // 2, (rank // 2 + 1) * ROWS // 2)
    columns = range(rank % 2 * COLUMNS // 2, (rank % 2 + 1) * COLUMNS // 2)
    for row in range(max(rows[0] - 1, 0), min(rows[-1] + 2, ROWS)):
        for column in range(max(columns[0] - 1, 0), min(columns[-1] + 2, COLUMNS)):
            x, y = left + (column - columns[0]) * CELL, top + (row - rows[0]) * CELL
            inside = row in rows and column in columns
            drawing.rect(x, y, CELL, CELL, color(field(row, column)), opacity=None if inside else "0.4", crisp=True)
    drawing.rect(left, top, len(columns) * CELL, len(rows) * CELL, stroke=INK, stroke_width="1.5")
    drawing.text(left + 6, top + 15, f"rank {rank}", 12, fill="#fff", bold=True)


def loss_curves() -> dict[str, list[float]]:
    """Return the losses of a UNet in fp32 under FSDP, one curve per mesh."""
    curves = json.loads((DOCS / "curves.json").read_text())
    return {name: curves[f"UNet fp32 {mesh} fsdp"] for mesh, name in MESHES.items()}


def hero() -> str:
    """Draw a field on 2 x 2 ranks with halos, and loss curves of four meshes that lie on each other."""
    drawing = Drawing(
        860, 334, "A field sharded over four ranks with its halos, and the loss curves of 1, 2, 4 and 2 x 2 ranks"
    )
    width, height, gap = COLUMNS // 2 * CELL, ROWS // 2 * CELL, 44
    for rank in range(4):
        tile(drawing, rank, 14 + rank % 2 * (width + gap), 44 + rank // 2 * (height + gap))
    middle_x, middle_y = 14 + width + gap / 2, 44 + height + gap / 2
    for y in (44 + height / 2, 44 + height * 1.5 + gap):
        drawing.arrow((middle_x - 9, y - 5), (middle_x + 9, y - 5))
        drawing.arrow((middle_x + 9, y + 5), (middle_x - 9, y + 5))
    for x in (14 + width / 2, 14 + width * 1.5 + gap):
        drawing.arrow((x - 5, middle_y - 9), (x - 5, middle_y + 9))
        drawing.arrow((x + 5, middle_y + 9), (x + 5, middle_y - 9))
    drawing.text(14, 24, "One field on four ranks, with its halos", 13, bold=True)

    curves = loss_curves()
    reference = curves["1 rank"]
    gap_at_most = max(abs(a / b - 1) for losses in curves.values() for a, b in zip(losses, reference, strict=True))
    frame = Panel("", {"1 rank": list(enumerate(reference))}, "step", log_y=True)
    xs, ys = panel_axes(drawing, frame, (500, 44, 345, 200))
    for i, (name, losses) in enumerate(curves.items()):
        shown = [(xs(step), ys(loss)) for step, loss in enumerate(losses) if step % 2 == 0]
        drawing.line(shown, COLORS[i], ("7", "4.5", "2.5", "1")[i])
        x = (490, 574, 666, 758)[i]
        drawing.line([(x, 296), (x + 18, 296)], COLORS[i], ("7", "4.5", "2.5", "1")[i])
        drawing.text(x + 23, 300, name)
    drawing.text(490, 24, "The same loss on every mesh (UNet, FSDP)", 13, bold=True)
    drawing.text(490, 322, f"largest relative difference in 300 steps, fp32: {gap_at_most:.0e}", 12, opacity="0.85")
    return str(drawing)


def peers() -> str:
    """Draw the time of calls on ShardTensors and DTensors, divided by that of plain torch."""
    rows = json.loads((RESULTS / "overhead.amd-epyc-2-cores.json").read_text())["rows"]
    shown = {
        "relu": "relu",
        "linear": "linear",
        "layer_norm": "layer_norm",
        "group_norm": "group_norm",
        "ten (linear, relu), forward + backward": "10 x (linear, relu), training",
        "CNN step, 64 x 64": "CNN step, 64 x 64",
        "UNet step, 64 x 64": "UNet step, 64 x 64",
    }
    groups: dict[str, dict[str, float]] = {name: {} for name in shown.values()}
    for row in rows:
        if row["case"] in shown and row["against"] == "plain torch":
            groups[shown[row["case"]]][row["candidate"]] = row["ratio"]
    return bars("Time of a call over that of plain torch: shardfield and DTensor", groups, "times plain torch")
