"""Scaled dot product attention of tensors in any layout.

`attention_plan` says what each mesh axis cuts; here operands are brought into the form that `ring_attention` takes, and
the result into torch's. Where every rank has a problem of its own, torch's function is called on the pieces.
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

from ..._compat import left_aligned
from ...comm import autograd_collectives
from ...comm.ring import Ring
from ...comm.route import Route, tile_route
from ...debug import explain
from ...dispatch.arguments import to_full_tensor
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import HANDLERS, handler, rule
from ...layout import Layout
from ...redistribute import redistribute
from ...tensor import ShardTensor
from .._common.probe import probe, probe_shapes
from ..elementwise.random import draw_key, global_index
from .causal_tiles import Coords, Spans, ZigzagExchange, causal_tiles, full_tiles, plan_zigzag
from .ring import Dropout, RingPlan, attend
from .strategy import Strategy, choose_strategy, is_zigzag


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
    """Queries stay where they are; keys and values go round, or whatever is cheaper."""
    dtype = _validate(fn, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        return None  # groups of two sizes: no cut of the heads serves both
    way = choose_strategy(query, key, value, attn_mask, enable_gqa, is_causal)
    ndim = way.computed.ndim
    alone = not way.ring and not way.merge and not (is_causal and way.computed.is_sharded(ndim - 2)) and not dropout_p
    # Of empty pieces torch's function makes what it likes, and forgets where they come from: then no rank calls it.
    alone = alone and not any(_has_empty_shard(x) for x in (way.query, way.key, way.value, way.computed))
    default = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    blocks = _BlockwiseAttention(
        way, query, key, is_causal, attn_mask, default if scale is None else scale, dropout_p, dtype
    )
    gathers = _gather_steps(way)

    def local(query, key, value, attn_mask):
        explain.record_outcome(f"rule: {way.summary}")
        for dim, lengths, group in gathers:
            key, value = _exchange_kv(
                partial(autograd_collectives.gather_replicate_in, dim=dim, shard_sizes=lengths, group=group), key, value
            )
        if alone:
            out = fn(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        else:
            out = blocks(query, key, value, attn_mask)
        return redistribute(out, way.computed, way.result)

    operands = {"query": way.query, "key": way.key, "value": way.value}
    if way.mask is not None:
        operands["attn_mask"] = way.mask
    return Plan(local=local, layout=way.result, operands=operands, own=dropout_p > 0)


_sdpa_rule = HANDLERS[F.scaled_dot_product_attention]


@handler("scaled_dot_product_attention")
def sdpa_handler(func, types, args, kwargs):
    """torch's causal biases are tensors without data: what they stand for is said otherwise."""
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    bias = named.get("attn_mask")
    # Who made one has imported its module, and the compiler with it: half a second that others need not pay.
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(bias, module.CausalBias):
        return _sdpa_rule(func, types, args, kwargs)
    if named.get("is_causal"):
        raise ValueError("CausalBias should not be used with causal=True")
    rows, columns = bias.seq_len_q, bias.seq_len_kv
    named["attn_mask"] = None
    if bias.variant is module.CausalVariant.UPPER_LEFT or rows == columns:
        named["is_causal"] = True
    else:
        device = named["query"].device
        named["attn_mask"] = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
    return _sdpa_rule(func, types, (), named)


@handler(left_aligned, exact=True)
def left_aligned_mask(func, types, args, kwargs):
    """Whether no row of a mask begins anew after it has ended: the mask tells, of the tensor no element is read."""
    tensor, mask = args
    plain = to_full_tensor(mask) if isinstance(mask, ShardTensor) else mask
    return func(torch.empty((*tensor.shape[:-1], 1), device=plain.device), plain)


def _validate(fn, query, key, value, mask, dropout_p, is_causal, scale, gqa) -> torch.dtype:
    """torch's own errors for a call it would not take, on all ranks alike; else the dtype of its result."""
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")

    def ask(query, key, value, mask=None):
        # mask and is_causal together are fine for some kernels and not for others, but not for shape functions
        return fn(query, key, value, mask, 0.0, is_causal and mask is None, scale=scale, enable_gqa=gqa)

    probe_shapes(ask, query, key, value, mask)

    def small(x: Operand) -> Tensor:
        shape = [*(min(n, 2) for n in x.shape[:-3]), *x.shape[-3:-2], *(min(n, 2) for n in x.shape[-2:-1]), x.shape[-1]]
        return torch.ones(shape, dtype=x.dtype, device=x.device)

    tiny = [
        small(x) if x.ndim > 1 else torch.ones(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    ]
    bias = None if mask is None else probe(lambda m: m, mask)
    with torch.no_grad():
        return fn(*tiny, _probe_mask(bias, mask), 0.0, is_causal, scale=scale, enable_gqa=gqa).dtype


def _probe_mask(bias: Any, mask: Any) -> Any:
    """A small mask for small operands: their heads are all there."""
    if bias is None or mask.ndim < 3:
        return bias
    return bias.narrow(-3, 0, 1).expand(*bias.shape[:-3], mask.shape[-3], *bias.shape[-2:])


def _has_empty_shard(layout: Layout) -> bool:
    return any(min((*f.shard_sizes, f.size), default=1) == 0 for d in layout.dims for f in d)


def _exchange_kv(move: Callable[[Tensor], Tensor], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in one message where their shapes allow."""
    if key.shape[:-1] != value.shape[:-1] or key.dtype != value.dtype:
        return move(key), move(value)
    features = key.shape[-1]
    both = move(torch.cat([key, value], -1))
    return both[..., :features], both[..., features:]


def _gather_steps(way: Strategy) -> list[tuple[int, Sequence[int], Any]]:
    """The axes along which keys are gathered first, innermost first: (dim, lengths, group)."""
    (cut,) = way.key.dims[-2]
    mesh = way.key.mesh
    found: list[tuple[int, Sequence[int], Any]] = []
    lengths = cut.shard_sizes
    for axis in reversed(cut.axes):
        size = mesh.size(axis)
        if axis not in way.gather:
            break
        at = way.key.index(cut.axes[: cut.axes.index(axis)]) * size
        if size > 1:
            found.append((-2, lengths[at : at + size], mesh.get_group(axis)))
        lengths = tuple(sum(lengths[i : i + size]) for i in range(0, len(lengths), size))
    return found


# ---------------------------------------------------------------------- by blocks


@dataclass(frozen=True)
class _ZigzagRoutes:
    """A deal of rows along a mesh axis, there and back."""

    forward_route: Route
    inverse_route: Route
    group: ProcessGroup

    @staticmethod
    def of(deal: ZigzagExchange, layout: Layout) -> _ZigzagRoutes:
        coord, group = layout.coords[deal.axis], layout.mesh.get_group(deal.axis)
        there = tile_route(-2, deal.before, deal.after, coord)
        return _ZigzagRoutes(there, tile_route(-2, deal.after, deal.before, coord), group)


class _BlockwiseAttention:
    """The call as blocks: what this rank computes of it, and how its operands become what `attend` takes."""

    def __init__(self, way: Strategy, query: Operand, key: Operand, is_causal, mask, scale, dropout_p, dtype):
        inner, mesh = way.computed, way.computed.mesh
        rows, columns = query.shape[-2], key.shape[-2]
        self.dtype = dtype
        self.dropout = Dropout(dropout_p, (rows, columns)) if dropout_p else None
        self.lead = Layout.make(mesh, inner.dims[:-2])
        everywhere = list(product(*(range(n) for n in mesh.shape)))
        of_rows = {c: _row_spans(inner, c) for c in everywhere}
        keys = _gathered_layout(way.key, way.gather)
        of_columns = {c: _row_spans(keys, c) for c in everywhere}
        deals: list[ZigzagExchange] = []
        key_deals: list[ZigzagExchange] = []
        if is_zigzag(way, is_causal, mask is not None):
            square = min(rows, columns)
            axes, key_axes = inner.nontrivial_axes(inner.axes_of(inner.ndim - 2)), inner.nontrivial_axes(way.ring)
            deals, of_rows = plan_zigzag(of_rows, mesh.shape, axes, inner.coords, square, False)
            key_deals, of_columns = plan_zigzag(of_columns, mesh.shape, key_axes, inner.coords, square, True)
        self.exchanges = [_ZigzagRoutes.of(d, inner) for d in deals]
        self.key_exchanges = [_ZigzagRoutes.of(d, inner) for d in key_deals]
        round_ = inner.nontrivial_axes(way.ring)
        ring = Ring(
            process_groups(inner, round_), tuple(mesh.size(a) for a in round_), tuple(inner.coords[a] for a in round_)
        )
        positions = [_replace_coords(inner.coords, round_, at) for at in product(*(range(n) for n in ring.sizes))]
        mine, theirs = of_rows[inner.coords], tuple(of_columns[c] for c in positions)
        tiles = tuple(
            (causal_tiles if is_causal else full_tiles)(mine, theirs[ring.owner(s)]) for s in range(ring.num_steps)
        )
        self.work = RingPlan(
            ring, mine, theirs, tiles, scale, is_causal, process_groups(inner, way.merge), self.dropout
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.to(self.dtype) for t in (q, k, v))
        lead, features = self.lead.local_shape, v.shape[-1]
        q = _as_4d(q.expand(*lead, *q.shape[-2:]), lead)
        k, v = (_kv_as_4d(t, lead) for t in (k, v))
        mask = None if mask is None else _mask_as_4d(mask, lead)
        for e in self.exchanges:
            q = autograd_collectives.exchange(q, e.forward_route, e.group)
        for e in self.key_exchanges:
            k, v = _exchange_kv(partial(autograd_collectives.exchange, route=e.forward_route, group=e.group), k, v)
        where = key = None
        if self.dropout is not None:
            key = draw_key(self.lead.mesh)
            where = global_index(self.lead, q.device).reshape(q.shape[:2])
        out = attend(self.work, q, k, v, mask, where, key)
        for e in reversed(self.exchanges):
            out = autograd_collectives.exchange(out, e.inverse_route, e.group)
        return out.reshape(*lead, out.shape[-2], features)


def _row_spans(layout: Layout, coords: Coords) -> Spans:
    return (layout.span(layout.ndim - 2, coords),)


def _replace_coords(coords: Coords, axes: Sequence[int], at: Sequence[int]) -> Coords:
    found = list(coords)
    for axis, coord in zip(axes, at, strict=True):
        found[axis] = coord
    return tuple(found)


def _gathered_layout(layout: Layout, axes: Sequence[int]) -> Layout:
    """The keys' layout after the innermost `axes` of their cut are gathered."""
    (cut,) = layout.dims[-2]
    lengths = cut.shard_sizes
    kept = [a for a in cut.axes if a not in axes]
    for axis in reversed(cut.axes[len(kept) :]):
        size = layout.mesh.size(axis)
        lengths = tuple(sum(lengths[i : i + size]) for i in range(0, len(lengths), size))
    return layout.with_dim(layout.ndim - 2, cut._replace(axes=tuple(kept), shard_sizes=lengths if kept else ()))


def _as_4d(t: Tensor, lead: Sequence[int]) -> Tensor:
    """(..., rows, features) -> (batch, heads, rows, features)."""
    heads = lead[-1] if lead else 1
    return t.reshape(math.prod(lead[:-1]), heads, *t.shape[-2:])


def _kv_as_4d(t: Tensor, lead: Sequence[int]) -> Tensor:
    """Keys or values as (batch or 1, heads or fewer, rows, features), as small as they come."""
    own = [1] * (len(lead) - t.ndim + 2) + list(t.shape[:-2])
    heads = own[-1] if own else 1
    whole_batch = all(n == m for n, m in zip(own[:-1], lead[:-1], strict=True))
    if not whole_batch and any(n != 1 for n in own[:-1]):
        t = t.expand(*lead[:-1], *t.shape[-3:])
        own[:-1] = list(lead[:-1])
    return t.reshape(math.prod(own[:-1]), heads, *t.shape[-2:])


def _mask_as_4d(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """A mask with four dims, those it is broadcast along 1 long where that can be."""
    if mask.ndim <= 2 or len(lead) <= 2:
        return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    own = [1] * (len(lead) - mask.ndim + 2) + list(mask.shape[:-2])
    if any(n != 1 for n in own[:-1]):
        mask = mask.reshape(*own, *mask.shape[-2:]).expand(*lead[:-1], *[-1] * 3)
        own[:-1] = list(lead[:-1])
    return mask.reshape(math.prod(own[:-1]), own[-1], *mask.shape[-2:])
