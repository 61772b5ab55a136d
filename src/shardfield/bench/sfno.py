"""A spherical model on the grid of a weather forecast: one rank against plain torch, and 60 days of 6-hour steps.

The SFNO of torch-harmonics on nlat x nlon points, unmodified. A training step is forward and backward; the forecast
calls the model on its own result, without gradients and without output.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..train.rollout import rollout
from .measure import Times, busy_seconds, interleave, synchronize
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, train_step
from .table import Table

PLAIN, OURS = "plain torch", "shardfield"


@dataclass(frozen=True)
class Settings:
    nlat: int = 33
    nlon: int = 64
    variables: int = 4
    width: int = 32
    layers: int = 4
    steps: int = 240
    rounds: int = 5

    quick: ClassVar[dict[str, Any]] = {"width": 8, "layers": 2, "steps": 4, "rounds": 2}
    cuda: ClassVar[dict[str, Any]] = {"nlat": 721, "nlon": 1440, "variables": 16, "width": 256}


class Step(nn.Module):
    """A time step: most of the state, and a little of what the model returns."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return 0.99 * x + 0.01 * self.model(x)


def make_model(settings: Settings) -> nn.Module:
    """Return the SFNO of torch-harmonics in a time step. Raise ImportError without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package, about parts of torch
        from torch_harmonics.examples.models import SphericalFourierNeuralOperator

        torch.manual_seed(0)
        return Step(
            SphericalFourierNeuralOperator(
                img_size=(settings.nlat, settings.nlon),
                grid="equiangular",
                scale_factor=3,
                in_chans=settings.variables,
                out_chans=settings.variables,
                embed_dim=settings.width,
                num_layers=settings.layers,
            )
        )


def compare_on_rank(device: str, settings: Settings) -> tuple[Times, Times, float]:
    """Return seconds of a training step and of a forecast, and the largest difference of a step's result."""
    model = make_model(settings).to(device)
    field = make_sharded_field(domain_mesh(device), (1, settings.variables, settings.nlat, settings.nlon))
    plain = field.to_local().clone()
    with torch.no_grad():
        difference = float((model(field).to_local() - model(plain)).abs().max())
    steps = {PLAIN: partial(train_step, model, plain), OURS: partial(train_step, model, field)}
    times = interleave(steps, settings.rounds, partial(busy_seconds, device=device, repeats=3))

    def forecast(state: Tensor) -> None:
        with torch.no_grad():
            for _ in rollout(model, state, settings.steps):
                pass

    def clock(call: Callable[[], Any]) -> float:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - start

    calls = {PLAIN: partial(forecast, plain), OURS: partial(forecast, field)}
    return times, interleave(calls, 2, clock, warmup=0), difference


def run(settings: Settings, device: str, table: Table) -> None:
    try:
        make_model(Settings(**Settings.quick))
    except ImportError as error:
        table.add_skipped("SFNO", f"torch-harmonics cannot be imported: {error}")
        return
    times, forecasts, difference = measure_on_ranks(compare_on_rank, 1, device, settings)[0]
    size = f"{settings.nlat} x {settings.nlon}"
    bars = {OURS: 1.05} if device == "cuda" else {}  # small fields are host-bound
    table.add_times(f"training step at {size}", times, PLAIN, bars=bars)
    table.add_times(f"{settings.steps} steps at {size}", forecasts, PLAIN, "s")
    table.add_text(f"a step at {size}: largest difference", OURS, f"{difference:.1e}")
