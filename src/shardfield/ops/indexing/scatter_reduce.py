"""Rows that are merged on their way: maxima, minima and means of what many entries write to one place.

Each rank merges what its own entries write to a place and sends one row for it, as for sums. Gradients are those of one
device: ties share alike, wherever they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm.autograd_collectives import Collective
from .exchange_lists import ExchangeLists


def can_prereduce(reduce: str | None, dtype: torch.dtype) -> bool:
    """Whether rows can be merged before they are sent. (A product's gradient takes all of its factors.)"""
    ordered = dtype is not torch.bool and not dtype.is_complex
    return (ordered and reduce in ("amax", "amin")) or (reduce == "mean" and dtype.is_floating_point)


def scatter_reduce_rows(
    target: Tensor, dim: int, lists: ExchangeLists, rows: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """`target`, along `dim`, with the rows of all ranks (entries first) reduced into it; a new tensor."""
    if reduce != "mean":
        return _ScatterMinMax.apply(target, rows, lists, dim, reduce, include_self)
    rows = lists.deliver(rows).movedim(0, dim)
    total = target.scatter_reduce(dim, scatter_index(lists, target, dim), rows, "sum", include_self=include_self)
    count = _entry_counts(lists, target, dim).to(total.dtype) + include_self
    return total / count.clamp(min=1).view([-1 if d == dim else 1 for d in range(target.ndim)])


def scatter_index(lists: ExchangeLists, target: Tensor, dim: int) -> Tensor:
    """Where the delivered rows go, as an index for a scatter along `dim`."""
    (at,) = lists.positions
    shape = list(target.shape)
    shape[dim] = len(at)
    return at.view([-1 if d == dim else 1 for d in range(target.ndim)]).expand(shape)


def _entry_counts(lists: ExchangeLists, target: Tensor, dim: int) -> Tensor:
    """How many entries name each row of this rank's block: known once the lists are."""
    if lists.row_counts is None:
        ones = torch.ones(lists.num_entries, dtype=torch.int64, device=target.device)
        lists.row_counts = ones.new_zeros(target.shape[dim]).index_add(0, lists.positions[0], lists.deliver(ones))
    return lists.row_counts


class _ScatterMinMax(Collective):
    """The largest (or smallest) of the target's and all ranks' rows.

    Backward: all that equal the result share its gradient alike, the target too, as torch has it.
    """

    @staticmethod
    def forward(ctx, target, rows, lists, dim, reduce, include_self):
        ctx.how = lists, dim, include_self
        sent = lists.deliver_reduced(rows, reduce).movedim(0, dim)
        out = target.scatter_reduce(dim, scatter_index(lists, target, dim), sent, reduce, include_self=include_self)
        ctx.save_for_backward(target, rows, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        target, rows, out = ctx.saved_tensors
        lists, dim, include_self = ctx.how
        place = scatter_index(lists, target, dim)
        with torch.no_grad():
            chosen = rows == lists.fetch(out, [dim])
            if lists.local_entries is not None:  # over other axes, other ranks have the places of other entries
                chosen &= lists.fetch(torch.ones_like(out), [dim]) > 0
            chosen = chosen.to(grad.dtype)
            own = (target == out).to(grad.dtype)
            count = own.scatter_add(dim, place, lists.deliver(chosen).movedim(0, dim))
        share = grad / count
        mine = share * own
        if not include_self:
            mine = mine.scatter(dim, place, 0)
        return mine, lists.fetch(share, [dim]) * chosen, None, None, None, None
