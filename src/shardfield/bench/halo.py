"""Halos of a CNN on a field cut into rows: what is sent, whether it hides behind the work, how the step scales.

A 6-layer CNN (3x3, padding 1, relu) takes a training step. Sent: bytes of a convolution's forward and backward, against
the rows of its halo. Late messages: every message is made to arrive 5 ms later, and the step's time is held against the
slower of its work and its messages; once more with one wide halo for all layers (`halo_blocks`). Scaling: the step on 1
rank against several, by the clock and in processor seconds of the busiest rank. Memory: the peak of a rank among
several against that of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..shard_utils import halo_blocks
from .measure import (
    Times,
    count_traffic,
    delay_messages,
    interleave,
    max_over_ranks,
    peak_memory,
    rank_seconds,
    rank_times,
)
from .models import cnn
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, rank_label, train_step
from .table import Table
from .traffic import checked_traffic

PLAIN = "one process, plain torch"
OVERLAP_BOUND = "the slower of work and messages"


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2, 4)
    channels: int = 32
    size: int = 512  # of the step with late messages; scaling and memory are taken at twice that
    rounds: int = 5
    delay_ms: float = 5.0

    quick: ClassVar[dict[str, Any]] = {"size": 64, "channels": 8, "rounds": 3}


def count_sent(device: str, size: int, channels: int) -> list[int]:
    """On a rank: bytes of one convolution, forward and backward, parameters frozen: the halo alone."""
    x = make_sharded_field(domain_mesh(device), (1, 3, size, size)).requires_grad_()
    weight = torch.randn(channels, 3, 3, 3, device=device)

    def both() -> None:
        out = F.conv2d(x, weight, padding=1)
        counts.append(checked_traffic(lambda: F.conv2d(x, weight, padding=1)).bytes)
        counts.append(checked_traffic(lambda: out.backward(torch.ones(out.shape, device=device))).bytes)

    counts: list[int] = []
    both()
    both()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    neighbours, row = (rank > 0) + (rank < ranks - 1), 3 * size * 4
    assert counts[2:] == [neighbours * row] * 2, (rank, counts)
    return counts[2:]


def time_delayed(device: str, size: int, channels: int, rounds: int, seconds: float) -> Times:
    """On a rank: the step with late messages, its work alone, and the time its messages take one after the other."""
    x = make_sharded_field(domain_mesh(device), (1, 3, size, size))
    model, blocked, local = (
        cnn(channels).to(device),
        halo_blocks(cnn(channels).to(device), redundancy=0.2),
        x.to_local(),
    )
    train_step(model, x)
    with count_traffic() as count:
        train_step(model, x)  # what one rank waits for: messages to both neighbours travel at once

    def with_late(call: Any) -> float:
        with delay_messages(seconds if call is not work else 0.0):
            return rank_seconds(call, device)

    work = partial(train_step, model, local.detach())
    found = interleave(
        {
            "work alone": work,
            "step": partial(train_step, model, x),
            "step, one wide halo": partial(train_step, blocked, x),
        },
        rounds,
        with_late,
    )
    return found | {"messages alone": [count.calls * seconds] * rounds}


def time_steps(device: str, size: int, channels: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """On a rank: seconds and processor seconds of each step; where it is alone, of a plain tensor's too."""
    mesh = domain_mesh(device)
    x, model = make_sharded_field(mesh, (1, 3, size, size)), cnn(channels).to(device)
    calls = {PLAIN: partial(train_step, model, x.to_local())} if mesh.size() == 1 else {}
    return interleave(
        calls | {rank_label(mesh.size()): partial(train_step, model, x)}, rounds, partial(rank_times, device=device)
    )


def step_memory(device: str, size: int, channels: int) -> int:
    """On a rank: bytes that a step takes."""
    model, x = cnn(channels).to(device), make_sharded_field(domain_mesh(device), (1, 3, size, size))
    train_step(model, x)
    model.zero_grad(set_to_none=True)
    return peak_memory(partial(train_step, model, x), device)


def measure_scaling(settings: Settings, device: str, table: Table) -> None:
    """Worlds take turns."""
    large = 2 * settings.size
    worlds = sorted({1, *settings.ranks})
    turn, each = (settings.rounds, 1) if len(worlds) > 1 else (1, settings.rounds)
    found: tuple[Times, Times] = {}, {}
    for _ in range(turn):
        for ranks in worlds:
            told = measure_on_ranks(time_steps, ranks, device, large, settings.channels, each)
            for i, times in enumerate(found):
                for name, seconds in max_over_ranks(
                    [{n: [at[i] for at in v] for n, v in t.items()} for t in told]
                ).items():
                    times.setdefault(name, []).extend(seconds)
    bars = {"2 ranks": 1 / 1.8} if device == "cpu" else {}
    table.add_times(f"step, {large} x {large}", found[0], "1 rank", bars=bars)
    if device == "cpu":
        table.add_times(f"step, {large} x {large}, processor time of a rank", found[1], "1 rank", bars=bars)


def run(settings: Settings, device: str, table: Table) -> None:
    size, channels, large = settings.size, settings.channels, 2 * settings.size
    several = [ranks for ranks in settings.ranks if ranks > 1]
    for ranks in several:
        told = measure_on_ranks(count_sent, ranks, device, size, channels)
        row = 3 * size * 4
        for i, way in enumerate(("forward", "backward")):
            counts = {"its rows of the halo": row * min(2, ranks - 1), "sent": max(t[i] for t in told)}
            table.add_counts(f"{ranks} ranks, a convolution, {way}", counts, "B", "its rows of the halo", {"sent": 1.0})
        how = (size, channels, settings.rounds, settings.delay_ms / 1e3)
        times = max_over_ranks(measure_on_ranks(time_delayed, ranks, device, *how))
        behind = {OVERLAP_BOUND: [max(at) for at in zip(times["work alone"], times["messages alone"], strict=True)]}
        table.add_times(
            f"{ranks} ranks, messages {settings.delay_ms:g} ms late, {size} x {size}",
            behind | times,
            OVERLAP_BOUND,
            bars={"step": 1.15},
        )
    measure_scaling(settings, device, table)
    worlds = sorted({1, *settings.ranks})
    most = {rank_label(r): max(measure_on_ranks(step_memory, r, device, large, channels)) for r in worlds}
    table.add_counts(f"memory of a step, {large} x {large}", most, "MB", "1 rank", {"4 ranks": 0.28})
