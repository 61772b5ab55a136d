"""Data, normalization and metrics of the recipes that learn Darcy flow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ...data import Darcy, ShardedLoader, UnitGaussian
from ..config import TrainConfig, UsageError
from ..log import Log


@dataclass(kw_only=True)
class DarcyConfig(TrainConfig):
    """Options of recipes that learn Darcy flow."""

    n_train: int = 1000
    """Training samples."""
    n_test: int = 200
    """Test samples."""
    resolution: int = 64
    """Points along each dim in training."""
    test_resolutions: tuple[int, ...] = (64, 22)
    """Points along each dim in the test sets, one test set for each number."""
    fine: int = 253
    """Points along each dim of the grid on which samples are solved, before they are subsampled."""
    cache: Path | None = None
    """Cache folder of the samples; by default the environment variable SHARDFIELD_CACHE, else ~/.cache/shardfield."""


class NormalizedModel(nn.Module):
    """A model with normalized input, whose output is converted back to the units of the data."""

    def __init__(self, model: nn.Module, x: UnitGaussian, y: UnitGaussian):
        super().__init__()
        self.model, self.x, self.y = model, x, y

    def forward(self, x: Tensor) -> Tensor:
        return self.y.inverse_transform(self.model(self.x.transform(x)))


class CastDataset:
    """A dataset cast to another dtype."""

    def __init__(self, dataset: Any, dtype: torch.dtype):
        self.dataset, self.dtype, self.shapes = dataset, dtype, dataset.shapes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {n: t.to(self.dtype) for n, t in self.dataset[i].items()}

    def read(self, i: int, slices: Any) -> dict[str, Tensor]:
        return {n: t.to(self.dtype) for n, t in self.dataset.read(i, slices).items()}


def build_loaders(config: DarcyConfig, mesh: DeviceMesh, log: Log) -> tuple[ShardedLoader, dict[str, ShardedLoader]]:
    """Return the loaders of the training samples and the test sets; solve the samples that are not cached."""
    for points in (config.resolution, *config.test_resolutions):
        if points < max(config.domain):
            raise UsageError(
                f"a field of {points} points along a dim cannot be sharded over {max(config.domain)} ranks"
            )
    begun = time.monotonic()

    def prepared(n: int, points: int, start: int) -> CastDataset:
        made = Darcy(n, resolution=points, fine=config.fine, seed=config.seed, start=start, cache=config.cache).prepare(
            mesh
        )
        return CastDataset(made, config.dtype)

    def loader(dataset: Any, size: int, **options: Any) -> ShardedLoader:
        placements = [Shard(1), Shard(2)][: len(config.domain)]
        return ShardedLoader(
            dataset, size, mesh, domain=config.axes, placements=placements, seed=config.seed, **options
        )

    log.print_line(
        f"Darcy flow: {config.n_train} + {config.n_test} samples, solved on {config.fine} x {config.fine} points"
    )
    each = config.batch_size // mesh.size(0) // config.accumulate
    train = loader(prepared(config.n_train, config.resolution, 0), each, drop_last=True)
    tests = {
        f"{points}x{points}": loader(prepared(config.n_test, points, config.n_train), 8, shuffle=False)
        for points in config.test_resolutions
    }
    log.print_line(f"data ready after {time.monotonic() - begun:.0f} s")
    return train, tests


def wrap_normalized(model: nn.Module) -> NormalizedModel:
    """Wrap the model with normalizers that have no statistics yet (see `fit_normalizers`)."""
    normalizers = (UnitGaussian(torch.zeros(1, 1, 1), torch.ones(1, 1, 1)) for _ in range(2))
    return NormalizedModel(model, *normalizers)


def fit_normalizers(model: Any, train: ShardedLoader) -> NormalizedModel:
    """Set the normalizers to the statistics of the training samples; return the model."""
    model.x, model.y = UnitGaussian.fit(train, "x"), UnitGaussian.fit(train, "y")
    return model


def field_shapes(config: DarcyConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a sample's fields."""
    return {name: (1, config.resolution, config.resolution) for name in ("x", "y")}


def relative_l2(output: Tensor, batch: Any) -> Tensor:
    """Return |output - y| / |y| for each sample."""
    difference = (output - batch["y"]).flatten(1).square().sum(1)
    return (difference / batch["y"].flatten(1).square().sum(1)).sqrt()
