"""Strong scaling: one field, forward and backward, on 1 to 8 gloo ranks with two threads each.

A ratio is the time on P ranks over a P-th of that on one rank: 1 is ideal, 1.14 is 88 % of ideal. Two further times say
where the rest goes, both on all ranks at once. `computing alone` is the same step without sending its messages: the
difference to the measured step is messages and waiting. `plain torch on its share` is the model on a plain tensor
of the rank's size (the ViT with the keys of all ranks): what the cores and their memory allow without any library.
`predicted` is what `shardfield plan` computes from the computation alone, the messages of the step and the measured
speed of collectives; its ratio is the larger of predicted over measured and measured over predicted. Worlds of
different sizes are interleaved, and the shortest of all rounds counts.

What is found on 16 cores. UNet, Transolver and TFNO compute alone at 0.5 to 1.1 of ideal, the ViT at 1.3 of ideal on 2
ranks, 1.7 on 4 and 2.1 on 8. The library does not add this: on one thread of another machine the ViT of a rank of 8
takes 1.01 times as long as plain torch with as many keys (207 and 205 ms), and its attention kernels are as fast on
blocks of 512 x 512 as on 512 x 4,096. What 16 threads of matrix products get from these cores has not been measured;
`plain torch on its share` will show it. Messages and waiting take up to a fifth of a step on 4 ranks, and a third to a
half on 8, where two threads of 8 ranks occupy every core; `plan` predicts half of that, and twice of it for the ViT. On
8 ranks the ring of keys sends 44 MB in a step of the ViT, gathered keys would send 29 MB: the ring is chosen because it
can overlap with computation, which needs cores that are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .. import runtime
from ..comm.transport import NullTransport
from ..planning import DEVICES, predict, watch
from . import models
from .links import LinkTimes, measure_links, network_of
from .measure import Times
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, rank_label, train_step
from .table import Table


class ModelCase(NamedTuple):
    """A model, the field that all ranks share, its sharded dim, and the part of ideal speed to reach at 8 ranks."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int
    efficiency: float


MODELS = {
    "UNet, 16 channels, 1024 x 1024": ModelCase(partial(models.unet, 16), (1, 3, 1024, 1024), 2, 0.88),
    "Transolver x 2, 64 channels, 131,072 points": ModelCase(
        partial(models.transolver, 64, 2), (1, 131072, 64), 1, 0.88
    ),
    "TFNO, 32 channels, 512 x 512": ModelCase(partial(models.tfno, 32, 32), (1, 1, 512, 512), 2, 0.88),
    "ViT x 2, 256 channels, 4,096 tokens": ModelCase(partial(models.token_mixer, 256, 2), (1, 4096, 256), 1, 0.8),
}
QUICK = {
    "UNet, 4 channels, 64 x 64": ModelCase(partial(models.unet, 4), (1, 3, 64, 64), 2, 0.88),
    "ViT x 1, 32 channels, 64 tokens": ModelCase(partial(models.token_mixer, 32, 1), (1, 64, 32), 1, 0.8),
}
PLAIN = "plain torch on its share"
WIDEST = 8  # ranks at which the bars hold


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4, WIDEST)
    threads: int = 2  # of a rank
    rounds: int = 4
    turns: int = 2
    only: str = "all"  # a part of a case's name: run these cases alone

    quick: ClassVar[dict[str, Any]] = {"ranks": (1, 2), "threads": 1, "rounds": 2, "turns": 1}


def cases_of(table: Table, only: str) -> dict[str, ModelCase]:
    cases = QUICK if table.quick else MODELS
    return {name: case for name, case in cases.items() if only == "all" or only in name}


def slowest_seconds(call: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of a call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def plain_model(case: ModelCase) -> nn.Module:
    """Return the model for a rank's share as a plain tensor: it does the rank's work, with the keys of all ranks."""
    model = case.build()
    for block in model.modules():
        if hasattr(block, "copies_of_keys"):
            block.copies_of_keys = dist.get_world_size()
    return model


def links_on_rank(device: str, threads: int) -> LinkTimes:
    """Measure the collectives of a world, with the threads that its ranks compute with."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return measure_links(3)
    finally:
        torch.set_num_threads(before)


def measure_on_rank(
    device: str, name: str, quick: bool, settings: Settings, links: LinkTimes | None
) -> dict[str, list[float]]:
    """Return the seconds of the step, of its computation alone, and the predicted ones."""
    case = (QUICK if quick else MODELS)[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        model, field = case.build(), make_sharded_field(domain_mesh(device), case.shape, case.dim)
        step, plain_step = partial(train_step, model, field), partial(train_step, plain_model(case), field.to_local())
        for _ in range(2):
            step()
            plain_step()
        measured, computing, plain = [], [], []
        for _ in range(settings.rounds):
            measured.append(slowest_seconds(step))
            plain.append(slowest_seconds(plain_step))
            with runtime.observing(transport_override=NullTransport()):
                computing.append(slowest_seconds(step))
        predicted = list(computing)
        if links is not None:
            with watch() as seen:
                step()
            predicted = [predict(seen, DEVICES["h200"], network_of(links), s).seconds for s in computing]
        return {"measured": measured, "computing alone": computing, PLAIN: plain, "predicted": predicted}
    finally:
        torch.set_num_threads(threads)


def run(settings: Settings, device: str, table: Table) -> None:
    if device != "cpu":
        table.add_skipped("all models", "this benchmark measures gloo ranks on CPU cores")
        return
    links = {
        n: measure_on_ranks(links_on_rank, n, device, settings.threads)[0] if n > 1 else None for n in settings.ranks
    }
    for name, case in cases_of(table, settings.only).items():
        if name.startswith("TFNO") and "neuraloperator" not in table.versions:
            table.add_skipped("TFNO", "neuraloperator is not installed", name)
            continue
        found: dict[int, Times] = {n: {} for n in settings.ranks}
        for _ in range(settings.turns):
            for ranks in settings.ranks:
                times = measure_on_ranks(measure_on_rank, ranks, device, name, table.quick, settings, links[ranks])[0]
                for kind, seconds in times.items():
                    found[ranks].setdefault(kind, []).extend(seconds)
        add_rows(table, name, case, found)


def add_rows(table: Table, name: str, case: ModelCase, found: dict[int, Times]) -> None:
    """Add the times by number of ranks and their ratios to ideal ones. The shortest time of a world is its time."""
    best = {n: {kind: min(seconds) for kind, seconds in of.items()} for n, of in found.items()}
    for n, of in found.items():
        table.add_times(f"{name}, {rank_label(n)}", of)
    fewest = min(found)
    for n in found:
        if n == fewest:
            continue
        ideal = best[fewest]["measured"] * fewest / n
        against = f"{fewest / n:.3g} of {rank_label(fewest)}"
        bar = 1 / case.efficiency if n == WIDEST and fewest == 1 else None
        for kind in ("measured", "computing alone", PLAIN):
            values = [best[n][kind] / ideal]
            table.add_ratio(
                f"{name}: of ideal, {rank_label(n)}", kind, values, against, bar if kind == "measured" else None
            )
        off = best[n]["predicted"] / best[n]["measured"]
        table.add_ratio(f"{name}: prediction, {rank_label(n)}", "predicted", [max(off, 1 / off)], "measured", 1.2)
