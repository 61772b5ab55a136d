"""The most that a training step holds on a rank, against the same step in one process on plain tensors.

Forward and backward of a UNet, a ViT and neuraloperator's TFNO on one field cut into rows. Counted are the bytes of
tensors that are alive at a time, by torch's own count of its allocations: the field, activations and gradients;
parameters, which every rank has whole here, are not among them.
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
    """A model and the channels of its field."""
    makers: dict[str, Callable[[], tuple[nn.Module, int]]] = {
        "UNet": lambda: (models.unet(channels), 3),
        "ViT": lambda: (models.vit(size), 1),
        "TFNO": lambda: (models.tfno(channels, 16), 1),
    }
    return makers[name]()


def step_memory(device: str, name: str, size: int, channels: int, plain: bool) -> int:
    """On a rank: bytes of the field and of what a step takes beside it."""
    model, inputs = make_model(name, size, channels)
    model = model.to(device)
    field: Tensor = make_sharded_field(domain_mesh(device), (1, inputs, size, size))
    local = field.to_local()  # type: ignore[attr-defined]
    if plain:
        assert dist.get_world_size() == 1
        field = local
    train_step(model, field)  # what is made once and kept is not the step's
    model.zero_grad(set_to_none=True)
    return peak_memory(partial(train_step, model, field), device) + local.nbytes


def run(settings: Settings, device: str, table: Table) -> None:
    for name in ("UNet", "ViT", "TFNO"):
        how = (name, settings.size, settings.channels)
        case = f"{name} step, {settings.size} x {settings.size}"
        if name == "TFNO" and "neuraloperator" not in table.versions:
            table.add_skipped("TFNO", "neuraloperator is not installed", case)
            continue
        found = {PLAIN: max(measure_on_ranks(step_memory, 1, device, *how, True))}
        for ranks in settings.ranks:
            found[rank_label(ranks)] = max(measure_on_ranks(step_memory, ranks, device, *how, False))
        table.add_counts(case, found, "MB", PLAIN)
