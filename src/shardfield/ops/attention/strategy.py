"""Choose how the mesh divides attention: the role of each mesh axis, by estimated cost. Pure.

Each mesh axis has one of these roles. Of all combinations the cheapest is chosen, by bytes sent and by how much of the
communication overlaps with computation:

    lead i    shards a batch dim or the heads: ranks are independent, nothing is sent
    ring      shards queries and keys: keys and values circulate
    gather    shards queries; sharded keys and values are gathered first
    merge     shards keys: each rank attends with all queries to its keys, and the outputs are merged
    none      shards nothing

A sharded sequence becomes sharded heads ("lead") by an all_to_all of all operands, and back for the result. The result
keeps the sharding of the queries along a batch dim, the heads or the sequence.
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
from .forced_strategy import allowed_roles

# The least work of a visit, so that it takes longer than its launches and messages, about a millisecond of host time;
# and the largest number of bytes of keys and values that are visited together.
VISIT_FLOPS = {"cpu": 1e8, "cuda": 5.6e11}
VISIT_BYTES = 1 << 27

# Floating point operations that take as long as sending one byte.
FLOPS_PER_BYTE = {"cpu": 64, "cuda": 1024}
MESSAGE_COST = 1 << 15  # bytes that take as long to send as the latency of one message
MEMORY_WEIGHT = 64  # cost of one more byte in memory, in bytes sent
RECEIVED_AGAIN = 1.5  # bytes of a ring whose blocks come at once over those of gathered keys: backward needs them again
FREE_MEMORY = 1 << 23  # bytes of gathered keys and values that cost no memory worth counting


class AxisRole(NamedTuple):
    """The role of a mesh axis: "lead", "ring", "gather", "merge" or "none"; `dim` is the dim that "lead" shards."""

    kind: str
    dim: int = 0


class Shapes(NamedTuple):
    """The sizes of a call. `lead`: leading dims of the result; `group`: query heads per key head."""

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
        if gqa:  # each head of the keys and values serves `group` consecutive query heads
            heads[1:] = [torch.Size((*h[:-1], query.shape[-3])) for h in heads[1:]]
        lead = tuple(torch.broadcast_shapes(*heads))
        return Shapes(lead, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1], group)


class Strategy(NamedTuple):
    """The layouts of the operands during the computation, of its output (`computed`), and of the result.

    `ring`, `gather` and `merge` are the mesh axes of each role. Keys are sharded by merge, ring and gather axes, in
    that order.
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
    costs: dict[str, float] | None = None  # summary of each strategy that was considered -> its estimated cost


def choose_strategy(
    query: Operand, key: Operand, value: Operand, mask: Operand | None, gqa: bool, is_causal: bool
) -> Strategy:
    """Return the strategy of lowest estimated cost."""
    shapes = Shapes.of(query, key, value, gqa)
    mesh = query.layout.mesh
    choices = [list(_axis_roles(a, shapes, query.layout, key.layout, value.layout, mask)) for a in range(mesh.ndim)]
    choices = [allowed_roles(roles, len(shapes.lead) - 1, mesh, a) for a, roles in enumerate(choices)]
    candidates = [_build_strategy(r, shapes, query.layout, key.layout, value.layout, mask) for r in product(*choices)]
    costs = [estimate_cost(c, shapes, query, key, value, mask, is_causal) for c in candidates]
    by_cost = sorted(zip(costs, range(len(costs)), strict=True))
    by_name = {candidates[i].summary: cost for cost, i in reversed(by_cost)}  # the cheapest of each name
    return candidates[by_cost[0][1]]._replace(costs=dict(sorted(by_name.items(), key=lambda item: item[1])))


# ---------------------------------------------------------------------- roles an axis may have


def _sharded_dim_kind(layout: Layout | None, axis: int, ndim: int) -> tuple[str, int] | None:
    """Return what an axis shards in an operand: ("lead", i) with i a dim of the result, ("rows", 0) or ("last", 0)."""
    if layout is None:
        return None
    for dim in range(layout.ndim):
        if axis in layout.axes_of(dim):
            from_end = layout.ndim - dim
            return ("last", 0) if from_end == 1 else ("rows", 0) if from_end == 2 else ("lead", ndim - from_end)
    return None


def _axis_roles(axis: int, shapes: Shapes, q: Layout, k: Layout, v: Layout, mask: Operand | None) -> Iterator[AxisRole]:
    """Yield the roles that an axis may have, by what it shards now."""
    ndim = len(shapes.lead) + 2
    size = q.mesh.size(axis)
    query_kind, *kv_kinds = [_sharded_dim_kind(x, axis, ndim) for x in (q, k, v)]
    mask_kind = _sharded_dim_kind(mask.layout, axis, ndim) if mask is not None else None
    few_key_heads = query_kind == ("lead", len(shapes.lead) - 1) and shapes.lead[-1] // shapes.group < size
    if query_kind is not None and query_kind[0] == "lead" and not (shapes.group > 1 and few_key_heads):
        yield AxisRole(*query_kind)
        return
    if query_kind is None and not any(kv_kinds) and mask_kind is None:
        yield AxisRole("none")
        return
    keys_sharded = any(kv_kinds)
    if keys_sharded and size > 1:
        yield AxisRole("ring")
        yield AxisRole("merge")
    if size == 1 and query_kind is None:
        yield AxisRole("none")
        return
    yield AxisRole("gather")
    for dim, n in enumerate(shapes.lead):
        units = n // shapes.group if dim == len(shapes.lead) - 1 else n
        if (
            size > 1
            and units
            and (("lead", dim) in (*kv_kinds, mask_kind) or (units % size == 0 and (query_kind or keys_sharded)))
        ):
            yield AxisRole("lead", dim)


# ---------------------------------------------------------------------- layouts


def _shard_dim(size: int, axes: Sequence[int], like: Sequence[DimSharding], mesh) -> tuple[DimSharding, ...]:
    """Return a dim sharded by `axes`, as one of `like` (or its outer axes) if possible, else in chunks."""
    axes = tuple(axes)
    if not axes:
        return (DimSharding(size),)
    for factor in like:
        if factor.size == size and factor.axes[: len(axes)] == axes:
            sizes = factor.shard_sizes
            for axis in reversed(factor.axes[len(axes) :]):
                sizes = outer_shard_sizes(sizes, mesh.size(axis))
            return (DimSharding(size, axes, sizes),)
    return (DimSharding(size, axes, nested_chunk(size, [mesh.size(a) for a in axes])),)


def _order_axes(axes: Sequence[int], like: DimSharding) -> list[int]:
    """Sort axes in the order of a factor's axes, the others after them."""
    return sorted(axes, key=lambda a: (like.axes.index(a) if a in like.axes else len(like.axes), a))


def _build_strategy(
    roles: Sequence[AxisRole], shapes: Shapes, q: Layout, k: Layout, v: Layout, mask: Operand | None
) -> Strategy:
    mesh = q.mesh
    (rows,), (columns,), (v_columns,) = (x.dims[-2] for x in (q, k, v))
    axes_of_role = {kind: [a for a, p in enumerate(roles) if p.kind == kind] for kind in ("ring", "gather", "merge")}
    kv_sharding = columns if columns.axes else v_columns  # the keys' sharding, or the values' if keys are unsharded
    gathered = [a for a in axes_of_role["gather"] if a in columns.axes or a in v_columns.axes]
    key_axes = [a for kind in ("merge", "ring") for a in _order_axes(axes_of_role[kind], kv_sharding)] + _order_axes(
        gathered, kv_sharding
    )
    row_axes = _order_axes([*axes_of_role["ring"], *axes_of_role["gather"]], rows)
    row_sharding = _shard_dim(shapes.rows, row_axes, [rows, kv_sharding], mesh)
    key_sharding = _shard_dim(shapes.columns, key_axes, [columns, v_columns], mesh)
    lead, key_lead = [], []
    for dim, n in enumerate(shapes.lead):
        axes = [a for a, p in enumerate(roles) if p == AxisRole("lead", dim)]
        query_dim, key_dim = _shard_leading_dim(dim, n, axes, shapes, q, k, v)
        lead.append(query_dim)
        key_lead.append(key_dim)
    computed = Layout.make(mesh, [*lead, row_sharding, (DimSharding(shapes.value_features),)])
    result = _result_layout(computed, rows, row_axes, shapes)
    mask_layout = None
    if mask is not None:
        column_sharding = _shard_dim(
            shapes.columns, [a for a in key_axes if a in axes_of_role["merge"]], [key_sharding[0]], mesh
        )
        mask_layout = _broadcast_layout(
            mesh, [*lead, row_sharding, column_sharding], (*shapes.lead, shapes.rows, shapes.columns), mask.shape
        )
    return Strategy(
        query=_broadcast_layout(
            mesh, [*lead, row_sharding, (DimSharding(q.shape[-1]),)], (*shapes.lead, *q.shape[-2:]), q.shape
        ),
        key=_key_layout(mesh, key_lead, key_sharding, k),
        value=_key_layout(mesh, key_lead, key_sharding, v),
        mask=mask_layout,
        computed=computed,
        result=result,
        ring=tuple(a for a in key_axes if a in axes_of_role["ring"]),
        gather=tuple(gathered),
        merge=tuple(a for a in key_axes if a in axes_of_role["merge"]),
        summary=_describe(roles, rows, gathered, shapes, mesh),
    )


def _shard_leading_dim(dim: int, n: int, axes, shapes: Shapes, q: Layout, k: Layout, v: Layout):
    """Return the sharding of a leading dim for queries and for keys: equal, or in units of head groups."""
    at = dim - len(shapes.lead) - 2
    group = shapes.group if dim == len(shapes.lead) - 1 else 1
    candidates = []
    for x, unit in ((q, group), (k, 1), (v, 1)):
        if -at <= x.ndim and x.axes_of(x.ndim + at):
            (factor,) = x.dims[at]
            if all(length % unit == 0 for length in factor.shard_sizes):
                candidates.append(
                    DimSharding(factor.size // unit, factor.axes, tuple(m // unit for m in factor.shard_sizes))
                )
    (per_group,) = _shard_dim(n // group, axes, candidates, q.mesh)
    return (DimSharding(n, per_group.axes, tuple(m * group for m in per_group.shard_sizes)),), (per_group,)


def _broadcast_layout(mesh, dims, sizes: Sequence[int], shape: Sequence[int]) -> Layout:
    """Return the layout of an operand of `shape` that broadcasts to dims of `sizes`, sharded like the dims it has."""
    skip = len(sizes) - len(shape)
    return Layout.make(
        mesh, [dims[skip + d] if n == sizes[skip + d] else (DimSharding(n),) for d, n in enumerate(shape)]
    )


def _key_layout(mesh, lead, sharding, x: Layout) -> Layout:
    sizes = [f.size for (f,) in lead]
    return _broadcast_layout(mesh, [*lead, sharding, (DimSharding(x.shape[-1]),)], (*sizes, *x.shape[-2:]), x.shape)


def _result_layout(computed: Layout, rows: DimSharding, row_axes: Sequence[int], shapes: Shapes) -> Layout:
    """Return the layout of the result: its sequence is sharded as that of the queries."""
    sequence_axes = set(row_axes) | set(rows.axes)
    if sequence_axes == set(row_axes):
        return computed
    dims = [
        _shard_dim(f.size, [a for a in f.axes if a not in sequence_axes], [f], computed.mesh) for (f,) in computed.dims
    ]
    dims[-2] = _shard_dim(shapes.rows, _order_axes(sorted(sequence_axes), rows), [rows], computed.mesh)
    return Layout.make(computed.mesh, dims)


def _describe(roles: Sequence[AxisRole], rows: DimSharding, gathered: Sequence[int], shapes: Shapes, mesh) -> str:
    """Describe the strategy, for reports."""
    words = []
    for axis, role in enumerate(roles):
        if mesh.size(axis) == 1:
            continue
        if role.kind in ("ring", "merge"):
            words.append(role.kind)
        elif role.kind == "lead" and axis in rows.axes:
            words.append("heads" if role.dim == len(shapes.lead) - 1 else "batch")
        elif axis in gathered:
            words.append("keys gathered")
    return " + ".join(dict.fromkeys(words)) or "local"


# ---------------------------------------------------------------------- cost


def estimate_cost(
    strategy: Strategy,
    shapes: Shapes,
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Operand | None,
    is_causal: bool,
) -> float:
    """Estimate the time of one rank, as the number of bytes that it could send in this time."""
    mesh, item = query.layout.mesh, query.dtype.itemsize
    total = sum(
        redistribute_bytes(x.layout, target, x.dtype.itemsize)
        for x, target in _redistributions(strategy, query, key, value, mask)
    )
    total += redistribute_bytes(strategy.computed, strategy.result, item)
    q, o, kv = (
        mean_local_numel(strategy.query) * item,
        mean_local_numel(strategy.computed) * item,
        (mean_local_numel(strategy.key) + mean_local_numel(strategy.value)) * item,
    )
    if strategy.gather:
        gathers = math.prod(mesh.size(a) for a in strategy.gather)
        total += (gathers - 1) * kv + MESSAGE_COST * len(strategy.gather)
        kv *= gathers
    if kv > max(q + o, (mean_local_numel(key.layout) + mean_local_numel(value.layout)) * item):
        total += MEMORY_WEIGHT * max(0, kv - FREE_MEMORY)  # a rank would hold more than its share
    if q + o > max(kv, 2 * mean_local_numel(query.layout) * item):
        total += MEMORY_WEIGHT * (q + o)
    for axis in strategy.merge:
        merged_bytes = o / item * max(4, item) * (1 + 2 / max(1, shapes.value_features))
        total += 2 * (1 - 1 / mesh.size(axis)) * merged_bytes + 2 * MESSAGE_COST
    if is_zigzag(strategy, is_causal, mask is not None):
        total += q + o + (kv if strategy.ring else 0)
    divided = math.prod(mesh.size(a) for a in (*strategy.computed.shard_axes, *strategy.merge))
    scores = math.prod(shapes.lead) * shapes.rows * shapes.columns / divided
    if is_causal and (
        is_zigzag(strategy, is_causal, mask is not None) or not (strategy.merge or strategy.computed.is_sharded(-2))
    ):
        scores /= 2  # else some rank has twice the average work
    flops = 2 * scores * (shapes.features + shapes.value_features)
    work = flops / FLOPS_PER_BYTE.get(mesh.device_type, 1024)
    others = math.prod(mesh.size(a) for a in strategy.ring) - 1
    if others and is_at_once(strategy, is_causal, item):  # nothing overlaps, and backward receives the blocks again
        return total + work + RECEIVED_AGAIN * others * kv + MESSAGE_COST
    return total + max(work, others * (kv + MESSAGE_COST))


def is_zigzag(strategy: Strategy, is_causal: bool, has_mask: bool) -> bool:
    """Return whether rows (and circulating columns) are in zigzag order, which gives ranks equal work."""
    return is_causal and not has_mask and strategy.computed.is_sharded(strategy.computed.ndim - 2)


def _redistributions(strategy: Strategy, query, key, value, mask) -> list[tuple[Operand, Layout]]:
    pairs = [(query, strategy.query), (key, strategy.key), (value, strategy.value)]
    return [*pairs, (mask, strategy.mask)] if mask is not None and strategy.mask is not None else pairs


def mean_local_numel(layout: Layout) -> float:
    """Return the average number of elements on a rank; costs must be equal on all ranks."""
    return layout.numel / math.prod(layout.mesh.size(a) for a in layout.shard_axes)


def redistribute_bytes(source: Layout, target: Layout, item: int) -> float:
    """Return the approximate bytes that a rank sends to redistribute a tensor with `item` bytes per element."""
    if source is target:
        return 0.0
    total, current = 0.0, source
    for step in steps(source, target):
        changed = [a for a, (p, n) in enumerate(zip(current.placements, step.after.placements, strict=True)) if p != n]
        size = math.prod(source.mesh.size(a) for a in changed)
        local_bytes = mean_local_numel(current) * item
        if step.name == "gather":
            total += (size - 1) * (local_bytes + MESSAGE_COST)
        elif step.name == "swap":
            total += (size - 1) * (local_bytes / size + MESSAGE_COST)
        elif step.name in ("reshard", "reshard merged"):
            total += local_bytes * _moved_fraction(current, step.after) + MESSAGE_COST
        current = step.after
    return total


def _moved_fraction(before: Layout, after: Layout) -> float:
    """Return the fraction of a dim that changes ranks when the same axis shards it with other shard sizes."""
    for a, b in zip(before.dims, after.dims, strict=True):
        if a != b and a[0].size:
            shards = zip(
                starts(a[0].shard_sizes), a[0].shard_sizes, starts(b[0].shard_sizes), b[0].shard_sizes, strict=True
            )
            kept = sum(max(0, min(s + n, t + m) - max(s, t)) for s, n, t, m in shards)
            return 1 - kept / a[0].size
    return 0.0


def blocks_together(strategy: Strategy, is_causal: bool, item: int) -> int:
    """Return how many blocks of a ring to visit at once, by the work with one block and its size. `item`: bytes."""
    mesh = strategy.key.mesh
    queries, keys, values = (mean_local_numel(x) for x in (strategy.query, strategy.key, strategy.value))
    columns = strategy.key.shape[-2] / math.prod(mesh.size(a) for a in (*strategy.merge, *strategy.ring))
    return _fill_visit(mesh.device_type, 4 * queries * columns / (1 + is_causal), (keys + values) * item)


def _fill_visit(device: str, flops: float, nbytes: float) -> int:
    """Return how many blocks, of so much work and so many bytes each, are one visit.

    >>> _fill_visit("cuda", 3.4e10, 8 << 20), _fill_visit("cuda", 6e11, 8 << 20)
    (16, 1)
    """
    wanted = VISIT_FLOPS.get(device, VISIT_FLOPS["cuda"]) / max(flops, 1.0)
    return max(1, int(min(wanted, VISIT_BYTES / max(nbytes, 1.0))))


def is_at_once(strategy: Strategy, is_causal: bool, item: int) -> bool:
    """Return whether all blocks of a ring are one visit: the work on the own block is too short to hide a message."""
    axes = [a for a in strategy.ring if strategy.key.mesh.size(a) > 1]
    if is_causal or len(axes) != 1:
        return False
    together = blocks_together(strategy, is_causal, item)
    return 1 < together >= strategy.key.mesh.size(axes[0]) - 1
