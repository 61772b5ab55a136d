"""k-th smallest elements of rows that are sharded in blocks, without moving the rows.

`sortable_key` maps values to integers of the same order. The k-th smallest key is found digit by digit: in each round
every rank counts its keys below a few pivots, and an all_reduce sums the counts. Only counts are communicated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._compat.autocast import concatenate
from ...comm import autograd_collectives, collectives
from .._common.blockwise import Blocks, pick_columns


def sortable_key(x: Tensor, descending: bool = False) -> Tensor:
    """Return int64 keys that sort as torch sorts `x`: NaN is greatest, -0.0 equals 0.0. Not differentiable."""
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
    """Return the number of bits that distinguish the keys of a dtype."""
    if dtype.is_floating_point:
        return 64 if dtype is torch.float64 else 32
    return {torch.bool: 8, torch.int8: 8, torch.uint8: 16, torch.int16: 16, torch.int32: 32}.get(dtype, 64)


def digit_width(count: int) -> int:
    """Return the number of key bits determined per round: fewer if many statistics make the messages large."""
    return 8 if count <= 64 else 4


def counting_cost_bytes(dtype: torch.dtype, count: int) -> int:
    """Return the bytes that a rank sends to find `count` order statistics."""
    width = digit_width(count)
    return key_bits(dtype) // width * ((1 << width) - 1) * 8 * count


def kth_index(rows: Tensor, ranks: Tensor, blocks: Blocks) -> Tensor:
    """Return the global column of the k-th smallest element of each row, for k in `ranks` (from 0), ties in order.

    rows: (rows, this block's columns). ranks: (rows, wanted), equal on all ranks of the blocks, as is
    the result.
    """
    keys, order = sortable_key(rows).sort(dim=1, stable=True)
    key = _kth_key(keys, ranks, blocks, key_bits(rows.dtype))
    below = torch.searchsorted(keys, key)
    equal = torch.searchsorted(keys, key, right=True) - below
    counts = blocks.all_gather_unit(torch.stack([below, equal])[None], 0)
    # index among the elements equal to the k-th, counted from this block's first
    tie_index = ranks - counts[:, 0].sum(0) - counts[: blocks.index, 1].sum(0)
    is_local = (tie_index >= 0) & (tie_index < equal)
    if rows.shape[1]:
        column = order.gather(1, (below + tie_index).clamp(0, rows.shape[1] - 1)) + blocks.start
    else:
        column = torch.zeros_like(tie_index)
    return autograd_collectives.reduce(torch.where(is_local, column, 0), blocks.groups)


def _kth_key(keys: Tensor, ranks: Tensor, blocks: Blocks, bits: int) -> Tensor:
    """Return the k-th smallest key of each row, for k in `ranks`: the greatest number with at most k keys below it."""
    width = digit_width(ranks.numel())
    key = torch.zeros_like(ranks)
    for shift in range(bits - width, -1, -width):
        first = -(1 << (width - 1)) if shift == bits - width else 0  # the top digit holds the sign
        steps = [digit << shift for digit in range(first + 1, first + (1 << width))]
        pivots = key[..., None] + torch.tensor(steps, device=keys.device)
        below = torch.searchsorted(keys, pivots.flatten(1)).view(pivots.shape)
        for group in blocks.groups:
            below = collectives.all_reduce(below, group)
        digit = (below <= ranks[..., None]).sum(-1) + first
        key = key + (digit << shift)
    return key


def select_columns(rows: Tensor, columns: Tensor, blocks: Blocks) -> Tensor:
    """Return the values at global columns on all ranks of the blocks, by an all_reduce of the owner's values."""
    is_local = (columns >= blocks.start) & (columns < blocks.start + rows.shape[1])
    if rows.shape[1]:
        values = pick_columns(rows, (columns - blocks.start).clamp(0, rows.shape[1] - 1))
    else:  # an empty shard must depend on rows too: all ranks run the adjoint of the reduction
        values = rows.sum(1, keepdim=True).to(rows.dtype).expand(columns.shape)
    return autograd_collectives.reduce(torch.where(is_local, values, values.new_zeros(())), blocks.groups)


def count_nans(rows: Tensor, blocks: Blocks) -> Tensor:
    """Return the number of NaNs of each row, (rows, 1), on all ranks of the blocks."""
    if not rows.is_floating_point():
        return rows.new_zeros(rows.shape[0], 1, dtype=torch.int64)
    return autograd_collectives.reduce(rows.isnan().sum(1, keepdim=True), blocks.groups)


def longest_run(values: Tensor, indices: Tensor, blocks: Blocks) -> Tensor:
    """Return the index of the last element of the first longest run, for sorted rows and their source indices."""
    n, length = sum(blocks.shard_sizes), values.shape[1]
    lasts = blocks.all_gather_unit(values[:, -1:] if length else values.new_zeros(len(values), 1), 1)
    position = torch.arange(blocks.start, blocks.start + length, device=values.device)
    nonempty = [i for i in range(blocks.index) if blocks.shard_sizes[i]]
    before = concatenate([lasts[:, nonempty[-1:]], values], 1)
    is_start = before[:, 1:] != before[:, :-1]
    if not nonempty:  # the first element of a row starts a run
        is_start = torch.cat([torch.ones_like(values[:, :1], dtype=torch.bool), is_start], 1)
    run_start = torch.where(is_start, position, 0).cummax(1)[0]
    earlier_start = blocks.all_gather_unit(run_start[:, -1:] if length else indices.new_zeros(len(values), 1), 1)
    earlier_start = torch.cat([earlier_start[:, : blocks.index], earlier_start.new_zeros(len(values), 1)], 1).amax(
        1, keepdim=True
    )
    # longest first, then foremost
    score = (position - torch.maximum(run_start, earlier_start) + 1) * (n + 1) - position
    best, which = score.max(1, keepdim=True) if length else (indices.new_zeros(len(values), 1),) * 2
    index = indices.gather(1, which) if length else best
    candidates = blocks.all_gather_unit(torch.stack([best, index])[None], 0)
    return candidates[:, 1].gather(0, candidates[:, 0].argmax(0, keepdim=True))[0]
