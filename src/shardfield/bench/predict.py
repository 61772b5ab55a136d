"""A forecast that is written while it is computed: against no output, and against gathering each state to one rank.

A network of convolutions steps a field of some variables forward. `shardfield.predict` writes every state to zarr: each
rank writes its own files in a thread. The usual alternative gathers the state and writes it on rank 0, while the other
ranks wait. Waiting for output is the time in which the computation was blocked by it, as a share of the forecast's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..predict import ForecastStore, Grid, predict
from ..tensor import ShardTensor
from ..train.rollout import rollout
from .measure import Times, interleave, max_over_ranks, wall_seconds
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, rank_label
from .table import Table

NO_OUTPUT, OURS, GATHERED = "no output", "shardfield predict", "gathered, written by rank 0"


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2)
    grid: tuple[int, ...] = (181, 360)
    variables: int = 4
    channels: int = 32
    steps: int = 10
    rounds: int = 4

    quick: ClassVar[dict[str, Any]] = {"grid": (32, 64), "channels": 8, "steps": 4, "rounds": 2}
    cuda: ClassVar[dict[str, Any]] = {"grid": (721, 1440), "variables": 16, "channels": 128, "ranks": (1,)}


class Step(nn.Module):
    """A residual network of four convolutions."""

    def __init__(self, variables: int, channels: int):
        super().__init__()
        widths = [variables, channels, channels, channels, variables]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x + 0.01 * y


def compare_on_rank(device: str, settings: Settings, folder: str) -> tuple[Times, list[float]]:
    """Return the seconds of each candidate by round, and the share of time in which output blocked ours."""
    mesh = domain_mesh(device)
    torch.manual_seed(0)
    model = Step(settings.variables, settings.channels).to(device)
    state = make_sharded_field(mesh, (1, settings.variables, *settings.grid))
    rows, columns = (np.arange(n, dtype=np.float64) for n in settings.grid)
    grid = Grid({f"v{i}": {} for i in range(settings.variables)}, {"lat": rows, "lon": columns})
    shares: list[float] = []
    written = iter(range(10**6))

    def without_output() -> None:
        with torch.no_grad():
            for _ in rollout(model, state, settings.steps):
                pass

    def overlapped() -> None:
        found = predict(model, state, settings.steps, Path(folder) / f"ours-{next(written)}.zarr", grid)
        shares.append(found.waited / found.seconds)

    candidates: dict[str, Callable[[], None]] = {
        NO_OUTPUT: without_output,
        OURS: overlapped,
        GATHERED: lambda: _gathered(model, state, settings.steps, Path(folder) / f"rank0-{next(written)}.zarr", grid),
    }
    times = interleave(candidates, settings.rounds, partial(wall_seconds, device=device))
    return times, shares[-settings.rounds :]


def _gathered(model: nn.Module, state: ShardTensor, steps: int, out: Path, grid: Grid) -> None:
    """Gather each state, and write it on rank 0 before the next step."""
    store = None
    if state.device_mesh.get_rank() == 0:
        ForecastStore.create(out, grid, state.shape, steps, 1, state.dtype)
        store = ForecastStore(out)
    with torch.no_grad():
        for i, x in enumerate(rollout(model, state, steps), 1):
            full = x.full_tensor()  # type: ignore[attr-defined]
            if store is not None:
                store.write(i, full.cpu().numpy(), store.region(None))


def run(settings: Settings, device: str, table: Table) -> None:
    try:
        import zarr  # noqa: F401
    except ImportError:
        table.add_skipped("forecasts", "zarr is not installed")
        return
    size = " x ".join(map(str, settings.grid))
    for ranks in settings.ranks:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings, folder)
        case = f"{settings.steps} steps at {size} on {rank_label(ranks)}"
        table.add_times(case, max_over_ranks([times for times, _ in by_rank]), NO_OUTPUT)
        shares = [max(at) for at in zip(*(shares for _, shares in by_rank), strict=True)]
        table.add_ratio(f"{case}: waiting for output", OURS, shares, "the time of the forecast", bar=0.05)
