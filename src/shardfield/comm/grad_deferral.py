"""Defer gradient sums to a wrapper that averages the parameters' gradients over all ranks.

The gradient of a parameter whose use differs from rank to rank is summed over those ranks (`replicate_in`). If a
data-parallel wrapper averages the gradients over the same ranks later, that message is not needed: each rank passes on
P times its partial sum, and the average over P ranks is the sum. If all ranks do the same work, each has the full
gradient, and the average does not change it. Both may occur in one parameter.

Between a parameter and its use there may be local calls (a cast, a complex view, a product of factors): their
derivatives are linear in the incoming gradient, so the average may be taken after them. There may be no other
collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat import function_apply, multiply_all
from ..errors import ShardfieldError

# Groups are compared by their ranks: two equal meshes have different ProcessGroup objects over the same ranks.
Ranks = tuple[int, ...]
NO_GROUPS: frozenset[Ranks] = frozenset()
MAX_GRAPH_NODES = 64  # visited nodes of a graph; the gradient of a larger graph is summed at once


def defer_to_average(parameter: nn.Parameter, groups: Iterable[ProcessGroup]) -> None:
    """Declare that a wrapper averages the gradient of a parameter over the ranks of all these groups."""
    parameter._averaged_later = frozenset(map(_ranks, groups))
    runtime.active.deferring_groups.update(parameter._averaged_later)


def refuse_shares(inputs: Iterable[Tensor]) -> None:
    """Refuse `autograd.grad` with respect to parameters of `virtualize`, which sums their gradients after all ranks."""
    if any(getattr(tensor, "_summed_by_virtualize", False) for tensor in inputs):
        raise ShardfieldError(
            "virtualize: autograd.grad with respect to a parameter of the model: a rank has its share of this gradient,"
            " and the sum is taken after the step; compute it from parameter.grad after the step, or use a VirtualWorld"
        )


@runtime.memo
def _ranks(group: ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))


def has_deferred(groups: Iterable[ProcessGroup]) -> bool:
    """Return whether some wrapper averages gradients over all these groups.

    For placements that are chosen before the parameter is known. The groups are those of all models of this world, also
    of models that no longer exist: when a model is freed depends on each rank's garbage collector, and ranks whose
    answers differed would choose different placements. After such a model, modes that meet a plain weight are placed
    as if its gradient were averaged later: equal numbers, other bytes.
    """
    return runtime.active.deferring_groups.issuperset(map(_ranks, groups))


def defers_all(tensor: Tensor, groups: Iterable[ProcessGroup]) -> bool:
    """Return whether the gradients of all leaves of a local tensor are averaged later over all these groups."""
    return _deferred_groups(tensor).issuperset(map(_ranks, groups))


def defers_any(tensor: Tensor, groups: Iterable[ProcessGroup]) -> bool:
    """Return whether the gradients of all leaves of a local tensor are averaged later over any of these groups."""
    return not _deferred_groups(tensor).isdisjoint(map(_ranks, groups))


def _deferred_groups(tensor: Tensor) -> frozenset[Ranks]:
    """Return the groups over which the gradients of all leaves of a local tensor are averaged later."""
    if not runtime.active.deferring_groups or not tensor.requires_grad:
        return NO_GROUPS
    if tensor.is_leaf:
        return getattr(tensor, "_averaged_later", NO_GROUPS)
    found: frozenset[Ranks] | None = None
    ahead, seen = [tensor.grad_fn], {tensor.grad_fn}
    while ahead:
        node = ahead.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            promised = getattr(leaf, "_averaged_later", NO_GROUPS)
            found = promised if found is None else found & promised
            if not found:
                return NO_GROUPS
        elif len(seen) > MAX_GRAPH_NODES or (
            isinstance(node, BackwardCFunction) and node.name() != "_DeferredSumBackward"
        ):
            return NO_GROUPS
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return found or NO_GROUPS


def defer_sums(tensors: Sequence[Tensor], groups: Sequence[ProcessGroup]) -> tuple[list[Tensor], tuple]:
    """Return tensors whose gradient sums are deferred where possible, and the groups to sum over at once."""
    if not runtime.active.deferring_groups or not groups or not torch.is_grad_enabled():
        return list(tensors), tuple(groups)
    later = frozenset(map(_ranks, groups))
    for tensor in tensors:
        if tensor.requires_grad:
            later &= _deferred_groups(tensor)
    if not later:
        return list(tensors), tuple(groups)
    times = math.prod(map(len, later))
    scaled = iter(_DeferredSum.apply(times, *[t for t in tensors if t.requires_grad]))
    return [next(scaled) if t.requires_grad else t for t in tensors], tuple(g for g in groups if _ranks(g) not in later)


class _DeferredSum(torch.autograd.Function):
    """Forward: identity. Adjoint: this rank's partial sum times the number of averaged ranks. No message."""

    apply = function_apply

    @staticmethod
    def forward(ctx, times, *tensors):
        ctx.times = times
        return tuple([t.view_as(t) for t in tensors])

    @staticmethod
    def backward(ctx, *grads):
        return None, *multiply_all(grads, ctx.times)
