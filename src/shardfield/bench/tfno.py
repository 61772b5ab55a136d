"""Forward and backward of an unmodified layer of neuraloperator's TFNO: speed and memory by number of ranks.

On one rank the layer also runs on plain tensors, interleaved with ShardTensors. Worlds of different sizes are
interleaved too, so that other load on the machine affects all of them. If there are fewer cores than ranks, the CPU
time of the busiest rank is more meaningful than wall-clock time. Memory is the peak of live tensors, as torch counts
its allocations.
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
    """Return seconds, CPU seconds, peak memory and bytes sent of a step on a rank; on a single rank also for plain
    tensors.
    """
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

    times = interleave(
        {method: partial(step, x) for method, x in fields.items()}, settings.rounds, partial(rank_times, device=device)
    )
    rows: dict[str, dict[str, Any]] = {}
    for method, x in fields.items():
        row: dict[str, Any] = {"seconds": [t[0] for t in times[method]], "cpu": [t[1] for t in times[method]]}
        if count:
            clear(x)
            local = x if method == PLAIN else x.to_local()  # type: ignore[attr-defined]
            row |= {
                "memory": peak_memory(partial(step, x), device) + local.nbytes,
                "sent": checked_traffic(partial(step, x)).bytes,
            }
        rows[method] = row
    return rows


def run(settings: Settings, device: str, table: Table) -> None:
    if "neuraloperator" not in table.versions:
        table.add_skipped("TFNO", "neuraloperator is not installed")
        return
    rows: dict[str, dict[str, Any]] = {}
    for turn in range(settings.turns if len(settings.ranks) > 1 else 1):  # worlds are interleaved
        for ranks in settings.ranks:
            by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings, turn == 0)
            for method in by_rank[0]:
                row = rows.setdefault(method, {"seconds": [], "cpu": [], "memory": 0, "sent": 0})
                for name in ("seconds", "cpu"):  # a step takes as long as its slowest rank
                    row[name] += [max(at) for at in zip(*(t[method][name] for t in by_rank), strict=True)]
                for name in ("memory", "sent"):
                    row[name] = max(row[name], *(t[method].get(name, 0) for t in by_rank))
    base = PLAIN if PLAIN in rows else next(iter(rows))
    grid = " x ".join(map(str, settings.grid))
    seconds: Times = {method: row["seconds"] for method, row in rows.items()}
    table.add_times(f"layer at {grid}, forward + backward", seconds, base, bars={"1 rank": 1.1, "2 ranks": 1 / 1.7})
    if device == "cpu":
        table.add_times(
            f"layer at {grid}, CPU time of a rank", {method: row["cpu"] for method, row in rows.items()}, base
        )
    memory = {method: row["memory"] for method, row in rows.items()}
    table.add_counts(f"layer at {grid}, memory of a rank", memory, "MB", base, {"4 ranks": 0.3})
    table.add_counts(f"layer at {grid}, sent by a rank", {method: row["sent"] for method, row in rows.items()}, "kB")
