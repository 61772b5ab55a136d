"""Peak memory of a training step on a rank, against the same step in one process on plain tensors.

Forward and backward of a UNet, a ViT and neuraloperator's TFNO on one field that is sharded along its rows. Counted are
the bytes of live tensors, as torch counts its allocations: the field, activations and gradients. Parameters, which are
replicated here, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from . import models
from .measure import peak_memory
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, rank_label, train_step
from .table import Table

PLAIN = "one process, plain torch"


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4)
    size: int = 256
    channels: int = 16

    quick: ClassVar[dict[str, Any]] = {"ranks": (1, 2), "size": 64}


def make_model(name: str, size: int, channels: int) -> tuple[nn.Module, int]:
    """Return a model and the number of channels of its input."""
    makers: dict[str, Callable[[], tuple[nn.Module, int]]] = {
        "UNet": lambda: (models.unet(channels), 3),
        "ViT": lambda: (models.vit(size), 1),
        "TFNO": lambda: (models.tfno(channels, 16), 1),
    }
    return makers[name]()


def step_memory(device: str, name: str, size: int, channels: int, plain: bool) -> int:
    """Return the bytes of the local field plus the peak of a step, on a rank."""
    model, inputs = make_model(name, size, channels)
    model = model.to(device)
    field: Tensor = make_sharded_field(domain_mesh(device), (1, inputs, size, size))
    local = field.to_local()  # type: ignore[attr-defined]
    if plain:
        assert dist.get_world_size() == 1
        field = local
    train_step(model, field)  # warm-up: allocations that are cached do not belong to a step
    model.zero_grad(set_to_none=True)
    return peak_memory(partial(train_step, model, field), device) + local.nbytes


def run(settings: Settings, device: str, table: Table) -> None:
    for name in ("UNet", "ViT", "TFNO"):
        args = (name, settings.size, settings.channels)
        case = f"{name} step, {settings.size} x {settings.size}"
        if name == "TFNO" and "neuraloperator" not in table.versions:
            table.add_skipped("TFNO", "neuraloperator is not installed", case)
            continue
        peaks = {PLAIN: max(measure_on_ranks(step_memory, 1, device, *args, True))}
        for ranks in settings.ranks:
            peaks[rank_label(ranks)] = max(measure_on_ranks(step_memory, ranks, device, *args, False))
        table.add_counts(case, peaks, "MB", PLAIN)
