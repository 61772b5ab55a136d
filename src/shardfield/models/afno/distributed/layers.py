"""Layers of a channel-parallel adaptive Fourier neural operator.

Between layers, tokens (batch, rows, columns, channels) are sharded along their channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....distributed.splits import compute_split_shapes
from .channels import ChannelGroup, ChannelParallel, random_weight


class PatchEmbedding(ChannelParallel):
    """Embed images (batch, channels, H, W) as tokens: one per patch of p x p pixels, plus a position embedding.

    With `own_inputs` the images are sharded along their channels, else replicated.
    """

    def __init__(
        self,
        ranks: ChannelGroup,
        grid: tuple[int, int],
        patch: int,
        inputs: int,
        channels: Sequence[int],
        own_inputs: bool,
    ):
        super().__init__(ranks)
        self.patch, self.channels, self.own_inputs = patch, tuple(channels), own_inputs
        size = sum(channels)
        self.inputs = compute_split_shapes(inputs, ranks.size)
        weight = random_weight(size, inputs, patch, patch)
        self.weight = self.shard_param(weight, *((1, self.inputs) if own_inputs else (0, channels)), "weight")
        self.bias = self.shard_param(torch.zeros(size), 0, channels, "bias")
        self.position = self.shard_param(random_weight(1, *grid, size), 3, channels, "position")

    def forward(self, x: Tensor) -> Tensor:
        p = self.patch
        batch, _, height, width = x.shape
        patches = x.reshape(batch, -1, height // p, p, width // p, p)
        if self.own_inputs:
            tokens = torch.einsum("bchpwq,ecpq->bhwe", patches, self.weight)  # partial sum of all channels
            tokens = self.ranks.reduce_scatter(tokens, 3, self.channels)
        else:
            tokens = torch.einsum("bchpwq,ecpq->bhwe", self.ranks.replicate_in(patches), self.weight)
        return tokens + self.bias + self.position


class ChannelNorm(ChannelParallel):
    """Layer norm over sharded channels.

    The ranks all-gather the mean and the sum of squared deviations of their channels, two numbers per token.
    """

    def __init__(self, ranks: ChannelGroup, channels: Sequence[int], eps: float = 1e-6):
        super().__init__(ranks)
        self.channels, self.eps = tuple(channels), eps
        self.weight = self.shard_param(torch.ones(sum(channels)), 0, channels, "weight")
        self.bias = self.shard_param(torch.zeros(sum(channels)), 0, channels, "bias")

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean = x32.mean(-1)
        squares = (x32 - mean.unsqueeze(-1)).square().sum(-1)
        moments = self.ranks.gather(torch.stack([mean, squares]).unsqueeze(0), 0, [1] * self.ranks.size)
        counts = torch.tensor(self.channels, dtype=x32.dtype, device=x.device).reshape(-1, *[1] * mean.dim())
        total = sum(self.channels)
        means, squares = moments.unbind(1)
        mean = (means * counts).sum(0) / total
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        normed = (x32 - mean.unsqueeze(-1)) * torch.rsqrt(variance + self.eps).unsqueeze(-1)
        return (normed * self.weight + self.bias).to(x.dtype)


class FourierMixing(ChannelParallel):
    """Mix tokens in Fourier space: a two-layer network with block-diagonal weights is applied to every mode.

    Channels are sharded between blocks, so each rank mixes its own channels without communication. Soft shrinkage sets
    small coefficients to zero. Complex weights are stored as pairs of real numbers.
    """

    def __init__(self, ranks: ChannelGroup, blocks: Sequence[int], width: int, threshold: float = 0.01):
        super().__init__(ranks)
        self.width, self.threshold = width, threshold
        count = sum(blocks)
        self.w1 = self.shard_param(0.02 * torch.randn(count, width, width, 2), 0, blocks, "w1")
        self.b1 = self.shard_param(0.02 * torch.randn(count, width, 2), 0, blocks, "b1")
        self.w2 = self.shard_param(0.02 * torch.randn(count, width, width, 2), 0, blocks, "w2")
        self.b2 = self.shard_param(0.02 * torch.randn(count, width, 2), 0, blocks, "b2")

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # FFT does not support half precision
        size = x32.shape[1:3]
        modes = torch.fft.rfft2(x32, dim=(1, 2), norm="ortho").unflatten(-1, (-1, self.width))
        modes = _on_real_and_imag(F.relu, self._dense(modes, self.w1, self.b1))
        modes = _on_real_and_imag(lambda t: F.softshrink(t, self.threshold), self._dense(modes, self.w2, self.b2))
        mixed = torch.fft.irfft2(modes.flatten(-2), s=size, dim=(1, 2), norm="ortho")
        return mixed.to(x.dtype) + x

    def _dense(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = (torch.view_as_complex(t.to(x.real.dtype)) for t in (weight, bias))
        return torch.einsum("...ki,kio->...ko", x, weight) + bias


def _on_real_and_imag(fn, x: Tensor) -> Tensor:
    """Apply a function of real numbers to the real and the imaginary parts."""
    return torch.view_as_complex(fn(torch.view_as_real(x)))


class ChannelMLP(ChannelParallel):
    """Two linear layers with a GELU between. The hidden features are sharded.

    Forward: all_gather of the channels, reduce_scatter of the result. Backward: the reverse.
    """

    def __init__(self, ranks: ChannelGroup, channels: Sequence[int], hidden: int):
        super().__init__(ranks)
        self.channels = tuple(channels)
        size, hidden_sizes = sum(channels), compute_split_shapes(hidden, ranks.size)
        self.w1 = self.shard_param(random_weight(hidden, size), 0, hidden_sizes, "w1")
        self.b1 = self.shard_param(torch.zeros(hidden), 0, hidden_sizes, "b1")
        self.w2 = self.shard_param(random_weight(size, hidden), 1, hidden_sizes, "w2")
        self.b2 = self.shard_param(torch.zeros(size), 0, channels, "b2")

    def forward(self, x: Tensor) -> Tensor:
        x = self.ranks.gather(x, 3, self.channels)  # all channels
        x = F.gelu(F.linear(x, self.w1, self.b1))  # this rank's hidden features
        x = F.linear(x, self.w2)  # partial sum of all channels
        return self.ranks.reduce_scatter(x, 3, self.channels) + self.b2


class PatchHead(ChannelParallel):
    """Map tokens to images (batch, channels, H, W): replicated, or with `own_outputs` sharded along their channels."""

    def __init__(self, ranks: ChannelGroup, channels: Sequence[int], outputs: int, patch: int, own_outputs: bool):
        super().__init__(ranks)
        self.patch, self.outputs, self.own_outputs = patch, outputs, own_outputs
        self.weight = self.shard_param(random_weight(outputs, patch, patch, sum(channels)), 3, channels, "weight")

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, _ = x.shape
        image = torch.einsum("bhwe,cpqe->bchpwq", x, self.weight)  # partial sum
        image = image.reshape(batch, self.outputs, rows * self.patch, columns * self.patch)
        if self.own_outputs:
            return self.ranks.reduce_scatter(image, 1, compute_split_shapes(self.outputs, self.ranks.size))
        return self.ranks.reduce(image)
