"""The adaptive Fourier neural operator of FourCastNet (arXiv:2202.11214), channel-parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ....distributed.splits import compute_split_shapes
from ....distributed.utils import all_gather_v_wrapper
from .channels import ChannelGroup, param_shardings_of
from .layers import ChannelMLP, ChannelNorm, FourierMixing, PatchEmbedding, PatchHead

GROUP = "model_parallel"


class DistributedAFNO(nn.Module):
    """AFNO from images to images of the same size, its channels sharded over the ranks of the group "model_parallel".

    Input (batch, in_channels, H, W) and output (batch, out_channels, H, W) are replicated over the group, or with
    `channel_parallel_inputs` and `channel_parallel_outputs` sharded along their channels by `compute_split_shapes`.
    Results and gradients equal those of the one-process model, of whose parameters each rank holds a shard. The same
    seed gives the same model for any number of ranks. `load_full_state_dict` and `full_state_dict` convert between the
    two. Without a group of this name the model is the one-process model.

    The images are split into patches of `patch_size`. Each of `depth` blocks mixes the `embed_dim` channels of the
    patches in Fourier space, in `num_blocks` blocks of channels, and then point by point. Channels are sharded between
    blocks of channels, of which there must be at least as many as ranks. A block sends one all_gather and one
    reduce_scatter of the patches, and four numbers per patch for its norms.

    >>> import torch
    >>> model = DistributedAFNO((32, 64), in_channels=3, out_channels=2, patch_size=8, embed_dim=16, depth=2)
    >>> model(torch.zeros(1, 3, 32, 64)).shape
    torch.Size([1, 2, 32, 64])
    """

    def __init__(
        self,
        inp_shape: Sequence[int],
        in_channels: int,
        out_channels: int | None = None,
        patch_size: int = 16,
        embed_dim: int = 256,
        depth: int = 4,
        num_blocks: int = 4,
        channel_parallel_inputs: bool = False,
        channel_parallel_outputs: bool = False,
    ):
        super().__init__()
        ranks = ChannelGroup.of(GROUP)
        height, width = inp_shape
        if height % patch_size or width % patch_size:
            raise ValueError(f"DistributedAFNO: {height} x {width} is not divisible into patches of {patch_size}")
        if embed_dim % num_blocks:
            raise ValueError(f"DistributedAFNO: {embed_dim} channels are not divisible into {num_blocks} equal blocks")
        if num_blocks < ranks.size:
            raise ValueError(
                f"DistributedAFNO: {num_blocks} blocks of channels are too few for the {ranks.size} ranks of {GROUP!r}"
            )
        self.inp_shape = (height, width)
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        inputs = compute_split_shapes(in_channels, ranks.size)
        self._channels_in = inputs[ranks.coord] if channel_parallel_inputs else in_channels
        blocks = compute_split_shapes(num_blocks, ranks.size)
        size = embed_dim // num_blocks
        channels = [n * size for n in blocks]
        grid = (height // patch_size, width // patch_size)
        self.embedding = PatchEmbedding(ranks, grid, patch_size, in_channels, channels, channel_parallel_inputs)
        self.blocks = nn.ModuleList(Block(ranks, blocks, size) for _ in range(depth))
        self.head = PatchHead(ranks, channels, self.out_channels, patch_size, channel_parallel_outputs)

    def forward(self, x: Tensor) -> Tensor:
        expected = (self._channels_in, *self.inp_shape)
        if x.dim() != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"DistributedAFNO: expected (batch, {', '.join(map(str, expected))}), got {tuple(x.shape)}"
            )
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the parameters of the one-process model: every rank passes all of them and keeps its shards."""
        shardings, coord = param_shardings_of(self), self.embedding.ranks.coord
        local = {}
        for name, value in state_dict.items():
            if name in shardings:
                expected = shardings[name].full_shape(self.get_parameter(name).shape)
                if tuple(value.shape) != expected:
                    raise ValueError(f"{name} has shape {tuple(value.shape)}, the one-process model's is {expected}")
                value = shardings[name].of(value, coord)
            local[name] = value
        self.load_state_dict(local)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the parameters of the one-process model on every rank. Collective: all ranks of the group call it."""
        shardings, ranks = param_shardings_of(self), self.embedding.ranks
        state = {name: value.detach() for name, value in self.state_dict().items()}
        if ranks.size == 1:
            return {name: value.clone() for name, value in state.items()}
        return {
            name: all_gather_v_wrapper(value, shardings[name].shard_sizes, shardings[name].dim, ranks.group)
            for name, value in state.items()
        }


class Block(nn.Module):
    """Fourier mixing, then an MLP; each acts on normalized tokens and is added to them."""

    def __init__(self, ranks: ChannelGroup, blocks: Sequence[int], size: int):
        super().__init__()
        channels = [n * size for n in blocks]
        self.norm1 = ChannelNorm(ranks, channels)
        self.mixing = FourierMixing(ranks, blocks, size)
        self.norm2 = ChannelNorm(ranks, channels)
        self.mlp = ChannelMLP(ranks, channels, 4 * sum(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixing(self.norm1(x))
        return x + self.mlp(self.norm2(x))
