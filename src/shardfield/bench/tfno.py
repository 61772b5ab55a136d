"""A layer of neuraloperator's TFNO, unmodified, forward and backward: how much faster and smaller it gets on ranks.

On one rank it is also run on plain tensors, in turn with ShardTensors. Worlds take turns, so that a busy machine slows
them alike; where there are fewer cores than ranks, CPU seconds of the busiest rank tell more than those on the clock.
Memory is the most that tensors take at a time, by torch's own count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .measure import Times, interleave, peak_memory, rank_times
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, rank_label
from .table import Table
from .traffic import checked_traffic

PLAIN = "one process, plain torch"


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4)
    grid: tuple[int, ...] = (512, 512)
    channels: int = 32
    modes: tuple[int, ...] = (32, 32)
    turns: int = 4
    rounds: int = 3

    quick: ClassVar[dict[str, Any]] = {"grid": (64, 64), "channels": 8, "modes": (8, 8), "turns": 2, "rounds": 2}


def compare_on_rank(device: str, settings: Settings, count: bool) -> dict[str, dict[str, Any]]:
    """On a rank: seconds, CPU seconds, bytes sent and held by a step, on ShardTensors and, if alone, on plain ones."""
    from neuralop.layers.fno_block import FNOBlocks

    mesh = domain_mesh(device)
    channels = settings.channels
    torch.manual_seed(0)
    layer = FNOBlocks(
        channels, channels, settings.modes, factorization="tucker", rank=0.1, implementation="factorized"
    ).to(device)
    x = make_sharded_field(mesh, (1, channels, *settings.grid)).requires_grad_()
    fields: dict[str, Tensor] = {rank_label(mesh.size()): x}
    if mesh.size() == 1:
        fields = {PLAIN: x.to_local().detach().clone().requires_grad_(), **fields}

    def clear(x: Tensor) -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)

    def step(x: Tensor) -> None:
        clear(x)
        layer(x).square().sum().backward()

    told = interleave(
        {way: partial(step, x) for way, x in fields.items()}, settings.rounds, partial(rank_times, device=device)
    )
    found: dict[str, dict[str, Any]] = {}
    for way, x in fields.items():
        row: dict[str, Any] = {"seconds": [t[0] for t in told[way]], "cpu": [t[1] for t in told[way]]}
        if count:
            clear(x)
            local = x if way == PLAIN else x.to_local()  # type: ignore[attr-defined]
            row |= {
                "memory": peak_memory(partial(step, x), device) + local.nbytes,
                "sent": checked_traffic(partial(step, x)).bytes,
            }
        found[way] = row
    return found


def run(settings: Settings, device: str, table: Table) -> None:
    if "neuraloperator" not in table.versions:
        table.add_skipped("TFNO", "neuraloperator is not installed")
        return
    found: dict[str, dict[str, Any]] = {}
    for turn in range(settings.turns if len(settings.ranks) > 1 else 1):  # worlds take turns
        for ranks in settings.ranks:
            told = measure_on_ranks(compare_on_rank, ranks, device, settings, turn == 0)
            for way in told[0]:
                row = found.setdefault(way, {"seconds": [], "cpu": [], "memory": 0, "sent": 0})
                for name in ("seconds", "cpu"):  # a step takes as long as its slowest rank
                    row[name] += [max(at) for at in zip(*(t[way][name] for t in told), strict=True)]
                for name in ("memory", "sent"):
                    row[name] = max(row[name], *(t[way].get(name, 0) for t in told))
    base = PLAIN if PLAIN in found else next(iter(found))
    grid = " x ".join(map(str, settings.grid))
    seconds: Times = {way: row["seconds"] for way, row in found.items()}
    table.add_times(f"layer at {grid}, forward + backward", seconds, base, bars={"1 rank": 1.1, "2 ranks": 1 / 1.7})
    if device == "cpu":
        table.add_times(f"layer at {grid}, CPU time of a rank", {way: row["cpu"] for way, row in found.items()}, base)
    memory = {way: row["memory"] for way, row in found.items()}
    table.add_counts(f"layer at {grid}, memory of a rank", memory, "MB", base, {"4 ranks": 0.3})
    table.add_counts(f"layer at {grid}, sent by a rank", {way: row["sent"] for way, row in found.items()}, "kB")
