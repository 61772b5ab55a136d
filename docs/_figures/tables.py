"""Draw the figures of folded tables: a page has its numbers once, and the picture above shows them."""

import re
from collections.abc import Callable
from pathlib import Path

from shardfield.bench.charts import Dot, bars, dots

DOCS = Path(__file__).parent.parent
Rows = dict[str, dict[str, str]]


def folded(page: str, summary: str) -> Rows:
    """Return {row: {column: cell}} of the first table below a summary of a page."""
    below = (DOCS / f"{page}.md").read_text().split(f"<summary>{summary}</summary>", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", below, re.M)[0].splitlines()
    cells = [[c.strip().replace("`", "") for c in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:]}


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell: two for a range ("0.9 to 1.05"), none for an empty one."""
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,.]*", cell)]


def as_bars(title: str, label: str, page: str, summary: str) -> Callable[[], str]:
    """Return the function that draws a table as bars: a group per row, a bar per column."""

    def draw() -> str:
        rows = folded(page, summary)
        return bars(title, {n: {c: numbers(v)[0] for c, v in r.items() if v} for n, r in rows.items()}, label)

    return draw


def as_dots(title: str, label: str, page: str, summary: str) -> Callable[[], str]:
    """Return the function that draws a table of ratios as dots, with a line at 1 and ranges as strokes."""

    def draw() -> str:
        shown = {}
        for name, row in folded(page, summary).items():
            found = {column: numbers(cell) for column, cell in row.items()}
            shown[name] = [Dot(c, sum(v) / len(v), min(v), max(v)) for c, v in found.items() if v]
        return dots(title, shown, label, mark=1)

    return draw
