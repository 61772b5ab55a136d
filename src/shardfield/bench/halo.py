"""Halo exchanges of a CNN on a field that is sharded along its rows: bytes sent, overlap, scaling.

A 6-layer CNN (3x3, padding 1, relu) runs a training step. Sent: bytes of a convolution's forward and backward, against
the rows of its halo. Delayed messages: every message arrives 5 ms later, and the time of the step is compared with the
slower of its computation and its messages; again with one wide halo for all layers (`halo_blocks`). Scaling: the step
on 1 rank against several, in wall-clock time and in CPU time of the busiest rank. Memory: the peak of a rank among
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
    size: int = 512  # of the field with delayed messages; scaling and memory use twice that
    rounds: int = 5
    delay_ms: float = 5.0

    quick: ClassVar[dict[str, Any]] = {"size": 64, "channels": 8, "rounds": 3}


def count_sent(device: str, size: int, channels: int) -> list[int]:
    """Return the bytes that a convolution sends in forward and backward. Its weight is frozen, so only halos count."""
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
    neighbors, row = (rank > 0) + (rank < ranks - 1), 3 * size * 4
    assert counts[2:] == [neighbors * row] * 2, (rank, counts)
    return counts[2:]


def time_delayed(device: str, size: int, channels: int, rounds: int, seconds: float) -> Times:
    """Time a step with delayed messages, its computation alone, and its messages one after the other, on a rank."""
    x = make_sharded_field(domain_mesh(device), (1, 3, size, size))
    model, blocked, local = (
        cnn(channels).to(device),
        halo_blocks(cnn(channels).to(device), redundancy=0.2),
        x.to_local(),
    )
    train_step(model, x)
    with count_traffic() as count:
        train_step(model, x)  # counts calls, not messages: those to both neighbors are in flight at the same time

    def with_delay(call: Any) -> float:
        with delay_messages(seconds if call is not work else 0.0):
            return rank_seconds(call, device)

    work = partial(train_step, model, local.detach())
    times = interleave(
        {
            "work alone": work,
            "step": partial(train_step, model, x),
            "step, one wide halo": partial(train_step, blocked, x),
        },
        rounds,
        with_delay,
    )
    return times | {"messages alone": [count.calls * seconds] * rounds}


def time_steps(device: str, size: int, channels: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall-clock and CPU seconds of each step on a rank; on a single rank also of plain tensors."""
    mesh = domain_mesh(device)
    x, model = make_sharded_field(mesh, (1, 3, size, size)), cnn(channels).to(device)
    calls = {PLAIN: partial(train_step, model, x.to_local())} if mesh.size() == 1 else {}
    return interleave(
        calls | {rank_label(mesh.size()): partial(train_step, model, x)}, rounds, partial(rank_times, device=device)
    )


def step_memory(device: str, size: int, channels: int) -> int:
    """Return the peak memory of a step on a rank."""
    model, x = cnn(channels).to(device), make_sharded_field(domain_mesh(device), (1, 3, size, size))
    train_step(model, x)
    model.zero_grad(set_to_none=True)
    return peak_memory(partial(train_step, model, x), device)


def measure_scaling(settings: Settings, device: str, table: Table) -> None:
    """Time the step in worlds of different sizes, interleaved."""
    large = 2 * settings.size
    worlds = sorted({1, *settings.ranks})
    turns, rounds = (settings.rounds, 1) if len(worlds) > 1 else (1, settings.rounds)
    wall_and_cpu: tuple[Times, Times] = {}, {}
    for _ in range(turns):
        for ranks in worlds:
            by_rank = measure_on_ranks(time_steps, ranks, device, large, settings.channels, rounds)
            for i, times in enumerate(wall_and_cpu):
                for name, seconds in max_over_ranks(
                    [{n: [at[i] for at in v] for n, v in t.items()} for t in by_rank]
                ).items():
                    times.setdefault(name, []).extend(seconds)
    bars = {"2 ranks": 1 / 1.8} if device == "cpu" else {}
    table.add_times(f"step, {large} x {large}", wall_and_cpu[0], "1 rank", bars=bars)
    if device == "cpu":
        table.add_times(f"step, {large} x {large}, processor time of a rank", wall_and_cpu[1], "1 rank", bars=bars)


def run(settings: Settings, device: str, table: Table) -> None:
    size, channels, large = settings.size, settings.channels, 2 * settings.size
    several = [ranks for ranks in settings.ranks if ranks > 1]
    for ranks in several:
        by_rank = measure_on_ranks(count_sent, ranks, device, size, channels)
        row = 3 * size * 4
        for i, direction in enumerate(("forward", "backward")):
            counts = {"its rows of the halo": row * min(2, ranks - 1), "sent": max(t[i] for t in by_rank)}
            case = f"{ranks} ranks, a convolution, {direction}"
            table.add_counts(case, counts, "B", "its rows of the halo", {"sent": 1.0})
        args = (size, channels, settings.rounds, settings.delay_ms / 1e3)
        times = max_over_ranks(measure_on_ranks(time_delayed, ranks, device, *args))
        bound = {OVERLAP_BOUND: [max(at) for at in zip(times["work alone"], times["messages alone"], strict=True)]}
        table.add_times(
            f"{ranks} ranks, messages {settings.delay_ms:g} ms late, {size} x {size}",
            bound | times,
            OVERLAP_BOUND,
            bars={"step": 1.15},
        )
    measure_scaling(settings, device, table)
    worlds = sorted({1, *settings.ranks})
    peaks = {rank_label(r): max(measure_on_ranks(step_memory, r, device, large, channels)) for r in worlds}
    table.add_counts(f"memory of a step, {large} x {large}", peaks, "MB", "1 rank", {"4 ranks": 0.28})
