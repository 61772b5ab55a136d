"""Shallow water forecasts as a dataset: trajectories that are solved once, cached on disk, and read in blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import arrays, swe_solver
from .darcy import cache_folder
from .error_sync import run_with_error_sync

TRAJECTORIES_PER_FILE = 4
SPIN_UP_HOURS = 24  # the solver starts without divergence


class ShallowWater:
    """Random shallow water flows on the sphere: from the state `x` at a time to the states `y` at the next times.

    A trajectory starts from a balanced random flow, and its state (height, vorticity, divergence) is recorded every
    `hours` on a Gauss-Legendre grid of `nlat` x `nlon` points, `records` times after the first. Sample i is a window of
    `leads` steps in one of `n` trajectories: x (3, nlat, nlon) and y (leads, 3, nlat, nlon). It depends only on `seed`,
    `start` and its index, not on the rank that solves it. `stride` leaves out starts of windows.

    >>> flows = ShallowWater(1, nlat=12, nlon=24, records=4, leads=2, cache="cache")
    >>> sample = flows[2]
    >>> len(flows), sample["x"].shape, sample["y"].shape
    (3, torch.Size([3, 12, 24]), torch.Size([2, 3, 12, 24]))

    Trajectories are solved at first use and cached in array files, as those of `Darcy`. `prepare(mesh)` solves all of
    them, divided among the ranks.
    """

    variables = tuple(swe_solver.VARIABLES)

    def __init__(
        self,
        n: int,
        *,
        nlat: int = 32,
        nlon: int = 64,
        hours: int = 6,
        records: int = 40,
        leads: int = 1,
        stride: int = 1,
        seed: int = 0,
        start: int = 0,
        cache: str | os.PathLike | None = None,
    ):
        if min(n, hours, records, leads, stride) < 1 or start < 0 or not 0 <= seed < 2**32:
            raise ValueError(
                f"ShallowWater: n {n}, hours {hours}, records {records}, leads {leads}, stride {stride}, start {start} "
                f"and seed {seed}: start is at least 0, the others 1, and seed has 32 bits"
            )
        if nlat < 8 or nlon < 4 * nlat // 3:
            raise ValueError(
                f"ShallowWater: a grid of {nlat} x {nlon}; at least 8 latitudes, and 4/3 as many longitudes"
            )
        if leads > records:
            raise ValueError(f"ShallowWater: a window of {leads} steps does not fit a trajectory of {records}")
        self.n, self.nlat, self.nlon, self.hours, self.records = n, nlat, nlon, hours, records
        self.leads, self.stride, self.seed, self.start = leads, stride, seed, start
        self.windows = (records - leads) // stride + 1  # of one trajectory
        self.folder = cache_folder(cache) / "shallow-water-1"  # increase the number if trajectories change
        self._files: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.n * self.windows

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a sample."""
        state = (len(self.variables), self.nlat, self.nlon)
        return {"x": state, "y": (self.leads, *state)}

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.read(i, {"x": (slice(None),) * 3, "y": (slice(None),) * 4})

    def read(self, i: int, slices: Mapping[str, Sequence[slice]]) -> dict[str, Tensor]:
        """Return the block of sample i within `slices`, one per dim of x and of y."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"ShallowWater: sample {i} of {len(self)}")
        trajectory, window = divmod(i % len(self), self.windows)
        file, row = divmod(self.start + trajectory, TRAJECTORIES_PER_FILE)
        if file not in self._files:
            self._files[file] = self._load_file(file)
        states = self._files[file][row, window * self.stride :]
        x, y = states[0][tuple(slices["x"])], states[1 : 1 + self.leads][tuple(slices["y"])]
        return {"x": torch.from_numpy(np.array(x)), "y": torch.from_numpy(np.array(y))}

    def prepare(self, mesh: DeviceMesh | None = None) -> ShallowWater:
        """Solve the trajectories that are not cached. With a mesh, the files are divided among the ranks.

        If a rank cannot write, every rank raises a `ShardingError` with its path and reason.
        """
        last = self.start + self.n - 1
        files = range(self.start // TRAJECTORIES_PER_FILE, last // TRAJECTORIES_PER_FILE + 1)
        if mesh is not None:
            ranks = mesh.mesh.flatten().tolist()
            files = files[ranks.index(mesh.get_rank()) :: len(ranks)]

        def make() -> None:
            for file in files:
                self._load_file(file)

        run_with_error_sync("ShallowWater.prepare", mesh, make)
        return self

    def _load_file(self, file: int) -> np.ndarray:
        """Return the states of one file as (trajectory, time, variable, lat, lon); solve those that are not cached."""
        path = self._file_path(file)
        shape = (TRAJECTORIES_PER_FILE, self.records + 1, len(self.variables), self.nlat, self.nlon)
        found = arrays.open_mapped(path, shape, np.float32)
        if found is None:
            arrays.write_atomic(path, self._solve(file))
            found = arrays.open_mapped(path, shape, np.float32)
        if found is None:
            raise OSError(f"{path} cannot be read back after it was written")
        return found

    def _solve(self, file: int) -> np.ndarray:
        solver = swe_solver.ShallowWaterSolver(self.nlat, self.nlon)
        first = file * TRAJECTORIES_PER_FILE
        state = swe_solver.random_flow(solver, self.seed * 1_000_003 + first, TRAJECTORIES_PER_FILE)
        state = solver.advance(state, 3600 * SPIN_UP_HOURS)
        grids = [solver.to_grid(state)]
        for _ in range(self.records):
            state = solver.advance(state, 3600 * self.hours)
            grids.append(solver.to_grid(state))
        return torch.stack(grids, 1).float().numpy()

    def _file_path(self, file: int) -> Path:
        what = f"seed{self.seed}-{self.nlat}x{self.nlon}-{self.hours}h-{self.records}"
        return self.folder / what / f"{file:06d}.npy"


def coordinates(flows: ShallowWater) -> dict[str, Any]:
    """Return latitudes and longitudes of the grid in degrees."""
    return {
        "lat": swe_solver.latitudes(flows.nlat).numpy(),
        "lon": np.arange(flows.nlon) * (360.0 / flows.nlon),
    }
