"""Choose the dim of each parameter that FSDP shards.

FSDP2 shards dim 0 by default and pads it to equal shards: a gather of a position embedding of shape (1, tokens,
channels) over a thousand ranks sends a thousand embeddings. It can shard another dim if the size of that dim is
divisible by the number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

# Bytes of padding per gather above which another dim pays: FSDP copies shards of other dims once more in each step.
MIN_SAVED_BYTES = 1 << 16
WARN_PADDING_BYTES = 1 << 20  # bytes of padding in one gather that are worth a warning


def choose_shard_dim(shape: Sequence[int], ranks: int, itemsize: int = 4) -> int:
    """Return the dim to shard over `ranks` ranks: 0, or the first divisible dim if this saves much padding.

    >>> shapes = [((1024, 512), 8), ((1, 4096, 64), 1024), ((3, 5), 1024), ((1, 64), 64)]
    >>> [choose_shard_dim(shape, ranks) for shape, ranks in shapes]
    [0, 1, 0, 0]
    """
    if (_padded_numel(shape, 0, ranks) - math.prod(shape)) * itemsize < MIN_SAVED_BYTES:
        return 0
    return next((dim for dim, n in enumerate(shape) if n % ranks == 0), 0)


def _padded_numel(shape: Sequence[int], dim: int, ranks: int) -> int:
    """Return the total elements of all padded shards of a parameter that is sharded along `dim`."""
    return math.prod(-(-n // ranks) * ranks if d == dim else n for d, n in enumerate(shape))


def padding_bytes(parameter: Tensor, ranks: int) -> int:
    """Return the bytes of padding in a gather of a parameter."""
    shape, itemsize = parameter.shape, parameter.element_size()
    return (_padded_numel(shape, choose_shard_dim(shape, ranks, itemsize), ranks) - parameter.numel()) * itemsize


def make_placement_fn(ranks: int) -> Callable[[Tensor], Shard | None]:
    """Return the function that `fully_shard` calls for the placement of each parameter."""
    return lambda p: Shard(choose_shard_dim(p.shape, ranks, p.element_size())) if p.ndim else None


def warn_about_padding(model: nn.Module, ranks: int) -> None:
    """Warn about the parameter with the most padding, if the total padding is large."""
    found = {name: (padding_bytes(p, ranks), p.numel() * p.element_size()) for name, p in model.named_parameters()}
    wasted = {name: extra for name, (extra, own) in found.items() if extra >= MIN_SAVED_BYTES and extra > own}
    total = sum(wasted.values())
    if total < WARN_PADDING_BYTES or dist.get_rank():  # one warning, not one per rank
        return
    name = max(wasted, key=lambda n: wasted[n])
    shape = tuple(model.get_parameter(name).shape)
    warnings.warn(
        f"parallelize: no dim of {name} {shape} is divisible by {ranks} ranks, so that FSDP pads it with "
        f"{wasted[name] / 1e6:.1f} MB in every gather ({total / 1e6:.1f} MB for {len(wasted)} such parameters); "
        f"'hsdp' shards parameters over the domain alone, and 'ddp' does not shard them",
        stacklevel=4,
    )
