"""Order statistics of rows that lie in blocks, found without moving the rows.

Values become integers of the same order (`sortable_key`); the k-th smallest key is then found digit by digit: each
round every rank counts how many of its keys lie below a few pivots, and the counts are summed. What travels is counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm import autograd_collectives, collectives
from .._common.blockwise import Blocks


def sortable_key(x: Tensor, descending: bool = False) -> Tensor:
    """int64 keys that sort as torch sorts `x`: NaN is greater than all, -0.0 equals 0.0. Not differentiable."""
    x = x.detach()
    if x.is_floating_point():
        wide = x.dtype is torch.float64
        ints, top = (torch.int64, 0x7FFFFFFFFFFFFFFF) if wide else (torch.int32, 0x7FFFFFFF)
        x = (x if wide else x.to(torch.float32)) + 0.0
        bits = x.contiguous().view(ints)
        key = torch.where(bits < 0, bits ^ top, bits).masked_fill(x.isnan(), top).to(torch.int64)
    else:
        key = x.to(torch.int64)
        if x.dtype is torch.uint64:
            key = key ^ torch.iinfo(torch.int64).min
    return ~key if descending else key


def key_bits(dtype: torch.dtype) -> int:
    """How many bits tell the keys of a dtype apart."""
    if dtype.is_floating_point:
        return 64 if dtype is torch.float64 else 32
    return {torch.bool: 8, torch.int8: 8, torch.uint8: 16, torch.int16: 16, torch.int32: 32}.get(dtype, 64)


def digit_width(count: int) -> int:
    """Bits found in one round for `count` statistics: few rounds while the counts make a small message."""
    return 8 if count <= 64 else 4


def counting_cost_bytes(dtype: torch.dtype, count: int) -> int:
    """What a rank sends to find `count` order statistics."""
    width = digit_width(count)
    return key_bits(dtype) // width * ((1 << width) - 1) * 8 * count


def kth_index(rows: Tensor, ranks: Tensor, blocks: Blocks) -> Tensor:
    """The global column of the element of each rank (0: the smallest) in its row; equal ones count in column order.

    rows: (rows, this block's columns). ranks: (rows, wanted), the same on all the blocks' ranks, as is the result.
    """
    keys, order = sortable_key(rows).sort(dim=1, stable=True)
    key = _kth_key(keys, ranks, blocks, key_bits(rows.dtype))
    below = torch.searchsorted(keys, key)
    equal = torch.searchsorted(keys, key, right=True) - below
    told = blocks.all_gather_unit(torch.stack([below, equal])[None], 0)
    # which of the equal ones is meant, counted from this block's first
    nth = ranks - told[:, 0].sum(0) - told[: blocks.index, 1].sum(0)
    mine = (nth >= 0) & (nth < equal)
    if rows.shape[1]:
        column = order.gather(1, (below + nth).clamp(0, rows.shape[1] - 1)) + blocks.start
    else:
        column = torch.zeros_like(nth)
    return autograd_collectives.reduce(torch.where(mine, column, 0), blocks.groups)


def _kth_key(keys: Tensor, ranks: Tensor, blocks: Blocks, bits: int) -> Tensor:
    """The key of each rank in its row: the greatest number that at most `rank` keys lie below."""
    width = digit_width(ranks.numel())
    found = torch.zeros_like(ranks)
    for shift in range(bits - width, -1, -width):
        first = -(1 << (width - 1)) if shift == bits - width else 0  # the top digit has the sign
        steps = [digit << shift for digit in range(first + 1, first + (1 << width))]
        pivots = found[..., None] + torch.tensor(steps, device=keys.device)
        below = torch.searchsorted(keys, pivots.flatten(1)).view(pivots.shape)
        for group in blocks.groups:
            below = collectives.all_reduce(below, group)
        digit = (below <= ranks[..., None]).sum(-1) + first
        found = found + (digit << shift)
    return found


def select_columns(rows: Tensor, columns: Tensor, blocks: Blocks) -> Tensor:
    """The values at global columns, Replicate over the blocks' ranks: the owner gives them. Differentiable."""
    mine = (columns >= blocks.start) & (columns < blocks.start + rows.shape[1])
    if rows.shape[1]:
        values = rows.gather(1, (columns - blocks.start).clamp(0, rows.shape[1] - 1))
    else:  # nothing here, but in the graph: its adjoint is a move that all ranks make
        values = rows.sum(1, keepdim=True).to(rows.dtype).expand(columns.shape)
    return autograd_collectives.reduce(torch.where(mine, values, values.new_zeros(())), blocks.groups)


def count_nans(rows: Tensor, blocks: Blocks) -> Tensor:
    """How many NaNs each row has, (rows, 1), on all the blocks' ranks."""
    if not rows.is_floating_point():
        return rows.new_zeros(rows.shape[0], 1, dtype=torch.int64)
    return autograd_collectives.reduce(rows.isnan().sum(1, keepdim=True), blocks.groups)


def longest_run(values: Tensor, indices: Tensor, blocks: Blocks) -> Tensor:
    """For sorted rows and where their elements came from: the index of the last element of the first longest run."""
    n, length = sum(blocks.shard_sizes), values.shape[1]
    lasts = blocks.all_gather_unit(values[:, -1:] if length else values.new_zeros(len(values), 1), 1)
    at = torch.arange(blocks.start, blocks.start + length, device=values.device)
    filled = [i for i in range(blocks.index) if blocks.shard_sizes[i]]
    before = torch.cat([lasts[:, filled[-1:]], values], 1)
    fresh = before[:, 1:] != before[:, :-1]
    if not filled:  # the very first element of a row begins a run
        fresh = torch.cat([torch.ones_like(values[:, :1], dtype=torch.bool), fresh], 1)
    begins = torch.where(fresh, at, 0).cummax(1)[0]
    begun = blocks.all_gather_unit(begins[:, -1:] if length else indices.new_zeros(len(values), 1), 1)
    begun = torch.cat([begun[:, : blocks.index], begun.new_zeros(len(values), 1)], 1).amax(1, keepdim=True)
    score = (at - torch.maximum(begins, begun) + 1) * (n + 1) - at  # longest first, then foremost
    best, which = score.max(1, keepdim=True) if length else (indices.new_zeros(len(values), 1),) * 2
    index = indices.gather(1, which) if length else best
    told = blocks.all_gather_unit(torch.stack([best, index])[None], 0)
    return told[:, 1].gather(0, told[:, 0].argmax(0, keepdim=True))[0]
