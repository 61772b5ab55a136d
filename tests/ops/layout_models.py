"""Small models with hidden states as large as the field, in which a rule that loses the sharding costs most."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SpectralFilter(nn.Module):
    """The filter of AFNO: block-diagonal layers on the channels of every mode, written into buffers of zeros."""

    def __init__(self, channels: int, blocks: int, kept: float = 1.0):
        super().__init__()
        size = channels // blocks
        self.blocks, self.size, self.kept = blocks, size, kept
        self.w1 = nn.Parameter(0.3 * torch.randn(2, blocks, size, size))
        self.b1 = nn.Parameter(0.3 * torch.randn(2, blocks, size))
        self.w2 = nn.Parameter(0.3 * torch.randn(2, blocks, size, size))
        self.b2 = nn.Parameter(0.3 * torch.randn(2, blocks, size))

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, channels = x.shape
        bias = x
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        x = x.reshape(batch, rows, columns // 2 + 1, self.blocks, self.size)
        total = rows // 2 + 1
        kept = int(total * self.kept)
        at = (slice(None), slice(total - kept, total + kept), slice(None, kept))
        hidden = self._layer(x[at].real, x[at].imag, self.w1, self.b1, F.relu)
        shape = (*x.shape, 2)
        out = torch.zeros(shape, dtype=self.w1.dtype, device=x.device)
        out[at] = torch.stack(self._layer(*hidden, self.w2, self.b2, lambda t: t), -1)
        x = torch.view_as_complex(F.softshrink(out, 0.01)).reshape(batch, rows, columns // 2 + 1, channels)
        return torch.fft.irfft2(x, s=(rows, columns), dim=(1, 2), norm="ortho") + bias

    @staticmethod
    def _layer(real, imag, weight, bias, act):
        def mix(x, w):
            return torch.einsum("...bi,bio->...bo", x, w)

        return (
            act(mix(real, weight[0]) - mix(imag, weight[1]) + bias[0]),
            act(mix(imag, weight[0]) + mix(real, weight[1]) + bias[1]),
        )


class AFNOBlock(nn.Module):
    """Norm, spectral filter, residual; norm, MLP, residual, as in FourCastNet. Fields are (batch, rows, columns, C)."""

    def __init__(self, channels: int, blocks: int = 4, ratio: int = 4, kept: float = 1.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.filter = SpectralFilter(channels, blocks, kept)
        self.mlp = MLP(channels, ratio)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.filter(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MLP(nn.Sequential):
    """Two linear layers with a GELU between them."""

    def __init__(self, channels: int, ratio: int = 4):
        super().__init__(nn.Linear(channels, ratio * channels), nn.GELU(), nn.Linear(ratio * channels, channels))


class SpectralMLP(nn.Module):
    """An MLP on the filtered field itself, without a residual that would bring its sharding back."""

    def __init__(self, channels: int, ratio: int = 4):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.mlp = MLP(channels, ratio)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft2(x, dim=(1, 2)) * self.gain
        return self.mlp(torch.fft.ifft2(spectrum, dim=(1, 2)).real)
