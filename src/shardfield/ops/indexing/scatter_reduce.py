"""Reduce rows before they are sent: maximum, minimum and mean of all rows that entries write to one place.

Each rank reduces the rows that its own entries write to a place and sends one row for it, as for sums. Gradients equal
those on one device: rows that tie share the gradient equally, on whichever rank they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm.adjoints import Collective
from .exchange_lists import ExchangeLists


def can_prereduce(reduce: str | None, dtype: torch.dtype) -> bool:
    """Return whether rows can be reduced before they are sent. (The gradient of a product needs all its factors.)"""
    ordered = dtype is not torch.bool and not dtype.is_complex
    return (ordered and reduce in ("amax", "amin")) or (reduce == "mean" and dtype.is_floating_point)


def scatter_reduce_rows(
    target: Tensor, dim: int, lists: ExchangeLists, rows: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """Return a new tensor: `target` with the rows of all ranks (entry dim first) reduced into it along `dim`."""
    if reduce != "mean":
        return _ScatterMinMax.apply(target, rows, lists, dim, reduce, include_self)
    rows = lists.deliver(rows).movedim(0, dim)
    total = target.scatter_reduce(dim, scatter_index(lists, target, dim), rows, "sum", include_self=include_self)
    count = _entry_counts(lists, target, dim).to(total.dtype) + include_self
    return total / count.clamp(min=1).view([-1 if d == dim else 1 for d in range(target.ndim)])


def scatter_index(lists: ExchangeLists, target: Tensor, dim: int) -> Tensor:
    """Return the positions of the delivered rows, as an index for a scatter along `dim`."""
    (at,) = lists.positions
    shape = list(target.shape)
    shape[dim] = len(at)
    return at.view([-1 if d == dim else 1 for d in range(target.ndim)]).expand(shape)


def _entry_counts(lists: ExchangeLists, target: Tensor, dim: int) -> Tensor:
    """Return the number of entries that name each row of this rank's shard, cached in the lists."""
    if lists.row_counts is None:
        ones = torch.ones(lists.num_entries, dtype=torch.int64, device=target.device)
        lists.row_counts = ones.new_zeros(target.shape[dim]).index_add(0, lists.positions[0], lists.deliver(ones))
    return lists.row_counts


class _ScatterMinMax(Collective):
    """Take the maximum (or minimum) of the target's rows and all ranks' rows.

    Backward: all rows that equal the result, and the target's if it does, share its gradient equally, as in torch.
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
            if lists.local_entries is not None:  # along masked axes, other ranks own the places of other entries
                chosen &= lists.fetch(torch.ones_like(out), [dim]) > 0
            chosen = chosen.to(grad.dtype)
            own = (target == out).to(grad.dtype)
            count = own.scatter_add(dim, place, lists.deliver(chosen).movedim(0, dim))
        share = grad / count
        target_grad = share * own
        if not include_self:
            target_grad = target_grad.scatter(dim, place, 0)
        return target_grad, lists.fetch(share, [dim]) * chosen, None, None, None, None
