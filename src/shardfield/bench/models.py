"""Small models for the benchmarks: plain modules without any distributed code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..train.recipes.aero_transolver import SliceAttention
from ..train.recipes.vit import ViT

CONV = {2: nn.Conv2d, 3: nn.Conv3d}
POOL = {2: F.max_pool2d, 3: F.max_pool3d}


def cnn(channels: int, depth: int = 6) -> nn.Module:
    """Return a CNN of 3x3 convolutions with padding 1 and relu, with three channels in and out."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(depth):
        inputs, outputs = 3 if i == 0 else channels, 3 if i == depth - 1 else channels
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1)] + ([nn.ReLU()] if i < depth - 1 else [])
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A UNet: each level halves the resolution and doubles the channels, with skip connections on the way up."""

    def __init__(self, channels: int, dims: int = 2, levels: int = 3):
        super().__init__()
        widths = [channels * 2**i for i in range(levels + 1)]
        self.pool = POOL[dims]
        self.first = block(3, channels, dims)
        self.down = nn.ModuleList(block(a, b, dims) for a, b in zip(widths, widths[1:], strict=False))
        self.up = nn.ModuleList(block(a + b, a, dims) for a, b in zip(widths, widths[1:], strict=False))
        self.last = CONV[dims](channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(self.pool(levels[-1], 2)))
        x = levels.pop()
        for up in reversed(self.up):
            x = up(torch.cat([levels.pop(), F.interpolate(x, scale_factor=2)], 1))
        return self.last(x)


def block(inputs: int, outputs: int, dims: int = 2) -> nn.Sequential:
    return nn.Sequential(CONV[dims](inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


def unet(channels: int, dims: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return UNet(channels, dims)


class Branches(nn.Module):
    """The sum of two branches of convolutions on the same field, each with a norm in the middle."""

    def __init__(self, channels: int):
        super().__init__()
        self.one, self.two = self.make_branch(channels), self.make_branch(channels)

    @staticmethod
    def make_branch(channels: int) -> nn.Module:
        into, out = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        between = nn.Conv2d(channels, channels, 3, padding=1)
        return nn.Sequential(into, nn.SiLU(), *block(channels, channels), between, nn.SiLU(), out)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


def branches(channels: int) -> nn.Module:
    torch.manual_seed(0)
    return Branches(channels)


def vit(points: int, patch: int = 8, width: int = 64, layers: int = 4) -> nn.Module:
    """Return a ViT with one channel in and out."""
    torch.manual_seed(0)
    return ViT(points, patch, width, 4, layers)


def transolver(width: int, layers: int) -> nn.Module:
    """Return Transolver blocks on a point cloud (samples, points, width)."""
    torch.manual_seed(0)
    return nn.Sequential(*(SliceAttention(width) for _ in range(layers)))


class TokenBlock(nn.Module):
    """A transformer block. `copies_of_keys` repeats keys and values: a rank of P attends to the tokens of P ranks."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.copies_of_keys = heads, 1
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.copies_of_keys > 1:
            k, v = (t.repeat(1, 1, self.copies_of_keys, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def token_mixer(width: int, layers: int) -> nn.Module:
    """Return transformer blocks on (samples, tokens, width)."""
    torch.manual_seed(0)
    return nn.Sequential(*(TokenBlock(width, max(width // 64, 4)) for _ in range(layers)))


def tfno(channels: int, modes: int) -> nn.Module:
    """Return neuraloperator's TFNO. Raise ImportError if neuraloperator is not installed."""
    from neuralop.models import TFNO

    torch.manual_seed(0)
    return TFNO(
        n_modes=(modes, modes),
        in_channels=1,
        out_channels=1,
        hidden_channels=channels,
        factorization="tucker",
        rank=0.42,
    )
