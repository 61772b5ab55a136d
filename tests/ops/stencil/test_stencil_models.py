"""Models of stencil ops on unevenly sharded fields: outputs and gradients equal one device."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain, strict
from shardfield.layout import Layout
from shardfield.redistribute import redistribute
from shardfield.shard_utils import halo_blocks
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


def conv(inputs: int, outputs: int, dims: int = 2, **kwargs) -> nn.Module:
    return (nn.Conv2d if dims == 2 else nn.Conv3d)(inputs, outputs, 3, padding=1, **kwargs)


class CNN(nn.Sequential):
    def __init__(self):
        layers = [m for i in range(6) for m in (conv(3 if i == 0 else 4, 4, padding_mode=MODES[i % 4]), nn.GELU())]
        super().__init__(*layers)


MODES = ["zeros", "circular", "reflect", "replicate"]


class UNet(nn.Module):
    """Two levels down and up, skip connections, transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.bottom = conv(3, 4), conv(4, 6), conv(6, 8)
        self.up_second, self.up_first = nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 3, 2, 1, 1)
        self.out_second, self.out_first, self.head = conv(12, 6), conv(8, 4), nn.Conv2d(4, 2, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        first = F.relu(self.norm(self.first(x)))
        second = F.relu(self.second(F.max_pool2d(first, 2)))
        x = F.relu(self.bottom(F.avg_pool2d(second, 2)))
        x = F.relu(self.out_second(torch.cat([self.up_second(x), second], 1)))
        x = F.relu(self.out_first(torch.cat([self.up_first(x), first], 1)))
        return self.head(x)


class UNet3d(nn.Module):
    """Group norms, strided convolutions down, trilinear interpolation up."""

    def __init__(self):
        super().__init__()
        self.inside, self.down = conv(2, 4, 3), nn.Conv3d(4, 6, 3, stride=2, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(3, 6)])
        self.up, self.head = conv(10, 4, 3), nn.Conv3d(4, 2, 1)

    def forward(self, x):
        x = F.silu(self.norms[0](self.inside(x)))
        low = F.silu(self.norms[1](self.down(x)))
        wide = F.interpolate(low, size=x.shape[2:], mode="trilinear", align_corners=False)
        return self.head(F.silu(self.up(torch.cat([x, wide], 1))))


class ConvNeXt(nn.Module):
    """Patches, then a block: a wide depthwise kernel, a channels-last norm, two linear layers, a scale."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 2, stride=2)
        self.depthwise = nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.norm, self.one, self.two = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.two(F.gelu(self.one(y)))).permute(0, 3, 1, 2)


class ResNet(nn.Module):
    """A stem with a strided pool, a plain and a strided residual block, batch norms, a global average, a classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.plain = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(True), conv(4, 4), nn.BatchNorm2d(4))
        self.strided = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 6))
        self.short = nn.Conv2d(4, 6, 1, 2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = F.relu(x + self.plain(x))
        x = F.relu(self.short(x) + self.strided(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


MODELS = {
    "cnn": (CNN, (2, 3, 17, 13)),
    "unet": (UNet, (2, 3, 20, 12)),
    "unet 3d": (UNet3d, (1, 2, 6, 9, 11)),
    "convnext": (ConvNeXt, (2, 3, 18, 14)),
    "resnet": (ResNet, (2, 3, 37, 29)),
}
# shard sizes of each sharded spatial dim, as fractions of its size; in the last, halos span more than one rank
SHARDINGS = {
    "rows": ((2,), {-2: (0.3, 0.7)}),
    "tiles": ((2, 2), {-2: (0.61, 0.39), -1: (0.27, 0.73)}),
    "thin": ((4,), {-1: (0.5, 0.08, 0.0, 0.42)}),
}


def shard_sizes(size: int, shares) -> list[int]:
    lengths = [round(size * share) for share in shares]
    lengths[-1] += size - sum(lengths)
    return lengths


def sharded(full: torch.Tensor, name: str) -> ShardTensor:
    shape, dims = SHARDINGS[name]
    mesh = world_mesh(shape)
    placements = [Shard(d % full.ndim) for d in dims]
    lengths = {d % full.ndim: shard_sizes(full.shape[d], shares) for d, shares in dims.items()}
    layout = Layout.of(mesh, placements, full.shape, lengths)
    return ShardTensor(redistribute(full, Layout.replicate(mesh, full.shape), layout).clone(), layout)


def step(model: nn.Module, x) -> tuple:
    """Return the loss, the outputs and the input's gradient of one step."""
    x.requires_grad_()
    out = model(x)
    loss = (out * torch.sin(out)).mean() + out.square().sum() / 7
    loss.backward()
    return loss, out, x.grad


class Chain(nn.Sequential):
    """Convolutions and activations alone: strides, dilations, even kernels, one with more padding than it reads."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False),
            nn.ReLU(),
            nn.Conv2d(4, 6, 4, stride=2, padding=1, groups=2),
            nn.Conv2d(6, 4, 2, padding="same"),
            nn.Tanh(),
            nn.Conv2d(4, 4, (1, 3), padding=(2, 1)),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 5, padding=2),
        )


def chained(how: str, redundancy: float) -> tuple[dict[str, float], int, int]:
    """Compare, on each rank, a chain with one shared halo with one device, and count the exchanges of both."""
    torch.manual_seed(5)
    alone = Chain().double()
    model = halo_blocks(copy.deepcopy(alone), redundancy)
    full = torch.randn(2, 3, 26, 22, dtype=torch.float64)
    counts = []
    for each in (copy.deepcopy(alone), model):
        with explain() as report, strict():
            got = step(each, sharded(full, how))
        counts.append(sum(row.kinds.get("exchange", 0) for row in report._all_rows()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an even kernel needs a padded copy
        expected = step(alone, full.clone())
    pairs = enumerate(zip(got, expected, strict=True))
    found = {f"result {i}": (g.full_tensor() - e).abs().max().item() for i, (g, e) in pairs}
    for (label, e), g in zip(alone.named_parameters(), model.parameters(), strict=True):
        found[label] = (g.grad - e.grad).abs().max().item()
    return found, *counts


@pytest.mark.parametrize("how", SHARDINGS)
def test_one_halo_for_a_chain_of_convolutions(how):
    for found, apart, together in run_on_ranks(chained, torch.Size(SHARDINGS[how][0]).numel(), how, 100.0, timeout=120):
        assert not {k: v for k, v in found.items() if not v < 1e-10}
        assert together < apart / 2


def test_thin_shards_do_not_compute_redundantly():
    for found, apart, together in run_on_ranks(chained, 4, "thin", 0.01, timeout=120):
        assert not {k: v for k, v in found.items() if not v < 1e-10}
        assert together == apart


def differences(name: str, how: str) -> dict[str, float]:
    """Return, on each rank, the differences of two steps of the model from one device."""
    build, shape = MODELS[name]
    torch.manual_seed(5)
    alone = build().double()
    model = copy.deepcopy(alone)
    full = torch.randn(shape, dtype=torch.float64)
    found = {}
    for turn in range(2):
        expected = step(alone, full.clone())
        with strict():
            got = step(model, sharded(full, how))
        for label, e, g in zip(("loss", "output", "input gradient"), expected, got, strict=True):
            found[f"{label} {turn}"] = (g.full_tensor() - e).abs().max().item()
    for (label, e), g in zip(alone.named_parameters(), model.parameters(), strict=True):
        found[f"gradient of {label}"] = (g.grad - e.grad).abs().max().item() / max(1.0, e.grad.abs().max().item())
    for (label, e), g in zip(alone.named_buffers(), model.buffers(), strict=True):
        found[label] = (g - e).abs().max().item()
    return found


@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_device(name, how):
    world = torch.Size(SHARDINGS[how][0]).numel()
    for found in run_on_ranks(differences, world, name, how, timeout=120):
        assert not {k: v for k, v in found.items() if not v < 1e-10}
