"""The result of a benchmark: rows that are printed as a table and stored as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import machine as machine_info
from .measure import Spread, ratios, spread

SCALE = {
    "us": 1e6,
    "ms": 1e3,
    "s": 1.0,
    "B": 1.0,
    "kB": 1e-3,
    "MB": 1e-6,
    "messages": 1.0,
    "kernels": 1.0,
    "": 1.0,
    "TFLOP/s": 1e-12,
}


@dataclass
class Row:
    """The result of one candidate in one case. `ratio` is relative to the candidate `against`, and `bar` its limit."""

    case: str
    candidate: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    against: str | None = None
    bar: float | None = None
    met: bool | None = None
    found: str | None = None  # a result that is a text, not a number

    def __post_init__(self) -> None:
        if self.bar is not None and self.ratio is not None:
            self.met = self.ratio <= self.bar

    def format_value(self) -> str:
        """Return the median with its quartiles and unit."""
        if self.median is None:
            return self.found or ""
        return f"{_with_quartiles(self.median, self.low, self.high)} {self.unit}".rstrip()

    def format_ratio(self) -> str:
        """Return the ratio with its quartiles, and whether its bar is met."""
        if self.ratio is None:
            return ""
        if self.bar is None:
            return _with_quartiles(self.ratio, self.ratio_low, self.ratio_high)
        bar = f"; bar {format_number(self.bar)}: {'met' if self.met else 'not met'}"
        return _with_quartiles(self.ratio, self.ratio_low, self.ratio_high, self.format_median_ratio()) + bar

    def format_median_ratio(self) -> str:
        """Return the ratio with as many digits as it takes to see that it exceeds its bar.

        >>> Row("a case", "shardfield", ratio=1.0538, bar=1.05).format_median_ratio()
        '1.054'
        """
        assert self.ratio is not None
        text = format_number(self.ratio)
        for digits in range(4, 7):
            if self.bar is None or self.met or text != format_number(self.bar):
                break
            text = f"{self.ratio:.{digits}g}"
        return text


@dataclass
class Table:
    """The rows of one benchmark on one machine, with the settings and versions that are needed to repeat it."""

    name: str
    settings: dict[str, Any]
    device: str
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    commit: str | None = field(default_factory=machine_info.commit)
    machine: dict[str, Any] = field(default_factory=machine_info.machine)
    versions: dict[str, str] = field(default_factory=machine_info.versions)
    on_row: Callable[[str], None] | None = None  # called with the text of each row when it is added

    # ------------------------------------------------------------------ filling

    def add_times(
        self,
        case: str,
        times: Mapping[str, Sequence[float]],
        against: str | None = None,
        unit: str = "ms",
        bars: Mapping[str, float] | None = None,
        exclude: Container[str] = (),
    ) -> None:
        """Add a row for each candidate that is not in `exclude`, from its values by round."""
        for name, values in times.items():
            if name in exclude:
                continue
            ratio = None if against is None or name == against else spread(ratios(times, name, against))
            median, low, high = map(_round_digits, spread([v * SCALE[unit] for v in values]))
            bar = (bars or {}).get(name)
            self._add(Row(case, name, median, low, high, unit, bar=bar, **_ratio_fields(ratio, against)))

    def add_counts(
        self,
        case: str,
        values: Mapping[str, float],
        unit: str,
        against: str | None = None,
        bars: Mapping[str, float] | None = None,
    ) -> None:
        """Add a row for each candidate, from a value that was measured once."""
        base = None if against is None else values[against]
        for name, value in values.items():
            ratio = None if not base or name == against else spread([value / base])
            scaled = _round_digits(value * SCALE[unit])
            bar = (bars or {}).get(name)
            self._add(Row(case, name, scaled, scaled, scaled, unit, bar=bar, **_ratio_fields(ratio, against)))

    def add_ratio(
        self, case: str, candidate: str, values: Sequence[float], against: str, bar: float | None = None
    ) -> None:
        """Add a row that has only a ratio, from its values by round."""
        self._add(Row(case, candidate, bar=bar, **_ratio_fields(spread(values), against)))

    def add_text(self, case: str, candidate: str, text: str) -> None:
        """Add a row whose result is a text, for example "does not fit"."""
        self._add(Row(case, candidate, found=text))

    def add_skipped(self, candidate: str, reason: str, case: str = "") -> None:
        """Add a candidate that cannot be measured on this machine, and the reason."""
        self.skipped.append({"case": case, "candidate": candidate, "why": reason})
        if self.on_row is not None:
            self.on_row(f"skipped: {format_skip(self.skipped[-1])}")

    def _add(self, row: Row) -> None:
        if self.quick:  # bars are set for the default sizes
            row.bar = row.met = None
        self.rows.append(row)
        if self.on_row is not None:
            against = f" of {row.against}" if row.against else ""
            self.on_row(f"{row.case}: {row.candidate}  {row.format_value()}  {row.format_ratio()}{against}")

    # ------------------------------------------------------------------ printing and writing

    @property
    def label(self) -> str:
        return machine_info.label(self.machine, self.device)

    def __str__(self) -> str:
        head = ("case", "candidate", "median (quartiles)", "ratio", "against")
        body, before = [], None
        for row in self.rows:
            shown = "" if row.case == before else row.case
            body.append((shown, row.candidate, row.format_value(), row.format_ratio(), row.against or ""))
            before = row.case
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in [head, *body]]
        lines += [f"skipped: {format_skip(skip)}" for skip in self.skipped]
        summary = f"{self.label}; torch {self.versions['torch']}; {format_settings(self)}"
        return "\n".join([f"{self.name}: {summary}", *lines])

    def as_json(self) -> dict[str, Any]:
        first = {k: getattr(self, k) for k in ("name", "date", "commit", "device", "machine", "versions")}
        rest = {"settings": self.settings | {"quick": self.quick}, "skipped": self.skipped}
        return (
            first
            | rest
            | {"rows": [{k: v for k, v in dataclasses.asdict(row).items() if k != "found" or v} for row in self.rows]}
        )

    def write(self, folder: Path) -> Path:
        """Write a JSON file named after benchmark and machine, with one row per line, so that diffs are readable."""
        folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-")
        path = folder / f"{self.name}.{slug}.json"
        data = self.as_json()
        rows = ",\n  ".join(json.dumps(row) for row in data.pop("rows"))
        rest = json.dumps(data, indent=1)[:-2]
        path.write_text(f'{rest},\n "rows": [\n  {rows}\n ]\n}}\n')
        return path


def read_table(path: Path) -> Table:
    """Read a table from a file of `Table.write`."""
    data = json.loads(path.read_text())
    quick = data["settings"].pop("quick")
    return Table(**data | {"rows": [Row(**row) for row in data["rows"]], "quick": quick})


def format_settings(table: Table) -> str:
    """Format the settings, for example `ranks 2 4, rounds 5`."""
    words = [
        f"{name} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for name, value in table.settings.items()
    ]
    return ", ".join(["quick"] * table.quick + words)


def format_skip(skip: Mapping[str, str]) -> str:
    """Format a skipped candidate and the reason."""
    return f"{skip['candidate']}{' in ' + skip['case'] if skip['case'] else ''}: {skip['why']}"


def format_number(value: float) -> str:
    """Format a number with three significant digits, or with thousands separators.

    >>> format_number(0.98765), format_number(12.345), format_number(999.9), format_number(1234567.0)
    ('0.988', '12.3', '1,000', '1,234,567')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _with_quartiles(value: float, low: float | None, high: float | None, text: str | None = None) -> str:
    text = text or format_number(value)
    if low is None or high is None or format_number(low) == format_number(high):
        return text
    return f"{text} ({format_number(low)} to {format_number(high)})"


def _round_digits(value: float) -> float:
    return float(f"{value:.5g}")


def _ratio_fields(ratio: Spread | None, against: str | None) -> dict[str, Any]:
    if ratio is None:
        return {}
    median, low, high = map(_round_digits, ratio)
    return {"ratio": median, "ratio_low": low, "ratio_high": high, "against": against}
