"""The autograd.Functions of the collectives: the backward of each is the forward of another one.

`autograd_collectives.py` has the functions to call, with the placements before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime, trace_state
from .._compat import function_apply, has_saved_tensor_hooks, unflatten_tensors
from .._compat.autocast import concatenate, flatten_tensors, stack
from .._compat.engine import DirectBackward
from . import collectives
from .route import Region
from .route_messages import exchange_no_grad

Groups = tuple[ProcessGroup, ...]


def local_slice(tensor: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    coord = group.rank()
    return tensor.narrow(dim, sum(lengths[:coord]), lengths[coord])


def _all_gather(tensor: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    if len(lengths) > 1 and lengths[0] > 0 and lengths.count(lengths[0]) == len(lengths):
        # One copy at most, and none where shards are contiguous in memory.
        stacked = collectives.all_gather_even(tensor, group)
        return detach_view(stacked.movedim(0, dim % tensor.ndim).flatten(dim % tensor.ndim, dim % tensor.ndim + 1))
    shapes = [Region(((dim, 0, n),)).shape(tensor.shape) for n in lengths]
    return concatenate(collectives.all_gather(tensor, shapes, group), dim)


def _all_reduce_all(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """All-reduce several tensors over each group, one message for those of one dtype. The results are new tensors."""
    dtype = tensors[0].dtype
    for t in tensors:
        if t.dtype is not dtype:
            break
    else:
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
    for t in like:
        if not t.numel():  # torch gives empty parts another shape
            return [p if p.numel() else p.view(t.shape) for p, t in zip(parts, like, strict=True)]
    return list(parts)


def detach_view(fresh: Tensor) -> Tensor:
    """Return `fresh`, made inside a Function, as a tensor that is not a view.

    Autograd forbids in-place writes into a view that a Function returns: an in-place activation would raise.
    """
    if not fresh._is_view():
        return fresh
    # In a traced program a result that aliases `.data` of another tensor, and a view of it, would lose a gradient.
    return fresh.data if runtime.active.tracer is None else fresh.clone()


class _NoContext:
    """The autograd context of a forward whose backward will not run: it saves nothing."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Collective(torch.autograd.Function, metaclass=DirectBackward):
    """Base of the collectives: messages of a backward are attributed to the call that issued its forward.

    Inside `torch.utils.checkpoint`, backward computes the forward again, with its messages, when the first saved tensor
    is read, and stops after the last one. Which local tensors torch saves depends on the shard. So each collective
    whose backward sends saves one and reads it first: all ranks recompute, before the same message, as far as the last
    such collective. (The result of one whose backward sends nothing may be cached in its operand, so that it is not
    recomputed.)
    """

    apply = function_apply  # torch's own: these Functions need no bridge for ShardTensors
    backward_sends = True  # messages; ranks that differentiate again compare those that do
    compute: Any  # `forward`, as a plain function

    def __init_subclass__(cls) -> None:
        forward, backward, sends = cls.forward, cls.backward, cls.backward_sends

        def tagged_forward(ctx, *args):
            ctx.tag, ctx.recomputed = runtime.active.tag, False
            out = forward(ctx, *args)
            if runtime.active.tracer is not None:  # of this rank: a virtual one may have waited in between
                return _clone_if_aliased(out, args)
            if sends and ctx.to_save is None and has_saved_tensor_hooks():
                ctx.recomputed = True
                ctx.save_for_backward(torch.empty(0))
            return out

        def tagged_backward(ctx, *grads):
            rt = runtime.active
            before, rt.tag = rt.tag, ctx.tag
            if ctx.recomputed:
                ctx.saved_tensors  # noqa: B018
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


class ReplicateIn(Collective):
    @staticmethod
    def forward(ctx, groups, *tensors):
        ctx.groups = groups
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled() or runtime.active.tracer is not None:
            return None, *Reduce.apply(ctx.groups, *grads)
        # `Reduce.adjoint`, inlined: this runs for every parameter of a step.
        return None, *_all_reduce_all(grads, ctx.groups)


class Reduce(Collective):
    backward_sends = False

    @staticmethod
    def forward(ctx, groups, *tensors):
        ctx.groups = groups
        return tuple(_all_reduce_all(tensors, groups))

    @staticmethod
    def backward(ctx, *grads):
        return None, *ReplicateIn.adjoint(ctx.groups, *grads)


class AttachReduced(Collective):
    backward_sends = False

    @staticmethod
    def forward(ctx, tensor, reduced, groups):
        ctx.groups = groups
        return reduced.data  # not `reduced` itself, of which C++ would return a view

    @staticmethod
    def backward(ctx, grad):
        return ReplicateIn.apply(ctx.groups, grad)[0], None, None


class MinMax(Collective):
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
        return ReplicateIn.adjoint(ctx.groups, grad)[0] * (chosen / count), None, None


class Gather(Collective):
    backward_sends = False

    @staticmethod
    def forward(ctx, tensor, dim, lengths, group):
        ctx.how = dim, lengths, group
        return _all_gather(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx, grad):
        return Split.adjoint(grad, *ctx.how), None, None, None


class Split(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group):
        ctx.how = dim, lengths, group
        return local_slice(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx, grad):
        return Gather.adjoint(grad, *ctx.how), None, None, None


class ReduceScatter(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group, widen):
        ctx.how = dim, lengths, group, widen
        out = collectives.reduce_scatter(tensor.split(lengths, dim), group, widen)
        return out.clone() if len(lengths) == 1 else out

    @staticmethod
    def backward(ctx, grad):
        return GatherReplicateIn.adjoint(grad, *ctx.how), None, None, None, None


class GatherReplicateIn(Collective):
    @staticmethod
    def forward(ctx, tensor, dim, lengths, group, widen):
        ctx.how = dim, lengths, group, widen
        return _all_gather(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx, grad):
        return ReduceScatter.adjoint(grad, *ctx.how), None, None, None, None


SMALL_BYTES = 1 << 16  # sums of at most this size are all-reduced where a reduce_scatter would do


class GatherAllReplicateIn(Collective):
    @staticmethod
    def forward(ctx, dim, lengths, group, *tensors):
        ctx.how = dim, lengths, group
        return tuple(map(detach_view, _all_gather(stack(tensors), *ctx.how).unbind()))

    @staticmethod
    def backward(ctx, *grads):
        both = stack(grads)
        if both.numel() * both.element_size() <= SMALL_BYTES and not torch.is_grad_enabled():
            mine = local_slice(collectives.all_reduce_(both, ctx.how[2]), *ctx.how)
        else:
            mine = ReduceScatter.adjoint(both, *ctx.how, True)
        return None, None, None, *mine.unbind()


class Exchange(Collective):
    @staticmethod
    def forward(ctx, tensor, route, group, fill):
        ctx.how, ctx.block = (route, group), tensor.shape
        return exchange_no_grad(tensor, route, group, fill)

    @staticmethod
    def backward(ctx, grad):
        route, group = ctx.how
        return Exchange.adjoint(grad, route.transposed, group, 0), None, None, None


class Shift(Collective):
    @staticmethod
    def forward(ctx, tensor, shape, step, group):
        ctx.how = tensor.shape, -step, group
        size, coord = group.size(), group.rank()
        if size == 1:
            return tensor.clone()
        to, source = (coord + step) % size, (coord - step) % size
        return collectives.start_sends([(to, tensor)], [(source, shape)], group, tensor).wait()[0]

    @staticmethod
    def backward(ctx, grad):
        return Shift.adjoint(grad, *ctx.how), None, None, None


class StartShift(Collective):
    @staticmethod
    def forward(ctx, tensor, into, step, group, started):
        ctx.how = tensor.shape, -step, group
        ctx.mark_dirty(into)
        size, coord = group.size(), group.rank()
        to, source = (coord + step) % size, (coord - step) % size
        if to == coord:
            into.copy_(tensor)
            started.append(collectives.Pending((), (), lambda: [into]))
            return into
        started.append(collectives.start_sends([(to, tensor)], [(source, into.shape)], group, tensor, into=[into]))
        return into

    @staticmethod
    def backward(ctx, grad):
        return Shift.adjoint(grad, *ctx.how), None, None, None, None


class ToPartial(Collective):
    backward_sends = False

    @staticmethod
    def forward(ctx, tensor, groups):
        ctx.groups = groups
        first = all(g.rank() == 0 for g in groups)
        return tensor.clone() if first else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ReplicateOut.adjoint(grad, ctx.groups), None


class ReplicateOut(Collective):
    """The adjoint of `ToPartial`. Forward: identity. Adjoint: `ToPartial`, since an all_reduce follows."""

    backward_sends = False

    @staticmethod
    def forward(ctx, grad, groups):
        ctx.groups = groups
        return grad.data  # not `grad` itself, of which C++ would return a view: it could not be written in place

    @staticmethod
    def backward(ctx, grad):
        return ToPartial.adjoint(grad, ctx.groups), None
