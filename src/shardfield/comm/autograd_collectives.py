"""Differentiable collectives on plain local tensors over the ranks of one mesh axis.

The placement defines what a local tensor and its gradient hold (see the architecture page):

- Shard: a slice, and the same slice of the gradient;
- Replicate: the full value, and the full gradient on every rank;
- Partial: a partial sum, and the full gradient on every rank.

Every collective below is the identity on the global value. Its docstring states forward and adjoint. Its backward is
again one of them (`adjoints.py`), so derivatives of any order work. Collectives over a group of one rank are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat.autocast import flatten_tensors
from ..errors import ShardingError
from . import collectives, grad_deferral
from .adjoints import (
    AttachReduced,
    Exchange,
    Gather,
    GatherAllReplicateIn,
    GatherReplicateIn,
    MinMax,
    Reduce,
    ReduceScatter,
    ReplicateIn,
    ReplicateOut,
    Shift,
    Split,
    StartShift,
    ToPartial,
    local_slice,
    unpack,
)
from .adjoints import Groups as Groups
from .route import Route


def replicate_in(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """Use Replicate values in work that differs from rank to rank. Forward: identity. Adjoint: all_reduce (sum).

    All tensors share one message per group in backward, a flat buffer of their gradients; none is sent if a
    wrapper averages the gradients over the group later (see `grad_deferral`).
    """
    if not groups or not torch.is_grad_enabled():
        return list(tensors)
    wanted = [t for t in tensors if t.requires_grad]
    if not wanted:
        return list(tensors)
    if runtime.active.deferring_groups:
        wanted, groups = grad_deferral.defer_sums(wanted, groups)
        if len(wanted) > 1 and any(grad_deferral.defers_any(t, groups) for t in wanted):
            entered = iter([replicate_in([t], groups)[0] for t in wanted])  # some sums can be deferred, others cannot
            return [next(entered) if t.requires_grad else t for t in tensors]
    summed = ReplicateIn.apply(groups, *wanted) if groups else wanted
    if len(wanted) == len(tensors):
        return list(summed)
    entered = iter(summed)
    return [next(entered) if t.requires_grad else t for t in tensors]


def reduce(tensor: Tensor, groups: Groups) -> Tensor:
    """Reduce Partial -> Replicate. Forward: all-reduce (sum). Adjoint: identity."""
    return Reduce.apply(groups, tensor)[0] if groups else tensor


def start_reduce(tensor: Tensor, groups: Groups, owned: bool = False) -> collectives.Pending[Tensor]:
    """Start to reduce Partial -> Replicate, without autograd; `attach_reduced` adds it.

    Every message is started here, so that a rank alone may wait. Over several groups, all but the last are waited for.
    `owned`: the tensor may be overwritten.
    """
    tensor = tensor.detach()
    if len(groups) == 1:
        return collectives.start_all_reduce(tensor, groups[0], "sum", owned)
    for group in groups[:-1]:
        tensor = collectives.all_reduce(tensor, group)
    return collectives.start_all_reduce(tensor, groups[-1], "sum", owned)


def attach_reduced(tensor: Tensor, reduced: Tensor, groups: Groups) -> Tensor:
    """Return `reduced`, the sum of `tensor` over the groups, as a function of `tensor`. Adjoint: identity."""
    return AttachReduced.apply(tensor, reduced, groups) if tensor.requires_grad else reduced


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
        return MinMax.apply(tensor, op, groups)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ShardingError(f"Partial({op}) has no gradient here: reduce it by sum, avg, max or min")
    for group in groups:
        tensor = collectives.all_reduce(tensor, group, op)
    return tensor


def gather(tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Gather Shard(dim) -> Replicate. Forward: all-gather. Adjoint: this rank's slice."""
    return Gather.apply(tensor, dim, tuple(shard_sizes), group)


def split(tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Split Replicate -> Shard(dim). Forward: this rank's slice (a view of the input). Adjoint: all-gather."""
    if tensor.requires_grad and torch.is_grad_enabled():
        (tensor,), now = grad_deferral.defer_sums([tensor], (group,))
        return (
            Split.apply(tensor, dim, tuple(shard_sizes), group) if now else local_slice(tensor, dim, shard_sizes, group)
        )
    return local_slice(tensor, dim, shard_sizes, group)


def reduce_scatter(
    tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup, widen: bool = True
) -> Tensor:
    """Reduce Partial -> Shard(dim). Forward: each slice goes to its owner, which sums. Adjoint: all-gather.

    Half precision is summed in fp32, or in its own dtype without `widen`.
    """
    return ReduceScatter.apply(tensor, dim, tuple(shard_sizes), group, widen)


def gather_replicate_in(
    tensor: Tensor, dim: int, shard_sizes: Sequence[int], group: ProcessGroup, widen: bool = True
) -> Tensor:
    """Gather Shard(dim) for work that differs from rank to rank. Forward: all_gather. Adjoint: `reduce_scatter`."""
    return GatherReplicateIn.apply(tensor, dim, tuple(shard_sizes), group, widen)


def gather_all_replicate_in(
    tensors: Sequence[Tensor], dim: int, shard_sizes: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Apply `gather_replicate_in` to tensors of one shape and dtype, in one message each way.

    Small gradients are all-reduced: that is one message too, and not one per rank.
    """
    return GatherAllReplicateIn.apply(dim % tensors[0].ndim + 1, tuple(shard_sizes), group, *tensors)


def exchange(tensor: Tensor, route: Route, group: ProcessGroup, fill: Any = 0) -> Tensor:
    """Exchange shards by a route. Forward: send regions to peers. Adjoint: the reverse route, overlaps summed."""
    return Exchange.apply(tensor, route, group, fill)


def shift(tensor: Tensor, shape: Sequence[int], step: int, group: ProcessGroup) -> Tensor:
    """Pass blocks around the ring of a group: send to `step` coords ahead, receive one of `shape` from `step` behind.

    Adjoint: the gradient goes `step` coords back.
    """
    return Shift.apply(tensor, tuple(shape), step, group)


def start_shift(
    tensor: Tensor, into: Tensor, step: int, group: ProcessGroup
) -> tuple[Tensor, collectives.Pending[list[Tensor]]]:
    """Start a `shift` into the buffer `into`: return it, and the message to wait for. Adjoint: that of `shift`."""
    started: list[collectives.Pending[list[Tensor]]] = []
    return StartShift.apply(tensor, into, step, group, started), started[0]


def to_partial(tensor: Tensor, groups: Groups) -> Tensor:
    """Convert Replicate -> Partial. Forward: the value on coord 0, zeros elsewhere. Adjoint: identity."""
    return ToPartial.apply(tensor, groups)


def replicate_out(tensor: Tensor, groups: Groups) -> Tensor:
    """Convert the gradient of a Partial, full on every rank -> Replicate. Forward: identity. Adjoint: `to_partial`."""
    return ReplicateOut.apply(tensor, groups) if groups and tensor.requires_grad else tensor


def reduce_all(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """Reduce several Partial values of one dtype -> Replicate by one message. Differentiable, like `reduce`."""
    return list(Reduce.apply(groups, *tensors)) if groups else list(tensors)


def sum_owned(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """Return the sums over all groups of tensors of one dtype, which may be overwritten: one message per group."""
    if not groups or not tensors:
        return list(tensors)
    if runtime.active.tracer is not None:  # one flat message for any number of tensors, which graph passes recognize
        return start_sum(tensors, groups).wait()
    flat = flatten_tensors(tensors) if len(tensors) > 1 else tensors[0]
    for group in groups:
        flat = collectives.all_reduce_(flat, group)
    return unpack(flat, tensors) if len(tensors) > 1 else [flat]


def start_sum(tensors: Sequence[Tensor], groups: Groups) -> collectives.Pending[list[Tensor]]:
    """Start the sums of tensors of one dtype over all groups: one message for the first group, the others on wait."""
    if not groups or not tensors:
        return collectives.Pending((), (), lambda: list(tensors))
    flat = flatten_tensors(tensors)
    pending = collectives.start_all_reduce(flat, groups[0], owned=len(tensors) > 1)

    def finish() -> list[Tensor]:
        total = pending.wait()
        for group in groups[1:]:
            total = collectives.all_reduce_(total, group)
        return unpack(total, tensors)

    return collectives.Pending((), (), finish)
