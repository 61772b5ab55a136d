"""Fields of 721 x 1440 on eight simulated ranks: work is shared and balanced, and memory falls with the ranks.

Two ranks of eight stand for all of them; `make sweep` counts every rank.
"""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfield.planning import Subject, count
from shardfield.planning.unet import UNet
from shardfield.train.task import TaskSpec
from tests.zoo.zoo import Transolver

ALL_RANKS = "SHARDFIELD_LAYOUTS" in os.environ
FIELD, POINTS = (3, 721, 1440), (262144, 4)
PATCH = 8


class Patches(nn.Module):
    """Blocks on patches of a field, each a token (channels last, rows x columns), and back to the field."""

    def __init__(self, blocks: list[nn.Module], width: int, flat: bool):
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, width, PATCH, PATCH), nn.Linear(width, 3 * PATCH**2)
        self.blocks, self.flat = nn.Sequential(*blocks), flat

    def forward(self, x):
        x = self.embed(x)
        n, c, h, w = x.shape
        x = x.flatten(2).transpose(1, 2) if self.flat else x.permute(0, 2, 3, 1)
        x = self.head(self.blocks(x)).reshape(n, h, w, 3, PATCH, PATCH)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(n, 3, h * PATCH, w * PATCH)


class AFNOBlock(nn.Module):
    """Multiply the spectrum by block-diagonal matrices, channels last, then an MLP, as FourCastNet does."""

    def __init__(self, width: int, groups: int = 8):
        super().__init__()
        self.groups, size = groups, width // groups
        self.weights = nn.ParameterList(0.02 * torch.randn(2, groups, size, size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def mix(self, real, imag, weight):
        def product(x, w):
            return torch.einsum("...gi,gio->...go", x, w)

        return product(real, weight[0]) - product(imag, weight[1]), product(imag, weight[0]) + product(real, weight[1])

    def filter(self, x):
        n, h, w, c = x.shape
        modes = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(n, h, w // 2 + 1, self.groups, -1)
        real, imag = self.mix(modes.real, modes.imag, self.weights[0])
        real, imag = self.mix(F.relu(real), F.relu(imag), self.weights[1])
        modes = torch.view_as_complex(F.softshrink(torch.stack([real, imag], -1), 0.01)).reshape(n, h, w // 2 + 1, c)
        return torch.fft.irfft2(modes, s=(h, w), dim=(1, 2), norm="ortho")

    def forward(self, x):
        x = x + self.filter(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def vit():
    return Patches([nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(12)], 256, True)


def afno():
    return Patches([AFNOBlock(256) for _ in range(4)], 256, False)


def transolver():
    return Transolver(width=128, slices=64)


def sfno():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_harmonics.examples.models import SphericalFourierNeuralOperator
    return SphericalFourierNeuralOperator(FIELD[1:], in_chans=3, out_chans=3, embed_dim=256, num_layers=6)


def without_values(model: nn.Module):
    """Return a function that copies the model with new tensors: planning builds it without data.

    torch-harmonics reads values where it builds its tables.
    """

    def copied():
        new = {id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in model.parameters()}
        return copy.deepcopy(model, new | {id(b): torch.empty(b.shape, dtype=b.dtype) for b in model.buffers()})

    return copied


def counted(make, shape, dims, ranks: int, sample):
    """Return the record of a training step on one device and those of some ranks of the domain."""

    def outline():
        return TaskSpec(
            model=make(), sample_shapes={"x": shape, "y": shape}, loss=lambda out, batch: out.square().mean()
        )

    subject = Subject("bars", outline, 1, dims=dims)
    return count(subject, (1, 1), 0), [count(subject, (1, ranks), r) for r in (range(ranks) if ALL_RANKS else sample)]


def figures(one, seen, ranks: int) -> tuple[float, float, float]:
    """Return balance, redundancy and the largest peak over that of one device."""
    flops, scale = [s.flops for s in seen], ranks / len(seen)
    return (
        max(flops) * len(flops) / sum(flops),
        sum(flops) * scale / one.flops,
        max(s.peak for s in seen) / one.peak,
    )


MODELS = {
    "UNet": (lambda: UNet(3, 32, 5), FIELD, (1, 2)),
    "ViT": (vit, FIELD, (1, 2)),
    "AFNO": (afno, FIELD, (1, 2)),
    "Transolver": (transolver, POINTS, (0,)),
    "SFNO": (sfno, FIELD, (1, 2)),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # its result is a view, which no one writes into
@pytest.mark.parametrize("name", MODELS)
def test_eight_ranks(name):
    make, shape, dims = MODELS[name]
    one, seen = counted(without_values(make()), shape, dims, 8, (0, 3))
    assert not any(s.gathers or s.lost for s in seen), [(s.gathers, s.lost) for s in seen]
    balance, redundancy, peak = figures(one, seen, 8)
    print(f"{name}: balance {balance:.3f}, redundancy {redundancy:.3f}, peak {peak:.3f} of {one.peak / 1e9:.2f} GB")
    assert balance <= 1.25 and redundancy <= 1.05 and peak <= 0.16, (balance, redundancy, peak)


def test_few_rows_a_rank():
    """Five levels of a UNet on 1000 rows and 48 ranks: 62 rows, one or two a rank, at the coarsest."""
    one, seen = counted(without_values(UNet(3, 16, 5)), (3, 1000, 64), (1, 2), 48, (0, 23, 47))
    assert not any(s.gathers or s.lost for s in seen)
    balance, redundancy, _ = figures(one, seen, 48)
    print(f"UNet on 48 ranks: balance {balance:.3f}, redundancy {redundancy:.3f}")
    assert balance <= 1.25 and redundancy <= 1.05, (balance, redundancy)
