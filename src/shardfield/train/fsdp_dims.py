"""Which dim of each parameter FSDP cuts.

FSDP2 cuts dim 0 into equal pieces and fills up the last: a position embedding of shape (1, tokens, channels) on a
thousand ranks travels as a thousand embeddings. Any other dim it cuts too, where the ranks divide it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

# Bytes in a gather that another dim must save: FSDP copies such pieces once more, by a few calls in each step.
MIN_SAVED_BYTES = 1 << 16
WARN_PADDING_BYTES = 1 << 20  # bytes of filling in one gather that are worth a word


def choose_shard_dim(shape: Sequence[int], ranks: int, itemsize: int = 4) -> int:
    """The dim to cut for `ranks` ranks: 0, or the first that they divide where this spares many bytes of filling.

    >>> shapes = [((1024, 512), 8), ((1, 4096, 64), 1024), ((3, 5), 1024), ((1, 64), 64)]
    >>> [choose_shard_dim(shape, ranks) for shape, ranks in shapes]
    [0, 1, 0, 0]
    """
    if (_padded_numel(shape, 0, ranks) - math.prod(shape)) * itemsize < MIN_SAVED_BYTES:
        return 0
    return next((dim for dim, n in enumerate(shape) if n % ranks == 0), 0)


def _padded_numel(shape: Sequence[int], dim: int, ranks: int) -> int:
    """The numbers that all pieces of a parameter have together, cut along a dim and filled up."""
    return math.prod(-(-n // ranks) * ranks if d == dim else n for d, n in enumerate(shape))


def padding_bytes(parameter: Tensor, ranks: int) -> int:
    """The bytes in a gather of a parameter that are not its own."""
    shape, itemsize = parameter.shape, parameter.element_size()
    return (_padded_numel(shape, choose_shard_dim(shape, ranks, itemsize), ranks) - parameter.numel()) * itemsize


def make_placement_fn(ranks: int) -> Callable[[Tensor], Shard | None]:
    """What `fully_shard` asks for the placement of each parameter."""
    return lambda p: Shard(choose_shard_dim(p.shape, ranks, p.element_size())) if p.ndim else None


def warn_about_padding(model: nn.Module, ranks: int) -> None:
    """Say which parameter travels with the most filling, where it is much: the ranks divide no dim of it."""
    found = {name: (padding_bytes(p, ranks), p.numel() * p.element_size()) for name, p in model.named_parameters()}
    wasted = {name: extra for name, (extra, own) in found.items() if extra >= MIN_SAVED_BYTES and extra > own}
    total = sum(wasted.values())
    if total < WARN_PADDING_BYTES or dist.get_rank():  # the ranks would all say the same
        return
    name = max(wasted, key=lambda n: wasted[n])
    shape = tuple(model.get_parameter(name).shape)
    warnings.warn(
        f"parallelize: {ranks} ranks divide no dim of {name} {shape}, so that FSDP fills it up with "
        f"{wasted[name] / 1e6:.1f} MB in every gather ({total / 1e6:.1f} MB for {len(wasted)} such parameters); "
        f"'hsdp' cuts parameters over the domain alone, and 'ddp' does not cut them",
        stacklevel=4,
    )
