"""Draw small SVG pictures that can be read on light and on dark pages.

Text and axes have the color of the page's text (`currentColor`). A picture shown as an image of its own follows the
reader's preference for dark pages; one that is part of a page follows the page. Numbers are rounded and nothing depends
on fonts or versions, so that the same input gives the same file everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import atan2, cos, pi, sin

INK = "currentColor"
# Middle tones: each has contrast with white and with dark gray.
COLORS = ("#3b82c4", "#e07b39", "#3a9d5d", "#a06cc8", "#d1495b", "#1f9aa8", "#a8862a", "#808a96", "#7a9a2e")
STYLE = (
    ".sf-fig{color:#222;font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
    "@media(prefers-color-scheme:dark){.sf-fig{color:#ddd}}"
)


def number(value: float) -> str:
    """Format a coordinate with at most one decimal.

    >>> number(3.0), number(-0.04), number(2.26)
    ('3', '0', '2.3')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def text_width(text: str, size: float = 12) -> float:
    """Estimate the width of a text in pixels."""
    return sum(0.32 if c in "il.,:;|'!()[] tfj" else 0.85 if c in "mwMW%@" else 0.56 for c in text) * size


class Drawing:
    """A picture of a given size; `title` is what screen readers say.

    >>> drawing = Drawing(40, 20, "a box")
    >>> drawing.rect(1, 1, 38, 18)
    >>> str(drawing).count("<rect")
    1
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def _add(self, tag: str, content: str | None = None, **attributes: float | str | None) -> None:
        words = [
            f'{name.rstrip("_").replace("_", "-")}="{escape(number(v) if isinstance(v, (int, float)) else v)}"'
            for name, v in attributes.items()
            if v is not None
        ]
        end = "/>" if content is None else f">{escape(content, quote=False)}</{tag}>"
        self.parts.append(f"<{tag} {' '.join(words)}{end}")

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str | None = None,
        *,
        opacity: str | None = None,
        radius: float | None = None,
        dash: str | None = None,
        stroke_width: str | None = None,
        crisp: bool = False,
    ) -> None:
        """Draw a rectangle; `crisp` ones that touch have no seam between them."""
        if fill == "none" and stroke is None:
            stroke = INK
        self._add(
            "rect",
            x=x,
            y=y,
            width=width,
            height=height,
            rx=radius,
            fill=fill,
            stroke=stroke,
            fill_opacity=opacity,
            stroke_dasharray=dash,
            stroke_width=stroke_width,
            shape_rendering="crispEdges" if crisp else None,
        )

    def line(
        self,
        points: Iterable[tuple[float, float]],
        stroke: str = INK,
        width: str = "1",
        *,
        dash: str | None = None,
        opacity: str | None = None,
    ) -> None:
        """Draw straight lines from point to point."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add(
            "polyline",
            points=path,
            fill="none",
            stroke=stroke,
            stroke_width=width,
            stroke_dasharray=dash,
            stroke_opacity=opacity,
            stroke_linejoin="round",
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str = INK, width: str = "1.5") -> None:
        """Draw a line with a head at its end."""
        (x0, y0), (x1, y1) = start, end
        angle = atan2(y1 - y0, x1 - x0)
        self.line([start, (x1 - 5 * cos(angle), y1 - 5 * sin(angle))], color, width)
        wings = [(x1 - 8 * cos(angle + turn * pi / 7), y1 - 8 * sin(angle + turn * pi / 7)) for turn in (-1, 1)]
        path = " ".join(f"{number(x)},{number(y)}" for x, y in [end, *wings])
        self._add("polygon", points=path, fill=color)

    def circle(self, x: float, y: float, r: float, fill: str, stroke: str | None = None) -> None:
        self._add("circle", cx=x, cy=y, r=r, fill=fill, stroke=stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        anchor: str | None = None,
        fill: str = INK,
        *,
        bold: bool = False,
        turn: float | None = None,
        opacity: str | None = None,
    ) -> None:
        self._add(
            "text",
            text,
            x=x,
            y=y,
            font_size=size,
            text_anchor=anchor,
            fill=fill,
            font_weight="600" if bold else None,
            transform=None if turn is None else f"rotate({number(turn)} {number(x)} {number(y)})",
            fill_opacity=opacity,
        )

    def __str__(self) -> str:
        size = f"{number(self.width)} {number(self.height)}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="sf-fig" viewBox="0 0 {size}" '
            f'width="{number(self.width)}" height="{number(self.height)}" role="img" '
            f'aria-label="{escape(self.title)}">'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>\n"])
