"""Recipe: train a small convolutional network to classify noisy waves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ...data import ShardedLoader
from ..config import TrainConfig, UsageError
from ..log import Log
from ..task import Task, TaskSpec

CLASSES = 10


@dataclass(kw_only=True)
class CNNConfig(TrainConfig):
    """A convolutional network classifies noisy fields by their wave number."""

    out: Path = Path("runs/cnn")
    epochs: int = 5
    batch_size: int = 32
    height: int = 32
    """Rows of a field, sharded by the first domain axis."""
    width: int = 64
    """Columns of a field."""
    channels: int = 16
    """Channels of the convolutions."""
    n_train: int = 640
    """Training samples."""
    n_test: int = 160
    """Test samples."""
    noise: float = 1.0
    """Standard deviation of the noise on a wave of amplitude 1."""


class WaveDataset:
    """Waves with noise; the class is the number of crests. Sample i depends only on seed and i."""

    def __init__(self, config: CNNConfig, start: int, n: int):
        self.config, self.start, self.n = config, start, n
        self.shapes = {"x": (3, config.height, config.width), "label": ()}

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        c = self.config
        generator = torch.Generator().manual_seed(c.seed * 1_000_003 + self.start + i)
        label = torch.randint(CLASSES, (), generator=generator)
        phase, across = torch.rand(2, generator=generator)
        rows, columns = torch.arange(c.height)[:, None] / c.height, torch.arange(c.width) / c.width
        wave = torch.sin(2 * torch.pi * ((1 + label) * columns + across * rows + phase))
        noise = torch.randn(3, c.height, c.width, generator=generator)
        return {"x": (wave + c.noise * noise).to(c.dtype), "label": label}


class CNN(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * channels),
            nn.ReLU(),
            nn.Conv2d(2 * channels, 4 * channels, 5, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(4 * channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((-2, -1)))


def task_spec(config: CNNConfig) -> TaskSpec:
    return TaskSpec(
        model=CNN(config.channels),
        sample_shapes={"x": (3, config.height, config.width), "label": ()},
        loss=lambda output, batch: F.cross_entropy(output, batch["label"]),
        integer_keys=("label",),
    )


def cnn(config: CNNConfig, mesh: DeviceMesh, log: Log) -> Task:
    if config.height < config.domain[0] or config.width < (*config.domain, 1)[1]:
        raise UsageError(f"a field of {config.height} x {config.width} cannot be sharded over {config.domain} ranks")
    placements = {"x": [Shard(1), Shard(2)][: len(config.domain)], "label": [Replicate()] * len(config.domain)}

    def loader(start: int, n: int, size: int, **options: Any) -> ShardedLoader:
        dataset = WaveDataset(config, start, n)
        return ShardedLoader(
            dataset, size, mesh, domain=config.axes, placements=placements, seed=config.seed, **options
        )

    torch.manual_seed(config.seed)
    each = config.batch_size // mesh.size(0) // config.accumulate
    spec = task_spec(config)
    return Task(
        model=spec.model,
        train=loader(0, config.n_train, each, drop_last=True),
        loss=spec.loss,
        tests={"test": loader(config.n_train, config.n_test, each, shuffle=False)},
        metrics={"wrong": lambda output, batch: (output.argmax(1) != batch["label"]).double()},
    )
