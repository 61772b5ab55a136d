"""The rule of scaled_dot_product_attention, for tensors of any layout.

`strategy` decides which dim each mesh axis shards. This module converts operands to the form that `ring.attend` takes
and converts the result back. If the strategy needs no communication between ranks, torch's function runs on the local
tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..._compat.attention import left_aligned
from ..._compat.autocast import concatenate
from ...comm import autograd_collectives
from ...comm.ring import Ring, plan_visits, visit_at_once
from ...comm.route import Route, tile_route
from ...debug import explain
from ...dispatch.arguments import to_full_tensor
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import handler, handler_of, rule
from ...layout import Layout
from ...redistribute import redistribute
from ...tensor import ShardTensor
from .._common.probe import HALF_DTYPES, probe, stand_in
from ..elementwise.random import draw_key, global_index
from .causal_tiles import (
    Coords,
    Spans,
    ZigzagExchange,
    all_columns,
    causal_tiles,
    full_tiles,
    merge_spans,
    plan_zigzag,
    visible_columns,
)
from .merged_dims import run_merged
from .result_order import keep_order, result_order
from .ring import attend
from .ring_plan import Dropout, RingPlan
from .strategy import Strategy, blocks_together, choose_strategy, is_at_once, is_zigzag


@rule("scaled_dot_product_attention")
def sdpa(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    fn,
):
    """Plan the cheapest strategy. Usually queries stay on their ranks, and keys and values circulate."""
    dtype = _validate(fn, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        return None  # key and value groups of different sizes: no sharding of the heads fits both
    strategy = choose_strategy(query, key, value, attn_mask, enable_gqa, is_causal)
    ndim = strategy.computed.ndim
    is_local = (
        not strategy.ring
        and not strategy.merge
        and not (is_causal and strategy.computed.is_sharded(ndim - 2))
        and not dropout_p
    )
    # torch's function drops empty shards from the graph, so if there are any, no rank calls it.
    is_local = is_local and not any(
        _has_empty_shard(x) for x in (strategy.query, strategy.key, strategy.value, strategy.computed)
    )
    default_scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    blocks = _BlockwiseAttention(
        strategy, query, key, is_causal, attn_mask, default_scale if scale is None else scale, dropout_p, dtype
    )
    gathers = _gather_steps(strategy)
    shapes = [tuple(x.shape) for x in (query, key, value, attn_mask) if x is not None]

    def local(query, key, value, attn_mask):
        explain.record_outcome(f"rule: {strategy.summary}", costs=strategy.costs)
        for dim, sizes, group in gathers:
            if key.shape == value.shape and key.dtype is value.dtype:
                key, value = autograd_collectives.gather_all_replicate_in([key, value], dim, sizes, group)
            else:
                move = partial(autograd_collectives.gather_replicate_in, dim=dim, shard_sizes=sizes, group=group)
                key, value = exchange_together(move, key, value)
        if is_local:
            out = fn(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        else:
            tensors = [t for t in (query, key, value, attn_mask) if t is not None]
            order = result_order(tensors, shapes, dtype, dropout_p, is_causal, enable_gqa)
            out = blocks(query, key, value, attn_mask, order)
        return out if strategy.computed is strategy.result else redistribute(out, strategy.computed, strategy.result)

    operands = {"query": strategy.query, "key": strategy.key, "value": strategy.value}
    if strategy.mask is not None:
        operands["attn_mask"] = strategy.mask
    return Plan(local=local, layout=strategy.result, operands=operands, own=dropout_p > 0)


_sdpa_rule = handler_of(F.scaled_dot_product_attention)


@handler("scaled_dot_product_attention")
def sdpa_handler(func, types, args, kwargs):
    """Replace torch's causal biases, which are tensors without data, by `is_causal` or a mask."""
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    bias = named.get("attn_mask")
    # A CausalBias implies that its module is imported. Importing it here would import the compiler, which takes 0.5 s.
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(bias, module.CausalBias):
        return keep_order(run_merged(_sdpa_rule, func, types, args, kwargs, named), named)
    if named.get("is_causal"):
        raise ValueError("CausalBias should not be used with causal=True")
    rows, columns = bias.seq_len_q, bias.seq_len_kv
    named["attn_mask"] = None
    if bias.variant is module.CausalVariant.UPPER_LEFT or rows == columns:
        named["is_causal"] = True
    else:
        device = named["query"].device
        named["attn_mask"] = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
    return keep_order(run_merged(_sdpa_rule, func, types, (), named, named), named)


@handler(left_aligned, exact=True)
def left_aligned_mask(func, types, args, kwargs):
    """Return whether the mask is left-aligned. Only the mask is read; the tensor contributes its shape."""
    tensor, mask = args
    full_mask = to_full_tensor(mask) if isinstance(mask, ShardTensor) else mask
    return func(torch.empty((*tensor.shape[:-1], 1), device=full_mask.device), full_mask)


def _validate(fn, query, key, value, mask, dropout_p, is_causal, scale, gqa) -> torch.dtype:
    """Raise torch's errors for invalid calls on all ranks; return the dtype of the result."""
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")

    def call(query, key, value, mask=None):
        # mask and is_causal together are valid for some kernels, but not for shape functions
        return fn(query, key, value, mask, 0.0, is_causal and mask is None, scale=scale, enable_gqa=gqa)

    probe(call, query, key, value, mask, meta=True)

    def small(x: Operand, full_dims: Sequence[int]) -> Tensor:
        return stand_in(x, [n if d - x.ndim in full_dims else min(n, 2) for d, n in enumerate(x.shape)])

    # Kernels check the number of heads and of features, so the stand-ins have all of them.
    tensors = [small(x, (-3, -1)) for x in (query, key, value)]
    bias = None if mask is None else small(mask, (-3,))
    return probe(fn, *tensors, bias, 0.0, is_causal, scale=scale, enable_gqa=gqa).dtype


def _has_empty_shard(layout: Layout) -> bool:
    return any(min((*f.shard_sizes, f.size), default=1) == 0 for d in layout.dims for f in d)


def exchange_together(move: Callable[[Tensor], Tensor], *tensors: Tensor) -> Sequence[Tensor]:
    """Apply `move` to queries, keys or values, in one message if their shapes allow it."""
    first = tensors[0]
    if any(t.shape[:-1] != first.shape[:-1] or t.dtype != first.dtype for t in tensors):
        return [move(t) for t in tensors]
    # `split`, not slices: its backward is one `cat`, and slices would each fill all features with zeros
    return move(concatenate(tensors, -1)).split([t.shape[-1] for t in tensors], -1)


def _gather_steps(strategy: Strategy) -> list[tuple[int, Sequence[int], Any]]:
    """Return (dim, shard sizes, group) of each axis along which keys are gathered, innermost first."""
    (sharding,) = strategy.key.dims[-2]
    mesh = strategy.key.mesh
    steps: list[tuple[int, Sequence[int], Any]] = []
    sizes = sharding.shard_sizes
    for axis in reversed(sharding.axes):
        size = mesh.size(axis)
        if axis not in strategy.gather:
            break
        first = strategy.key.index(sharding.axes[: sharding.axes.index(axis)]) * size
        if size > 1:
            steps.append((-2, sizes[first : first + size], mesh.get_group(axis)))
        sizes = tuple(sum(sizes[i : i + size]) for i in range(0, len(sizes), size))
    return steps


# ---------------------------------------------------------------------- blockwise attention


@dataclass(frozen=True)
class _ZigzagRoutes:
    """The zigzag exchange of rows along a mesh axis, and its inverse."""

    forward_route: Route
    inverse_route: Route
    group: ProcessGroup

    @staticmethod
    def of(exchange: ZigzagExchange, layout: Layout) -> _ZigzagRoutes:
        coord, group = layout.coords[exchange.axis], layout.mesh.get_group(exchange.axis)
        forward_route = tile_route(-2, exchange.before, exchange.after, coord)
        return _ZigzagRoutes(forward_route, tile_route(-2, exchange.after, exchange.before, coord), group)


class _BlockwiseAttention:
    """Blockwise attention of one call: this rank's `RingPlan`, and the conversion of operands for `attend`."""

    def __init__(self, strategy: Strategy, query: Operand, key: Operand, is_causal, mask, scale, dropout_p, dtype):
        computed, mesh = strategy.computed, strategy.computed.mesh
        rows, columns = query.shape[-2], key.shape[-2]
        self.dtype = dtype
        self.dropout = Dropout(dropout_p, (rows, columns)) if dropout_p else None
        self.lead = Layout.make(mesh, computed.dims[:-2])
        all_coords = list(product(*(range(n) for n in mesh.shape)))
        rows_by_coords = {c: _row_spans(computed, c) for c in all_coords}
        keys = _gathered_layout(strategy.key, strategy.gather)
        columns_by_coords = {c: _row_spans(keys, c) for c in all_coords}
        exchanges: list[ZigzagExchange] = []
        key_exchanges: list[ZigzagExchange] = []
        self.exchange_all = False  # queries, keys and values in one message
        if is_zigzag(strategy, is_causal, mask is not None):
            square = min(rows, columns)
            axes, key_axes = (
                computed.nontrivial_axes(computed.axes_of(computed.ndim - 2)),
                computed.nontrivial_axes(strategy.ring),
            )
            # the same on all ranks, as it follows from the spans of all
            self.exchange_all = axes == key_axes and rows_by_coords == columns_by_coords
            exchanges, rows_by_coords = plan_zigzag(rows_by_coords, mesh.shape, axes, computed.coords, square, False)
            key_exchanges, columns_by_coords = plan_zigzag(
                columns_by_coords, mesh.shape, key_axes, computed.coords, square, True
            )
        self.exchanges = [_ZigzagRoutes.of(d, computed) for d in exchanges]
        self.key_exchanges = [_ZigzagRoutes.of(d, computed) for d in key_exchanges]
        ring_axes = computed.nontrivial_axes(strategy.ring)
        ring = Ring(
            process_groups(computed, ring_axes),
            tuple(mesh.size(a) for a in ring_axes),
            tuple(computed.coords[a] for a in ring_axes),
        )
        positions = [_replace_coords(computed.coords, ring_axes, at) for at in product(*(range(n) for n in ring.sizes))]
        local_rows, ring_columns = rows_by_coords[computed.coords], tuple(columns_by_coords[c] for c in positions)
        together = blocks_together(strategy, is_causal, dtype.itemsize)
        if is_at_once(strategy, is_causal, dtype.itemsize):
            visits = visit_at_once(ring)
        else:  # the columns of a mask are in the order of single blocks
            visits = plan_visits(ring, together if mask is None else 1)
        columns_of = [
            merge_spans(tuple(span for step in visit for span in ring_columns[ring.owner(step)])) for visit in visits
        ]
        used = tuple((visible_columns if is_causal else all_columns)(local_rows, spans) for spans in columns_of)
        tiles = tuple((causal_tiles if is_causal else full_tiles)(local_rows, spans) for _, spans in used)
        self.plan = RingPlan(
            ring,
            visits,
            local_rows,
            ring_columns,
            used,
            tiles,
            scale,
            is_causal,
            process_groups(computed, strategy.merge),
            self.dropout,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, order: tuple[int, ...] | None) -> Tensor:
        q, k, v = (t.to(self.dtype) for t in (q, k, v))
        lead, features = self.lead.local_shape, v.shape[-1]
        q = _as_4d(q.expand(*lead, *q.shape[-2:]), lead)
        k, v = (_kv_as_4d(t, lead) for t in (k, v))
        if mask is not None:
            # kernels take a mask in fp32 or in the dtype of the query, to which autocast casts it
            mask = _mask_as_4d(mask.to(self.dtype) if mask.dtype in HALF_DTYPES else mask, lead)
        for e in self.exchanges:
            move = partial(autograd_collectives.exchange, route=e.forward_route, group=e.group)
            if self.exchange_all:
                q, k, v = exchange_together(move, q, k, v)
            else:
                q = move(q)
        for e in () if self.exchange_all else self.key_exchanges:
            move = partial(autograd_collectives.exchange, route=e.forward_route, group=e.group)
            k, v = exchange_together(move, k, v)
        head_index = key = None
        if self.dropout is not None:
            key = draw_key(self.lead.mesh)
            head_index = global_index(self.lead, q.device).reshape(q.shape[:2])
        out = attend(self.plan, q, k, v, mask, head_index, key, order)
        for e in reversed(self.exchanges):
            out = autograd_collectives.exchange(out, e.inverse_route, e.group)
        if len(lead) != 2:  # torch's kernels for other leading dims return contiguous memory
            out = out.contiguous()
        return out.reshape(*lead, out.shape[-2], features)


def _row_spans(layout: Layout, coords: Coords) -> Spans:
    return (layout.span(layout.ndim - 2, coords),)


def _replace_coords(coords: Coords, axes: Sequence[int], at: Sequence[int]) -> Coords:
    replaced = list(coords)
    for axis, coord in zip(axes, at, strict=True):
        replaced[axis] = coord
    return tuple(replaced)


def _gathered_layout(layout: Layout, axes: Sequence[int]) -> Layout:
    """Return the layout of the keys after the innermost `axes` of their sharding are gathered."""
    (sharding,) = layout.dims[-2]
    sizes = sharding.shard_sizes
    kept = [a for a in sharding.axes if a not in axes]
    for axis in reversed(sharding.axes[len(kept) :]):
        size = layout.mesh.size(axis)
        sizes = tuple(sum(sizes[i : i + size]) for i in range(0, len(sizes), size))
    return layout.with_dim(layout.ndim - 2, sharding._replace(axes=tuple(kept), shard_sizes=sizes if kept else ()))


def _as_4d(t: Tensor, lead: Sequence[int]) -> Tensor:
    """Reshape (..., rows, features) to (batch, heads, rows, features)."""
    heads = lead[-1] if lead else 1
    return t.reshape(math.prod(lead[:-1]), heads, *t.shape[-2:])


def _kv_as_4d(t: Tensor, lead: Sequence[int]) -> Tensor:
    """Reshape keys or values to (batch or 1, heads or fewer, rows, features) without expanding more than needed."""
    own_lead = [1] * (len(lead) - t.ndim + 2) + list(t.shape[:-2])
    heads = own_lead[-1] if own_lead else 1
    full_batch = all(n == m for n, m in zip(own_lead[:-1], lead[:-1], strict=True))
    if not full_batch and any(n != 1 for n in own_lead[:-1]):
        t = t.expand(*lead[:-1], *t.shape[-3:])
        own_lead[:-1] = list(lead[:-1])
    return t.reshape(math.prod(own_lead[:-1]), heads, *t.shape[-2:])


def _mask_as_4d(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """Reshape a mask to four dims, with size 1 along dims that broadcast if possible."""
    if mask.ndim <= 2 or len(lead) <= 2:
        return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    own_lead = [1] * (len(lead) - mask.ndim + 2) + list(mask.shape[:-2])
    if any(n != 1 for n in own_lead[:-1]):
        mask = mask.reshape(*own_lead, *mask.shape[-2:]).expand(*lead[:-1], *[-1] * 3)
        own_lead[:-1] = list(lead[:-1])
    return mask.reshape(math.prod(own_lead[:-1]), own_lead[-1], *mask.shape[-2:])
