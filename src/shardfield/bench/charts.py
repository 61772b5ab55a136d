"""Charts of numbers as SVG: dots by case, bars by case, and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

from .svg import COLORS, Drawing, text_width

FAINT = "0.18"


@dataclass
class Axis:
    """Map values to positions, on a logarithmic scale or a linear one."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.ticks:
            self.ticks = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        self.low, self.high = min(self.low, self.ticks[0]), max(self.high, self.ticks[-1])

    def __call__(self, value: float) -> float:
        if self.log:
            low, high, value = log10(self.low), log10(self.high), log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1)


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks that enclose a range: 1, 2, 5 within two decades, powers of ten beyond.

    >>> log_ticks(0.4, 3), log_ticks(2, 4000)
    ([0.2, 0.5, 1.0, 2.0, 5.0], [1.0, 10.0, 100.0, 1000.0, 10000.0])
    """
    first, last = floor(log10(low)), ceil(log10(high))
    steps = (1, 2, 5) if log10(high / low) < 2 else (1,)
    every = [float(f"{m}e{p}") for p in range(first, last + 1) for m in steps]
    ticks = [t for t in every if low <= t <= high]
    ticks = [max((t for t in every if t <= low), default=every[0]), *ticks, min(t for t in every if t >= high)]
    ticks = sorted(set(ticks))
    return ticks[:: 1 + (len(ticks) - 1) // 8]


def linear_ticks(low: float, high: float) -> list[float]:
    """Return about five ticks that enclose a range.

    >>> linear_ticks(0, 1.7)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    step = 10 ** floor(log10((high - low) / 4 or 1))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 5)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def short(value: float) -> str:
    """Format the value at a tick.

    >>> short(0.5), short(20000.0), short(1e-05)
    ('0.5', '20,000', '1e-05')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


@dataclass
class Dot:
    """One value of a row: the color of its series, its quartiles and its limit."""

    series: str
    value: float
    low: float | None = None
    high: float | None = None
    limit: float | None = None


def legend(drawing: Drawing, names: Sequence[str], x: float, y: float, width: float) -> float:
    """Draw the names of all series beside their colors, in as many lines as they need; return the y below them."""
    left = x
    for i, name in enumerate(names):
        need = 22 + text_width(name, 12)
        if left > x and left + need > x + width:
            left, y = x, y + 18
        drawing.circle(left + 5, y - 4, 4.5, COLORS[i % len(COLORS)])
        drawing.text(left + 14, y, name)
        left += need + 8
    return y + 12


def legend_lines(names: Sequence[str], width: float) -> int:
    """Return the number of lines that `legend` needs."""
    lines, left = 1, 0.0
    for name in names:
        need = 22 + text_width(name, 12)
        if left and left + need > width:
            lines, left = lines + 1, 0.0
        left += need + 8
    return lines


def dots(
    title: str, rows: Mapping[str, Sequence[Dot]], label: str, *, width: float = 680, mark: float | None = None
) -> str:
    """Return a chart with a line per row: its name, and below it one dot per series on a logarithmic scale.

    A value of zero is written at the left end.
    """
    names = list(dict.fromkeys(d.series for ds in rows.values() for d in ds))
    room = width - 34 - text_width(label, 11)  # the label is beside the last line of the legend
    top, step, pad = 18 * legend_lines(names, room) + 34, 31, 14
    drawing = Drawing(width, top + step * len(rows) + 14, title)
    bottom = legend(drawing, names, 10, 18, room)
    values = [v for ds in rows.values() for d in ds for v in (d.value, d.low, d.high, d.limit) if v and v > 0]
    values += [mark] if mark else []
    values = values or [1.0]  # all zero
    axis = Axis(min(values), max(values), pad, width - pad, log=True)
    for tick in axis.ticks:
        anchor = "start" if tick == axis.ticks[0] else "end" if tick == axis.ticks[-1] else "middle"
        drawing.line([(axis(tick), top - 4), (axis(tick), drawing.height - 6)], opacity=FAINT)
        drawing.text(axis(tick), top - 8, short(tick), 11, anchor, opacity="0.8")
    drawing.text(width - 10, bottom - 12, label, 11, "end", opacity="0.8")
    if mark:
        drawing.line([(axis(mark), top - 4), (axis(mark), drawing.height - 6)], opacity="0.7")
    for i, (name, ds) in enumerate(rows.items()):
        y = top + step * i
        drawing.text(10, y + 11, name, 12)
        y += 20
        drawing.line([(pad, y), (width - pad, y)], opacity=FAINT)
        zeros = 0  # of this row: a logarithmic scale has no place for them, so they are numbers at its left end
        for d in ds:
            color = COLORS[names.index(d.series) % len(COLORS)]
            if d.limit:
                drawing.line([(axis(d.limit), y - 6), (axis(d.limit), y + 6)], color, "2")
            if d.low and d.high and axis(d.high) - axis(d.low) > 8:
                drawing.line([(axis(d.low), y), (axis(d.high), y)], color, "3", opacity="0.45")
            if d.value > 0:
                drawing.circle(axis(d.value), y, 4.5, color)
            else:
                drawing.text(pad + 2 + 12 * zeros, y + 5, "0", 12, fill=color, bold=True)
                zeros += 1
    return str(drawing)


def bars(title: str, groups: Mapping[str, Mapping[str, float]], label: str, *, width: float = 680) -> str:
    """Return a chart of horizontal bars: a group per name with one bar per series, and the value at its end."""
    names = list(dict.fromkeys(s for g in groups.values() for s in g))
    left = 16 + max(text_width(name, 12) for name in groups)
    top, bar = 18 * legend_lines(names, width - 20) + 16, 13
    height = top + sum(bar * len(g) + 10 for g in groups.values()) + 26
    drawing = Drawing(width, height, title)
    legend(drawing, names, 10, 18, width - 20)
    axis = Axis(0, max(v for g in groups.values() for v in g.values()), left, width - 50)
    for tick in axis.ticks:
        drawing.line([(axis(tick), top - 4), (axis(tick), height - 24)], opacity=FAINT)
        drawing.text(axis(tick), height - 10, short(tick), 11, "middle", opacity="0.8")
    drawing.text(10, height - 10, label, 11, opacity="0.8")
    y: float = top
    for name, group in groups.items():
        drawing.text(left - 8, y + bar * len(group) / 2 + 4, name, 12, "end")
        for series, value in group.items():
            color = COLORS[names.index(series) % len(COLORS)]
            drawing.rect(left, y, max(axis(value) - left, 1), bar - 2, color, radius=1.5)
            drawing.text(axis(value) + 5, y + bar - 3, f"{value:.3g}", 11)
            y += bar
        y += 10
    return str(drawing)


@dataclass
class Panel:
    """One plot of lines: {name: [(x, y), ...]}; a name in `dashed` is drawn dashed and without markers."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()
    y_ticks: Sequence[float] = ()
    dashed: Sequence[str] = ()
    markers: bool = True


def panel_axes(drawing: Drawing, panel: Panel, box: tuple[float, float, float, float]) -> tuple[Axis, Axis]:
    """Draw the axes and titles of a panel into a box (x, y, width, height); return its axes."""
    x, y, width, height = box
    points = [p for line in panel.lines.values() for p in line]
    xs = Axis(min(p[0] for p in points), max(p[0] for p in points), x, x + width, panel.log_x, list(panel.x_ticks))
    ys = Axis(min(p[1] for p in points), max(p[1] for p in points), y + height, y, panel.log_y, list(panel.y_ticks))
    for tick in ys.ticks:
        drawing.line([(x, ys(tick)), (x + width, ys(tick))], opacity=FAINT)
        drawing.text(x - 6, ys(tick) + 4, short(tick), 11, "end", opacity="0.8")
    for tick in xs.ticks:
        drawing.line([(xs(tick), y), (xs(tick), y + height)], opacity=FAINT)
        drawing.text(xs(tick), y + height + 15, short(tick), 11, "middle", opacity="0.8")
    drawing.text(x + width / 2, y - 8, panel.title, 12, "middle", bold=True)
    drawing.text(x + width / 2, y + height + 31, panel.x_label, 11, "middle", opacity="0.8")
    drawing.text(x - 40, y + height / 2, panel.y_label, 11, "middle", turn=-90, opacity="0.8")
    return xs, ys


def draw_panel(drawing: Drawing, panel: Panel, names: Sequence[str], box: tuple[float, float, float, float]) -> None:
    """Draw a panel into a box; `names` are those of the legend, in the order of their colors."""
    xs, ys = panel_axes(drawing, panel, box)
    for name, line in panel.lines.items():
        color = COLORS[names.index(name) % len(COLORS)]
        at = [(xs(a), ys(b)) for a, b in line]
        if name in panel.dashed:
            drawing.line(at, color, "1.5", dash="4 3")
            continue
        drawing.line(at, color, "1.8")
        for a, b in at if panel.markers else ():
            drawing.circle(a, b, 3.5, color)


def panels(title: str, plots: Sequence[Panel], *, size: tuple[float, float] = (230, 190), columns: int = 3) -> str:
    """Return several plots of lines beside each other.

    One legend above them names all lines. Plots without a common name have a legend each.
    """
    names = list(dict.fromkeys(n for p in plots for n in p.lines))
    columns = min(columns, len(plots))
    cell = size[0] + 74, size[1] + 72
    width = max(columns * cell[0], 420)
    shared = len(plots) == 1 or len(names) < sum(len(p.lines) for p in plots)
    room = width - 20 if shared else size[0] + 50
    lines = max(legend_lines(names if shared else list(p.lines), room) for p in plots)
    above = 0 if shared else 18 * lines + 8  # of each plot
    top = 18 * lines + 22 if shared else 4
    drawing = Drawing(width, top + (cell[1] + above) * ceil(len(plots) / columns), title)
    if shared:
        legend(drawing, names, 10, 18, room)
    for i, panel in enumerate(plots):
        x, y = (i % columns) * cell[0], top + (i // columns) * (cell[1] + above)
        if not shared:
            legend(drawing, list(panel.lines), x + 20, y + 16, room)
        draw_panel(drawing, panel, names if shared else list(panel.lines), (x + 60, y + above + 20, *size))
    return str(drawing)
