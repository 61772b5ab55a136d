"""Windows in time over stored fields: from the states of some times to those of later times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShardingError
from .coordinates import Coordinate, describe_difference, irregular_steps
from .field import Field, UnopenedField

Slices = Sequence[slice]


class TimeWindows:
    """A dataset of forecasts: the variables at a time and before it as `x`, those at lead times as `y`.

        z = open_field("era5.zarr", name="z")      # (time, level, lat, lon)
        t = open_field("era5.zarr", name="t2m")    # (time, lat, lon)
        windows = TimeWindows({"z": z, "t2m": t}, leads=[1, 2, 4], levels={"z": [0, 5]}, static={"orography": height})
        loader = ShardedLoader(windows, 8, mesh)

    A sample is a dict: x (history * channels, lat, lon), y (lead, channels, lat, lon), and, if requested, static
    (fields, lat, lon) and masks. The channels are the variables in their order; one with levels (the dim after the
    time) has a channel for each level, or for those that `levels` names. `history` times end at the time of the sample,
    the oldest first. `leads` are in steps of the stored times; the number 4 means 1, 2, 3, 4. `times` selects a range,
    such as the years to train on: no sample reads outside of it. `stride` leaves out samples. With `mask=True`, `mask`
    is True where y has a value and `x_mask` where x has one, and missing values (NaN) in x, y and static are 0.

    Times, latitudes and longitudes that are stored with the variables must be the same for all of them. `gaps`: what
    happens if the times are not evenly spaced. "error": the windows are refused. "skip": samples with an uneven step
    are left out. "allow": a step is one stored time, however long (months).

    Every rank reads its block of each time. Fields are opened without a mesh. If one of several ranks cannot open a
    field, the first use of the windows raises: a `ShardedLoader` then raises on all ranks.
    """

    def __init__(
        self,
        variables: Mapping[str, Field],
        *,
        history: int = 1,
        leads: int | Sequence[int] = 1,
        levels: Mapping[str, Sequence[int]] | None = None,
        static: Mapping[str, Field] | None = None,
        times: slice = slice(None),
        stride: int = 1,
        mask: bool = False,
        gaps: str = "error",
    ):
        self.leads = list(range(1, leads + 1)) if isinstance(leads, int) else list(leads)
        if not variables or history < 1 or stride < 1 or not self.leads or min(self.leads) < 0:
            raise ValueError(
                f"TimeWindows: {len(variables)} variables, history {history}, leads {self.leads}, stride {stride}: at "
                "least one variable, history and stride of 1 or more, and leads of 0 or more"
            )
        if gaps not in ("error", "skip", "allow"):
            raise ValueError(f"TimeWindows: gaps is 'error', 'skip' or 'allow', not {gaps!r}")
        self.fields, self.static, self.history, self.mask = dict(variables), dict(static or {}), history, mask
        self._problem: Exception | None = None
        try:
            self._set_up(levels or {}, times, stride, gaps)
        except (ShardingError, OSError) as error:
            # Of this rank alone, if it could not open or read a field: the loader tells the other ranks.
            opened = not any(isinstance(field, UnopenedField) for field in (*variables.values(), *self.static.values()))
            if opened and isinstance(error, ShardingError):
                raise
            if not dist.is_initialized() or dist.get_world_size() == 1:
                raise
            self._problem = error

    def _set_up(self, levels: Mapping[str, Sequence[int]], times: slice, stride: int, gaps: str) -> None:
        lengths = {name: len(field) for name, field in self.fields.items()}
        if len(set(lengths.values())) > 1:
            raise ShardingError(f"TimeWindows: the variables have different numbers of times: {lengths}")
        start, stop, step = times.indices(next(iter(lengths.values())))
        if step != 1:
            raise ValueError(f"TimeWindows: times {times}: every time is needed; use stride to leave out samples")
        if unknown := [name for name in levels if name not in self.fields]:
            raise ShardingError(f"TimeWindows: levels of unknown variables {unknown}; there are {list(self.fields)}")
        self.levels = {name: self._levels_of(name, levels.get(name)) for name in self.fields}
        self.points = tuple(next(iter(self.fields.values())).shape[-2:])
        for name, field in (*self.fields.items(), *self.static.items()):
            if tuple(field.shape[-2:]) != self.points:
                raise ShardingError(
                    f"TimeWindows: {name} has {tuple(field.shape[-2:])} points, and other variables have {self.points}"
                )
        first, last = start + self.history - 1, stop - 1 - max(self.leads)
        regular = self._regular_times(start, stop, gaps)
        self.times = [i for i in range(first, last + 1, stride) if regular(i - self.history + 1, i + max(self.leads))]
        if not self.times:
            raise ShardingError(
                f"TimeWindows: {max(0, stop - start)} times are too few for a history of {self.history} and leads up "
                f"to {max(self.leads)}{' without gaps' if gaps == 'skip' else ''}"
            )

    def _regular_times(self, start: int, stop: int, gaps: str) -> Callable[[int, int], bool]:
        """Compare the coordinates of all variables; return whether no step from one time to another is uneven."""
        common: dict[int, tuple[str, Coordinate]] = {}
        fields = [(*item, (0, -2, -1)) for item in self.fields.items()]
        static = [(*item, (-2, -1)) for item in self.static.items()]  # without times
        for name, field, dims in (*fields, *static):
            for dim in dims:
                found = field.coordinate(dim % len(field.shape))
                other, expected = common.setdefault(dim, (name, found)) if found is not None else ("", None)
                difference = expected and describe_difference(expected, found)  # type: ignore[arg-type]
                if difference:
                    what = {0: "times", -2: "rows", -1: "columns"}[dim]
                    raise ShardingError(f"TimeWindows: the {what} of {other} and {name} differ: {difference}")
        if 0 not in common or gaps == "allow":
            return lambda first, last: True
        name, times = common[0]
        uneven, usual = irregular_steps(times)
        if gaps == "error" and uneven[start : max(start, stop - 1)].any():
            at = start + int(uneven[start : stop - 1].argmax())
            raise ShardingError(
                f"TimeWindows: the times of {name} are {usual} apart, but not {times.values[at]} and "
                f"{f'{times.values[at + 1]} {times.units}'.strip()} (index {at}), and leads are numbers of steps: "
                "gaps='skip' leaves out the samples with such a step, gaps='allow' takes the times as they are"
            )
        before = np.concatenate([[0], np.cumsum(uneven)])
        return lambda first, last: bool(before[last] == before[first])

    def _levels_of(self, name: str, wanted: Sequence[int] | None) -> list[int] | None:
        """Return the levels of a variable that are read; None if it has no levels."""
        shape = self.fields[name].shape
        if len(shape) not in (3, 4):
            raise ShardingError(
                f"TimeWindows: {name} is (time, lat, lon) or (time, level, lat, lon), not {tuple(shape)}"
            )
        if len(shape) == 3:
            if wanted is not None:
                raise ShardingError(f"TimeWindows: {name} has no levels")
            return None
        found = list(range(shape[1])) if wanted is None else list(wanted)
        if any(not 0 <= level < shape[1] for level in found):
            raise ShardingError(f"TimeWindows: levels {found} of {name}, which has {shape[1]}")
        return found

    def __len__(self) -> int:
        self._check_opened()
        return len(self.times)

    def _check_opened(self) -> None:
        if self._problem is not None:
            raise self._problem

    @property
    def channels(self) -> list[str]:
        """The names of the channels."""
        return [
            name if level is None else f"{name}{level}"
            for name, levels in self.levels.items()
            for level in (levels if levels is not None else [None])
        ]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a sample."""
        self._check_opened()
        channels, y = len(self.channels), (len(self.leads), len(self.channels), *self.points)
        found = {"x": (self.history * channels, *self.points), "y": y}
        if self.static:
            found["static"] = (len(self.static), *self.points)
        return {**found, "mask": y, "x_mask": found["x"]} if self.mask else found

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.read(i, {key: tuple(slice(0, n) for n in shape) for key, shape in self.shapes.items()})

    def read(self, i: int, slices: Mapping[str, Slices]) -> dict[str, Tensor]:
        """Return the block of sample i within `slices`, read by this rank alone."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"TimeWindows: sample {i} of {len(self)}")
        now = self.times[i]
        _, *points = slices["x"]
        x = torch.cat([self._state(now - back, points) for back in range(self.history - 1, -1, -1)])
        _, _, *points = slices["y"]
        y = torch.stack([self._state(now + lead, points) for lead in self.leads])
        found: dict[str, Any] = {"x": x, "y": y}
        if self.static:
            _, *points = slices["static"]
            found["static"] = torch.stack([_read_static(field, points) for field in self.static.values()])
        if self.mask:
            found |= {"mask": ~y.isnan(), "x_mask": ~x.isnan()}
            found |= {
                key: found[key].masked_fill(found[key].isnan(), 0) for key in ("x", "y", "static") if key in found
            }
        return {key: found[key][tuple(slices[key])[: found[key].ndim - 2]] for key in self.shapes}

    def _state(self, time: int, points: Slices) -> Tensor:
        """Return a block of all channels at one time."""
        parts = []
        for name, levels in self.levels.items():
            field = self.fields[name]
            if levels is None:
                parts.append(field.read(time, points)[None])
            else:
                parts += [field.read(time, (slice(level, level + 1), *points)) for level in levels]
        return torch.cat(parts)


def _read_static(field: Field, points: Slices) -> Tensor:
    """Return a block of a field without a time, or of the first time of one with it."""
    return field.read_block(tuple(points)) if len(field.shape) == 2 else field.read(0, points)
