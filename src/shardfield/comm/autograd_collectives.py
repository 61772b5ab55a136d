"""Differentiable collectives on plain local tensors over the ranks of one mesh axis.

The placement defines what a local tensor and its gradient hold (see the architecture page):

- Shard: a slice, and the same slice of the gradient;
- Replicate: the full value, and the full gradient on every rank;
- Partial: a partial sum, and the full gradient on every rank.

Every collective below is the identity on the global value. Its docstring states forward and adjoint. Its backward is
again one of them, so derivatives of any order work. Collectives over a group of one rank are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime, trace_state
from .._compat import flatten_tensors, function_apply, unflatten_tensors
from ..errors import ShardingError
from . import collectives, grad_deferral
from .route import Region, Route, Shapes

Groups = tuple[ProcessGroup, ...]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by ndim


def replicate_in(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """Use Replicate values in work that differs from rank to rank. Forward: identity. Adjoint: all_reduce (sum).

    All tensors share one message per group in backward, a flat buffer of their gradients; none is sent if a
    wrapper averages the gradients over the group later (see `grad_deferral`).
    """
    wanted = [t for t in tensors if t.requires_grad]
    if not groups or not wanted or not torch.is_grad_enabled():
        return list(tensors)
    if runtime.active.deferring_groups:
        wanted, groups = grad_deferral.defer_sums(wanted, groups)
        if len(wanted) > 1 and any(grad_deferral.defers_any(t, groups) for t in wanted):
            entered = iter([replicate_in([t], groups)[0] for t in wanted])  # some sums can be deferred, others cannot
            return [next(entered) if t.requires_grad else t for t in tensors]
    summed = _ReplicateIn.apply(groups, *wanted) if groups else wanted
    if len(wanted) == len(tensors):
        return list(summed)
    entered = iter(summed)
    return [next(entered) if t.requires_grad else t for t in tensors]


def reduce(tensor: Tensor, groups: Groups) -> Tensor:
    """Reduce Partial -> Replicate. Forward: all-reduce (sum). Adjoint: identity."""
    return _Reduce.apply(groups, tensor)[0] if groups else tensor


def start_reduce(tensor: Tensor, groups: Groups) -> tuple[Tensor, collectives.Pending[Tensor]]:
    """Start to reduce Partial -> Replicate. Return the result, valid once the second value was waited for.

    Every message is started here, so that a rank alone may wait. Over several groups, all but the last are waited for.
    Adjoint: identity. It needs no wait.
    """
    started: list[collectives.Pending[Tensor]] = []
    return _StartReduce.apply(tensor, groups, started), started[0]


def reduce_with(tensor: Tensor, op: str, groups: Groups) -> Tensor:
    """Reduce Partial(op) -> Replicate. Adjoint: identity for a sum; for avg, 1/P.

    For max and min, the adjoint is that of amax over the stacked local values of all ranks: ranks with equal values get
    equal shares of the gradient. If local values are themselves maxima of several elements, the shares must be counted
    in elements, as one device does. Such ops do not use this function.
    """
    if op == "sum":
        return reduce(tensor, groups)
    if op == "avg":
        return reduce(tensor / math.prod(dist.get_world_size(g) for g in groups), groups)
    if op in ("max", "min"):
        return _MinMax.apply(tensor, op, groups)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ShardingError(f"Partial({op}) has no gradient here: reduce it by sum, avg, max or min")
    for group in groups:
        tensor = collectives.all_reduce(tensor, group, op)
    return tensor


def gather(tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Gather Shard(dim) -> Replicate. Forward: all-gather. Adjoint: this rank's slice."""
    return _Gather.apply(tensor, dim, tuple(shard_sizes), group)


def split(tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Split Replicate -> Shard(dim). Forward: this rank's slice (a view of the input). Adjoint: all-gather."""
    if tensor.requires_grad and torch.is_grad_enabled():
        (tensor,), now = grad_deferral.defer_sums([tensor], (group,))
        return _Split.apply(tensor, dim, tuple(shard_sizes), group) if now else _slice(tensor, dim, shard_sizes, group)
    return _slice(tensor, dim, shard_sizes, group)


def reduce_scatter(
    tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup, widen: bool = True
) -> Tensor:
    """Reduce Partial -> Shard(dim). Forward: each slice goes to its owner, which sums. Adjoint: all-gather.

    Half precision is summed in fp32, or in its own dtype without `widen`.
    """
    return _ReduceScatter.apply(tensor, dim, tuple(shard_sizes), group, widen)


def gather_replicate_in(
    tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup, widen: bool = True
) -> Tensor:
    """Gather Shard(dim) for work that differs from rank to rank. Forward: all_gather. Adjoint: `reduce_scatter`."""
    return _GatherReplicateIn.apply(tensor, dim, tuple(shard_sizes), group, widen)


def gather_all_replicate_in(
    tensors: Sequence[Tensor], dim: int, shard_sizes: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Apply `gather_replicate_in` to tensors of one shape and dtype, in one message each way.

    Small gradients are all-reduced: that is one message too, and not one per rank.
    """
    return _GatherAllReplicateIn.apply(dim % tensors[0].ndim + 1, tuple(shard_sizes), group, *tensors)


def exchange(tensor: Tensor, route: Route, group: ProcessGroup, fill: Any = 0) -> Tensor:
    """Exchange shards by a route. Forward: send regions to peers. Adjoint: the reverse route, overlaps summed."""
    return _Exchange.apply(tensor, route, group, fill)


def shift(tensor: Tensor, shape: Sequence[int], step: int, group: ProcessGroup) -> Tensor:
    """Pass blocks around the ring of a group: send to `step` coords ahead, receive one of `shape` from `step` behind.

    Adjoint: the gradient goes `step` coords back.
    """
    return _Shift.apply(tensor, tuple(shape), step, group)


def start_shift(
    tensor: Tensor, into: Tensor, step: int, group: ProcessGroup
) -> tuple[Tensor, collectives.Pending[list[Tensor]]]:
    """Start a `shift` into the buffer `into`: return it, and the message to wait for. Adjoint: that of `shift`."""
    started: list[collectives.Pending[list[Tensor]]] = []
    return _StartShift.apply(tensor, into, step, group, started), started[0]


def to_partial(tensor: Tensor, groups: Groups) -> Tensor:
    """Convert Replicate -> Partial. Forward: the value on coord 0, zeros elsewhere. Adjoint: identity."""
    return _ToPartial.apply(tensor, groups)


def replicate_out(tensor: Tensor, groups: Groups) -> Tensor:
    """Convert the gradient of a Partial, full on every rank -> Replicate. Forward: identity. Adjoint: `to_partial`."""
    return _ReplicateOut.apply(tensor, groups) if groups and tensor.requires_grad else tensor


def exchange_no_grad(tensor: Tensor, route: Route, group: ProcessGroup, fill: Any = 0) -> Tensor:
    """Exchange shards by a route, without autograd."""
    shapes = route.shapes_for(tensor.shape)
    received = collectives.start_sends(
        _pack(tensor, route), shapes.receives, group, tensor, packed=shapes.filled
    ).wait()
    return _assemble(tensor, route, shapes, received, fill, False)


def start_route(
    tensor: Tensor, route: Route, group: ProcessGroup, fill: Any = 0, owned: bool = False
) -> collectives.Pending[Tensor]:
    """Start the messages of a route, without autograd. Waiting for the result assembles it: one kernel, if possible.

    `owned`: the tensor may be overwritten, and the result may be a view of it.
    """
    shapes = route.shapes_for(tensor.shape)
    pending = collectives.start_sends(_pack(tensor, route), shapes.receives, group, tensor, packed=shapes.filled)
    return collectives.Pending((), (), lambda: _assemble(tensor, route, shapes, pending.wait(), fill, owned))


def _pack(block: Tensor, route: Route) -> list[tuple[int, Tensor]]:
    """Return a contiguous tensor for each peer. One kernel packs all messages if their shapes are equal."""
    if route.equal_sends:
        packed = collectives.concatenate([_region(block, regions[0]) for _, regions in route.send], new_dim=True)
        parts = (packed if packed.is_contiguous() else packed.contiguous()).unbind(0)
        return [(peer, part) for (peer, _), part in zip(route.send, parts, strict=True)]
    sends = []
    for peer, regions in route.send:
        views = [_region(block, region) for region in regions]
        one = views[0] if len(views) == 1 else collectives.concatenate([view.reshape(-1) for view in views])
        sends.append((peer, collectives.contiguous(one)))
    return sends


def _region(block: Tensor, region: Region) -> Tensor:
    return region.view(block).flip(region.flip) if region.flip else region.view(block)


def _assemble(
    block: Tensor, route: Route, shapes: Shapes, received: Sequence[Tensor], fill: Any, owned: bool
) -> Tensor:
    """Return the result of a route from the block and the received tensors."""
    parts = received
    if not shapes.single:
        parts = []
        for flat, of in zip(received, shapes.regions, strict=True):
            sizes = [math.prod(shape) for shape in of]
            parts += [part.view(shape) for part, shape in zip(flat.view(-1).split(sizes), of, strict=True)]
    if route.steps is not None:
        return _concatenate(block, route, route.steps, shapes.result, parts, fill)
    wide = collectives.accumulate_dtype(block.dtype) if route.add else block.dtype
    if route.add and route.keeps_all:
        out = _region(block, route.own[0][0])
        if not owned or wide != block.dtype:
            out = out.to(wide, copy=True, memory_format=torch.contiguous_format)
    else:
        out = block.new_full(shapes.result, 0 if route.add else fill, dtype=wide)
        for source, target in route.own:
            _place(out, target, _region(block, source), route.add)
    for target, part in zip(route.targets, parts, strict=True):
        _place(out, target, part, route.add)
    return out if wide == block.dtype else out.to(block.dtype)


def _concatenate(
    block: Tensor,
    route: Route,
    steps: Sequence[tuple[int, int, int]],
    shape: Sequence[int],
    parts: Sequence[Tensor],
    fill: Any,
) -> Tensor:
    dim = (route.own[0][1] if route.own else route.targets[0]).ranges[0][0]
    pieces = []
    for kind, index, length in steps:
        if kind == 0:
            source, target = route.own[index]
            piece = _region(block, source)
            pieces.append(piece.flip(target.flip) if target.flip else piece)
        elif kind == 1 and len(route.targets[index].ranges) == 1:
            flip = route.targets[index].flip
            pieces.append(parts[index].flip(flip) if flip else parts[index])
        else:
            piece = block.new_full([length if d == dim % block.ndim else n for d, n in enumerate(shape)], fill)
            if kind == 1:
                Region(route.targets[index].ranges[1:]).view(piece).copy_(parts[index])
            pieces.append(piece)
    if not block.is_contiguous():
        kept = CHANNELS_LAST.get(block.ndim)
        if kept is not None and block.is_contiguous(memory_format=kept):  # torch.cat keeps it if all parts have it
            pieces = [piece.contiguous(memory_format=kept) for piece in pieces]
    return collectives.concatenate(pieces, dim)


def _place(out: Tensor, region: Region, part: Tensor, add: bool) -> None:
    target, part = region.view(out), part.flip(region.flip) if region.flip else part
    target.add_(part) if add else target.copy_(part)


def _slice(tensor: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    coord = dist.get_rank(group)
    return tensor.narrow(dim, sum(lengths[:coord]), lengths[coord])


def _all_gather(tensor: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    if len(lengths) > 1 and lengths[0] > 0 and lengths.count(lengths[0]) == len(lengths):
        # One copy at most, and none where shards are contiguous in memory.
        stacked = collectives.all_gather_even(tensor, group)
        return detach_view(stacked.movedim(0, dim % tensor.ndim).flatten(dim % tensor.ndim, dim % tensor.ndim + 1))
    shapes = [Region(((dim, 0, n),)).shape(tensor.shape) for n in lengths]
    return torch.cat(collectives.all_gather(tensor, shapes, group), dim)


def _all_reduce_all(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """All-reduce several tensors over each group, one message for those of one dtype. The results are new tensors."""
    dtypes = {t.dtype for t in tensors}
    if len(tensors) == 1 or len(dtypes) == 1:
        return _all_reduce_packed(tensors, groups)
    done: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        done.update(zip(chosen, _all_reduce_packed([tensors[i] for i in chosen], groups), strict=True))
    return [done[i] for i in range(len(tensors))]


def _all_reduce_packed(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """All-reduce tensors of one dtype in one message per group."""
    if len(tensors) == 1:
        total = tensors[0]
        for group in groups:
            total = collectives.all_reduce(total, group)
        return [total.clone() if total is tensors[0] else total]
    flat = flatten_tensors(tensors)
    for group in groups:
        flat = collectives.all_reduce_(flat, group)
    return unpack(flat, tensors)


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor as views of the shapes of `like`: the inverse of `flatten_tensors`."""
    parts = unflatten_tensors(flat, like)
    return [p if p.shape == t.shape else p.view(t.shape) for p, t in zip(parts, like, strict=True)]


def reduce_all(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """Reduce several Partial values of one dtype -> Replicate by one message. Differentiable, like `reduce`."""
    return list(_Reduce.apply(groups, *tensors)) if groups else list(tensors)


def start_sum(tensors: Sequence[Tensor], groups: Groups, owned: bool = False) -> collectives.Pending[list[Tensor]]:
    """Start the sums of tensors of one dtype over all groups: one message for the first group, the others on wait.

    `owned`: the tensors may be overwritten.
    """
    if not groups or not tensors:
        return collectives.Pending((), (), lambda: list(tensors))
    flat = flatten_tensors(tensors)
    pending = collectives.start_all_reduce(flat, groups[0], owned=owned or len(tensors) > 1)

    def land() -> list[Tensor]:
        total = pending.wait()
        for group in groups[1:]:
            total = collectives.all_reduce_(total, group)
        return unpack(total, tensors)

    return collectives.Pending((), (), land)


def detach_view(fresh: Tensor) -> Tensor:
    """Return `fresh`, made inside a Function, as a tensor that is not a view.

    Autograd forbids in-place writes into a view that a Function returns: an in-place activation would raise.
    """
    if not fresh._is_view():
        return fresh
    # In a traced program a result that aliases `.data` of another tensor, and a view of it, would lose a gradient.
    return fresh.data if runtime.active.tracer is None else fresh.clone()


class _NoContext:
    """Takes what a forward saves for a backward that will not come."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Collective(torch.autograd.Function):
    """Base of the collectives: messages of a backward are attributed to the call that issued its forward."""

    apply = function_apply  # torch's own: these Functions need no bridge for ShardTensors
    compute: Any  # `forward`, as a plain function

    def __init_subclass__(cls) -> None:
        forward, backward = cls.forward, cls.backward

        def tagged_forward(ctx, *args):
            ctx.tag = runtime.active.tag
            out = forward(ctx, *args)
            return out if runtime.active.tracer is None else _clone_if_aliased(out, args)

        def tagged_backward(ctx, *grads):
            rt = runtime.active
            before, rt.tag = rt.tag, ctx.tag
            try:
                return backward(ctx, *grads)
            finally:
                rt.tag = before

        cls.forward, cls.backward = staticmethod(tagged_forward), staticmethod(tagged_backward)
        cls.compute = staticmethod(forward)

    @classmethod
    def adjoint(cls, *args: Any) -> Any:
        """Apply this collective inside the backward of another one, as a part of the graph if it is recorded."""
        if torch.is_grad_enabled() or runtime.active.tracer is not None:
            return cls.apply(*args)
        return cls.compute(_NoContext(), *args)


def _clone_if_aliased(out: Any, args: tuple) -> Any:
    """Return a result that does not share memory with the inputs, for traces.

    A traced program would return such a result as a view of its input, and its gradient would bypass the collective.
    """
    if isinstance(out, tuple):
        return tuple(_clone_if_aliased(part, args) for part in out)
    shared = any(isinstance(x, Tensor) and trace_state.same_memory(out, x) for x in args)
    return out.clone() if shared else out


class _ReplicateIn(Collective):
    @staticmethod
    def forward(ctx, groups, *tensors):
        ctx.groups = groups
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        return None, *_Reduce.adjoint(ctx.groups, *grads)


class _Reduce(Collective):
    @staticmethod
    def forward(ctx, groups, *tensors):
        ctx.groups = groups
        return tuple(_all_reduce_all(tensors, groups))

    @staticmethod
    def backward(ctx, *grads):
        return None, *_ReplicateIn.adjoint(ctx.groups, *grads)


class _StartReduce(Collective):
    @staticmethod
    def forward(ctx, tensor, groups, started):
        ctx.groups = groups
        for group in groups[:-1]:
            tensor = collectives.all_reduce(tensor, group)
        pending = collectives.start_all_reduce(tensor, groups[-1])
        if pending.recv_buffers is not None:
            started.append(pending)
            return pending.recv_buffers.data  # the transport writes into the buffer, which must have no graph
        out = torch.empty_like(tensor)
        target = out.data
        started.append(collectives.Pending((), (), lambda: target.copy_(pending.wait())))
        return out

    @staticmethod
    def backward(ctx, grad):
        return _ReplicateIn.apply(ctx.groups, grad)[0], None, None


class _MinMax(Collective):
    @staticmethod
    def forward(ctx, tensor, op, groups):
        out = tensor
        for group in groups:
            out = collectives.all_reduce(out, group, op)
        out = out.clone() if out is tensor else out
        chosen = (tensor == out) | (tensor.isnan() & out.isnan())
        ctx.groups = groups
        ctx.save_for_backward(chosen)
        return out

    @staticmethod
    def backward(ctx, grad):
        (chosen,) = ctx.saved_tensors
        count = chosen.to(grad.dtype)
        for group in ctx.groups:
            count = collectives.all_reduce(count, group)
        return _ReplicateIn.adjoint(ctx.groups, grad)[0] * (chosen / count), None, None


class _Gather(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group):
        ctx.how = dim, lengths, group
        return _all_gather(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx, grad):
        return _Split.adjoint(grad, *ctx.how), None, None, None


class _Split(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group):
        ctx.how = dim, lengths, group
        return _slice(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.adjoint(grad, *ctx.how), None, None, None


class _ReduceScatter(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group, widen):
        ctx.how = dim, lengths, group, widen
        out = collectives.reduce_scatter(tensor.split(lengths, dim), group, widen)
        return out.clone() if len(lengths) == 1 else out

    @staticmethod
    def backward(ctx, grad):
        return _GatherReplicateIn.adjoint(grad, *ctx.how), None, None, None, None


class _GatherReplicateIn(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group, widen):
        ctx.how = dim, lengths, group, widen
        return _all_gather(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx, grad):
        return _ReduceScatter.adjoint(grad, *ctx.how), None, None, None, None


SMALL_BYTES = 1 << 16  # sums of at most this size are all-reduced where a reduce_scatter would do


class _GatherAllReplicateIn(Collective):
    @staticmethod
    def forward(ctx, dim, lengths, group, *tensors):
        ctx.how = dim, lengths, group
        return tuple(map(detach_view, _all_gather(torch.stack(tensors), *ctx.how).unbind()))

    @staticmethod
    def backward(ctx, *grads):
        both = torch.stack(grads)
        if both.numel() * both.element_size() <= SMALL_BYTES and not torch.is_grad_enabled():
            mine = _slice(collectives.all_reduce_(both, ctx.how[2]), *ctx.how)
        else:
            mine = _ReduceScatter.adjoint(both, *ctx.how, True)
        return None, None, None, *mine.unbind()


class _Exchange(Collective):
    @staticmethod
    def forward(ctx, tensor, route, group, fill):
        ctx.how = route, group
        return exchange_no_grad(tensor, route, group, fill)

    @staticmethod
    def backward(ctx, grad):
        route, group = ctx.how
        return _Exchange.adjoint(grad, route.transposed, group, 0), None, None, None


class _Shift(Collective):
    @staticmethod
    def forward(ctx, tensor, shape, step, group):
        ctx.how = tensor.shape, -step, group
        size, coord = dist.get_world_size(group), dist.get_rank(group)
        if size == 1:
            return tensor.clone()
        to, source = (coord + step) % size, (coord - step) % size
        return collectives.start_sends([(to, tensor)], [(source, shape)], group, tensor).wait()[0]

    @staticmethod
    def backward(ctx, grad):
        return _Shift.adjoint(grad, *ctx.how), None, None, None


class _StartShift(Collective):
    @staticmethod
    def forward(ctx, tensor, into, step, group, started):
        ctx.how = tensor.shape, -step, group
        ctx.mark_dirty(into)
        size, coord = dist.get_world_size(group), dist.get_rank(group)
        to, source = (coord + step) % size, (coord - step) % size
        if to == coord:
            into.copy_(tensor)
            started.append(collectives.Pending((), (), lambda: [into]))
            return into
        started.append(collectives.start_sends([(to, tensor)], [(source, into.shape)], group, tensor, into=[into]))
        return into

    @staticmethod
    def backward(ctx, grad):
        return _Shift.adjoint(grad, *ctx.how), None, None, None, None


class _ToPartial(Collective):
    @staticmethod
    def forward(ctx, tensor, groups):
        ctx.groups = groups
        first = all(dist.get_rank(g) == 0 for g in groups)
        return tensor.clone() if first else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx, grad):
        return _ReplicateOut.adjoint(grad, ctx.groups), None


class _ReplicateOut(Collective):
    """The adjoint of `_ToPartial`. Forward: identity. Adjoint: `_ToPartial`, since an all_reduce follows."""

    @staticmethod
    def forward(ctx, grad, groups):
        ctx.groups = groups
        return grad

    @staticmethod
    def backward(ctx, grad):
        return _ToPartial.adjoint(grad, ctx.groups), None
