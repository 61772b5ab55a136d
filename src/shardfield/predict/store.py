"""A forecast on disk: a zarr group (format 3) that xarray opens, written in parallel and complete up to a marker.

Each variable is an array (member, case, lead_time, ...). Its files (zarr's shards) hold one time each and the rows and
columns of one rank: a state is redistributed onto file boundaries before it is written, so that no two ranks write one
file and no file is read to be written. The attribute `complete` of the group is the marker: the number of lead times,
from the first, of which every rank's files are on disk. It is replaced in one step. Files of later times may exist
after a kill; they are written again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ShardfieldError, ShardingError
from ..layout import DimSharding, Layout, chunk

FORMAT = 1
DIMS = ("member", "case", "lead_time")
CHUNK_ELEMENTS = 1 << 20  # of a chunk inside a file: what a reader decompresses at least


@dataclass(frozen=True)
class Grid:
    """Names of the channels and dims of a state, and their metadata for readers of the forecast.

    `variables` maps the name of each channel, in their order, to its attributes (units). `coords` maps the dims after
    the channels to their coordinates. `hours` is the length of a time step; `attrs` are attributes of the dataset.
    """

    variables: Mapping[str, Mapping[str, str]]
    coords: Mapping[str, np.ndarray]
    hours: float = 6.0
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def check(self, shape: Sequence[int]) -> None:
        """Raise unless a state (sample, channel, ...) has these channels and dims."""
        points = tuple(len(values) for values in self.coords.values())
        if len(shape) < 2 or shape[1] != len(self.variables) or tuple(shape[2:]) != points:
            raise ShardingError(
                f"a state of shape {tuple(shape)} is not (sample, {len(self.variables)} variables, "
                f"{' x '.join(map(str, points))} points) of the grid, whose variables are {', '.join(self.variables)} "
                f"and whose dims are {', '.join(self.coords)}"
            )
        if taken := [name for name in self.variables if name in (*DIMS, *self.coords)]:
            raise ShardingError(f"a variable cannot have the name of a dim: {', '.join(taken)}")


class ForecastStore:
    """An existing forecast of `members` x `cases` initial states, open for reading and writing. One rank creates it."""

    def __init__(self, path: str | os.PathLike):
        zarr = _import_zarr()
        self.path = Path(path)
        try:
            group = zarr.open_group(str(self.path), mode="r+", zarr_format=3)
            attrs = dict(group.attrs)
            if attrs.get("shardfield_forecast") != FORMAT:
                raise ShardfieldError(f"{self.path}: is no forecast of shardfield")
            self.variables: list[str] = list(attrs["variables"])
            self.arrays = [group[name] for name in self.variables]
            self.group = group
        except (OSError, KeyError, ValueError) as error:
            raise ShardfieldError(f"{self.path}: cannot be opened: {type(error).__name__}: {error}") from error
        self.members, self.cases, self.times, *self.points = self.arrays[0].shape
        _, _, _, *self.file_points = self.arrays[0].shards
        self.file_members = self.arrays[0].shards[0]
        self.dtype = torch.from_numpy(np.empty(0, self.arrays[0].dtype)).dtype
        self.source: str = attrs["source"]

    @staticmethod
    def create(
        path: str | os.PathLike,
        grid: Grid,
        layout: Layout | torch.Size,
        steps: int,
        members: int,
        dtype: torch.dtype,
        source: str = "",
    ) -> None:
        """Create the group and its arrays without data. The files are those of the ranks of `layout`, a state's."""
        zarr = _import_zarr()
        path = Path(path)
        shape = tuple(layout.shape) if isinstance(layout, Layout) else tuple(layout)
        grid.check(shape)
        parts = (
            [math.prod(layout.mesh.size(a) for a in layout.axes_of(d)) for d in range(layout.ndim)]
            if isinstance(layout, Layout)
            else [1] * len(shape)
        )
        files = [-(-n // p) for n, p in zip((members, *shape[2:]), (parts[0], *parts[2:]), strict=True)]
        part = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            _create_group(zarr, part, grid, shape, files, steps, members, dtype, source)
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # of a full disk; renamed, it is not there

    # ------------------------------------------------------------------ the marker

    @property
    def attrs(self) -> dict[str, Any]:
        return json.loads((self.path / "zarr.json").read_text())["attributes"]

    @property
    def scores(self) -> dict[str, dict[str, list[float]]]:
        """The scores by name, variable and lead time. NaN, which JSON has not, is stored as null."""
        stored = self.attrs["scores"]
        return {
            name: {v: [math.nan if x is None else x for x in values] for v, values in by_variable.items()}
            for name, by_variable in stored.items()
        }

    def mark(self, complete: int, scores: Mapping[str, Any]) -> None:
        """Declare the first `complete` lead times complete; called by one rank when all files of them are on disk."""
        path = self.path / "zarr.json"
        content = json.loads(path.read_text())
        written = {
            name: {v: [x if math.isfinite(x) else None for x in values] for v, values in by_variable.items()}
            for name, by_variable in scores.items()
        }
        content["attributes"] |= {"complete": complete, "scores": written}
        part = path.with_name(f".zarr.json-{uuid.uuid4().hex[:8]}")
        try:
            part.write_text(json.dumps(content, indent=2, allow_nan=False))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def differing_coords(self, grid: Grid) -> list[str]:
        """Return the dims whose coordinates are not those of a grid."""
        wanted = {"lead_time": np.arange(self.times) * grid.hours, **grid.coords}
        return [n for n, v in wanted.items() if n not in self.group or not np.array_equal(self.group[n][:], v)]

    # ------------------------------------------------------------------ blocks

    def aligned(self, layout: Layout) -> Layout:
        """Return the layout of a state whose shard boundaries are file boundaries."""
        if layout.is_sharded(1):
            raise ShardingError(f"predict: the variables (dim 1) of a state cannot be sharded: {layout}")
        sizes = [(self.file_members * self.cases), len(self.variables), *self.file_points]
        target = layout
        for dim, size in enumerate(sizes):
            axes = layout.axes_of(dim)
            if axes:
                n, parts = layout.shape[dim], math.prod(layout.mesh.size(a) for a in axes)
                ends = np.cumsum([0, *chunk(-(-n // size), parts)]) * size
                shard_sizes = np.diff(np.minimum(ends, n)).tolist()
                target = target.with_dim(dim, DimSharding(n, axes, tuple(shard_sizes)))
        return target

    def region(self, layout: Layout | None) -> tuple[slice, ...]:
        """Return this rank's members and points, as slices of (member, point dims); `layout` is an aligned one."""
        if layout is None:
            return (slice(0, self.members), *(slice(0, n) for n in self.points))
        rows, _, *points = (slice(*layout.span(d)) for d in range(layout.ndim))
        return (slice(rows.start // self.cases, rows.stop // self.cases), *points)

    def write(self, time: int, block: np.ndarray, region: tuple[slice, ...]) -> None:
        """Write a block (sample, variable, ...) of one lead time; it consists of complete files."""
        members, *points = region
        if not block.size:
            return
        for i, array in enumerate(self.arrays):
            values = block[:, i].reshape(-1, self.cases, *block.shape[2:])
            array[(members, slice(None), time, *points)] = values

    def read(self, time: int, region: tuple[slice, ...]) -> Tensor:
        """Return the block (sample, variable, ...) of one lead time."""
        members, *points = region
        shape = ((members.stop - members.start) * self.cases, *(p.stop - p.start for p in points))
        if not math.prod(shape):  # a rank without files
            return torch.empty(shape[0], len(self.arrays), *shape[1:], dtype=self.dtype)
        blocks = [np.asarray(a[(members, slice(None), time, *points)]).reshape(shape) for a in self.arrays]
        return torch.from_numpy(np.stack(blocks, 1))


def _create_group(
    zarr: Any,
    path: Path,
    grid: Grid,
    shape: tuple[int, ...],
    files: Sequence[int],
    steps: int,
    members: int,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Create the group with its coordinates, and the arrays without data; `files` are the sizes of a file."""
    cases = shape[0] // members
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # consolidated metadata is no part of the specification yet
        group = zarr.create_group(str(path), zarr_format=3)
        group.attrs.update(
            {
                **grid.attrs,
                "Conventions": "CF-1.10",
                "shardfield_forecast": FORMAT,
                "variables": list(grid.variables),
                "source": source,
                "complete": 0,
                "scores": {},
            }
        )
        dims = (*DIMS, *grid.coords)
        coords = {
            "member": (np.arange(members), {}),
            "case": (np.arange(cases), {}),
            "lead_time": (
                np.arange(steps + 1) * grid.hours,
                {"units": "hours", "standard_name": "forecast_period"},
            ),
            **{name: (np.asarray(values), COORD_ATTRS.get(name, {})) for name, values in grid.coords.items()},
        }
        for name, (values, attrs) in coords.items():
            group.create_array(name, data=values, dimension_names=(name,), attributes=dict(attrs))
        for name, described in grid.variables.items():
            group.create_array(
                name,
                shape=(members, cases, steps + 1, *shape[2:]),
                shards=(files[0], cases, 1, *files[1:]),
                chunks=(1, 1, 1, *_inner_chunks(files[1:])),
                dtype=str(dtype).removeprefix("torch."),
                fill_value=math.nan,
                dimension_names=dims,
                attributes=dict(described),
                config={"write_empty_chunks": True},
            )
        zarr.consolidate_metadata(str(path), zarr_format=3)


COORD_ATTRS = {
    "lat": {"units": "degrees_north", "standard_name": "latitude"},
    "lon": {"units": "degrees_east", "standard_name": "longitude"},
}


def _inner_chunks(files: Sequence[int]) -> list[int]:
    """Divide the first dim of a file until a chunk has at most CHUNK_ELEMENTS."""
    if not files:
        return []
    first, *rest = files
    parts = next(
        p
        for p in range(1, first + 1)
        if first % p == 0 and (first // p * math.prod(rest) <= CHUNK_ELEMENTS or p == first)
    )
    return [first // parts, *rest]


def _import_zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise ShardfieldError("forecasts are written with zarr: pip install 'shardfield[recipes]'") from None
    return zarr
