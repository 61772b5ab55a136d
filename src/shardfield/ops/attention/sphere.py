"""torch-harmonics' neighborhood attention on the sphere, on queries and keys sharded along any dims.

A query attends to the keys within a distance on the sphere. The table of these pairs has a row for each latitude of the
queries and a column for each key that the first query of the latitude reads (a coarser grid of keys: the other way
round). Each rank computes the latitudes of the queries that it owns. It receives the band of key latitudes that they
read, and keeps the part of the table that belongs to them. A sharding of longitudes moves to samples, latitudes or
heads first. The handlers are found by the names of the operators, so that torch-harmonics need not be installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import runtime, trace_state
from ..._compat.autocast import concatenate
from ...dispatch.arguments import as_operand, mesh_of, to_full_tensor
from ...dispatch.fallback import gather_fallback
from ...layout import DimSharding, Layout, nested_chunk, shard_sizes_of
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.derived import kept_with_tensor
from .._common.together import empty_result_of, together
from ..stencil.disco import Bands
from ..stencil.opaque import Reach, place_axes
from ..stencil.padded_block import PaddedBlockPlan

LIBRARY = "attention_kernels"
ATTENTION = "_neighborhood_s2_attention"
LATITUDE = 1  # of tensors (batch, latitude, longitude, channels)
NAMES = (
    "kw", "vw", "qw", "quad_weights", "col_idx", "row_off", "seg", "seg_off", "nh", "nlon_in", "nlat_out", "nlon_out",
)  # fmt: skip


class Pairs(NamedTuple):
    """The table of pairs: columns of each row, and the same as arcs (latitude, first longitude, length) of each row."""

    column: Tensor
    row_offsets: Tensor
    arcs: Tensor
    arc_offsets: Tensor


class SpherePlan(NamedTuple):
    """One rank's part of the attention: layouts, heads, the band of keys with its latitudes, and the pairs."""

    keys: Layout
    queries: Layout
    heads: DimSharding
    band: PaddedBlockPlan
    latitudes: slice
    pairs: Pairs


def attend(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `attention(keys, values, queries, weights of key latitudes, *pairs, heads, *sizes)` on sharded fields."""
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    plain = {n: to_full_tensor(t) if isinstance(t, ShardTensor) else t for n, t in given.items() if n not in NAMES[:3]}
    fields = [given[n] for n in NAMES[:3]]
    if (trace_state.values_unknown() and not trace_state.is_concrete(plain["col_idx"])) or not _match(fields, plain):
        return gather_fallback(func, types, args, kwargs)  # the plan depends on the values; or the call raises
    mesh = mesh_of(fields, None)
    (key, key_layout), (value, value_layout), (query, query_layout) = (as_operand(t, mesh) for t in fields)
    made_for = ("sphere", key_layout.bare, query_layout.bare, *(plain[n] for n in NAMES[8:]))
    plan = kept_with_tensor(plain["col_idx"], made_for, lambda: _make_plan(key_layout, query_layout, plain))
    channels = [x.shape[-1] for x in (key_layout, value_layout)]
    of_values = _with_channels(plan.keys, channels[1], plan.heads)
    both = [redistribute(key, key_layout, plan.keys), redistribute(value, value_layout, of_values)]
    block = plan.band.gather_block(concatenate(both, -1))  # one message for both
    query, block = together([redistribute(query, query_layout, plan.queries), block])
    result = _with_channels(plan.queries, channels[1], plan.heads)
    shape, heads = result.local_shape, result.local_size_of(plan.heads)
    if 0 in shape:
        return wrap(empty_result_of([query, block], shape, block.dtype, block), result)
    key, value = (t.contiguous() for t in block.split([n // plan.heads.size * heads for n in channels], -1))
    sizes = heads, plain["nlon_in"], shape[LATITUDE], plain["nlon_out"]
    weights = plain["quad_weights"][plan.latitudes].contiguous()
    return wrap(func(key, value, query.contiguous(), weights, *plan.pairs, *sizes), result)


def _match(fields: Sequence[Tensor], plain: dict[str, Any]) -> bool:
    """Return whether the operator accepts the sizes and dtypes of keys, values and queries."""
    key, value, query = fields
    return (
        all(t.ndim == 4 and t.dtype is query.dtype and t.shape[-1] % plain["nh"] == 0 for t in fields)
        and key.shape[:-1] == value.shape[:-1] == (query.shape[0], len(plain["quad_weights"]), plain["nlon_in"])
        and query.shape[1:] == (plain["nlat_out"], plain["nlon_out"], key.shape[-1])
    )


def _with_channels(layout: Layout, channels: int, heads: DimSharding) -> Layout:
    """Return the layout with this number of channels, which are sharded as the heads are."""
    each = channels // heads.size
    return layout.with_dim(
        layout.ndim - 1, DimSharding(channels, heads.axes, tuple(n * each for n in heads.shard_sizes))
    )


def _shard_heads(layout: Layout, axes: Sequence[int], heads: int) -> DimSharding:
    """Return the heads, sharded over the `axes` that have no place in the layout; not if there are too few heads."""
    left = [a for a in axes if a not in layout.shard_axes]
    sizes = [layout.mesh.size(a) for a in left]
    if not left or heads < math.prod(sizes):
        return DimSharding(heads)
    return DimSharding(heads, tuple(left), tuple(nested_chunk(heads, sizes)))


def _make_plan(keys: Layout, queries: Layout, plain: dict[str, Any]) -> SpherePlan:
    pairs = Pairs(*(plain[n] for n in NAMES[4:8]))
    nlon_in, nlat_out, nlon_out = (plain[n] for n in NAMES[9:])
    by_key = nlon_in % nlon_out != 0  # rows of the table are latitudes of keys, columns are queries
    nlat_in, wide = keys.shape[LATITUDE], nlon_out if by_key else nlon_in
    row = _row_of(pairs.row_offsets)
    outputs, inputs = (pairs.column // wide, row) if by_key else (row, pairs.column // wide)
    bands = Bands.of(nlat_in, nlat_out, outputs, inputs)
    reach = {0: Reach(0, 0), LATITUDE: Reach(1, 1)}
    axes = queries.nontrivial_axes(queries.shard_axes or keys.shard_axes)
    if queries.shard_axes or not keys.shard_axes:  # the result has the layout of the queries
        target = place_axes(queries, reach)
        (rows,) = target.dims[LATITUDE]
        back = Bands(nlat_out, nlat_in, (), ())
        (own,) = keys.dims[LATITUDE] if len(keys.dims[LATITUDE]) == 1 else (DimSharding(nlat_in),)
        sizes = own.shard_sizes if own.axes == rows.axes else back.owned(shard_sizes_of(rows)) if rows.axes else ()
        source = target.with_dim(LATITUDE, DimSharding(nlat_in, rows.axes, tuple(sizes)))
    else:
        source = place_axes(keys, reach)
        (own,) = source.dims[LATITUDE]
        sizes = bands.owned(own.shard_sizes) if own.axes else ()
        target = source.with_dim(LATITUDE, DimSharding(nlat_out, own.axes, tuple(sizes)))
    heads = _shard_heads(target, axes, plain["nh"])
    source = _with_channels(source.with_dim(2, DimSharding(nlon_in)), keys.shape[-1], heads)
    target = _with_channels(target.with_dim(2, DimSharding(nlon_out)), queries.shape[-1], heads)
    band = PaddedBlockPlan(source, {LATITUDE: bands}, {LATITUDE: shard_sizes_of(target.dims[LATITUDE][0])})
    if not source.is_sharded(LATITUDE):
        return SpherePlan(source, target, heads, band, slice(None), pairs)
    (first, stop), start = band.owned[LATITUDE], band.block_starts[LATITUDE]
    end = bands.receptive_field(first, stop).stop if first < stop else start
    at, of = ((start, end), (first, stop)) if by_key else ((first, stop), (start, end))
    return SpherePlan(source, target, heads, band, slice(start, end), _select(pairs, at, of, wide))


def _row_of(offsets: Tensor) -> Tensor:
    lengths = offsets.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)


def _select(pairs: Pairs, rows: tuple[int, int], latitudes: tuple[int, int], wide: int) -> Pairs:
    """Return the entries of some rows, and of some latitudes of their columns; both are counted from their first."""

    def chosen(offsets: Tensor, latitude: Tensor) -> tuple[Tensor, Tensor]:
        row = _row_of(offsets)
        kept = (row >= rows[0]) & (row < rows[1]) & (latitude >= latitudes[0]) & (latitude < latitudes[1])
        counts = torch.bincount(row[kept] - rows[0], minlength=max(rows[1] - rows[0], 0))
        return kept, torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(offsets.dtype)

    kept, row_offsets = chosen(pairs.row_offsets, pairs.column // wide)
    kept_arcs, arc_offsets = chosen(pairs.arc_offsets, pairs.arcs[:, 0])
    arcs = pairs.arcs[kept_arcs] - pairs.arcs.new_tensor([latitudes[0], 0, 0])
    return Pairs((pairs.column[kept] - latitudes[0] * wide).contiguous(), row_offsets, arcs.contiguous(), arc_offsets)


def permute(order: tuple[int, ...]) -> Any:
    """Return a handler that copies a field with its dims in another order."""
    return lambda func, types, args, kwargs: args[0].permute(order).clone(memory_format=torch.contiguous_format)


for _name in ("optimized", "torch"):
    runtime.active.registry.register_named(f"{LIBRARY}.{ATTENTION}_{_name}.default", attend)
runtime.active.registry.register_named(f"{LIBRARY}.permute_to_nhwc.default", permute((0, 2, 3, 1)))
runtime.active.registry.register_named(f"{LIBRARY}.permute_to_nchw.default", permute((0, 3, 1, 2)))
