"""AFNO as in FourCastNet, in plain torch: on a sharded field it equals one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import strict
from shardfield.testing import run_on_ranks
from tests.ops.stencil.test_conv import field


class Mixer(nn.Module):
    """Apply two block-diagonal layers to the low modes of the tokens, then soft shrinkage."""

    def __init__(self, channels: int, blocks: int, kept: float):
        super().__init__()
        self.blocks, self.size, self.kept = blocks, channels // blocks, kept
        self.w1 = nn.Parameter(0.2 * torch.randn(2, blocks, self.size, 2 * self.size))
        self.b1 = nn.Parameter(0.2 * torch.randn(2, blocks, 2 * self.size))
        self.w2 = nn.Parameter(0.2 * torch.randn(2, blocks, 2 * self.size, self.size))
        self.b2 = nn.Parameter(0.2 * torch.randn(2, blocks, self.size))

    def forward(self, x):
        bias = x
        b, h, w, c = x.shape
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        x = x.reshape(b, h, w // 2 + 1, self.blocks, self.size)
        wide = [b, h, w // 2 + 1, self.blocks, 2 * self.size]
        o1_real, o1_imag = (torch.zeros(wide, dtype=bias.dtype, device=x.device) for _ in range(2))
        o2_real, o2_imag = (torch.zeros(x.shape, dtype=bias.dtype, device=x.device) for _ in range(2))
        total = h // 2 + 1
        kept = int(total * self.kept)
        modes = (slice(None), slice(total - kept, total + kept), slice(kept))

        def mixed(value, weight):
            return torch.einsum("...bi,bio->...bo", value, weight)

        real, imag = x[modes].real, x[modes].imag
        o1_real[modes] = F.relu(mixed(real, self.w1[0]) - mixed(imag, self.w1[1]) + self.b1[0])
        o1_imag[modes] = F.relu(mixed(imag, self.w1[0]) + mixed(real, self.w1[1]) + self.b1[1])
        real, imag = o1_real[modes], o1_imag[modes]
        o2_real[modes] = mixed(real, self.w2[0]) - mixed(imag, self.w2[1]) + self.b2[0]
        o2_imag[modes] = mixed(imag, self.w2[0]) + mixed(real, self.w2[1]) + self.b2[1]
        x = F.softshrink(torch.stack([o2_real, o2_imag], dim=-1), lambd=0.01)
        x = torch.view_as_complex(x).reshape(b, h, w // 2 + 1, c)
        return torch.fft.irfft2(x, s=(h, w), dim=(1, 2), norm="ortho") + bias


class Block(nn.Module):
    """Mix modes, then channels."""

    def __init__(self, channels: int, kept: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.filter = Mixer(channels, 2, kept)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x):
        x = x + self.filter(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class AFNO(nn.Module):
    """Embed patches as tokens, apply the blocks, and map tokens back to patches."""

    def __init__(self, size: tuple[int, int], patch: int, channels: int, kept: float):
        super().__init__()
        self.patch, self.grid = patch, (size[0] // patch, size[1] // patch)
        self.embed = nn.Conv2d(3, channels, patch, patch)
        self.position = nn.Parameter(torch.randn(1, self.grid[0] * self.grid[1], channels))
        self.blocks = nn.ModuleList(Block(channels, kept) for _ in range(2))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 2 * patch * patch, bias=False)

    def forward(self, x):
        b, (h, w), p = x.shape[0], self.grid, self.patch
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        x = x.reshape(b, h, w, -1)
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x))
        x = x.reshape(b, h, w, p, p, 2).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(b, 2, h * p, w * p)


def compared(mesh, placements, lengths, kept) -> float:
    """Return the largest difference of the output and all gradients from one device."""
    full, x = field(mesh, placements, (2, 3, 16, 24), lengths)
    torch.manual_seed(0)
    model = AFNO((16, 24), 2, 8, kept).double()
    alone = copy.deepcopy(model)
    with strict():
        out = model(x.requires_grad_())
        out.square().mean().backward()
    expected = alone(full.requires_grad_())
    expected.square().mean().backward()
    pairs = [(out.full_tensor(), expected), (x.grad.full_tensor(), full.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kept", [0.7, 1.0])
@pytest.mark.parametrize(
    ("mesh", "placements", "lengths"),
    [
        ((2,), [Shard(2)], None),
        ((3,), [Shard(2)], {2: [7, 1, 8]}),
        ((3,), [Shard(3)], {3: [5, 0, 19]}),
        ((2, 2), [Shard(2), Shard(3)], {2: [9, 7], 3: [13, 11]}),
    ],
)
def test_equals_one_device(mesh, placements, lengths, kept):
    assert max(run_on_ranks(compared, torch.Size(mesh).numel(), mesh, placements, lengths, kept)) < 1e-10
