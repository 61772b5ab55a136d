"""The sharding of a label of a contraction: restrict it to mesh axes, divide it further, compare two of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch.distributed.device_mesh import DeviceMesh

from ...layout import DimSharding, canonicalize, nested_chunk, outer_shard_sizes, starts

LabelSharding = tuple[DimSharding, ...]


def restrict_axes(sharding: LabelSharding, axes: Collection[int], mesh: DeviceMesh) -> LabelSharding:
    """Return the sharding restricted to `axes`. If it loses an outer axis, the inner axes shard in chunks."""
    factors = []
    for factor in sharding:
        kept = [a for a in factor.axes if a in axes]
        sizes = factor.shard_sizes
        if kept == list(factor.axes[: len(kept)]):
            for axis in reversed(factor.axes[len(kept) :]):
                sizes = outer_shard_sizes(sizes, mesh.size(axis))
        elif all(a in kept or mesh.size(a) == 1 for a in factor.axes):
            pass  # an axis of one rank does not divide the dim
        else:
            sizes = nested_chunk(factor.size, [mesh.size(a) for a in kept])
        factors.append(DimSharding(factor.size, tuple(kept), sizes if kept else ()))
    return canonicalize(factors)


def shard_further(sharding: LabelSharding, axes: Sequence[int], mesh: DeviceMesh) -> LabelSharding | None:
    """Return the sharding with each shard divided further in chunks by those of `axes` it does not have."""
    new_axes = [a for a in axes if not any(a in f.axes for f in sharding)]
    if not new_axes:
        return sharding
    if len(sharding) > 1:
        return None
    (factor,) = sharding
    parts = [mesh.size(a) for a in new_axes]
    sizes = [n for size in factor.shard_sizes or (factor.size,) for n in nested_chunk(size, parts)]
    return (DimSharding(factor.size, (*factor.axes, *new_axes), tuple(sizes)),)


def max_local_fraction(sharding: LabelSharding) -> float:
    """Return the fraction of a dim that the rank with the largest shard holds."""
    return math.prod(max(f.shard_sizes) / f.size for f in sharding if f.axes and f.size)


def moved_fraction(old: LabelSharding, new: LabelSharding, fraction: float) -> float:
    """Return the fraction of a dim that moves when the same axes shard it with other shard sizes."""
    if len(old) > 1 or len(new) > 1 or old[0].axes != new[0].axes or not old[0].size:
        return fraction
    kept = 0
    shards = zip(
        starts(old[0].shard_sizes), old[0].shard_sizes, starts(new[0].shard_sizes), new[0].shard_sizes, strict=True
    )
    for a, n, b, m in shards:
        kept += max(0, min(a + n, b + m) - max(a, b))
    return (old[0].size - kept) / old[0].size / len(old[0].shard_sizes)
