"""Messages of reductions, softmax and losses along a sharded dim: the fewest and smallest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, runtime
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, world_mesh

# name -> (call on x of shape (8, 5) sharded along dim 0, messages forward, messages backward)
TABLE = {
    "sum": (lambda x, t: x.sum(0), 0, 0),
    "mean": (lambda x, t: x.mean(), 1, 0),  # a single number: its sum starts at once
    "sum of an unsharded dim": (lambda x, t: x.sum(1), 0, 0),
    "max of an unsharded dim": (lambda x, t: x.max(1)[0], 0, 0),
    "count_nonzero": (lambda x, t: x.count_nonzero(), 1, 0),
    "prod": (lambda x, t: x.prod(0), 1, 0),
    "any": (lambda x, t: (x > 0).any(0), 1, 0),
    "nanmean": (lambda x, t: x.nanmean(0), 1, 0),
    "amax": (lambda x, t: x.amax(0), 1, 1),  # backward counts the ties that share the gradient
    "aminmax": (lambda x, t: sum(x.aminmax(dim=0)), 1, 2),
    "max": (lambda x, t: x.max(0)[0], 2, 0),
    "argmax": (lambda x, t: x.argmax(0), 2, 0),
    "var_mean": (lambda x, t: sum(torch.var_mean(x, 0)), 1, 0),
    "norm": (lambda x, t: torch.linalg.vector_norm(x, 2, 0), 1, 0),
    "norm of order 1": (lambda x, t: torch.linalg.vector_norm(x, 1, 0), 0, 0),
    "logsumexp": (lambda x, t: x.logsumexp(0), 1, 0),
    "softmax": (lambda x, t: x.softmax(0), 2, 1),
    "log_softmax": (lambda x, t: x.log_softmax(0), 2, 1),
    "normalize": (lambda x, t: F.normalize(x, dim=0), 1, 1),
    "renorm": (lambda x, t: x.renorm(2, 1, 1.0), 1, 1),
    "renorm along the sharded dim": (lambda x, t: x.renorm(2, 0, 1.0), 0, 0),
    "cosine_similarity": (lambda x, t: F.cosine_similarity(x, x.detach(), 0), 1, 1),
    "mse_loss": (lambda x, t: F.mse_loss(x, x.detach() + 1), 1, 0),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), 1, 0),
    "cross_entropy over sharded classes": (lambda x, t: F.cross_entropy(x.T, t[:5]), 3, 1),
}
ROWS = 8


def count(name: str, seed: int) -> tuple[int, int]:
    """Return, on each rank, the messages it sends forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 5, generator=generator)
    target = torch.randint(5, (ROWS,), generator=generator)
    mesh = world_mesh((3,))
    layout = Layout.of(mesh, [Shard(0)], x.shape, {0: (4, 1, 3)})
    held = ShardTensor(local_shard(x, layout).requires_grad_(), layout)
    sent = [0]
    runtime.active.meter = lambda kind, messages, nbytes: sent.__setitem__(0, sent[0] + messages)
    try:
        out = TABLE[name][0](held, target)
        forward, sent[0] = sent[0], 0
        if out.requires_grad:
            local = out._local_tensor
            torch.autograd.backward(local, torch.ones_like(local))
        return forward, sent[0]
    finally:
        runtime.active.meter = None


@pytest.mark.parametrize("name", TABLE)
def test_messages(name):
    results = run_on_ranks(count, 3, name, 0, timeout=60)
    assert results == [TABLE[name][1:]] * 3
