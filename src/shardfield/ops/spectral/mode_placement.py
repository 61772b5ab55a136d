"""Where a block of modes is mixed: whole on every rank, or a share of the modes on each. Bytes decide. Pure.

The modes of a cut field are addends on P ranks; weights mix their channels, and every rank needs all of the product
for its rows of the field. Let b be the bytes of the block, c those of the product, w those of the weights:

- whole: an all-reduce of b, and of c in backward. Every rank does all of the product and of its two gradients;
- shares: a reduce-scatter of b before the product and an all-gather of c after it, in backward the other way round.
  Every rank does 1/P of the product and of its gradients. Weights that are whole want their gradient whole: an
  all-gather of w.

An all-reduce is a reduce-scatter and an all-gather, so over one mesh axis both send the same, 2 (1 - 1/P) (b + c), but
for w. Over several axes shares still send that, and sums axis by axis 2 (1 - 1/Pi) (b + c) for each. But w is (out
channels / batch) times b. So large blocks are mixed in shares where the weights' gradient is not owed at once: it is
not wanted, or a wrapper sums all parameters' gradients over these ranks anyway (`comm/grad_deferral.py`). Weights
that lie in shards of their modes have it so in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...layout import DimSharding, Layout, balanced

# Bytes of a block below which a rank mixes all of it: it would wait for messages longer than it mixes.
MIN_SHARDED_BYTES = 1 << 18


def shard_modes(layout: Layout, dims: Sequence[int]) -> Layout:
    """A Partial block with a dim of modes, among `dims`, cut by each axis it is Partial over; the longest comes first.

    An axis of more ranks than there are modes along any dim that is left is summed over instead.
    """
    found = layout.with_partial(())
    for axis in sorted(layout.nontrivial_axes(layout.partial_axes), key=lambda a: -layout.mesh.size(a)):
        free = [d for d in dims if not found.axes_of(d) and found.shape[d] >= layout.mesh.size(axis)]
        if free:
            dim = max(free, key=lambda d: found.shape[d])
            size = found.shape[dim]
            found = found.with_dim(dim, DimSharding(size, (axis,), tuple(balanced(size, layout.mesh.size(axis)))))
    return found


def choose_placement(
    layout: Layout,
    dims: Sequence[int],
    itemsize: int,
    *,
    out_ratio: float = 1.0,
    grad_bytes: float = 0.0,
    grad: bool = False,
) -> Layout:
    """Where a Partial block of modes along `dims` goes, whole or in shares, whichever sends less; shares on a tie.

    growth: the bytes of the product for each of the block. owed: bytes of weights whose gradient must be whole at once.
    grad: backward is to come.
    """
    whole, shares = layout.with_partial(()), shard_modes(layout, dims)
    block = itemsize * math.prod(max(layout.shard_sizes(d)) for d in range(layout.ndim))
    if block < MIN_SHARDED_BYTES or shares is whole:
        return whole
    summed = scattered = again = 0.0  # for each byte of the block, or of the product
    left, parts = 1.0, 1
    for axis in layout.nontrivial_axes(layout.partial_axes):
        size = layout.mesh.size(axis)
        summed += 2 * (1 - 1 / size)
        if axis in shares.shard_axes:
            scattered += left * (1 - 1 / size)
            left, parts = left / size, parts * size
        else:
            again += 2 * left * (1 - 1 / size)
    product = out_ratio * block
    by_whole = summed * (block + (product if grad else 0))
    by_shares = scattered * (block + product) * (2 if grad else 1) + again * (block + (product if grad else 0))
    by_shares += grad_bytes * (1 - 1 / parts)
    return shares if by_shares <= by_whole * (1 + 1e-9) else whole
