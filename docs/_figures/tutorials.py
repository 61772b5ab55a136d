"""Draw the times that `make tutorial-times` has measured."""

import json
from collections.abc import Callable
from pathlib import Path

from shardfield.bench.charts import Panel, panels

TIMES = Path(__file__).parent.parent / "tutorials.json"
SIZES = {
    "vector-add": "elements",
    "dot-product": "elements",
    "knn-ring": "points (8 points per query)",
    "reshape-subtract": "points (8 points per query)",
    "cnn-fsdp": "rows and columns of 16 images",
    "tfno-darcy": "rows and columns of 2 fields",
    "process-groups": "elements of the message",
}


def measured() -> list[str]:
    """Return the tutorials that the file has times of."""
    return list(json.loads(TIMES.read_text()))


def times(name: str) -> Callable[[], str]:
    """Return the function that draws the times of one tutorial: against sizes, and against ranks."""

    def draw() -> str:
        found = {int(ranks): row for ranks, row in json.loads(TIMES.read_text())[name].items()}
        by_size = {f"{r} rank{'s' * (r > 1)}": [(float(s), ms) for s, ms in row.items()] for r, row in found.items()}
        sizes = [float(s) for s in found[1]]
        by_rank = {f"size {int(s):,}": [(float(r), row[str(int(s))]) for r, row in found.items()] for s in sizes}
        plots = [
            Panel("by size", by_size, SIZES[name], "ms", log_x=True, log_y=True, x_ticks=sizes),
            Panel("by ranks", by_rank, "ranks", "ms", log_x=True, log_y=True, x_ticks=[float(r) for r in found]),
        ]
        return panels(f"Times of {name} on {', '.join(map(str, found))} ranks", plots, size=(250, 190), columns=2)

    return draw
