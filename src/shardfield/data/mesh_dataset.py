"""Meshes of different sizes as a dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShardingError
from .error_sync import run_with_error_sync
from .mesh import Mesh, has_owners, open_mesh, row_dim


class MeshDataset:
    """Meshes of different sizes as a dataset: sample i has the fields `names` of the i-th file.

        cars = MeshDataset(sorted(Path("cars").glob("*.vtu")), ("points", "normals", "pressure")).prepare(mesh)
        for batch in ShardedLoader(cars, 1, mesh, placements=[Shard(0)]):
            prediction = model(batch["points"])   # (1, n, 3), n of this mesh

    A batch has one sample on each data rank, since samples differ in size. `prepare(mesh)` orders all meshes, divided
    among the ranks.

    A compiled model is traced again for every new number of points. `bucket=1.25` rounds the numbers up to powers of
    1.25, so that a few programs serve all meshes: the last point is repeated, with "areas" of zero. Sums over points
    that are weighted by area, as in `area_norm`, `force_coefficients` and the Transolver of `aero_transolver` with
    areas, are then exactly those of the mesh. Only data of points can be padded, and "areas" must be one of the names.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        names: Sequence[str],
        *,
        order: str = "morton",
        cache: str | os.PathLike | None = None,
        bucket: float | None = None,
    ):
        self.paths, self.names, self.order, self.cache = [Path(p) for p in paths], tuple(names), order, cache
        if bucket is not None and not (1 < bucket < math.inf and "areas" in self.names):
            raise ValueError(f"MeshDataset: bucket={bucket} must be more than 1, and 'areas' one of {self.names}")
        if bucket is not None and (other := [name for name in self.names if has_owners(name)]):
            raise ValueError(f"MeshDataset: {', '.join(other)} cannot be padded to buckets; only data of points can")
        self.bucket = bucket
        self._meshes: dict[int, Mesh] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def prepare(self, mesh: DeviceMesh | None = None) -> MeshDataset:
        """Write the ordered arrays of meshes that have none yet. With a device mesh, the files are divided by rank."""
        ranks = [0] if mesh is None else mesh.mesh.flatten().tolist()
        first = 0 if mesh is None else ranks.index(mesh.get_rank())

        def open_all() -> None:
            for i in range(first, len(self), len(ranks)):
                self.open(i)

        run_with_error_sync("MeshDataset.prepare", mesh, open_all)
        return self

    def open(self, i: int) -> Mesh:
        """Return mesh i, without a device mesh."""
        if i not in self._meshes:
            found = open_mesh(self.paths[i], order=self.order, cache=self.cache)
            if missing := [name for name in self.names if name not in found.fields]:
                raise ShardingError(f"{self.paths[i]} has no {', '.join(missing)}; it has {', '.join(found.fields)}")
            self._meshes[i] = found
        return self._meshes[i]

    def shapes_of(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of sample i."""
        shapes = {name: self.open(i).fields[name] for name in self.names}
        if self.bucket is None:
            return shapes
        return {name: (self._padded(shape[0]), *shape[1:]) for name, shape in shapes.items()}

    def _padded(self, n: int) -> int:
        """Return the lowest power of `bucket`, rounded up, that is at least n."""
        assert self.bucket is not None
        power = math.floor(math.log(n, self.bucket))
        while (padded := math.ceil(self.bucket**power)) < n:
            power += 1
        return padded

    def read(self, i: int, slices: Mapping[str, Sequence[slice]]) -> dict[str, Tensor]:
        """Return the block of sample i within `slices`."""
        mesh, blocks = self.open(i), {}
        for name in self.names:
            dim = row_dim(name)
            at = tuple(slices[name])
            kept = tuple(slice(None) if d == dim else part for d, part in enumerate(at))
            blocks[name] = self._read_padded(mesh, name, at[dim])[kept]
        return blocks

    def _read_padded(self, mesh: Mesh, name: str, rows: slice) -> Tensor:
        n = mesh.fields[name][row_dim(name)]
        if self.bucket is None or rows.stop is None or rows.stop <= n:
            return mesh.read(name, rows)
        block = mesh.read(name, slice(min(rows.start, n), n))
        last = mesh.read(name, slice(n - 1, n)).repeat(rows.stop - rows.start - len(block), *[1] * (block.ndim - 1))
        return torch.cat([block, torch.zeros_like(last) if name == "areas" else last])
