"""Recipe: train neuraloperator's TFNO on Darcy flow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..config import UsageError
from ..log import Log
from ..plots import plot_prediction
from ..task import Task, TaskSpec
from .darcy import DarcyConfig, build_loaders, field_shapes, fit_normalizers, relative_l2, wrap_normalized


@dataclass(kw_only=True)
class DarcyTFNOConfig(DarcyConfig):
    """A TFNO learns the pressure in a porous medium from its permeability."""

    out: Path = Path("runs/darcy_tfno")
    epochs: int = 6
    evaluate_every: int = 2
    batch_size: int = 8
    learning_rate: float = 1e-2
    modes: int = 16
    """Fourier modes kept along each dim."""
    width: int = 24
    """Channels."""
    layers: int = 4
    """Fourier layers."""
    factorization: Literal["tucker", "cp", "tt", "dense"] = "tucker"
    """Factorization of the spectral weights."""
    rank: float = 0.42
    """Rank of the factorized weights, as a fraction of the elements of dense weights."""
    loss: Literal["h1", "l2"] = "h1"
    """Relative error, averaged over samples: of values and first derivatives (h1), or of values (l2)."""


def task_spec(config: DarcyTFNOConfig) -> TaskSpec:
    try:
        from neuralop.losses import H1Loss, LpLoss
        from neuralop.models import TFNO
    except ImportError as error:
        raise UsageError(
            f"the recipe darcy_tfno needs neuraloperator ({error}): pip install 'shardfield[recipes]'"
        ) from None
    if config.modes > config.resolution:
        raise UsageError(f"--modes {config.modes}: a field of {config.resolution} points has no more modes")
    model = TFNO(
        n_modes=(config.modes, config.modes),
        hidden_channels=config.width,
        in_channels=1,
        out_channels=1,
        n_layers=config.layers,
        factorization=None if config.factorization == "dense" else config.factorization,
        rank=config.rank,
    )
    chosen = H1Loss(d=2, reduction="mean") if config.loss == "h1" else LpLoss(d=2, p=2, reduction="mean")

    def loss(output: Tensor, batch: Any) -> Tensor:
        return chosen(output, batch["y"])

    return TaskSpec(model=wrap_normalized(model), sample_shapes=field_shapes(config), loss=loss)


def darcy_tfno(config: DarcyTFNOConfig, mesh: DeviceMesh, log: Log) -> Task:
    if config.modes > min(config.test_resolutions):
        raise UsageError(f"--modes {config.modes}: a field of {min(config.test_resolutions)} points has no more modes")
    torch.manual_seed(config.seed)
    spec = task_spec(config)
    train, tests = build_loaders(config, mesh, log)
    from neuralop.losses import H1Loss

    h1 = H1Loss(d=2)
    h1.reduce_all = lambda each: each  # one number per sample

    def relative_h1(output: Tensor, batch: Any) -> Tensor:
        return h1(output, batch["y"]).reshape(-1)

    return Task(
        model=fit_normalizers(spec.model, train),
        train=train,
        loss=spec.loss,
        tests=tests,
        metrics={"l2": relative_l2, "h1": relative_h1},
        draw=plot_prediction,
    )
