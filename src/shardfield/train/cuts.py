"""Which dim of each parameter FSDP cuts.

FSDP2 cuts dim 0 into equal pieces and fills up the last: a position embedding of shape (1, tokens, channels) on a
thousand ranks travels as a thousand embeddings. Any other dim it cuts too, where the ranks divide it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import Shard

WASTE = 1 << 20  # bytes of filling in one gather of a parameter that are worth a word


def cut_dim(shape: Sequence[int], ranks: int) -> int:
    """The dim along which a parameter in pieces for `ranks` ranks has the fewest bytes: the first of several.

    >>> cut_dim((1024, 3), 8), cut_dim((1, 4096, 64), 1024), cut_dim((3, 5, 2), 2), cut_dim((3, 5), 2)
    (0, 1, 2, 0)
    """
    return next((dim for dim, n in enumerate(shape) if n % ranks == 0), 0)


def padded(shape: Sequence[int], ranks: int) -> int:
    """The numbers that all pieces of a parameter have together, filling included."""
    dim = cut_dim(shape, ranks)
    return math.prod(-(-n // ranks) * ranks if d == dim else n for d, n in enumerate(shape))


def cuts(ranks: int) -> Callable[[Tensor], Shard | None]:
    """What `fully_shard` asks for the placement of each parameter."""
    return lambda parameter: Shard(cut_dim(parameter.shape, ranks)) if parameter.ndim else None


def warn_of_filling(model: nn.Module, ranks: int) -> None:
    """Say once which parameter travels with the most filling, where it is much: no dim of it can be cut well."""
    wasted = {
        name: (padded(p.shape, ranks) - p.numel()) * p.element_size()
        for name, p in model.named_parameters()
        if 2 * p.numel() < padded(p.shape, ranks)
    }
    total = sum(wasted.values())
    if total < WASTE:
        return
    name = max(wasted, key=lambda n: wasted[n])
    shape = tuple(model.get_parameter(name).shape)
    warnings.warn(
        f"parallelize: {ranks} ranks divide no dim of {name} {shape}, so that FSDP fills it up with "
        f"{wasted[name] / 1e6:.1f} MB in every gather ({total / 1e6:.1f} MB for {len(wasted)} such parameters); "
        f"'hsdp' cuts parameters over the domain alone, and 'ddp' does not cut them",
        stacklevel=4,
    )
