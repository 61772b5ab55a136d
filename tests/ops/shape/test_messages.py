"""Bytes of views, joins and rearrangements: only rows that change their owner are sent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor, runtime, strict
from shardfield.layout import Layout
from shardfield.redistribute import redistribute
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh

ROW = 3 * 8  # bytes of a row of three float64


def rows(size: int, *sizes: int) -> ShardTensor:
    """Return `size` rows of three with these shard sizes; without any, replicated."""
    mesh = world_mesh((2,))
    full = torch.arange(size * 3, dtype=torch.float64).view(size, 3)
    layout = Layout.of(mesh, [Shard(0) if sizes else Replicate()], full.shape, {0: sizes} if sizes else None)
    return ShardTensor(redistribute(full, Layout.replicate(mesh, full.shape), layout), layout)


def sent(calls) -> list[int]:
    """Return the bytes that this rank sends in each call."""
    found = []
    for call in calls:
        total = []
        runtime.active.meter = lambda kind, messages, nbytes, total=total: total.append(nbytes)
        try:
            with strict():
                call()
        finally:
            runtime.active.meter = None
        found.append(sum(total))
    return found


def on_rank() -> list[int]:
    big, small, other = rows(8, 5, 3), rows(1, 0, 1), rows(8, 2, 6)
    tokens = rows(12, 5, 7)
    return sent(
        [
            lambda: big.roll(1, 0),
            lambda: big.diff(dim=0),  # one row at the shard boundary
            lambda: torch.cat([big, small]),  # the last row is already on its rank
            lambda: torch.cat([small, big]),  # one row is sent, the eight rows stay
            lambda: torch.cat([big, rows(2)]),
            lambda: torch.stack([big, other]),  # the second takes the sharding of the first: three rows
            lambda: F.pad(big, (0, 0, 3, 3)),
            lambda: F.pad(big.t(), (3, 2), "replicate").to_local(),  # materializes the lazy pad
            lambda: F.pad(big.t(), (4, 4), "reflect").to_local(),  # rank 1 has three of the five reflected rows
            lambda: F.pad(big.t(), (1, 0), "circular").to_local(),
            lambda: tokens.view(3, 4, 3),  # the shard boundary moves from 5 to 4
            lambda: tokens.view(2, 2, 3, 3).flip(1),  # here to 6, so that each half is on one rank
            lambda: big.t().flatten().view(3, 8).t(),
            lambda: [part.unsqueeze(0) for part in big.chunk(3)],
            lambda: big.repeat(2, 2).repeat_interleave(2, 1),
            lambda: torch.stack([row * 2 for row in big.unbind()]),
        ]
    )


def test_bytes_sent():
    first, second = run_on_ranks(on_rank, 2, timeout=60)
    assert first == [ROW, ROW, 0, 0, 0, 0, 0, 0, 2 * ROW, 0, ROW, 0, 0, 0, 0, 0]
    assert second == [ROW, 0, 0, ROW, 0, 3 * ROW, 0, 0, 0, ROW, 0, ROW, 0, 0, 0, 0]
