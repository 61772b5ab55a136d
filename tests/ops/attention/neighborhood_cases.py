"""Neighborhood attention: windows with halos, that shift inward at the edge, in one to three dims."""

import math

import torch

from shardfield import ShardTensor
from shardfield.ops.attention import neighborhood
from shardfield.ops.attention.neighborhood import neighborhood_attention
from tests.harness import T, case, raises

FEW, SOME = {"layouts": 4}, {"layouts": 8}


def explicit(q, k, v, sizes, steps):
    """Return attention with a mask over all pairs of cells: a pair in one window along every dim."""
    space = q.shape[1:-2]
    allowed = torch.ones(1, 1, dtype=torch.bool)
    for n, size, step in zip(space, sizes, steps, strict=True):
        near = torch.zeros(n, n, dtype=torch.bool)
        for i in range(n):
            same = [j for j in range(n) if j % step == i % step]
            first = min(max(same.index(i) - size // 2, 0), len(same) - size)
            near[i, same[first : first + size]] = True
        allowed = (allowed[:, None, :, None] & near[None, :, None, :]).flatten(0, 1).flatten(1)
    q, k, v = (t.flatten(1, -3).transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed.to(q.device), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, space)


def attend(sizes, steps=None, limit=None):
    """Return a call; on plain tensors it is the explicit formula. `limit`: bytes of windows held at a time."""
    steps = steps or [1] * len(sizes)

    def run(q, k, v):
        if not any(isinstance(t, ShardTensor) for t in (q, k, v)):
            return explicit(q, k, v, sizes, steps)
        before = neighborhood.MAX_WINDOW_BYTES
        neighborhood.MAX_WINDOW_BYTES = before if limit is None else limit
        try:
            return neighborhood_attention(q, k, v, sizes, steps)
        finally:
            neighborhood.MAX_WINDOW_BYTES = before

    return run


def qkv(*space, batch=2, heads=2):
    return T(batch, *space, heads, 3), T(batch, *space, heads, 3), T(batch, *space, heads, 2)


CASES = [
    case(attend([3]), *qkv(8), options=SOME | {"name": "1-D"}),
    case(attend([3, 5]), *qkv(5, 7), options={"layouts": 12, "name": "2-D"}),
    case(attend([3, 3], [2, 1]), *qkv(9, 4), options=SOME | {"name": "2-D, dilation"}),
    case(attend([3], [3]), *qkv(11), options=SOME | {"name": "1-D, dilation"}),
    case(attend([1, 3]), *qkv(4, 6, batch=1), options=FEW | {"name": "2-D, a window of one row"}),
    case(attend([3, 1, 3]), *qkv(4, 2, 3), options=SOME | {"name": "3-D"}),
    case(attend([3, 3], limit=1), *qkv(5, 4), options=FEW | {"name": "2-D, row by row"}),
    case(attend([5]), *qkv(5), options=FEW | {"name": "1-D, a window of all cells"}),
    *(
        case(
            lambda q, k, v, size=size: neighborhood_attention(q, k, v, size),
            *operands,
            options=FEW | raises(ValueError, text) | {"name": f"kernel {size}"},
        )
        for size, operands, text in [
            (2, qkv(5), "odd sizes"),
            (7, qkv(5), "do not fit a dim of 5 cells"),
            (3, [T(4, 3)] * 3, "one to three dims of space"),
            ((3, 3), qkv(5), "for 1 dims"),
        ]
    ),
]
