"""ShardTensorSpec, the documented form of a layout (`x._spec`), and layouts from local shapes or placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from .comm import collectives
from .errors import ShardingError
from .layout import Layout, balanced


class TensorMeta(NamedTuple):
    """Global shape, strides of a contiguous tensor of that shape, and dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ShardTensorSpec:
    """Mesh, placements, shapes and `tensor_meta` of a ShardTensor, as `x._spec`. Compared by layout and dtype."""

    def __init__(self, layout: Layout, local: Tensor):
        self.layout = layout
        self._dtype = local.dtype

    mesh = property(lambda self: self.layout.mesh)
    placements = property(lambda self: self.layout.placements)
    shape = property(lambda self: self.layout.shape)
    ndim = property(lambda self: self.layout.ndim)
    device_mesh = mesh

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's shard."""
        return self.layout.local_shape

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Return the local shapes along the sharded mesh axes, `{mesh axis: shapes by coord}`.

        With `mesh_dim`, those along that axis, sharded or not. The shapes are of the ranks that share all other coords
        with this rank.
        """
        table = self.layout.sharding_shapes()
        if mesh_dim is not None:
            return tuple(map(tuple, table[mesh_dim]))
        return {a: tuple(map(tuple, table[a])) for a, p in enumerate(self.placements) if p.is_shard()}

    def offsets(self, mesh_dim: int | None = None) -> Any:
        """Return the global index of this rank's first element; with `mesh_dim`, along the dim sharded by that axis."""
        offsets = self.layout.offsets()
        if mesh_dim is None:
            return offsets
        placed = self.placements[mesh_dim]
        return offsets[placed.dim] if placed.is_shard() else 0

    @property
    def tensor_meta(self) -> TensorMeta:
        strides, step = [], 1
        for n in reversed(self.shape):
            strides.append(step)
            step *= max(n, 1)
        return TensorMeta(self.shape, tuple(reversed(strides)), self._dtype)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardTensorSpec) and self.layout.bare is other.layout.bare and self._dtype == other._dtype
        )

    def __hash__(self) -> int:
        return hash((self.layout, self._dtype))

    def __repr__(self) -> str:
        return f"ShardTensorSpec({self.layout})"


def infer_layout(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], global_shape: Sequence[int] | None
) -> Layout:
    """Return the layout of shards of unknown sizes. Ranks exchange their local shapes; all agree or all raise."""
    row = [local.ndim, DTYPES.index(local.dtype), *local.shape] + [0] * (MAX_DIMS - local.ndim)
    table = [row]
    for axis in reversed(range(mesh.ndim)):  # rows end up in row-major order of coords
        flat = [n for r in table for n in r]
        gathered = collectives.gather_ints(flat, mesh.get_group(axis), local.device)
        table = [part[i : i + len(row)] for part in gathered for i in range(0, len(part), len(row))]
    shapes = [tuple(r[2 : 2 + r[0]]) for r in table]
    held = "; ".join(f"{i}: {s}" for i, s in enumerate(shapes))
    if len({r[0] for r in table}) > 1 or len({r[1] for r in table}) > 1:
        raise ShardingError(f"from_local: local tensors differ in ndim or dtype (mesh position: shape): {held}")
    ndim = local.ndim
    axes_of: dict[int, list[int]] = {}
    for axis, placed in enumerate(placements):
        if isinstance(placed, Shard):
            dim = placed.dim + ndim if placed.dim < 0 else placed.dim
            if not 0 <= dim < ndim:
                raise ShardingError(
                    f"from_local: {placed} names a dim that local tensors of shape {shapes[0]} do not have"
                )
            axes_of.setdefault(dim, []).append(axis)
    sizes = [mesh.size(a) for a in range(mesh.ndim)]

    def flat_index(coords: Sequence[int]) -> int:
        at = 0
        for c, n in zip(coords, sizes, strict=True):
            at = at * n + c
        return at

    lengths: dict[int, list[int]] = {}
    shape = []
    for dim in range(ndim):
        axes = axes_of.get(dim, [])
        sizes_along = []
        for index in range(_prod(sizes[a] for a in axes)):
            coords = [0] * mesh.ndim
            for a in reversed(axes):
                index, coords[a] = divmod(index, sizes[a])
            sizes_along.append(shapes[flat_index(coords)][dim])
        if axes:
            lengths[dim] = sizes_along
        shape.append(sum(sizes_along))
    layout = Layout.of(mesh, placements, shape, lengths)
    if mesh.get_coordinate() is not None:
        for at, have in enumerate(shapes):
            coords, rest = [0] * mesh.ndim, at
            for a in reversed(range(mesh.ndim)):
                rest, coords[a] = divmod(rest, sizes[a])
            if tuple(layout.local_shape_at(coords)) != have:
                raise ShardingError(
                    f"from_local: local shapes do not fit placements {tuple(placements)} (mesh position: shape): {held}"
                )
    if global_shape is not None and tuple(global_shape) != tuple(shape):
        raise ShardingError(
            f"from_local: local shapes give {tuple(shape)}, global_shape says {tuple(global_shape)}: {held}"
        )
    return layout


def layout_from_shapes(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shapes: Any, global_shape: Sequence[int] | None
) -> Layout:
    """Return the layout of shards with stated sizes ({mesh axis: shapes}) or those of torch.chunk ("chunk")."""
    shapes = _by_axis(shapes)
    shape = list(local.shape if global_shape is None else global_shape)
    lengths: dict[int, list[int]] = {}
    nested: dict[int, int] = {}
    for axis, placed in enumerate(placements):
        if not isinstance(placed, Shard):
            continue
        dim = placed.dim % local.ndim if local.ndim else placed.dim
        nested[dim] = nested.get(dim, 0) + 1
        if isinstance(shapes, Mapping):
            if axis not in shapes:
                raise ShardingError(
                    f"from_local: sharding_shapes has no entry for mesh axis {axis}, which shards dim {dim}"
                )
            if nested[dim] > 1:
                raise ShardingError('from_local: for a dim that is sharded by two axes, use sharding_shapes="infer"')
            lengths[dim] = [s if isinstance(s, int) else s[dim] for s in shapes[axis]]
            total = sum(lengths[dim])
            if global_shape is not None and shape[dim] != total:
                raise ShardingError(f"from_local: shard sizes {lengths[dim]} of dim {dim} do not sum to {shape[dim]}")
            shape[dim] = total
        elif shapes == "chunk":
            if global_shape is None:
                shape[dim] *= mesh.size(axis)
        else:
            raise ShardingError(f'from_local: sharding_shapes is "infer", "chunk", a dict or a list, not {shapes!r}')
    layout = Layout.of(mesh, placements, shape, lengths)
    if layout.local_shape != local.shape:
        raise ShardingError(
            f"from_local: this rank holds {tuple(local.shape)}, the layout {layout} gives it {layout.local_shape}"
        )
    return layout


def _prod(values: Any) -> int:
    out = 1
    for v in values:
        out *= v
    return out


MAX_DIMS = 16
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def _by_axis(shapes: Any) -> Any:
    """Return sharding shapes listed axis by axis as a dict; any other value as it is."""
    return dict(enumerate(shapes)) if isinstance(shapes, (list, tuple)) else shapes


def target_layout(layout: Layout, placements: Sequence[Placement] | None, shapes: Any) -> Layout:
    """Return the target layout of `redistribute(placements=..., sharding_shapes=...)`."""
    shapes = _by_axis(shapes)
    placed = list(placements) if placements is not None else list(layout.placements)
    if len(placed) == 1 and placed[0].is_replicate():  # unambiguous on a mesh of any number of axes
        placed *= layout.mesh.ndim
    plain = Layout.of(layout.mesh, placed, layout.shape)
    lengths: dict[int, Sequence[int]] = {}
    for dim in range(layout.ndim):
        axes = plain.axes_of(dim)
        if not axes:
            continue
        if shapes is None and layout.axes_of(dim) == axes and len(layout.dims[dim]) == 1:
            lengths[dim] = layout.shard_sizes(dim)
        elif shapes == "balanced":
            lengths[dim] = balanced(layout.shape[dim], len(plain.shard_sizes(dim)))
        elif isinstance(shapes, Mapping):
            stated = [shapes[a] for a in axes if a in shapes]
            if len(stated) == 1 and len(axes) == 1:
                lengths[dim] = [n if isinstance(n, int) else n[dim] for n in stated[0]]
            elif stated:
                raise ShardingError(
                    f"redistribute: dim {dim} is sharded by axes {axes} together; state shard sizes for one axis only"
                )
        elif shapes not in (None, "chunk"):
            raise ShardingError(
                f'redistribute: sharding_shapes is None, "chunk", "balanced", a dict or a list, not {shapes!r}'
            )
    return Layout.of(layout.mesh, placed, layout.shape, lengths)
