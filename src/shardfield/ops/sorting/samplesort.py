"""Rows that lie in blocks, sorted across the blocks: for where no other dim can take the cut.

A sample of each block tells which part of the order each rank should get; elements go there, are sorted, and then go
to the ranks that own their places. Every element travels twice, no rank ever holds much more than its share, and the
order is exact: equal elements stay in the order of their global index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common.blockwise import Blocks
from ..indexing.owners import AxisExchange, gather_counts
from .order_statistics import sortable_key


def sort_rows(rows: Tensor, blocks: Blocks, descending: bool) -> tuple[Tensor, Tensor]:
    """(values, global columns) of rows (rows, this block's columns) sorted along their whole length. Differentiable.

    An element's code, row * length + column, goes with it: codes tell rows and equal elements apart.
    """
    count, n, device = len(rows), sum(blocks.shard_sizes), rows.device
    if not count:  # then it is so on all the blocks' ranks
        return rows, torch.zeros_like(rows, dtype=torch.int64)
    keys, order = sortable_key(rows, descending).sort(dim=1, stable=True)
    codes = order + blocks.start + torch.arange(count, device=device)[:, None] * n
    values = rows.gather(1, order).flatten()
    bounds = torch.tensor(_bucket_bounds(keys, codes, blocks, n), dtype=torch.int64, device=device)
    bucket = torch.searchsorted(bounds, torch.arange(len(values), device=device), right=True)
    narrow = torch.int32 if count * n < 1 << 31 else torch.int64  # codes are most of what travels
    values, codes = _send_columns([values, codes.flatten().to(narrow)], bucket, blocks)

    # Here: one stretch of the global order, pieces from every block, equal ones in the order of their codes.
    order = sortable_key(values, descending).argsort(stable=True)
    order = order[(codes[order].div(n, rounding_mode="floor")).argsort(stable=True)] if count > 1 else order
    held = gather_counts(len(values), blocks.layout, blocks.axes, device)
    place = torch.arange(len(values), device=device) + sum(held[: blocks.index])
    ends = torch.tensor(blocks.shard_sizes, device=device).cumsum(0)
    owner = torch.searchsorted(ends, place % n, right=True)
    values, codes = _send_columns([values.index_select(0, order), codes[order]], owner, blocks)

    # Here: the elements whose places this rank owns. Stretches arrive in global order, so they are in place.
    return values.view(rows.shape), (codes.to(torch.int64) % n).view(rows.shape)


def plan_exchanges(peers: Tensor, blocks: Blocks) -> list[AxisExchange]:
    """The way of entry i to block `peers[i]`, one hop for each axis. Arrivals keep the order of blocks, then theirs."""
    inner, found = 1, []
    left = sum(size > 1 for size in blocks.sizes)
    for axis, size in zip(reversed(blocks.axes), reversed(blocks.sizes), strict=True):
        if size > 1:
            found.append(AxisExchange.to(peers.div(inner, rounding_mode="floor") % size, axis, blocks.layout))
            left -= 1
            peers = found[-1].exchange(peers) if left else peers  # the last hop needs no further address
        inner *= size
    return found


def _send_columns(columns: list[Tensor], peers: Tensor, blocks: Blocks) -> list[Tensor]:
    """Entry i of each column goes to block `peers[i]`."""
    for hop in plan_exchanges(peers, blocks):
        columns = [hop.exchange(c) for c in columns]
    return columns


def assign_buckets(keys: Tensor, counts: Sequence[int], blocks: Blocks) -> Tensor:
    """The block to which each of this block's `counts[blocks.index]` keys should go: equal ones together, in order."""
    parts = blocks.count
    step = max(1, sum(counts) // (2 * parts * parts))
    taken = [len(range(step // 2, count, step)) for count in counts]
    sample = blocks.all_gather(keys.sort()[0][step // 2 :: step], 0, taken).sort()[0]
    chosen = [len(sample) * part // parts for part in range(1, parts)]
    return torch.searchsorted(sample[chosen], keys, right=True)


def _bucket_bounds(keys: Tensor, codes: Tensor, blocks: Blocks, n: int) -> list[int]:
    """Where in this block's sorted elements each rank's part begins, but the first: near-equal parts of the whole."""
    count, parts = len(keys), blocks.count
    step = max(1, count * n // (2 * parts * parts))  # parts come out at most 1.5 times their fair share
    taken = [len(range(step // 2, count * length, step)) for length in blocks.shard_sizes]
    mine = torch.stack([keys.flatten(), codes.flatten()], 1)[step // 2 :: step]
    sample = blocks.all_gather(mine, 0, taken)
    sample = sample[sample[:, 1].argsort()]
    sample = sample[sample[:, 0].argsort(stable=True)]
    sample = sample[sample[:, 1].div(n, rounding_mode="floor").argsort(stable=True)]
    chosen = [len(sample) * part // parts for part in range(1, parts)]
    bounds, length = [], keys.shape[1]
    for key, code in sample[chosen].tolist():
        row = code // n
        low, high = (int(torch.searchsorted(keys[row], key, right=right)) for right in (False, True))
        bounds.append(row * length + low + int(torch.searchsorted(codes[row, low:high].contiguous(), code)))
    return bounds
