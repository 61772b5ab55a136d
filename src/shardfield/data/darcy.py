"""Darcy flow as a dataset: made once, kept on disk, and read in blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import arrays, darcy_solver
from .error_sync import run_with_error_sync

Slices = Sequence[slice]

# Samples in one file: few enough that ranks share the work evenly, enough to keep files few.
SAMPLES_PER_FILE = 8
FIELDS = ("x", "y")


class Darcy:
    """The standard Darcy flow problem: from the permeability `x` of a medium (3 or 12) to the pressure `y` in it.

    Sample i is solved on a grid of `fine` x `fine` points (to 1e-9), and every k-th point is kept, so that
    `resolution` points are left along each dim. It depends on `seed`, `start + i` and `fine` alone: not on who makes
    it, nor when. `Darcy(200, start=1000)` are 200 samples that `Darcy(1000)` has not.

    >>> darcy = Darcy(2, resolution=9, fine=33, cache="cache")
    >>> x, y = darcy[1].values()
    >>> x.shape, x.unique()
    (torch.Size([1, 9, 9]), tensor([ 3., 12.]))

    Samples are made when first asked for, and kept in array files under `cache` (default: the environment's
    SHARDFIELD_CACHE, else ~/.cache/shardfield). `prepare(mesh)` makes them all, the ranks sharing the work. A finer
    grid of the same samples that is kept already is thinned out, not solved again.
    """

    def __init__(
        self,
        n: int,
        *,
        resolution: int = 64,
        fine: int = 253,
        seed: int = 0,
        cache: str | os.PathLike | None = None,
        start: int = 0,
    ):
        if n < 1 or start < 0 or not 0 <= seed < 2**32:
            raise ValueError(
                f"Darcy: n {n}, start {start}, seed {seed}: n is at least 1, start 0, and seed has 32 bits"
            )
        if fine < 3 or resolution < 2 or (fine - 1) % (resolution - 1):
            works = [r for r in range(2, max(fine, 3) + 1) if (fine - 1) % (r - 1) == 0]
            raise ValueError(
                f"Darcy: no stride keeps {resolution} of {fine} points with both ends; resolutions that do: {works}"
            )
        self.n, self.resolution, self.fine, self.seed, self.start = n, resolution, fine, seed, start
        self.folder = cache_folder(cache) / "darcy-1"  # another number when samples change
        self._files: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.n

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a sample."""
        return {key: (1, self.resolution, self.resolution) for key in FIELDS}

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.read(i, (slice(None),) * 3)

    def read(self, i: int, slices: Slices | Mapping[str, Slices]) -> dict[str, Tensor]:
        """The block of sample i within `slices` (one per dim; a mapping has its own for "x" and "y").

        Only the pages of the file that hold the block are read.
        """
        if not -self.n <= i < self.n:
            raise IndexError(f"Darcy: sample {i} of {self.n}")
        file, row = divmod(self.start + i % self.n, SAMPLES_PER_FILE)
        if file not in self._files:
            self._files[file] = self._load_file(file)
        sample = self._files[file][row]
        blocks = {}
        for which, key in enumerate(FIELDS):
            at = tuple(slices[key] if isinstance(slices, Mapping) else slices)
            blocks[key] = torch.from_numpy(np.array(sample[which : which + 1][at]))
        return blocks

    def prepare(self, mesh: DeviceMesh | None = None, progress: Callable[[int, int], Any] | None = None) -> Darcy:
        """Make what the cache lacks. With a mesh, each rank makes its share of the files, and all wait for all.

        If a rank cannot write, every rank raises a `ShardingError` that says where and why. `progress(done, total)`
        is called with the number of samples of this rank's share. Ranks that do not share the cache folder (a disk
        of each host) make the rest when they read it.
        """
        files = range(self.start // SAMPLES_PER_FILE, -(-(self.start + self.n) // SAMPLES_PER_FILE))
        if mesh is not None:
            ranks = mesh.mesh.flatten().tolist()
            files = files[ranks.index(mesh.get_rank()) :: len(ranks)]

        def make() -> None:
            for done, file in enumerate(files, 1):
                self._load_file(file)
                if progress is not None:
                    progress(done * SAMPLES_PER_FILE, len(files) * SAMPLES_PER_FILE)

        run_with_error_sync("Darcy.prepare", mesh, make)
        return self

    def _load_file(self, file: int) -> np.ndarray:
        """The samples of one file as (sample, field, row, column): read, or made and written where it is not sound."""
        found = self._open_mapped(file, self.resolution)
        if found is None:
            arrays.write_atomic(self._file_path(file, self.resolution), self._build_samples(file))
            found = self._open_mapped(file, self.resolution)
        if found is None:
            raise OSError(f"{self._file_path(file, self.resolution)} does not hold what was written to it")
        return found

    def _build_samples(self, file: int) -> np.ndarray:
        """The samples of one file: every k-th point of a finer grid that the cache has, else solved."""
        for points in range(self.resolution + 1, self.fine + 1):
            if (self.fine - 1) % (points - 1) == 0 and (points - 1) % (self.resolution - 1) == 0:
                finer = self._open_mapped(file, points)
                if finer is not None:
                    step = (points - 1) // (self.resolution - 1)
                    return np.ascontiguousarray(finer[:, :, ::step, ::step])
        step = (self.fine - 1) // (self.resolution - 1)
        first = file * SAMPLES_PER_FILE
        solved = (darcy_solver.solve_sample(self.seed, first + row, self.fine) for row in range(SAMPLES_PER_FILE))
        return np.stack([torch.stack(both)[:, ::step, ::step].float().numpy() for both in solved])

    def _open_mapped(self, file: int, points: int) -> np.ndarray | None:
        shape = (SAMPLES_PER_FILE, len(FIELDS), points, points)
        found = arrays.open_mapped(self._file_path(file, points), shape, np.float32)
        # Of the right shape and yet not ours: a coefficient is 3 or 12.
        return found if found is not None and np.isin(found[:, 0, 0, 0], (3, 12)).all() else None

    def _file_path(self, file: int, points: int) -> Path:
        return self.folder / f"seed{self.seed}-fine{self.fine}-points{points}" / f"{file:06d}.npy"


def cache_folder(cache: str | os.PathLike | None = None) -> Path:
    """Where made data is kept: `cache`, else the environment's SHARDFIELD_CACHE, else ~/.cache/shardfield."""
    return Path(cache or os.environ.get("SHARDFIELD_CACHE") or Path.home() / ".cache" / "shardfield").expanduser()
