"""Recipe: train a vision transformer on Darcy flow; its tokens are sharded with the field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import UsageError
from ..log import Log
from ..plots import plot_prediction
from ..task import Task, TaskSpec
from .darcy import DarcyConfig, build_loaders, field_shapes, fit_normalizers, relative_l2, wrap_normalized


@dataclass(kw_only=True)
class ViTConfig(DarcyConfig):
    """A vision transformer learns the pressure in a porous medium from its permeability."""

    out: Path = Path("runs/vit")
    epochs: int = 20
    batch_size: int = 8
    learning_rate: float = 1e-3
    test_resolutions: tuple[int, ...] = (64,)
    patch: int = 4
    """Points along each side of a patch."""
    width: int = 96
    """Channels."""
    heads: int = 4
    """Attention heads."""
    layers: int = 4
    """Transformer blocks."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches in, patches out: a field of the same size."""

    def __init__(self, points: int, patch: int, width: int, heads: int, layers: int):
        super().__init__()
        self.patch, self.tokens = patch, points // patch
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.tokens**2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, patch * patch)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x)).transpose(1, 2).unflatten(2, (self.tokens, self.tokens))
        return F.pixel_shuffle(x, self.patch)


def task_spec(config: ViTConfig) -> TaskSpec:
    if config.resolution % config.patch or config.width % config.heads:
        raise UsageError(
            f"--patch {config.patch} must divide --resolution {config.resolution}, and --heads {config.heads} "
            f"--width {config.width}"
        )
    model = ViT(config.resolution, config.patch, config.width, config.heads, config.layers)
    return TaskSpec(
        model=wrap_normalized(model),
        sample_shapes=field_shapes(config),
        loss=lambda output, batch: relative_l2(output, batch).mean(),
    )


def vit(config: ViTConfig, mesh: DeviceMesh, log: Log) -> Task:
    if config.test_resolutions != (config.resolution,):
        raise UsageError(
            f"--test-resolutions {config.test_resolutions}: the position embedding needs {config.resolution} points"
        )
    torch.manual_seed(config.seed)
    spec = task_spec(config)
    train, tests = build_loaders(config, mesh, log)
    return Task(
        model=fit_normalizers(spec.model, train),
        train=train,
        loss=spec.loss,
        tests=tests,
        metrics={"l2": relative_l2},
        draw=plot_prediction,
    )
