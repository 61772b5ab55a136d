"""Darcy flow as a dataset: solved once, cached on disk, and read in blocks."""

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

# Samples per file: few, so that ranks share the work evenly, but not so few that there are many files.
SAMPLES_PER_FILE = 8
FIELDS = ("x", "y")


class Darcy:
    """The standard Darcy flow problem: from the permeability `x` of a medium (3 or 12) to the pressure `y` in it.

    Sample i is solved on a grid of `fine` x `fine` points (to 1e-9) and subsampled to `resolution` points along each
    dim. It depends only on `seed`, `start + i` and `fine`, not on the rank that solves it. `Darcy(200, start=1000)` has
    200 samples that are not in `Darcy(1000)`.

    >>> darcy = Darcy(2, resolution=9, fine=33, cache="cache")
    >>> x, y = darcy[1].values()
    >>> x.shape, x.unique()
    (torch.Size([1, 9, 9]), tensor([ 3., 12.]))

    Samples are solved at first use and cached in array files under `cache` (default: the environment variable
    SHARDFIELD_CACHE, else ~/.cache/shardfield). `prepare(mesh)` solves all of them, divided among the ranks. If the
    cache has the same samples on a finer grid, they are subsampled, not solved again.
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
        self.folder = cache_folder(cache) / "darcy-1"  # increase the number if samples change
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
        """Return the block of sample i within `slices` (one per dim; a mapping has separate ones for "x" and "y").

        Only the pages of the file that contain the block are read.
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
        """Solve the samples that are not cached. With a mesh, the files are divided among the ranks, which then sync.

        If a rank cannot write, every rank raises a `ShardingError` with its path and reason. `progress(done, total)` is
        called with sample counts of this rank. Ranks that do not share the cache folder (one disk per host) solve the
        missing samples when they read them.
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
        """Return the samples of one file as (sample, field, row, column); solve and write those that are not cached."""
        found = self._open_mapped(file, self.resolution)
        if found is None:
            arrays.write_atomic(self._file_path(file, self.resolution), self._build_samples(file))
            found = self._open_mapped(file, self.resolution)
        if found is None:
            raise OSError(f"{self._file_path(file, self.resolution)} cannot be read back after it was written")
        return found

    def _build_samples(self, file: int) -> np.ndarray:
        """Subsample the samples of one file from a finer grid in the cache, else solve them."""
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
        # A file of the right shape may have other content: every coefficient is 3 or 12.
        return found if found is not None and np.isin(found[:, 0, 0, 0], (3, 12)).all() else None

    def _file_path(self, file: int, points: int) -> Path:
        return self.folder / f"seed{self.seed}-fine{self.fine}-points{points}" / f"{file:06d}.npy"


def cache_folder(cache: str | os.PathLike | None = None) -> Path:
    """Return the cache folder: `cache`, else the environment variable SHARDFIELD_CACHE, else ~/.cache/shardfield."""
    return Path(cache or os.environ.get("SHARDFIELD_CACHE") or Path.home() / ".cache" / "shardfield").expanduser()
