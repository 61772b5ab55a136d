"""Bytes of scans, sorts and order statistics: small summaries per block, never the tensor."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, runtime, strict
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks

RANKS = 4
LONG = 8192  # elements of a row, 2048 on each rank
ROW = LONG // RANKS * 8  # bytes of it that a rank holds


def sent(name: str, shape: tuple[int, ...], args: tuple, kwargs: dict) -> tuple[int, bool]:
    """Return, on each rank, the bytes of a call on a tensor sharded along its last dim, and whether it is right."""
    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layout = Layout.of(mesh, [Shard(len(shape) - 1)], shape)
    start, stop = layout.span(len(shape) - 1)
    x = ShardTensor(full[..., start:stop].clone(), layout)
    total = [0]
    runtime.active.meter = lambda kind, messages, nbytes: total.__setitem__(0, total[0] + nbytes)
    try:
        with strict():
            got = getattr(torch, name)(x, *args, **kwargs)
    finally:
        runtime.active.meter = None
    ref = getattr(torch, name)(full, *args, **kwargs)
    pairs = zip(got, ref, strict=True) if isinstance(ref, tuple) else [(got, ref)]
    return total[0], all(torch.allclose(g.full_tensor(), r) for g, r in pairs)


@pytest.mark.parametrize(
    ("name", "shape", "args", "kwargs", "bound"),
    [
        ("cumsum", (LONG,), (0,), {}, 3 * 8),
        ("cumsum", (5, LONG), (1,), {}, 3 * 5 * 8),
        ("cummax", (LONG,), (0,), {}, 2 * 3 * 8),
        ("logcumsumexp", (LONG,), (0,), {}, 3 * 8),
        ("topk", (LONG,), (7,), {}, 3 * 7 * 16),
        ("median", (LONG,), (), {}, ROW * 2),
        ("median", (2, LONG), (1,), {}, ROW * 4),
        ("kthvalue", (16 * LONG,), (5000,), {}, ROW * 2),  # the same bytes for a longer row
        ("quantile", (16 * LONG,), (0.3,), {}, ROW * 4),
        # values and indices sent and returned; a quarter stays
        ("sort", (LONG,), (), {"stable": True}, ROW / 8 * 24 * 1.1),
        ("sort", (8, LONG), (), {"stable": True}, 8 * ROW / 8 * 20),
        ("argsort", (8, LONG), (), {"stable": True}, 8 * ROW / 8 * 12),
        # distinct values and their counts sent, positions returned
        ("unique", (LONG,), (), {"return_inverse": True, "return_counts": True}, ROW / 8 * 24),
        ("histc", (LONG,), (10,), {}, 3 * 16),
        ("bucketize", (LONG,), (torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64),), {}, 0),
    ],
)
def test_bytes(name, shape, args, kwargs, bound):
    results = run_on_ranks(sent, RANKS, name, shape, args, kwargs, timeout=60)
    assert all(right for _, right in results)
    assert max(nbytes for nbytes, _ in results) <= bound
