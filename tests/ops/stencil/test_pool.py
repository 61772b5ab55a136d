"""Bytes of pools and unfolds: rows of windows across a shard boundary, once, and nothing without such windows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, runtime, strict
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, world_mesh

ROW = 3 * 4 * 8  # bytes of a row of the field below: three channels, four columns, float64

# name -> (call on x of shape (1, 3, 8, 4), shard sizes of its rows, bytes each rank sends forward, backward)
TABLE = {
    "max, windows inside": (lambda x: F.max_pool2d(x, 2), (4, 4), (0, 0), (0, 0)),
    "average, windows inside": (lambda x: F.avg_pool2d(x, 2), (6, 2), (0, 0), (0, 0)),
    "max, windows across an odd shard boundary": (lambda x: F.max_pool2d(x, 2), (3, 5), (0, ROW), (ROW, 0)),
    "max, stride 1": (lambda x: F.max_pool2d(x, 3, 1, 1), (4, 4), (ROW, ROW), (ROW, ROW)),
    "max, stride 2": (lambda x: F.max_pool2d(x, 3, 2, 1), (4, 4), (ROW, 0), (0, ROW)),
    "max with indices": (
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0],
        (4, 4),
        (ROW, 0),
        (0, ROW),
    ),
    "average, a wide window": (
        lambda x: F.avg_pool2d(x, (5, 1), 1, (2, 0)),
        (4, 4),
        (2 * ROW, 2 * ROW),
        (2 * ROW, 2 * ROW),
    ),
    "average, padding at the ends": (lambda x: F.avg_pool2d(x, 2, 2, 1, True, False), (3, 5), (0, 0), (0, 0)),
    "norm": (lambda x: F.lp_pool2d(x, 2, 2), (4, 4), (0, 0), (0, 0)),
    "to its half": (lambda x: F.adaptive_max_pool2d(x, (4, 2)), (4, 4), (0, 0), (0, 0)),
    "to fewer rows": (lambda x: F.adaptive_avg_pool2d(x, (7, 4)), (4, 4), (ROW, 0), (0, ROW)),
    "to one cell": (lambda x: F.adaptive_avg_pool2d(x, 1), (4, 4), (0, 0), (0, 0)),
    "the largest of all": (lambda x: F.adaptive_max_pool2d(x, 1), (4, 4), (2 * 3 * 8, 2 * 3 * 8), (0, 0)),
    "patches": (lambda x: F.unfold(x, 3, padding=1), (4, 4), (ROW, ROW), (ROW, ROW)),
    "patches side by side": (lambda x: F.unfold(x, 2, stride=2), (4, 4), (0, 0), (0, 0)),
    "patches and back": (
        lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 4), 3, padding=1),
        (4, 4),
        (2 * ROW, 2 * ROW),
        (2 * ROW, 2 * ROW),
    ),
    "pixels as channels": (lambda x: F.pixel_unshuffle(x, 2), (4, 4), (0, 0), (0, 0)),
    "channels as pixels": (lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), (3, 5), (0, 0), (0, 0)),
}


def count(name: str) -> tuple[int, int]:
    """Return, on each rank, its bytes forward and backward."""
    call, sizes, _, _ = TABLE[name]
    x = torch.randn(1, 3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = Layout.of(world_mesh((2,)), [Shard(2)], x.shape, {2: sizes})
    held = ShardTensor(local_shard(x, layout).requires_grad_(), layout)
    sent = [0]
    runtime.active.meter = lambda kind, messages, nbytes: sent.__setitem__(0, sent[0] + nbytes)
    try:
        with strict():
            out = call(held)._local_tensor
            forward, sent[0] = sent[0], 0
            torch.autograd.backward(out, torch.ones_like(out))
        return forward, sent[0]
    finally:
        runtime.active.meter = None


@pytest.mark.parametrize("name", TABLE)
def test_bytes_sent(name):
    first, second = run_on_ranks(count, 2, name, timeout=60)
    _, _, forward, backward = TABLE[name]
    assert ((first[0], second[0]), (first[1], second[1])) == (forward, backward)


def formats() -> list[bool]:
    """Return, on each rank, whether results of pools on channels-last fields are stored channels last."""
    x = torch.randn(2, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    layout = Layout.of(world_mesh((2,)), [Shard(2)], x.shape, {2: (3, 5)})
    held = ShardTensor(local_shard(x, layout).contiguous(memory_format=torch.channels_last), layout)
    calls = (F.max_pool2d, F.avg_pool2d)
    made = [call(held, *how) for call in calls for how in ((2,), (3, 2, 1), (3, 1, 1))]
    return [t._local_tensor.is_contiguous(memory_format=torch.channels_last) for t in made]


def test_channels_last_is_kept():
    assert run_on_ranks(formats, 2, timeout=60) == [[True] * 6] * 2
