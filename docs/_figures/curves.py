"""Draw the losses that `make curves` has recorded."""

import json
from pathlib import Path

from shardfield.bench.charts import Panel, legend, panel_axes
from shardfield.bench.svg import COLORS, Drawing

DOCS = Path(__file__).parent.parent
MODELS = ("TFNO", "UNet", "ViT")
LIMITS = {"fp64": 1e-10, "fp32": 1e-4}  # as in tests/train/curves.py


def curves() -> str:
    """Draw the losses of all runs, one over the other, and below them the gaps to plain torch."""
    recorded: dict[str, list[float]] = json.loads((DOCS / "curves.json").read_text())
    drawing = Drawing(912, 500, "Losses of three models on several meshes, and their differences from one device")
    legend(drawing, [f"{p}; the dashed line below is its limit" for p in LIMITS], 10, 18, 900)
    for column, model in enumerate(MODELS):
        found = {p: recorded.get(f"{model} {p} plain") for p in LIMITS}
        references = {p: losses for p, losses in found.items() if losses is not None}
        if not references:
            continue
        lines = {p: list(enumerate(losses)) for p, losses in references.items()}
        x = 60 + column * 304
        top = panel_axes(drawing, Panel(model, lines, y_label="" if column else "loss", log_y=True), (x, 50, 230, 190))
        gaps = Panel(
            "", {"": [(0, 1e-17), (len(lines["fp32"]), 1e-3)]}, "step", "" if column else "relative gap", log_y=True
        )
        bottom = panel_axes(drawing, gaps, (x, 280, 230, 160))
        for color, (precision, reference) in zip(COLORS, references.items(), strict=False):
            drawn = set()  # most runs have the same curve to a tenth of a pixel
            for name, losses in recorded.items():
                if not name.startswith(f"{model} {precision} ") or name.endswith("plain"):
                    continue
                for (xs, ys), values in (
                    (top, losses),
                    (bottom, [max(abs(a / b - 1), 1e-17) for a, b in zip(losses, reference, strict=False)]),
                ):
                    points = tuple((round(xs(i), 1), round(ys(v), 1)) for i, v in enumerate(values) if i % 4 == 0)
                    if points not in drawn:
                        drawing.line(points, color, "0.9")
                    drawn.add(points)
            limit = bottom[1](LIMITS[precision])
            drawing.line([(x, limit), (x + 230, limit)], color, "1.2", dash="4 3")
    return str(drawing)
