"""Choose the placement of a block of modes before its channels are mixed: replicated, or sharded by modes. Pure.

The modes of a sharded field are partial sums on P ranks. The weights mix their channels, and every rank then needs the
full product to evaluate its rows of the field. With b bytes of modes, c bytes of product and w bytes of weights:

- replicated: all_reduce b; all_reduce c in backward. Every rank computes the full product and both its gradients.
- sharded: reduce_scatter b before the product and all_gather c after it; the reverse in backward. Every rank computes
  1/P of the product and of its gradients. Replicated weights need their full gradient, an all_gather of w.

Over one mesh axis both send 2 (1 - 1/P) (b + c), as an all_reduce is a reduce_scatter and an all_gather; sharded sends
w in addition. Over several axes of Pi ranks sharded sends the same in total, but replicated sends 2 (1 - 1/Pi) (b + c)
for each axis. As w is (out channels / batch) times b, large blocks are sharded if the weights' gradient need not be
replicated now: it is not required, or a wrapper reduces the gradients of all parameters over these ranks later
(`comm/grad_deferral.py`). Weights sharded by modes always use sharded modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...layout import DimSharding, Layout, balanced

# A smaller block, in bytes, is replicated: the latency of the messages exceeds the time of the product.
MIN_SHARDED_BYTES = 1 << 18


def shard_modes(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return the layout of a Partial block after a reduce_scatter: each Partial axis shards one of `dims`.

    Each axis shards the largest dim still unsharded, axes with the most ranks first. An axis with more ranks than any
    such dim has modes is all-reduced instead.
    """
    result = layout.with_partial(())
    for axis in sorted(layout.nontrivial_axes(layout.partial_axes), key=lambda a: -layout.mesh.size(a)):
        free = [d for d in dims if not result.axes_of(d) and result.shape[d] >= layout.mesh.size(axis)]
        if free:
            dim = max(free, key=lambda d: result.shape[d])
            size = result.shape[dim]
            result = result.with_dim(dim, DimSharding(size, (axis,), tuple(balanced(size, layout.mesh.size(axis)))))
    return result


def choose_placement(
    layout: Layout,
    dims: Sequence[int],
    itemsize: int,
    *,
    out_ratio: float = 1.0,
    grad_bytes: float = 0.0,
    grad: bool = False,
) -> Layout:
    """Return the layout that a Partial block of modes along `dims` is redistributed to: the one that sends less.

    On a tie the modes are sharded.

    out_ratio: bytes of the product per byte of the block.
    grad_bytes: bytes of weights whose full gradient every rank needs in this backward.
    grad: a backward will follow.
    """
    replicated = layout.with_partial(())
    block = itemsize * math.prod(layout.largest_shard)
    if block < MIN_SHARDED_BYTES:
        return replicated
    sharded = shard_modes(layout, dims)
    if sharded is replicated:
        return replicated
    all_reduce = reduce_scatter = rest = 0.0  # bytes sent per byte; `rest`: all_reduce over the axes left unsharded
    local_share, shards = 1.0, 1
    for axis in layout.nontrivial_axes(layout.partial_axes):
        size = layout.mesh.size(axis)
        all_reduce += 2 * (1 - 1 / size)
        if axis in sharded.shard_axes:
            reduce_scatter += local_share * (1 - 1 / size)
            local_share, shards = local_share / size, shards * size
        else:
            rest += 2 * local_share * (1 - 1 / size)
    product = out_ratio * block
    reduced = block + (product if grad else 0)
    replicated_cost = all_reduce * reduced
    sharded_cost = reduce_scatter * (block + product) * (2 if grad else 1) + rest * reduced
    sharded_cost += grad_bytes * (1 - 1 / shards)
    return sharded if sharded_cost <= replicated_cost * (1 + 1e-9) else replicated
