"""How a mesh divides attention: what each axis cuts, and what that costs. Pure.

Each mesh axis is given one of these parts, and of all ways to give them the cheapest is taken, by bytes sent and by
what of them hides behind arithmetic:

    lead i    cuts a batch dim or the heads: every rank has its own problem, nothing is sent
    ring      cuts queries and keys: keys and values go round
    gather    cuts queries; keys and values, where they are cut, are gathered first
    merge     cuts keys: every rank takes all queries to its own, and what that gives is merged
    none      cuts nothing

A sequence that is cut becomes heads that are cut ("lead") by an all-to-all of everything, and back. Queries that are
cut along a batch dim, the heads or the sequence keep the result in that cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from ...dispatch.plan import Operand
from ...layout import DimSharding, Layout, nested_chunk, outer_shard_sizes, starts
from ...redistribute import steps

# Arithmetic that takes as long as sending one byte, and bytes that take as long as one message more.
FLOPS_PER_BYTE = {"cpu": 64, "cuda": 1024}
MESSAGE_COST = 1 << 15
MEMORY_WEIGHT = 64  # and by how much a byte more in memory is dearer than one sent


class AxisRole(NamedTuple):
    """What a mesh axis does: "lead", "ring", "gather", "merge" or "none", and for "lead" the dim it cuts."""

    kind: str
    dim: int = 0


class Shapes(NamedTuple):
    """The sizes of a call: leading dims of the result, queries, keys, features; queries' heads to one of the keys'."""

    lead: tuple[int, ...]
    rows: int
    columns: int
    features: int
    value_features: int
    group: int

    @staticmethod
    def of(query: Operand, key: Operand, value: Operand, gqa: bool) -> Shapes:
        group = query.shape[-3] // key.shape[-3] if gqa else 1
        heads = [x.shape[:-2] for x in (query, key, value)]
        if gqa:  # keys and values have their heads for several queries' in a row each
            heads[1:] = [torch.Size((*h[:-1], query.shape[-3])) for h in heads[1:]]
        lead = tuple(torch.broadcast_shapes(*heads))
        return Shapes(lead, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1], group)


class Strategy(NamedTuple):
    """Where operands lie while the work is done, where the result lies then and where it goes.

    `ring`, `gather` and `merge` are the mesh axes of that part; keys are cut by merge, ring and gather axes, in that
    order.
    """

    query: Layout
    key: Layout
    value: Layout
    mask: Layout | None
    computed: Layout
    result: Layout
    ring: tuple[int, ...]
    gather: tuple[int, ...]
    merge: tuple[int, ...]
    summary: str


def choose_strategy(
    query: Operand, key: Operand, value: Operand, mask: Operand | None, gqa: bool, is_causal: bool
) -> Strategy:
    """The cheapest way."""
    shapes = Shapes.of(query, key, value, gqa)
    mesh = query.layout.mesh
    choices = [list(_axis_roles(a, shapes, query.layout, key.layout, value.layout, mask)) for a in range(mesh.ndim)]
    best, least = None, math.inf
    for parts in product(*choices):
        found = _build_strategy(parts, shapes, query.layout, key.layout, value.layout, mask)
        cost = estimate_cost(found, shapes, query, key, value, mask, is_causal)
        if cost < least:
            best, least = found, cost
    assert best is not None
    return best


# ---------------------------------------------------------------------- which parts an axis may have


def _sharded_dim_kind(layout: Layout | None, axis: int, ndim: int) -> tuple[str, int] | None:
    """What an axis cuts in an operand, in terms of the result's dims: ("lead", i), ("rows", 0), ("last", 0)."""
    if layout is None:
        return None
    for dim in range(layout.ndim):
        if axis in layout.axes_of(dim):
            back = layout.ndim - dim
            return ("last", 0) if back == 1 else ("rows", 0) if back == 2 else ("lead", ndim - back)
    return None


def _axis_roles(axis: int, shapes: Shapes, q: Layout, k: Layout, v: Layout, mask: Operand | None) -> Iterator[AxisRole]:
    """The parts that are open to an axis, by what it cuts now."""
    ndim = len(shapes.lead) + 2
    size = q.mesh.size(axis)
    here, *there = [_sharded_dim_kind(x, axis, ndim) for x in (q, k, v)]
    masked = _sharded_dim_kind(mask.layout, axis, ndim) if mask is not None else None
    if here is not None and here[0] == "lead":
        yield AxisRole(*here)
        return
    if here is None and not any(there) and masked is None:
        yield AxisRole("none")
        return
    keys_cut = any(there)
    if keys_cut and size > 1:
        yield AxisRole("ring")
        yield AxisRole("merge")
    if size == 1 and here is None:
        yield AxisRole("none")
        return
    yield AxisRole("gather")
    for dim, n in enumerate(shapes.lead):
        units = n // shapes.group if dim == len(shapes.lead) - 1 else n
        if size > 1 and units and (("lead", dim) in (*there, masked) or (units % size == 0 and (here or keys_cut))):
            yield AxisRole("lead", dim)


# ---------------------------------------------------------------------- layouts


def _shard_dim(size: int, axes: Sequence[int], like: Sequence[DimSharding], mesh) -> tuple[DimSharding, ...]:
    """A dim cut by `axes`, where possible as one of `like` (or its outer axes) is; else as torch.chunk does."""
    axes = tuple(axes)
    if not axes:
        return (DimSharding(size),)
    for factor in like:
        if factor.size == size and factor.axes[: len(axes)] == axes:
            lengths = factor.shard_sizes
            for axis in reversed(factor.axes[len(axes) :]):
                lengths = outer_shard_sizes(lengths, mesh.size(axis))
            return (DimSharding(size, axes, lengths),)
    return (DimSharding(size, axes, nested_chunk(size, [mesh.size(a) for a in axes])),)


def _order_axes(axes: Sequence[int], like: DimSharding) -> list[int]:
    """Axes in the order in which a factor has them, the others after."""
    return sorted(axes, key=lambda a: (like.axes.index(a) if a in like.axes else len(like.axes), a))


def _build_strategy(
    parts: Sequence[AxisRole], shapes: Shapes, q: Layout, k: Layout, v: Layout, mask: Operand | None
) -> Strategy:
    mesh = q.mesh
    (rows,), (columns,), (v_columns,) = (x.dims[-2] for x in (q, k, v))
    of = {kind: [a for a, p in enumerate(parts) if p.kind == kind] for kind in ("ring", "gather", "merge")}
    cut = columns if columns.axes else v_columns  # the keys' cut, or the values' where keys are whole
    gathered = [a for a in of["gather"] if a in columns.axes or a in v_columns.axes]
    key_axes = [a for kind in ("merge", "ring") for a in _order_axes(of[kind], cut)] + _order_axes(gathered, cut)
    row_axes = _order_axes([*of["ring"], *of["gather"]], rows)
    row_cut = _shard_dim(shapes.rows, row_axes, [rows, cut], mesh)
    key_cut = _shard_dim(shapes.columns, key_axes, [columns, v_columns], mesh)
    lead, key_lead = [], []
    for dim, n in enumerate(shapes.lead):
        axes = [a for a, p in enumerate(parts) if p == AxisRole("lead", dim)]
        one, other = _shard_leading_dim(dim, n, axes, shapes, q, k, v)
        lead.append(one)
        key_lead.append(other)
    inner = Layout.make(mesh, [*lead, row_cut, (DimSharding(shapes.value_features),)])
    goal = _result_layout(inner, rows, row_axes, shapes)
    mask_layout = None
    if mask is not None:
        merged = _shard_dim(shapes.columns, [a for a in key_axes if a in of["merge"]], [key_cut[0]], mesh)
        mask_layout = _broadcast_layout(
            mesh, [*lead, row_cut, merged], (*shapes.lead, shapes.rows, shapes.columns), mask.shape
        )
    return Strategy(
        query=_broadcast_layout(
            mesh, [*lead, row_cut, (DimSharding(q.shape[-1]),)], (*shapes.lead, *q.shape[-2:]), q.shape
        ),
        key=_key_layout(mesh, key_lead, key_cut, k),
        value=_key_layout(mesh, key_lead, key_cut, v),
        mask=mask_layout,
        computed=inner,
        result=goal,
        ring=tuple(a for a in key_axes if a in of["ring"]),
        gather=tuple(gathered),
        merge=tuple(a for a in key_axes if a in of["merge"]),
        summary=_describe(parts, rows, gathered, shapes, mesh),
    )


def _shard_leading_dim(dim: int, n: int, axes, shapes: Shapes, q: Layout, k: Layout, v: Layout):
    """A leading dim's cut for queries and for keys: the same, or in whole groups of heads."""
    at = dim - len(shapes.lead) - 2
    group = shapes.group if dim == len(shapes.lead) - 1 else 1
    units = []
    for x, each in ((q, group), (k, 1), (v, 1)):
        if -at <= x.ndim and x.axes_of(x.ndim + at):
            (factor,) = x.dims[at]
            if all(length % each == 0 for length in factor.shard_sizes):
                units.append(
                    DimSharding(factor.size // each, factor.axes, tuple(m // each for m in factor.shard_sizes))
                )
    (small,) = _shard_dim(n // group, axes, units, q.mesh)
    return (DimSharding(n, small.axes, tuple(m * group for m in small.shard_sizes)),), (small,)


def _broadcast_layout(mesh, dims, sizes: Sequence[int], shape: Sequence[int]) -> Layout:
    """The layout of an operand of `shape` that broadcasts to dims of `sizes`, cut like them where it has them."""
    skip = len(sizes) - len(shape)
    return Layout.make(
        mesh, [dims[skip + d] if n == sizes[skip + d] else (DimSharding(n),) for d, n in enumerate(shape)]
    )


def _key_layout(mesh, lead, cut, x: Layout) -> Layout:
    sizes = [f.size for (f,) in lead]
    return _broadcast_layout(mesh, [*lead, cut, (DimSharding(x.shape[-1]),)], (*sizes, *x.shape[-2:]), x.shape)


def _result_layout(inner: Layout, rows: DimSharding, row_axes: Sequence[int], shapes: Shapes) -> Layout:
    """Where the result goes: queries that were cut along the sequence are so again."""
    back = set(row_axes) | set(rows.axes)
    if back == set(row_axes):
        return inner
    dims = [_shard_dim(f.size, [a for a in f.axes if a not in back], [f], inner.mesh) for (f,) in inner.dims]
    dims[-2] = _shard_dim(shapes.rows, _order_axes(sorted(back), rows), [rows], inner.mesh)
    return Layout.make(inner.mesh, dims)


def _describe(parts: Sequence[AxisRole], rows: DimSharding, gathered: Sequence[int], shapes: Shapes, mesh) -> str:
    """What was chosen, for reports."""
    words = []
    for axis, part in enumerate(parts):
        if mesh.size(axis) == 1:
            continue
        if part.kind in ("ring", "merge"):
            words.append(part.kind)
        elif part.kind == "lead" and axis in rows.axes:
            words.append("heads" if part.dim == len(shapes.lead) - 1 else "batch")
        elif axis in gathered:
            words.append("keys gathered")
    return " + ".join(dict.fromkeys(words)) or "local"


# ---------------------------------------------------------------------- what it costs


def estimate_cost(
    way: Strategy, shapes: Shapes, query: Operand, key: Operand, value: Operand, mask: Operand | None, is_causal: bool
) -> float:
    """About the time of a rank, in bytes that could be sent in it."""
    mesh, item = query.layout.mesh, query.dtype.itemsize
    total = sum(
        redistribute_bytes(x.layout, to, x.dtype.itemsize) for x, to in _redistributions(way, query, key, value, mask)
    )
    total += redistribute_bytes(way.computed, way.result, item)
    q, o, kv = (
        _mean_local_numel(way.query) * item,
        _mean_local_numel(way.computed) * item,
        (_mean_local_numel(way.key) + _mean_local_numel(way.value)) * item,
    )
    if way.gather:
        gathers = math.prod(mesh.size(a) for a in way.gather)
        total += (gathers - 1) * kv + MESSAGE_COST * len(way.gather)
        kv *= gathers
    if kv > max(q + o, (_mean_local_numel(key.layout) + _mean_local_numel(value.layout)) * item):
        total += MEMORY_WEIGHT * kv  # a rank would hold more than its share
    if q + o > max(kv, 2 * _mean_local_numel(query.layout) * item):
        total += MEMORY_WEIGHT * (q + o)
    for axis in way.merge:
        sums = o / item * max(4, item) * (1 + 2 / max(1, shapes.value_features))
        total += 2 * (1 - 1 / mesh.size(axis)) * sums + 2 * MESSAGE_COST
    if is_zigzag(way, is_causal, mask is not None):
        total += q + o + (kv if way.ring else 0)
    divided = math.prod(mesh.size(a) for a in (*way.computed.shard_axes, *way.merge))
    scores = math.prod(shapes.lead) * shapes.rows * shapes.columns / divided
    if is_causal and (is_zigzag(way, is_causal, mask is not None) or not (way.merge or way.computed.is_sharded(-2))):
        scores /= 2  # else some rank has twice the mean
    flops = 2 * scores * (shapes.features + shapes.value_features)
    stops = math.prod(mesh.size(a) for a in way.ring)
    return total + max(flops / FLOPS_PER_BYTE.get(mesh.device_type, 1024), (stops - 1) * (kv + MESSAGE_COST))


def is_zigzag(way: Strategy, is_causal: bool, masked: bool) -> bool:
    """Whether rows (and columns that go round) are dealt so that ranks have equal work."""
    return is_causal and not masked and way.computed.is_sharded(way.computed.ndim - 2)


def _redistributions(way: Strategy, query, key, value, mask) -> list[tuple[Operand, Layout]]:
    found = [(query, way.query), (key, way.key), (value, way.value)]
    return [*found, (mask, way.mask)] if mask is not None and way.mask is not None else found


def _mean_local_numel(layout: Layout) -> float:
    """Elements on a rank, on average: costs must come out alike on all ranks."""
    return layout.numel / math.prod(layout.mesh.size(a) for a in layout.shard_axes)


def redistribute_bytes(source: Layout, target: Layout, item: int) -> float:
    """Bytes that a rank sends to take a tensor of `item` bytes an element from one layout to another, about."""
    if source is target:
        return 0.0
    total, now = 0.0, source
    for step in steps(source, target):
        changed = [a for a, (p, n) in enumerate(zip(now.placements, step.after.placements, strict=True)) if p != n]
        size = math.prod(source.mesh.size(a) for a in changed)
        held = _mean_local_numel(now) * item
        if step.name == "gather":
            total += (size - 1) * (held + MESSAGE_COST)
        elif step.name == "swap":
            total += (size - 1) * (held / size + MESSAGE_COST)
        elif step.name in ("recut", "retile"):
            total += held * _moved_fraction(now, step.after) + MESSAGE_COST
        now = step.after
    return total


def _moved_fraction(before: Layout, after: Layout) -> float:
    """The part of a dim, cut otherwise by the same axis, that changes hands."""
    for a, b in zip(before.dims, after.dims, strict=True):
        if a != b and a[0].size:
            cuts = zip(
                starts(a[0].shard_sizes), a[0].shard_sizes, starts(b[0].shard_sizes), b[0].shard_sizes, strict=True
            )
            stays = sum(max(0, min(s + n, t + m) - max(s, t)) for s, n, t, m in cuts)
            return 1 - stays / a[0].size
    return 0.0
