"""A plain UNet for `shardfield plan`: a common model, dominated by halo exchanges and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..train.config import TrainConfig, UsageError
from ..train.task import TaskSpec


@dataclass(kw_only=True)
class UNetConfig(TrainConfig):
    """A UNet from fields to fields."""

    batch_size: int = 8
    resolution: int = 256
    """Grid points along each dim."""
    channels: int = 3
    """Channels of the fields."""
    width: int = 32
    """Channels of the first level; each level below has twice as many."""
    levels: int = 4
    """Levels, each at half the resolution of the one above."""


class Block(nn.Sequential):
    """Two convolutions, each followed by a norm and an activation."""

    def __init__(self, i: int, o: int):
        layers: list[nn.Module] = []
        for a in (i, o):
            layers += [nn.Conv2d(a, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """A UNet: strided convolutions down, bilinear interpolation up, skip connections at each level."""

    def __init__(self, channels: int, width: int, levels: int):
        super().__init__()
        widths = [width << i for i in range(levels)]
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        self.first = Block(channels, width)
        self.shrink = nn.ModuleList(nn.Conv2d(a, a, 3, stride=2, padding=1) for a, _ in pairs)
        self.down = nn.ModuleList(Block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(Block(a + b, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = [x]
        for shrink, down in zip(self.shrink, self.down, strict=True):
            skips.append(down(shrink(skips[-1])))
        x = skips.pop()
        for up in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = up(torch.cat([x, skip], 1))
        return self.last(x)


def unet_outline(config: UNetConfig) -> TaskSpec:
    if config.width % 8 or config.levels < 1 or config.resolution >> (config.levels - 1) < 1:
        raise UsageError(
            f"--width {config.width} must be a multiple of 8, and --levels {config.levels} must leave at least one "
            f"point of --resolution {config.resolution}"
        )
    field = (config.channels, config.resolution, config.resolution)
    return TaskSpec(
        model=UNet(config.channels, config.width, config.levels),
        sample_shapes={"x": field, "y": field},
        loss=lambda output, batch: F.mse_loss(output, batch["y"]),
    )
