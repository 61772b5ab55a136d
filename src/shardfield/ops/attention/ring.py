"""Ring attention: each rank keeps its queries, and blocks of keys and values circulate around a ring of ranks.

The result of each block is combined with the others by log-sum-exp. A rank holds a few blocks of keys and values at a
time (its own, the one in use, two in flight), for any number of ranks. Blocks that are too small for a kernel of their
own are visited together (`strategy`). Where that is all of them, one all_gather brings them, and one kernel computes
the result: the work on the rank's own block would be too short to hide a message. Received blocks are not saved for
backward, which circulates them again and sends the gradient of each block to its owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ..._compat import has_saved_tensor_hooks, keeps_graph
from ..._compat.autocast import concatenate
from ...comm import adjoints, autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...comm.ring import gather_at_once, gather_blocks, iterate_blocks, pack, sum_at_owners, unpack
from ...dispatch.write_tracking import SavedTensor
from ...layout import Span
from ...triton_kernels import fold as fused
from .._common.autocast import autocast_disabled
from .block_kernels import StoredWeights, expand_heads, neg_inf_to_zero, stores_weights
from .causal_tiles import Tile
from .kv_blocks import pack_pair, pack_spans, restore_spans, take_spans, unpack_pair
from .result_order import HEADS_INSIDE, in_order
from .ring_plan import RingPlan
from .tile_operands import TileOperands, add_tile, dropout_mask_fn, mask_tile, span_indices, take_rows


def attend(
    plan: RingPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    head_index: Any = None,
    key: Any = None,
    order: tuple[int, ...] | None = None,
) -> Tensor:
    """Compute attention of local queries (batch, heads, rows, features) to the keys of all ranks of a ring.

    k and v may have fewer heads (each serves several consecutive heads) or a batch of 1. The columns of `mask`, if more
    than one, are all circulating columns in global order. For dropout, `head_index` is the global index of each (batch,
    head) and `key` the random key of this call. `order` is the order of the result's dims in memory; the default places
    heads next to features. Adjoint: circulate the blocks again and send the gradient of each to its owner.
    """
    # Kernels require the features of a row to be contiguous, and read wrong elements otherwise.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _RingAttention.apply(plan, q, k, v, mask, head_index, key, order or HEADS_INSIDE)


class _RingAttention(adjoints.Collective):
    @staticmethod
    def forward(ctx, plan, q, k, v, mask, head_index, key, order):
        log = runtime.active.message_log
        stores = ctx.needs_input_grad[4] and log is None and stores_weights(q.device)
        weights = StoredWeights() if stores else None
        with autocast_disabled(q):
            if log is None:
                out, lse = _forward(plan, q, k, v, mask, head_index, key, order, weights)
            else:  # the results take less memory than the blocks of all ranks
                out, lse = log.compute("attention", lambda: _forward(plan, q, k, v, mask, head_index, key, order))
        ctx.plan = plan
        # On one device the result need not be saved, so that it may be written; here a snapshot is taken before a
        # write. With saved-tensor hooks (a checkpoint) it is saved in the usual way, so that the hooks see it. In
        # inference mode there is no backward, and no version that would show a write.
        ctx.out = None if has_saved_tensor_hooks() or out.is_inference() else SavedTensor(out.detach())
        stored = () if weights is None else weights.tensors
        ctx.save_for_backward(q, k, v, mask, head_index, key, out if ctx.out is None else None, lse, *stored)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, head_index, key, out, lse, *stored = ctx.saved_tensors
        weights = StoredWeights(stored) if stored else None
        if ctx.out is not None:
            out = ctx.out.checked_tensor()
            if not keeps_graph():
                ctx.out = None  # as torch frees saved tensors: the loss may keep this node alive
        needs_grad = ctx.needs_input_grad[1:5]
        with autocast_disabled(q):
            if torch.is_grad_enabled():  # create_graph=True: use a differentiable formula
                grads = _double_backward(ctx.plan, grad, (q, k, v, mask), needs_grad, head_index, key)
            else:
                grads = _backward(ctx.plan, grad, q, k, v, mask, head_index, key, out, lse, weights, needs_grad)
        return None, *grads, None, None, None


# ---------------------------------------------------------------------- circulating blocks


def _kv_blocks(plan: RingPlan, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the keys and values of each visit that this rank uses, in one message per block for both."""
    if plan.ring.num_steps == 1:
        yield take_spans(k, plan.used[0][0]), take_spans(v, plan.used[0][0])
        return
    sizes = _packed_sizes(plan, k, v)
    if plan.at_once:
        flat = gather_at_once(pack_pair(k, v), sizes, plan.ring)
        yield _unpack_visit(plan, 0, flat if k.shape == v.shape else flat.split(sizes), k, v)
        return
    circulating = iterate_blocks(pack_pair(k, v), sizes, plan.ring, plan.visits)
    next(circulating)  # starts communication, which overlaps with the work on the own block
    yield take_spans(k, plan.used[0][0]), take_spans(v, plan.used[0][0])
    for number, blocks in enumerate(circulating, 1):
        yield _unpack_visit(plan, number, blocks, k, v)


def _unpack_visit(
    plan: RingPlan, number: int, blocks: Sequence[Tensor] | Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a visit that this rank uses, from its blocks or one tensor with all of them."""
    visit, (spans, _) = plan.visits[number], plan.used[number]
    if isinstance(blocks, Tensor) and k.shape == v.shape:
        column = 2 * math.prod(k.shape[:-2]) * k.shape[-1]
        block = take_spans(blocks.view(plan.length(number), column), spans, 0)  # one copy for both
        return unpack_pair(block.view(-1), [[*t.shape[:-2], len(block), t.shape[-1]] for t in (k, v)])
    pairs = [
        unpack_pair(block, _kv_shapes(plan, plan.ring.owner(step), k, v))
        for step, block in zip(visit, blocks, strict=True)
    ]
    ks, vs = (ts[0] if len(visit) == 1 else concatenate(ts, -2) for ts in zip(*pairs, strict=True))
    return take_spans(ks, spans), take_spans(vs, spans)


def _kv_shapes(plan: RingPlan, position: int, k: Tensor, v: Tensor) -> list[list[int]]:
    return [[*t.shape[:-2], plan.lengths[position], t.shape[-1]] for t in (k, v)]


def _packed_sizes(plan: RingPlan, k: Tensor, v: Tensor) -> list[int]:
    """Return the size of each position's packed block."""
    column = sum(math.prod(t.shape[:-2]) * t.shape[-1] for t in (k, v))
    return [column * length for length in plan.lengths]


# ---------------------------------------------------------------------- forward


def _forward(
    plan: RingPlan, q, k, v, mask, head_index, key, order: tuple[int, ...], weights: StoredWeights | None = None
) -> tuple[Tensor, Tensor]:
    dtype = collectives.accumulate_dtype(q.dtype)
    rows = q.shape[-2]

    def tiles_of(number: int, kb: Tensor, vb: Tensor) -> TileOperands:
        return TileOperands(plan, number, q, kb, vb, mask, head_index, key, weights is not None, weights)

    if plan.has_one_tile and not plan.merge and q.shape[0] and q.shape[1]:
        ((kb, vb),) = _kv_blocks(plan, k, v)
        ((tile, kernel, (qt, kt, vt, bias)),) = tiles_of(0, kb, vb)
        block_out, block_lse = kernel.forward(qt, kt, vt, bias, tile.causal, plan.scale)
        return adjoints.detach_view(in_order(block_out.to(q.dtype), order)), block_lse.to(dtype)
    # The result is not a view: autograd would refuse a write into a view made here, but not on a rank with an empty
    # shard.
    out = torch.empty_permuted((*q.shape[:-1], v.shape[-1]), order, dtype=dtype, device=q.device)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)
    written = False
    for number, (kb, vb) in enumerate(_kv_blocks(plan, k, v)):
        for tile, kernel, (qt, kt, vt, bias) in tiles_of(number, kb, vb):
            block_out, block_lse = kernel.forward(qt, kt, vt, bias, tile.causal, plan.scale)
            if not written:
                written = True
                if tile.rows == (0, rows):  # nothing to combine it with
                    take_rows(out, tile).copy_(block_out)
                    take_rows(lse, tile, -1).copy_(block_lse)
                    continue
                out.zero_()
                lse.fill_(-math.inf)
            accumulate_block(take_rows(out, tile), take_rows(lse, tile, -1), block_out, block_lse, mask is not None)
    if not written:
        out.zero_()
        lse.fill_(-math.inf)
    if plan.merge:
        out, lse = _merge_ranks(out, lse, plan.merge)
    return out.to(q.dtype), lse


def accumulate_block(
    out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, may_be_masked: bool = True
) -> None:
    """Combine a block's output with the earlier blocks, in place: a mean weighted by exp(lse).

    may_be_masked: a row may attend to no column of the block and of the earlier ones.
    """
    if fused.supports(out, lse, block_out, block_lse):
        return fused.accumulate_block(out, lse, block_out, block_lse)
    weight = torch.sigmoid(block_lse - lse)
    if may_be_masked:
        weight.nan_to_num_(0)  # NaN if neither attends to any column
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def _merge_ranks(out: Tensor, lse: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Combine the outputs of the same queries on ranks with other keys: all_reduce the maximal lse, then one sum."""
    top = lse
    for group in groups:
        top = collectives.all_reduce(top, group, "max")
    top = neg_inf_to_zero(top)
    weight = (lse - top).exp().unsqueeze(-1)
    weighted = concatenate([out * weight, weight], -1)
    for group in groups:
        weighted = collectives.all_reduce(weighted, group)
    total = weighted[..., -1]
    safe = torch.where(total == 0, 1, total)
    return weighted[..., :-1] / safe.unsqueeze(-1), total.log() + top


# ---------------------------------------------------------------------- backward


def _backward(
    plan: RingPlan,
    grad,
    q,
    k,
    v,
    mask,
    head_index,
    key,
    out,
    lse,
    weights: StoredWeights | None,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    dtype = collectives.accumulate_dtype(q.dtype)
    grad = grad.contiguous()
    if mask is not None or plan.is_causal:  # else every row attends to all columns
        lse = neg_inf_to_zero(lse)
    dq: Tensor | None = None
    dmask = torch.zeros_like(mask, dtype=dtype, memory_format=torch.contiguous_format) if needs_grad[3] else None
    block_sizes = _packed_sizes(plan, k, v)
    send_back = plan.ring.num_steps > 1 and (needs_grad[1] or needs_grad[2])
    own_grad: Any = None
    in_flight: list[Callable[[], Tensor]] = []
    for number, (visit, (kb, vb)) in enumerate(zip(plan.visits, _kv_blocks(plan, k, v), strict=True)):
        dk: Tensor | None = None
        dv: Tensor | None = None
        for tile, kernel, (qt, kt, vt, bias) in TileOperands(
            plan, number, q, kb, vb, mask, head_index, key, needs_grad[3], weights
        ):
            operands = take_rows(grad, tile), qt, kt, vt, take_rows(out, tile), take_rows(lse, tile, -1)
            grads_of_tile = kernel.backward(*operands, bias, tile.causal, plan.scale)
            dq = add_tile(dq, grads_of_tile.query, tile.rows, tile.squares, q, dtype)
            dk = add_tile(dk, grads_of_tile.key, tile.columns, tile.squares, kb, dtype)
            dv = add_tile(dv, grads_of_tile.value, tile.columns, tile.squares, vb, dtype)
            if dmask is not None:
                assert grads_of_tile.bias is not None
                target = mask_tile(dmask, plan, tile, plan.used[number][1])
                target += grads_of_tile.bias.sum_to_size(target.shape)
        dk, dv = (torch.zeros_like(t) if d is None else d for d, t in ((dk, kb), (dv, vb)))
        if plan.at_once:
            parts = _split_by_owner(plan, 0, dk.to(k.dtype), dv.to(k.dtype))
            own_grad = parts.pop(visit.index(0)).to(dtype)
            if send_back:
                others = tuple(step for step in visit if step)
                in_flight.append(sum_at_owners(parts, others, block_sizes, plan.ring, dtype))
        elif number == 0:
            own_grad = pack_spans(dk, dv, plan.used[0][0], plan.length(0)).to(dtype)
        elif send_back:
            if in_flight:  # the gradients of the previous visit were in flight during the work on this one
                own_grad += in_flight.pop()()
            parts = _split_by_owner(plan, number, dk.to(k.dtype), dv.to(k.dtype))
            in_flight.append(sum_at_owners(parts, visit, block_sizes, plan.ring, dtype))
    for wait in in_flight:
        own_grad += wait()
    dk, dv = unpack_pair(own_grad.to(k.dtype), [k.shape, v.shape])
    dq = torch.zeros_like(q) if dq is None else dq
    grads = [dq.to(q.dtype), dk, dv.to(v.dtype), None if dmask is None else dmask.to(mask.dtype)]
    return [g if w else None for g, w in zip(grads, needs_grad, strict=True)]


def _split_by_owner(plan: RingPlan, number: int, dk: Tensor, dv: Tensor) -> list[Tensor]:
    """Return the gradients of the keys and values of each owner of a visit as one flat tensor."""
    spans, length = plan.used[number][0], plan.length(number)
    sizes = [plan.lengths[plan.ring.owner(step)] for step in plan.visits[number]]
    if len(sizes) == 1:
        return [pack_spans(dk, dv, spans, length)]
    if dk.shape == dv.shape:
        rows = math.prod((*dk.shape[:-2], dk.shape[-1]))
        return list(pack_spans(dk, dv, spans, length).split([2 * rows * size for size in sizes]))
    pairs = (restore_spans(t, spans, length).split(sizes, -2) for t in (dk, dv))
    return [pack(pair) for pair in zip(*pairs, strict=True)]


# ---------------------------------------------------------------------- double backward


def _double_backward(plan: RingPlan, grad, inputs, needs_grad: Sequence[bool], head_index, key) -> list[Tensor | None]:
    """Return gradients that are differentiable functions of all inputs; holds all blocks at once."""
    with torch.enable_grad():
        # Use views: the inputs may have a common history, through which gradients would flow twice.
        leaves = [t.view_as(t) if w else t for t, w in zip(inputs, needs_grad, strict=True)]
        q, k, v, mask = leaves
        out = _autograd_attention(plan, q, k, v, mask, head_index, key)
        inputs_with_grad = [s for s, w in zip(leaves, needs_grad, strict=True) if w]
        grads = iter(torch.autograd.grad(out, inputs_with_grad, grad, create_graph=True))
    return [next(grads) if w else None for w in needs_grad]


def _autograd_attention(plan: RingPlan, q, k, v, mask, head_index, key) -> Tensor:
    """Compute attention by its definition, from functions that are differentiable any number of times."""
    ring = plan.ring
    blocks = gather_blocks(pack([k, v]), _packed_sizes(plan, k, v), ring)
    pairs = [unpack(b, _kv_shapes(plan, ring.owner(s), k, v)) for s, b in enumerate(blocks)]
    columns = tuple(span for s in range(ring.num_steps) for span in plan.columns[ring.owner(s)])
    dtype = collectives.accumulate_dtype(q.dtype)
    ks, vs = (expand_heads(concatenate([p[i] for p in pairs], -2), q).to(dtype) for i in (0, 1))
    rows, cols = span_indices(plan.rows, q.device), span_indices(columns, q.device)
    scores = (q.to(dtype) * plan.scale) @ ks.mT
    if mask is not None:
        bias = mask if mask.shape[-1] == 1 else mask.index_select(-1, cols - plan.origin)
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype is torch.bool else scores + bias
    if plan.is_causal:
        scores = scores.masked_fill(cols > rows[:, None], -math.inf)
    top = scores.detach().amax(-1, keepdim=True) if len(cols) else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    for group in plan.merge:
        top = collectives.all_reduce(top, group, "max")
    powers = (scores - neg_inf_to_zero(top)).exp()
    total = autograd_collectives.reduce(powers.sum(-1, keepdim=True), plan.merge)
    if plan.dropout is not None:
        full_tile = Tile(Span(0, len(rows)), Span(0, len(cols)))
        powers = powers * dropout_mask_fn(plan, head_index, key, columns, dtype)(full_tile)(0, len(rows))
    summed = autograd_collectives.reduce(powers @ vs, plan.merge)
    return (summed / torch.where(total == 0, 1, total)).to(q.dtype)
