"""Coordinates of stored arrays: the values along their dims (times, latitudes), and whether two arrays share them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from .formats import DecodedArray, XarrayArray, import_package

SECONDS = MappingProxyType(
    {"second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "h": 3600, "day": 86400}
)
MONTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
REFERENCE = re.compile(
    r"(\w+?)s?\s+since\s+(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]\s*(\d{1,2}):(\d{1,2})(?::(\d{1,2}(?:\.\d*)?))?)?"
    r"\s*(?:Z|UTC|[+-]?0{1,2}:?(?:00)?)?$"
)
DEGREES = 1e-3  # latitudes and longitudes that differ by less are the same point


@dataclass(frozen=True)
class Coordinate:
    """The values along one dim: numbers with units, datetime64, or dates of cftime."""

    name: str
    values: np.ndarray
    units: str = ""
    calendar: str = ""

    def numbers(self) -> tuple[str, np.ndarray]:
        """Return the values as numbers, and what they count: seconds of a calendar for times, otherwise the units.

        >>> Coordinate("time", np.array([0, 6]), "hours since 1970-01-02").numbers()[1] / 3600 % 24
        array([0., 6.])
        """
        values = self.values
        if values.dtype.kind == "M":
            return "standard", values.astype("datetime64[ms]").astype(np.float64) / 1000 + _days("", 1970, 1, 1) * 86400
        if values.dtype.kind == "m":
            return "seconds", values.astype("timedelta64[ms]").astype(np.float64) / 1000
        if values.dtype.kind == "O":  # cftime
            first = values[0]
            start = _days(first.calendar, first.year, first.month, first.day)
            since = np.array([(value - first).total_seconds() for value in values])
            start += (first.hour * 3600 + first.minute * 60 + first.second) / 86400
            return _calendar(first.calendar), since + start * 86400
        found = REFERENCE.match(self.units.strip())
        calendar = _calendar(self.calendar)
        if found is None or found[1].lower() not in SECONDS or not _is_known(calendar, int(found[2])):
            return f"{self.units} {self.calendar}".strip(), values.astype(np.float64)
        year, month, day, hour, minute = (int(part or 0) for part in found.groups()[1:6])
        start = _days(self.calendar, year, month, day) * 86400 + hour * 3600 + minute * 60 + float(found[7] or 0)
        return calendar, values.astype(np.float64) * SECONDS[found[1].lower()] + start


def read_coordinate(array: Any, dim: int) -> Coordinate | None:
    """Return the coordinate of a dim that is stored with an array; None if there is none."""
    array = getattr(array, "raw", array)
    if isinstance(array, XarrayArray):
        name = array.variable.dims[dim]
        if name not in array.variable.coords:  # xarray would count from 0
            return None
        found = array.variable.coords[name]
        is_date = found.dtype.kind == "O" and found.size and hasattr(found.values[0], "calendar")
        return _coordinate(str(name), found.values, found.attrs) if is_date or found.dtype.kind in "iufMm" else None
    stored = _hdf5_scale(array, dim) if hasattr(array, "id") else _zarr_coordinate(array, dim)
    if stored is None or stored.ndim != 1 or stored.shape[0] != array.shape[dim] or stored.dtype.kind not in "iuf":
        return None
    return _coordinate(stored.name.rsplit("/", 1)[-1], np.asarray(DecodedArray.of(stored)[:]), stored.attrs)


def describe_difference(one: Coordinate, other: Coordinate) -> str | None:
    """Return in words where two coordinates of equal length differ; None if they are the same points or times."""
    (kind, a), (other_kind, b) = one.numbers(), other.numbers()
    is_time = "standard" in (kind, other_kind) or " since " in f"{one.units}{other.units}"
    if is_time and kind != other_kind:
        return f"{kind or 'no units'}, and {other_kind or 'no units'}, which cannot be compared"
    if len(a) and len(a) == len(b) and np.array_equal(a, b[::-1]) and not np.array_equal(a, b):
        return f"from {one.values[0]} to {one.values[-1]}, and in the opposite order"
    differ = np.nonzero(np.abs(a - b) > (0.5 if is_time else DEGREES))[0]
    return None if not len(differ) else f"{one.values[differ[0]]} and {other.values[differ[0]]} at index {differ[0]}"


def irregular_steps(times: Coordinate) -> tuple[np.ndarray, str]:
    """Return which steps between times differ from the most common one, and that one in words."""
    kind, numbers = times.numbers()
    steps = np.diff(numbers)
    if not len(steps):
        return np.zeros(0, bool), ""
    values, counts = np.unique(np.round(steps, 3), return_counts=True)
    usual = values[counts.argmax()]
    return np.abs(steps - usual) > max(1e-3 * abs(usual), 1e-9), describe_step(kind, usual)


def describe_step(kind: str, step: float) -> str:
    """Return the length of a step between times in words.

    >>> describe_step("standard", 21600.0), describe_step("", 1.0)
    ('6 hours', '1')
    """
    return f"{step:g}" if kind not in (*CALENDARS, "seconds") else f"{step / 3600:g} hours"


# ---------------------------------------------------------------------- formats


def _coordinate(name: str, values: np.ndarray, attrs: Any) -> Coordinate:
    texts = [attrs.get(key, "") for key in ("units", "calendar")]
    return Coordinate(name, values, *(text.decode() if isinstance(text, bytes) else str(text) for text in texts))


def _hdf5_scale(array: Any, dim: int) -> Any:
    """Return the dimension scale of a dim, unless it is one that only has the size of a dim of NetCDF."""
    if not len(array.dims[dim]):
        return None
    scale = array.dims[dim][0]
    title = scale.attrs.get("NAME", b"")
    return None if bytes(title).startswith(b"This is a netCDF dimension but not") else scale


def _zarr_coordinate(array: Any, dim: int) -> Any:
    names: Sequence[str | None] = getattr(array.metadata, "dimension_names", None) or array.attrs.get(
        "_ARRAY_DIMENSIONS", ()
    )
    name = names[dim] if len(names) == array.ndim else None
    if name is None:
        return None
    folder = array.path.rpartition("/")[0]
    try:
        return import_package("zarr").open_array(
            store=array.store, path=f"{folder}/{name}" if folder else name, mode="r"
        )
    except (FileNotFoundError, KeyError):
        return None


# ---------------------------------------------------------------------- calendars

CALENDARS = {
    "standard": ("", "standard", "gregorian", "proleptic_gregorian"),
    "noleap": ("noleap", "365_day"),
    "all_leap": ("all_leap", "366_day"),
    "360_day": ("360_day",),
}


def _calendar(name: str) -> str:
    return next((kind for kind, names in CALENDARS.items() if name.lower() in names), name)


def _is_known(calendar: str, year: int) -> bool:
    """Return whether `_days` counts days of this calendar; the standard one was another one before 1582."""
    return calendar in CALENDARS and (calendar != "standard" or year > 1582)


def _days(calendar: str, year: int, month: int, day: int) -> float:
    """Return the number of a day, counted from a day that is the same for all dates of a calendar."""
    kind = _calendar(calendar)
    if kind == "360_day":
        return 360 * year + 30 * (month - 1) + day
    if kind in ("noleap", "all_leap"):
        leap = int(kind == "all_leap")
        return (365 + leap) * year + sum(MONTHS[: month - 1]) + (leap if month > 2 else 0) + day
    return datetime.date(year, month, day).toordinal()
