"""Sample sort of rows that are sharded in blocks, used if no other dim can take over the sharding.

A sample of each block determines the splitters, that is, which range of the global order each rank receives. Elements
are sent to the rank of their range, sorted there, and sent on to the ranks that own their positions. Every element is
sent twice, and no rank holds much more than its share. The order is exact: ties stay in the order of their global
index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common.blockwise import Blocks, pick_columns
from ..indexing.owners import AxisExchange, gather_counts
from .order_statistics import sortable_key


def sort_rows(rows: Tensor, blocks: Blocks, descending: bool) -> tuple[Tensor, Tensor]:
    """Return (values, global columns) of rows (rows, this block's columns), sorted globally. Differentiable.

    Each element is sent with its code, row * length + column, which identifies its row and orders ties.
    """
    count, n, device = len(rows), sum(blocks.shard_sizes), rows.device
    if not count:  # equal on all ranks of the blocks
        return rows, torch.zeros_like(rows, dtype=torch.int64)
    keys, order = sortable_key(rows, descending).sort(dim=1, stable=True)
    codes = order + blocks.start + torch.arange(count, device=device)[:, None] * n
    values = pick_columns(rows, order).flatten()
    bounds = torch.tensor(_bucket_bounds(keys, codes, blocks, n), dtype=torch.int64, device=device)
    bucket = torch.searchsorted(bounds, torch.arange(len(values), device=device), right=True)
    narrow = torch.int32 if count * n < 1 << 31 else torch.int64  # codes are most of the bytes sent
    values, codes = _send_columns([values, codes.flatten().to(narrow)], bucket, blocks)

    # Held here: one range of the global order, received from every block, with ties in the order of their codes.
    order = sortable_key(values, descending).argsort(stable=True)
    order = order[(codes[order].div(n, rounding_mode="floor")).argsort(stable=True)] if count > 1 else order
    counts = gather_counts(len(values), blocks.layout, blocks.axes, device)
    position = torch.arange(len(values), device=device) + sum(counts[: blocks.index])
    ends = torch.tensor(blocks.shard_sizes, device=device).cumsum(0)
    owner = torch.searchsorted(ends, position % n, right=True)
    values, codes = _send_columns([values.index_select(0, order), codes[order]], owner, blocks)

    # Held here: the elements at the positions this rank owns. Ranges arrive in global order, so they are sorted.
    return values.view(rows.shape), (codes.to(torch.int64) % n).view(rows.shape)


def plan_exchanges(peers: Tensor, blocks: Blocks) -> list[AxisExchange]:
    """Return the exchange of each axis that sends entry i to block `peers[i]`; arrivals are in block order."""
    inner, exchanges = 1, []
    remaining = sum(size > 1 for size in blocks.sizes)
    for axis, size in zip(reversed(blocks.axes), reversed(blocks.sizes), strict=True):
        if size > 1:
            exchanges.append(AxisExchange.to(peers.div(inner, rounding_mode="floor") % size, axis, blocks.layout))
            remaining -= 1
            peers = exchanges[-1].exchange(peers) if remaining else peers  # the last exchange needs no addresses
        inner *= size
    return exchanges


def _send_columns(columns: list[Tensor], peers: Tensor, blocks: Blocks) -> list[Tensor]:
    """Send entry i of each column to block `peers[i]`."""
    for hop in plan_exchanges(peers, blocks):
        columns = [hop.exchange(c) for c in columns]
    return columns


def assign_buckets(keys: Tensor, counts: Sequence[int], blocks: Blocks) -> Tensor:
    """Return the destination block of each key: one range of the global order per block, equal keys in one block."""
    parts = blocks.count
    step = max(1, sum(counts) // (2 * parts * parts))
    sample_sizes = [len(range(step // 2, count, step)) for count in counts]
    sample = blocks.all_gather(keys.sort()[0][step // 2 :: step], 0, sample_sizes).sort()[0]
    chosen = [len(sample) * part // parts for part in range(1, parts)]
    return torch.searchsorted(sample[chosen], keys, right=True)


def _bucket_bounds(keys: Tensor, codes: Tensor, blocks: Blocks, n: int) -> list[int]:
    """Return the offsets in this block's sorted elements where the ranges of ranks 1, 2, ... begin.

    The ranges have nearly equal global sizes.
    """
    count, parts = len(keys), blocks.count
    step = max(1, count * n // (2 * parts * parts))  # a range is at most 1.5 times the average
    sample_sizes = [len(range(step // 2, count * length, step)) for length in blocks.shard_sizes]
    local_sample = torch.stack([keys.flatten(), codes.flatten()], 1)[step // 2 :: step]
    sample = blocks.all_gather(local_sample, 0, sample_sizes)
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
