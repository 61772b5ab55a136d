"""Attention by blocks: queries stay, keys and values come by, and what each block gives is folded by log-sum-exp.

Memory is that of one rank's share: a few blocks of keys and values at a time (its own, one that is worked on, two in
flight), however many ranks there are, and nothing of them is kept for backward, which fetches them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...comm.ring import Ring, gather_blocks, iterate_blocks, pack, send_to_owner, unpack
from ...layout import Span
from ...triton_kernels import fold as fused
from ..elementwise.random import uniform_at
from . import block_kernels
from .block_kernels import neg_inf_to_zero
from .causal_tiles import Spans, Tile, total_length


class Dropout(NamedTuple):
    """Weights dropped by their global index: the probability, and the whole weights' (rows, columns)."""

    p: float
    shape: tuple[int, int]


@dataclass(frozen=True)
class RingPlan:
    """What a rank does: the ring, which tiles of each stop's block it computes, and what is done across ranks after.

    rows: the global indices of this rank's queries. columns: those of each ring position's keys. tiles: by stop.
    merge: groups whose ranks hold other keys for the same queries.
    """

    ring: Ring
    rows: Spans
    columns: tuple[Spans, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    scale: float
    is_causal: bool
    merge: Groups = ()
    dropout: Dropout | None = None

    @property
    def scores(self) -> float:
        """How many scores of each head this rank computes."""
        return sum(tile.area for tiles in self.tiles for tile in tiles)

    @property
    def origin(self) -> int:
        """The first of the columns that come by: those of a mask begin there."""
        return min((span.start for spans in self.columns for span in spans), default=0)


def attend(
    work: RingPlan, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, where: Any = None, key: Any = None
) -> Tensor:
    """Attention of local queries (batch, heads, rows, features) to the keys of all ranks of a ring.

    k and v may have fewer heads (each serves several in a row) or a batch of 1. The columns of `mask`, where it has
    more than one, are all those that come by, in global order. For dropout: `where` is the global index of each (batch,
    head), `key` the random key of this call. Adjoint: the ring again; what was made of a block goes to its owner.
    """
    # Kernels take the features of a row to lie side by side, and read something else where they do not.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _RingAttention.apply(work, q, k, v, mask, where, key)


class _RingAttention(autograd_collectives.Collective):
    @staticmethod
    def forward(ctx, work, q, k, v, mask, where, key):
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward(work, q, k, v, mask, where, key)
        ctx.area = work
        ctx.save_for_backward(q, k, v, mask, where, key, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, where, key, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:5]
        with torch.autocast(q.device.type, enabled=False):
            if torch.is_grad_enabled():  # the gradient will be differentiated: by a formula that can be
                found = _double_backward(ctx.area, grad, (q, k, v, mask), wanted, where, key)
            else:
                found = _backward(ctx.area, grad, q, k, v, mask, where, key, out, lse, wanted)
        return None, *found, None, None


# ---------------------------------------------------------------------- what comes by


def _kv_blocks(work: RingPlan, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of every rank of the ring, one message for both."""
    if work.ring.num_steps == 1:
        yield k, v
        return
    flat = iterate_blocks(pack([k, v]), _packed_sizes(work, k, v), work.ring)
    next(flat)  # before the own block is worked on: messages are in flight meanwhile
    yield k, v
    for stop, block in enumerate(flat, 1):
        shapes = _kv_shapes(work, work.ring.owner(stop), k, v)
        found = unpack(block, shapes)
        yield found[0], found[1]


def _kv_shapes(work: RingPlan, position: int, k: Tensor, v: Tensor) -> list[list[int]]:
    columns = total_length(work.columns[position])
    return [[*t.shape[:-2], columns, t.shape[-1]] for t in (k, v)]


def _packed_sizes(work: RingPlan, k: Tensor, v: Tensor) -> list[int]:
    """How long each position's flat block is."""
    return [sum(map(math.prod, _kv_shapes(work, p, k, v))) for p in range(work.ring.num_steps)]


def _expand_heads(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values as many times as there are queries for them."""
    batch, heads = q.shape[:2]
    if t.shape[1] != heads:
        t = t.repeat_interleave(heads // t.shape[1], 1)
    return t.expand(batch, -1, -1, -1)


def _reduce_heads(grad: Tensor, like: Tensor) -> Tensor:
    """The adjoint of `_expand_heads`."""
    if grad.shape[1] != like.shape[1]:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return grad if grad.shape[0] == like.shape[0] else grad.sum(0, keepdim=True)


def _mask_tile(mask: Tensor, work: RingPlan, tile: Tile, columns: Spans) -> Tensor:
    """A tile's rows of a mask (or of its gradient), and those columns of the block that it takes: a view."""
    if mask.shape[-2] > 1:
        mask = mask[..., slice(*tile.rows), :]
    if mask.shape[-1] > 1:
        (block,) = columns  # masked keys are not dealt
        start = block.start - work.origin
        mask = mask[..., start + tile.columns.start : start + tile.columns.stop]
    return mask


def _mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.detach()


def _span_indices(spans: Spans, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in spans] or [torch.arange(0, device=device)])


def _dropout_mask_fn(
    work: RingPlan, where: Tensor, key: Tensor, columns: Spans, dtype: torch.dtype
) -> Callable[[Tile], block_kernels.DropoutMaskFn]:
    """What dropout multiplies the weights of a tile by: 0, or what makes up for the zeros."""
    assert work.dropout is not None
    p, (height, width) = work.dropout
    rows, cols = _span_indices(work.rows, where.device), _span_indices(columns, where.device)
    factor = 0.0 if p == 1 else 1 / (1 - p)

    def of(tile: Tile) -> block_kernels.DropoutMaskFn:
        def keep(first: int, last: int) -> Tensor:
            r = rows[tile.rows.start + first : tile.rows.start + last]
            c = cols[tile.columns.start : tile.columns.stop]
            index = (where[:, :, None, None] * height + r[:, None]) * width + c
            return (uniform_at(key, index) >= p).to(dtype) * factor

        return keep

    return of


class _TileOperands:
    """The tiles of one stop's block with the operands of each."""

    def __init__(self, work: RingPlan, stop: int, q, k, v, mask, where, key, bias_grad: bool):
        self.area, self.tiles, self.bias_grad = work, work.tiles[stop], bias_grad
        self.q, self.k, self.v, self.mask = q, k, v, mask
        self.columns = work.columns[work.ring.owner(stop)]
        self.dropout_mask_fn = (
            _dropout_mask_fn(work, where, key, self.columns, collectives.accumulate_dtype(q.dtype))
            if work.dropout is not None
            else None
        )

    def __iter__(self) -> Iterator[tuple[Tile, block_kernels.Kernel, tuple]]:
        if not self.q.shape[0] or not self.q.shape[1]:
            return
        k, v = (_expand_heads(t, self.q) for t in (self.k, self.v)) if self.tiles else (self.k, self.v)
        for tile in self.tiles:
            rows, part = slice(*tile.rows), slice(*tile.columns)
            bias = None
            if self.mask is not None:
                bias = _mask_to_bias(_mask_tile(self.mask, self.area, tile, self.columns), self.q.dtype)
                if tile.causal:  # as one mask: together they may hide what neither hides alone
                    size = tile.rows.stop - tile.rows.start
                    later = torch.ones(size, size, dtype=torch.bool, device=bias.device).triu(1)
                    bias, tile = bias.masked_fill(later, -math.inf), tile._replace(causal=False)
            keep = self.dropout_mask_fn(tile) if self.dropout_mask_fn is not None else None
            kernel = block_kernels.select_kernel(self.q, v, bias, dropout=keep, bias_grad=self.bias_grad)
            yield tile, kernel, (self.q[..., rows, :], k[..., part, :], v[..., part, :], bias)


# ---------------------------------------------------------------------- forward


def _forward(work: RingPlan, q, k, v, mask, where, key) -> tuple[Tensor, Tensor]:
    exact = collectives.accumulate_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=exact)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=exact)
    for stop, (kb, vb) in enumerate(_kv_blocks(work, k, v)):
        for tile, kernel, (qt, kt, vt, bias) in _TileOperands(work, stop, q, kb, vb, mask, where, key, False):
            part, part_lse = kernel.forward(qt, kt, vt, bias, tile.causal, work.scale)
            rows = slice(*tile.rows)
            accumulate_block(out[..., rows, :], lse[..., rows], part, part_lse)
    if work.merge:
        out, lse = _merge_ranks(out, lse, work.merge)
    return out.to(q.dtype), lse


def accumulate_block(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a block's share into what earlier blocks gave, in place: a mean weighted by exp(lse)."""
    if fused.supports(out, lse, part, part_lse):
        return fused.accumulate_block(out, lse, part, part_lse)
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0)  # no number: where neither has seen anything
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _merge_ranks(out: Tensor, lse: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The same queries' shares from ranks with other keys: the largest lse, then one sum of both."""
    top = lse
    for group in groups:
        top = collectives.all_reduce(top, group, "max")
    top = neg_inf_to_zero(top)
    weight = (lse - top).exp().unsqueeze(-1)
    both = torch.cat([out * weight, weight], -1)
    for group in groups:
        both = collectives.all_reduce(both, group)
    total = both[..., -1]
    safe = torch.where(total == 0, 1, total)
    return both[..., :-1] / safe.unsqueeze(-1), total.log() + top


# ---------------------------------------------------------------------- backward


def _backward(work: RingPlan, grad, q, k, v, mask, where, key, out, lse, wanted: Sequence[bool]) -> list[Tensor | None]:
    exact = collectives.accumulate_dtype(q.dtype)
    grad = grad.contiguous()
    dq = torch.zeros_like(q, dtype=exact, memory_format=torch.contiguous_format)
    dmask = torch.zeros_like(mask, dtype=exact, memory_format=torch.contiguous_format) if wanted[3] else None
    lengths = _packed_sizes(work, k, v)
    returning = work.ring.num_steps > 1 and (wanted[1] or wanted[2])
    own: Tensor | None = None
    arriving: list[Callable[[], Tensor]] = []
    for stop, (kb, vb) in enumerate(_kv_blocks(work, k, v)):
        dk, dv = (torch.zeros_like(t, dtype=exact, memory_format=torch.contiguous_format) for t in (kb, vb))
        for tile, kernel, (qt, kt, vt, bias) in _TileOperands(work, stop, q, kb, vb, mask, where, key, wanted[3]):
            rows, part = slice(*tile.rows), slice(*tile.columns)
            of_rows = grad[..., rows, :], qt, kt, vt, out[..., rows, :], lse[..., rows]
            found = kernel.backward(*of_rows, bias, tile.causal, work.scale)
            dq[..., rows, :] += found.query
            dk[..., part, :] += _reduce_heads(found.key, kb)
            dv[..., part, :] += _reduce_heads(found.value, vb)
            if dmask is not None:
                assert found.bias is not None
                target = _mask_tile(dmask, work, tile, work.columns[work.ring.owner(stop)])
                target += found.bias.sum_to_size(target.shape)
        if stop == 0:
            own = pack([dk, dv])
        elif returning:
            if arriving:  # what was made here of the last block went home while this one was worked on
                own += arriving.pop()()
            arriving.append(send_to_owner(pack([dk, dv]).to(k.dtype), stop, lengths, work.ring))
    for wait in arriving:
        own += wait()
    dk, dv = unpack(own, [k.shape, v.shape])
    grads = [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if dmask is None else dmask.to(mask.dtype)]
    return [g if w else None for g, w in zip(grads, wanted, strict=True)]


# ---------------------------------------------------------------------- a formula of other moves


def _double_backward(work: RingPlan, grad, inputs, wanted: Sequence[bool], where, key) -> list[Tensor | None]:
    """The gradients as functions of everything that has one, for derivatives of them; all blocks are held at once."""
    with torch.enable_grad():
        # Not the inputs themselves: those may have a history in common, through which gradients would go twice.
        stand_ins = [t.view_as(t) if w else t for t, w in zip(inputs, wanted, strict=True)]
        q, k, v, mask = stand_ins
        out = _autograd_attention(work, q, k, v, mask, where, key)
        asked = [s for s, w in zip(stand_ins, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(out, asked, grad, create_graph=True))
    return [next(found) if w else None for w in wanted]


def _autograd_attention(work: RingPlan, q, k, v, mask, where, key) -> Tensor:
    """Attention by its definition, of moves and torch functions that can be differentiated any number of times."""
    ring = work.ring
    blocks = gather_blocks(pack([k, v]), _packed_sizes(work, k, v), ring)
    pairs = [unpack(b, _kv_shapes(work, ring.owner(s), k, v)) for s, b in enumerate(blocks)]
    columns = tuple(span for s in range(ring.num_steps) for span in work.columns[ring.owner(s)])
    exact = collectives.accumulate_dtype(q.dtype)
    ks, vs = (_expand_heads(torch.cat([p[i] for p in pairs], -2), q).to(exact) for i in (0, 1))
    rows, cols = _span_indices(work.rows, q.device), _span_indices(columns, q.device)
    scores = (q.to(exact) * work.scale) @ ks.mT
    if mask is not None:
        bias = mask if mask.shape[-1] == 1 else mask.index_select(-1, cols - work.origin)
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype is torch.bool else scores + bias
    if work.is_causal:
        scores = scores.masked_fill(cols > rows[:, None], -math.inf)
    top = scores.detach().amax(-1, keepdim=True) if len(cols) else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    for group in work.merge:
        top = collectives.all_reduce(top, group, "max")
    powers = (scores - neg_inf_to_zero(top)).exp()
    total = autograd_collectives.reduce(powers.sum(-1, keepdim=True), work.merge)
    if work.dropout is not None:
        everything = Tile(Span(0, len(rows)), Span(0, len(cols)))
        powers = powers * _dropout_mask_fn(work, where, key, columns, exact)(everything)(0, len(rows))
    summed = autograd_collectives.reduce(powers @ vs, work.merge)
    return (summed / torch.where(total == 0, 1, total)).to(q.dtype)
