"""The layout of a tensor that is sharded over a device mesh.

A `Layout` is a value: mesh, global shape, and the sharding of every tensor dim. Every rank computes it without
communication. Equal layouts on one mesh are the same object (they are interned, weakly, see `runtime.py`). A layout
answers which rank holds which indices. Nothing in this file touches data or communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from . import runtime
from ._compat.patches import patches
from .caches import cached_property
from .dim_sharding import MOVED_SHARDING as MOVED_SHARDING
from .dim_sharding import UNBALANCED as UNBALANCED
from .dim_sharding import DimSharding as DimSharding
from .dim_sharding import Origin as Origin
from .dim_sharding import Span as Span
from .dim_sharding import balanced as balanced
from .dim_sharding import canonicalize as canonicalize
from .dim_sharding import chunk as chunk
from .dim_sharding import nested_balanced as nested_balanced
from .dim_sharding import nested_chunk as nested_chunk
from .dim_sharding import outer_shard_sizes as outer_shard_sizes
from .dim_sharding import regroup as regroup
from .dim_sharding import rescale as rescale
from .dim_sharding import shard_sizes_of as shard_sizes_of
from .dim_sharding import starts as starts
from .errors import ShardingError


class Layout:
    """Mesh, global shape and sharding of every dim. Build with `Layout.of`, `Layout.replicate` or a transform."""

    mesh: DeviceMesh
    axis_sizes: tuple[int, ...]  # of the mesh: `mesh.size(axis)` takes ten times as long as this attribute
    shape: torch.Size
    dims: tuple[tuple[DimSharding, ...], ...]
    partial: tuple[tuple[int, str], ...]
    has_origins: bool

    # ------------------------------------------------------------------ construction

    @staticmethod
    def make(
        mesh: DeviceMesh, dims: Iterable[Iterable[DimSharding]], partial: Iterable[tuple[int, str]] = ()
    ) -> Layout:
        """Return the layout with these dims; equal arguments give the same object.

        Layouts are interned weakly, per mesh and world: a layout that nothing uses is freed.
        """
        if not patches.installed:  # the first layout: no ShardTensor can exist without one
            patches.install()
        state = runtime.mesh_state(mesh)
        canonical = tuple([canonicalize(d) for d in dims])
        origins = tuple([f.origins for d in canonical for f in d])  # equal shardings may have different ones
        key = (canonical, tuple(sorted(partial)) if partial else (), origins if any(origins) else ())
        found = state.layouts.get(key)
        if found is None:
            found = object.__new__(Layout)
            found.mesh, found.axis_sizes = state.mesh, state.sizes
            found.dims, found.partial, found.has_origins = canonical, key[1], bool(key[2])
            found.shape = torch.Size([d[0].size if len(d) == 1 else math.prod([f.size for f in d]) for d in canonical])
            found._check()
            state.layouts[key] = found
        return found

    @staticmethod
    def replicate(mesh: DeviceMesh, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor that every rank holds in full."""
        table = runtime.mesh_state(mesh).replicated
        shape = tuple(shape)
        found = table[shape]
        if found is None:
            found = table[shape] = Layout.make(mesh, [(DimSharding(int(n)),) for n in shape])
        return found

    @staticmethod
    def of(
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        shard_sizes: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """Return the layout of DTensor placements. `shard_sizes` maps tensor dims to sizes; default: torch.chunk."""
        shape = tuple(int(n) for n in shape)
        if len(placements) != mesh.ndim:
            raise ShardingError(f"{len(placements)} placements for a mesh of {mesh.ndim} axes: one each is needed")
        axes: dict[int, list[int]] = {}
        partial = []
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
                if not 0 <= dim < len(shape):
                    raise ShardingError(f"{placement} names a dim that a tensor of shape {shape} does not have")
                axes.setdefault(dim, []).append(axis)
            elif isinstance(placement, Partial):
                partial.append((axis, str(placement.reduce_op)))
            elif not isinstance(placement, Replicate):
                raise ShardingError(f"placement {placement!r} is not one of Shard, Replicate, Partial")
        dims = []
        for dim, size in enumerate(shape):
            if dim not in axes:
                dims.append((DimSharding(size),))
                continue
            if shard_sizes is not None and dim in shard_sizes:
                sizes = tuple(int(n) for n in shard_sizes[dim])
            else:
                sizes = nested_chunk(size, [mesh.size(a) for a in axes[dim]])
            dims.append((DimSharding(size, tuple(axes[dim]), sizes),))
        return Layout.make(mesh, dims, partial)

    def _check(self) -> None:
        used: set[int] = {axis for axis, _ in self.partial}
        for dim, factors in enumerate(self.dims):
            for size, axes, lengths in factors:
                if not axes:
                    continue
                if used & set(axes):
                    raise ShardingError(f"a mesh axis is used twice by the layout of shape {tuple(self.shape)}")
                used |= set(axes)
                parts = math.prod(self.axis_sizes[a] if 0 <= a < self.mesh.ndim else self.mesh.size(a) for a in axes)
                if len(lengths) != parts:
                    raise ShardingError(f"dim {dim}: {len(lengths)} shard sizes {lengths} for {parts} ranks")
                if sum(lengths) != size or min(lengths) < 0:
                    raise ShardingError(f"dim {dim}: shard sizes {lengths} do not sum to its size {size}")
        if used and not used <= set(range(self.mesh.ndim)):
            raise ShardingError(f"the mesh has {self.mesh.ndim} axes; the layout names {sorted(used)}")

    # ------------------------------------------------------------------ this rank's shard

    @cached_property
    def coords(self) -> tuple[int, ...]:
        """This rank's coordinate on every mesh axis."""
        coords = self.mesh.get_coordinate()
        if coords is None:
            raise ShardingError(f"this rank is not on the mesh {self.mesh}")
        return tuple(coords)

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's local tensor."""
        return self.local_shape_at(self.coords)

    def local_shape_at(self, coords: Sequence[int]) -> torch.Size:
        """Return the shape of the local tensor of the rank at `coords`."""
        return torch.Size([math.prod([self.local_size_of(f, coords) for f in d]) for d in self.dims])

    def local_size_of(self, factor: DimSharding, coords: Sequence[int] | None = None) -> int:
        """Return the size of the shard of one factor on the rank at `coords`."""
        return factor.shard_sizes[self.index(factor.axes, coords)] if factor.axes else factor.size

    def index(self, axes: Sequence[int], coords: Sequence[int] | None = None) -> int:
        """Return the row-major position of `coords` over `axes`."""
        coords = self.coords if coords is None else coords
        flat = 0
        for axis in axes:
            flat = flat * self.axis_sizes[axis] + coords[axis]
        return flat

    def span(self, dim: int, coords: Sequence[int] | None = None) -> Span:
        """Return the global index range of a simple dim on the rank at `coords`, by default this rank."""
        (factor,) = self.dims[dim]
        if not factor.axes:
            return Span(0, factor.size)
        i = self.index(factor.axes, coords)
        start = sum(factor.shard_sizes[:i])
        return Span(start, start + factor.shard_sizes[i])

    # ------------------------------------------------------------------ properties

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One DTensor placement per mesh axis."""
        found: list[Placement] = [Replicate()] * self.mesh.ndim
        for dim, factors in enumerate(self.dims):
            for factor in factors:
                for axis in factor.axes:
                    found[axis] = Shard(dim)
        for axis, op in self.partial:
            found[axis] = Partial(op)
        return tuple(found)

    @cached_property
    def ndim(self) -> int:
        return len(self.dims)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def shard_axes(self) -> tuple[int, ...]:
        """The mesh axes that shard a dim."""
        return tuple(sorted([a for d in self.dims for f in d for a in f.axes]))

    @cached_property
    def is_sharded_over_all_axes(self) -> bool:
        """True if every mesh axis of more than one rank shards a dim."""
        return set(self.nontrivial_axes(range(self.mesh.ndim))) <= set(self.shard_axes)

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """The mesh axes with a pending reduction."""
        return tuple([a for a, _ in self.partial])

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank holds the full value; axes of size 1 do not count."""
        return not self.nontrivial_axes(self.shard_axes) and not self.nontrivial_axes(self.partial_axes)

    @cached_property
    def is_simple(self) -> bool:
        """True if no dim merges several sharded ones."""
        return all([len(d) == 1 for d in self.dims])

    def nontrivial_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return those of `axes` that have more than one rank."""
        return tuple([a for a in axes if self.axis_sizes[a] > 1])

    def group(self, axis: int) -> ProcessGroup:
        """Return the process group of a mesh axis; `mesh.get_group(axis)` takes ten times as long."""
        return runtime.mesh_state(self.mesh).group(axis)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that shard a dim, outermost first."""
        factors = self.dims[dim]
        return factors[0].axes if len(factors) == 1 else tuple([a for f in factors for a in f.axes])

    def is_sharded(self, dim: int) -> bool:
        """Return True if a dim is sharded over more than one rank."""
        return bool(self.nontrivial_axes(self.axes_of(dim)))

    @cached_property
    def sharded_dims(self) -> tuple[int, ...]:
        """The dims that are sharded over more than one rank."""
        return tuple(d for d in range(self.ndim) if self.is_sharded(d))

    def shard_sizes(self, dim: int) -> tuple[int, ...]:
        """Return the shard sizes of a simple dim."""
        (factor,) = self.dims[dim]
        return factor.shard_sizes or (factor.size,)

    @cached_property
    def largest_shard(self) -> tuple[int, ...]:
        """The shape of the largest shard along each dim of a simple layout."""
        return tuple(max(self.shard_sizes(d)) for d in range(self.ndim))

    @property
    def bare(self) -> Layout:
        """The same layout without origins. Two layouts place data equally if they have the same `bare` one."""
        return self._without_origins if self.has_origins else self  # not cached: a layout must not refer to itself

    @cached_property
    def _without_origins(self) -> Layout:
        return self.with_dims([[f.with_origins() for f in d] for d in self.dims])

    def origins(self, dim: int) -> tuple[Origin, ...]:
        """Return the origins of a simple dim; a merged dim has none."""
        return self.dims[dim][0].origins if len(self.dims[dim]) == 1 else ()

    @cached_property
    def former_shardings(self) -> dict[frozenset[int], tuple[int, DimSharding]]:
        """Mesh axes whose sharding an op moved to another dim -> the dim that they sharded before, and its sharding."""
        found: dict[frozenset[int], tuple[int, DimSharding]] = {}
        for dim, factors in enumerate(self.dims) if self.has_origins else ():
            for origin in factors[0].origins if len(factors) == 1 and not factors[0].axes else ():
                if origin.kind == MOVED_SHARDING and origin.size == factors[0].size:
                    sharding = DimSharding(*origin[1:]).with_origins(factors[0].origins)
                    found.setdefault(frozenset(origin.axes), (dim, sharding))
        return found

    # ------------------------------------------------------------------ transforms

    def with_dims(self, dims: Iterable[Iterable[DimSharding]]) -> Layout:
        """Return the layout with the same mesh and partial axes and other dims."""
        return Layout.make(self.mesh, dims, self.partial)

    def with_partial(self, axes: Iterable[int], op: str = "sum") -> Layout:
        """Return the layout with the same dims, Partial over exactly `axes`."""
        partial = [(a, op) for a in axes]
        if partial:
            return Layout.make(self.mesh, self.dims, partial)
        return self._without_partial if self.partial else self  # not cached: a layout must not refer to itself

    @cached_property
    def _without_partial(self) -> Layout:
        return Layout.make(self.mesh, self.dims)

    def with_dim(self, dim: int, *factors: DimSharding) -> Layout:
        """Return the layout with one dim replaced."""
        dims = list(self.dims)
        dims[dim] = factors
        return self.with_dims(dims)

    def unshard(self, dims: Iterable[int]) -> Layout:
        """Return the layout with `dims` unsharded."""
        chosen = {d % self.ndim for d in dims}
        return self.with_dims(
            [
                (DimSharding(self.shape[d]).with_origins(self.origins(d)),) if d in chosen else f
                for d, f in enumerate(self.dims)
            ]
        )

    def drop_dims(self, dims: Iterable[int]) -> Layout:
        """Return the layout without `dims`."""
        chosen = {d % self.ndim for d in dims}
        return self.with_dims([f for d, f in enumerate(self.dims) if d not in chosen])

    def permute(self, order: Sequence[int]) -> Layout:
        """Return the layout with reordered dims."""
        return self.with_dims([self.dims[d] for d in order])

    def insert(self, dim: int, size: int = 1) -> Layout:
        """Return the layout with a new unsharded dim before `dim`."""
        dims = list(self.dims)
        dims.insert(dim, (DimSharding(size),))
        return self.with_dims(dims)

    def unmerged(self) -> Layout:
        """Return the layout with every factor of every dim as its own dim."""
        return self.with_dims([(f,) for d in self.dims for f in d])

    # ------------------------------------------------------------------ the documented spec surface

    def sharding_shapes(self) -> list[list[torch.Size]]:
        """Return the local shapes as `[axis][coord]`, of ranks that share all other coords with this rank."""
        table = []
        for axis in range(self.mesh.ndim):
            at = [self.coords[:axis] + (c,) + self.coords[axis + 1 :] for c in range(self.mesh.size(axis))]
            table.append([self.local_shape_at(coords) for coords in at])
        return table

    def offsets(self) -> tuple[int, ...]:
        """Return the global index of this rank's first element, dim by dim."""
        return tuple(self._start(d) for d in range(self.ndim))

    def _start(self, dim: int) -> int:
        flat = 0
        for f in self.dims[dim]:
            start = sum(f.shard_sizes[: self.index(f.axes)]) if f.axes else 0
            flat = flat * f.size + start
        return flat

    def __reduce__(self) -> Any:
        return Layout.make, (self.mesh, self.dims, self.partial)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    def __repr__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        names = self.mesh.mesh_dim_names or tuple(str(a) for a in range(self.mesh.ndim))
        parts = []
        for dim, factors in enumerate(self.dims):
            for f in factors:
                if f.axes:
                    over = ",".join(names[a] for a in f.axes)
                    inner = "" if len(factors) == 1 else f" (of {'x'.join(str(g.size) for g in factors)})"
                    parts.append(f"Shard({dim}) as {'+'.join(map(str, f.shard_sizes))}{inner} over {over!r}")
        parts += [f"Partial({op}) over {names[a]!r}" for a, op in self.partial]
        return f"{tuple(self.shape)} {'; '.join(parts) or 'Replicate'}"
