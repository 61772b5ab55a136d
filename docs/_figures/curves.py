"""Draw the losses that `make curves` has recorded."""

import json
from pathlib import Path

from shardfield.bench.charts import Panel, legend, panel_axes
from shardfield.bench.svg import COLORS, Drawing

DOCS = Path(__file__).parent.parent
MODELS = ("TFNO", "UNet", "ViT")
LIMITS = {"fp64": 1e-10, "fp32": 1e-4}  # as in tests/train/curves.py


def largest_gaps(runs: list[list[float]], reference: list[float]) -> list[tuple[float, float]]:
    """Return, for every four steps, the largest relative difference of any run from the reference."""
    gaps = [
        max(abs(loss / expected - 1) for loss in losses) for *losses, expected in zip(*runs, reference, strict=True)
    ]
    return [(i, max(*gaps[i : i + 4], 1e-17)) for i in range(0, len(gaps), 4)]


def curves() -> str:
    """Draw the losses of all runs, one over the other, and below them their largest gap to plain torch."""
    recorded: dict[str, list[float]] = json.loads((DOCS / "curves.json").read_text())
    drawing = Drawing(912, 500, "Losses of three models on several meshes, and their differences from one device")
    legend(drawing, [f"{p}; the dashed line below is its limit" for p in LIMITS], 10, 18, 900)
    for column, model in enumerate(MODELS):
        references = {p: recorded[f"{model} {p} plain"] for p in LIMITS if f"{model} {p} plain" in recorded}
        if not references:
            continue
        lines = {p: list(enumerate(losses)) for p, losses in references.items()}
        x = 60 + column * 304
        top = panel_axes(drawing, Panel(model, lines, y_label="" if column else "loss", log_y=True), (x, 50, 230, 190))
        y_label = "" if column else "largest relative difference"
        steps = len(next(iter(references.values())))
        gaps = Panel("", {"": [(0, 1e-17), (steps, 1e-3)]}, "step", y_label, log_y=True)
        bottom = panel_axes(drawing, gaps, (x, 280, 230, 160))
        for color, (precision, reference) in zip(COLORS, references.items(), strict=False):
            prefix = f"{model} {precision} "
            runs = [r for name, r in recorded.items() if name.startswith(prefix) and not name.endswith("plain")]
            drawn = {
                tuple((round(top[0](i), 1), round(top[1](v), 1)) for i, v in enumerate(r) if i % 4 == 0) for r in runs
            }
            for points in sorted(drawn):  # most runs have the same curve to a tenth of a pixel
                drawing.line(points, color, "0.9")
            drawing.line([(bottom[0](i), bottom[1](gap)) for i, gap in largest_gaps(runs, reference)], color, "1.2")
            limit = bottom[1](LIMITS[precision])
            drawing.line([(x, limit), (x + 230, limit)], color, "1.2", dash="4 3")
    return str(drawing)
