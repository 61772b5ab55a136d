"""Shard the samples of a dataset, and read this rank's blocks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..errors import ShardingError
from ..layout import Layout, balanced


class ZippedDatasets:
    """Several datasets that are read in blocks, zipped: a sample has one tensor of each."""

    def __init__(self, datasets: Mapping[Any, Any]):
        self.datasets = datasets
        if other := [key for key, d in datasets.items() if not (hasattr(d, "read") and hasattr(d, "shapes"))]:
            raise ValueError(f"zipped datasets need read(i, slices) and shapes; {other} lack them")
        if len({len(d) for d in datasets.values()}) > 1:
            raise ValueError(f"zipped datasets have different lengths: { {k: len(d) for k, d in datasets.items()} }")

    def __len__(self) -> int:
        return max((len(d) for d in self.datasets.values()), default=0)

    @property
    def shapes(self) -> dict[Any, tuple[int, ...]]:
        return {key: dataset.shapes for key, dataset in self.datasets.items()}

    def read(self, i: int, slices: Mapping[Any, Sequence[slice]]) -> dict[Any, Tensor]:
        return {key: dataset.read(i, slices[key]) for key, dataset in self.datasets.items()}


class SampleSharding:
    """The layout of every tensor of a sample over the domain mesh (None: unsharded), and this rank's blocks.

    Samples of a dataset with `shapes_of(i)` differ in size, and so do their layouts.
    """

    def __init__(self, dataset: Any, mesh: DeviceMesh | None, placements: Any, sizes: Mapping | None):
        self.dataset, self.blockwise, self.varies = dataset, hasattr(dataset, "read"), hasattr(dataset, "shapes_of")
        if self.blockwise and not (hasattr(dataset, "shapes") or self.varies):
            raise ValueError("a dataset with read(i, slices) needs `shapes` too: those of the tensors of a sample")
        if self.varies and sizes:
            raise ValueError("samples differ in size: `sizes` cannot hold for all of them")
        like = dataset.shapes_of(0) if self.varies else dataset.shapes if self.blockwise else dataset[0]
        self.keys, parts = _flatten_sample(like, _is_shape if self.blockwise else _is_tensor)
        self._container = None if self.keys == [None] else dict if isinstance(like, Mapping) else tuple
        if isinstance(placements, Mapping) and (unknown := [key for key in placements if key not in self.keys]):
            raise ValueError(f"placements has {unknown}, a sample has {self.keys}")
        self._mesh, self._placements, self._sizes = mesh, placements, sizes
        shapes = [tuple(p) if self.blockwise else tuple(torch.as_tensor(p).shape) for p in parts]
        self._first = shapes, self._build_layouts(shapes)
        self._empty: list[Tensor] | None = None

    def describe(self) -> dict[str, Any]:
        """Return the keys, shapes and layouts of sample 0, which must be equal on all ranks."""
        shapes, layouts = self._first
        return {"keys": self.keys, "shapes": shapes, "layouts": layouts}

    def read(self, indices: Sequence[int]) -> list[tuple[Tensor, Layout | None]]:
        """Return this rank's blocks of each tensor, stacked over the samples, and the layout of one sample.

        Without samples the batch size is 0.
        """
        shapes, layouts = self._layouts_of(indices[0]) if indices else self._first
        other = next((i for i in indices if self._layouts_of(i)[0] != shapes), None)
        if other is not None:
            raise ShardingError(
                f"samples {indices[0]} and {other} of one batch differ in size: use batches of one sample"
            )
        rows = [self._read_blocks(i, shapes, layouts) for i in indices]
        if not rows and self._empty is None:  # only a sample shows the dtypes
            self._empty = [t.new_empty((0, *t.shape)) for t in self._read_blocks(0, shapes, layouts)]
        stacked = [torch.stack(column) for column in zip(*rows, strict=True)] if rows else self._empty or []
        return list(zip(stacked, layouts, strict=True))

    def restore_structure(self, values: Sequence[Any]) -> Any:
        """Return one value per tensor in the structure of a sample."""
        if self._container is None:
            return values[0]
        return tuple(values) if self._container is tuple else dict(zip(self.keys, values, strict=True))

    def _layouts_of(self, i: int) -> tuple[list[tuple[int, ...]], list[Layout | None]]:
        """Return the shapes and layouts of sample i."""
        if not self.varies or not i:
            return self._first
        keys, shapes = _flatten_sample(self.dataset.shapes_of(i), _is_shape)
        if keys != self.keys:
            raise ShardingError(f"sample {i} has {keys}, sample 0 has {self.keys}")
        return list(map(tuple, shapes)), self._build_layouts(list(map(tuple, shapes)))

    def _build_layouts(self, shapes: list[tuple[int, ...]]) -> list[Layout | None]:
        if self._mesh is None:
            return [None] * len(shapes)
        return [
            build_layout(self._mesh, _placements_for(self._placements, key, shape, self._mesh), shape, self._sizes)
            for key, shape in zip(self.keys, shapes, strict=True)
        ]

    def _read_blocks(self, i: int, shapes: list[tuple[int, ...]], layouts: Sequence[Layout | None]) -> list[Tensor]:
        parts = [
            tuple(slice(0, n) for n in shape) if layout is None else local_slices(layout)
            for shape, layout in zip(shapes, layouts, strict=True)
        ]
        found = self.dataset.read(i, self.restore_structure(parts)) if self.blockwise else self.dataset[i]
        tensors = [torch.as_tensor(p) for p in _flatten_sample(found, _is_tensor)[1]]
        expected = [tuple(at.stop - at.start for at in block) for block in parts] if self.blockwise else shapes
        if [tuple(t.shape) for t in tensors] != expected:
            actual = [tuple(t.shape) for t in tensors]
            raise ShardingError(f"sample {i} has tensors of shapes {actual}, expected are {expected}")
        return tensors if self.blockwise else [t[at] for t, at in zip(tensors, parts, strict=True)]


def build_layout(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], sizes: Mapping[Any, Sequence[int]] | None
) -> Layout:
    """Build the layout of a stored array; `sizes` maps a mesh axis (name or number) to its shard sizes."""
    if any(isinstance(p, Partial) for p in placements):
        raise ShardingError(f"stored data are placed Shard or Replicate, not {tuple(placements)}")
    layout = Layout.of(mesh, placements, shape)
    shard_sizes = {}
    for name, axis_sizes in (sizes or {}).items():
        names = mesh.mesh_dim_names or ()
        axis = names.index(name) if name in names else name
        if not isinstance(axis, int) or not 0 <= axis < mesh.ndim:
            raise ShardingError(f"sizes: {name!r} is not an axis of the mesh, which has {names or mesh.ndim}")
        for dim in range(len(shape)):
            if axis in layout.axes_of(dim):
                if len(layout.axes_of(dim)) > 1:
                    raise ShardingError(
                        f"sizes: dim {dim} is sharded over several mesh axes; sizes are for dims sharded over one axis"
                    )
                shard_sizes[dim] = axis_sizes
    return Layout.of(mesh, placements, shape, shard_sizes)


def aligned_shard_sizes(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], chunks: Sequence[int] | None
) -> dict[int, tuple[int, ...]]:
    """Return by mesh axis the shard sizes that end at chunk boundaries, as balanced as the chunks allow."""
    found = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and chunks is not None:
            dim = placement.dim % len(shape)
            found[axis] = align_to_chunks(shape[dim], chunks[dim], mesh.size(axis))
    return found


def align_to_chunks(size: int, chunk: int, parts: int) -> tuple[int, ...]:
    """Divide a dim of `size` in chunks of `chunk` into parts of whole chunks.

    >>> align_to_chunks(721, 100, 4)
    (200, 200, 200, 121)
    """
    counts = balanced(-(-size // chunk), parts)
    ends = [min(size, chunk * n) for n in accumulate(counts)]
    return tuple(b - a for a, b in pairwise([0, *ends]))


def local_slices(layout: Layout) -> tuple[slice, ...]:
    """Return this rank's slice of the global tensor, one per dim."""
    return tuple(slice(*layout.span(dim)) for dim in range(layout.ndim))


def _placements_for(placements: Any, key: Any, shape: tuple[int, ...], mesh: DeviceMesh) -> Sequence[Placement]:
    """Return the user's placements; by default the second last dim over one axis, the last k dims over k axes."""
    if callable(placements):
        return placements(key, shape)
    if isinstance(placements, Mapping):
        placements = placements.get(key)
    if placements is not None:
        return placements
    first = len(shape) - max(mesh.ndim, 2)
    return [Shard(first + axis) for axis in range(mesh.ndim)] if first >= 0 else [Replicate()] * mesh.ndim


def _flatten_sample(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """Return the keys (positions; None for a single tensor) and the tensors of a sample."""
    if isinstance(value, Mapping):
        return list(value), list(value.values())
    return ([None], [value]) if is_leaf(value) else (list(range(len(value))), list(value))


def _is_shape(value: Any) -> bool:
    return all(isinstance(n, int) for n in value)


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, (tuple, list))
