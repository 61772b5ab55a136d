"""Random ops: shards differ, replicas agree, and a seed gives the same global values for every sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardfield import scatter_tensor, strict
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh

DRAWS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1), 0.5).squeeze(-1),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None, None], 0.5)[:, :, 0, 0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[:, :, None], 0.3, training=True)[:, :, 0],
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(0, 0.5),
    "uniform": lambda x: torch.empty_like(x).uniform_(2, 5),
    "random_": lambda x: torch.empty_like(x).random_(10, 20),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal of a number": lambda x: torch.normal(1.0, x.abs()),
    "normal by rows": lambda x: torch.normal(x, torch.linspace(0.1, 1, 10)),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 4),
    "multinomial with replacement": lambda x: torch.multinomial(x.sigmoid(), 14, replacement=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
}


def drawn(what, mesh_shape, placements, same_seed):
    torch.manual_seed(7 if same_seed or dist.get_rank() == 0 else 70 + dist.get_rank())
    mesh = world_mesh(mesh_shape)
    x = scatter_tensor(torch.linspace(-2, 2, 60 * 10).view(60, 10), 0, mesh, placements)
    torch.manual_seed(7 if same_seed or dist.get_rank() == 0 else 70 + dist.get_rank())
    first, second = DRAWS[what](x), DRAWS[what](x)
    assert not torch.equal(first.full_tensor(), second.full_tensor())
    return first.full_tensor()


SHARDINGS = [
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((3,), [Shard(0)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2,), [Replicate()]),
]


@pytest.mark.parametrize("what", DRAWS)
def test_values_are_independent_of_the_sharding(what):
    (expected,) = run_on_ranks(drawn, 1, what, (1,), [Shard(0)], True)
    for mesh, placements in SHARDINGS:
        for same_seed in (True, False):
            for got in run_on_ranks(drawn, torch.Size(mesh).numel(), what, mesh, placements, same_seed):
                if what == "gumbel_softmax":  # equal values, but a sharded sum is taken in another order
                    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
                else:
                    assert torch.equal(got, expected), (mesh, placements)


def distributions():
    mesh = world_mesh((2,))
    x = scatter_tensor(torch.zeros(400, 500, dtype=torch.float64), 0, mesh, [Shard(0)])
    torch.manual_seed(0)
    u, n = torch.rand_like(x).full_tensor(), torch.randn_like(x).full_tensor()
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(n.mean()) < 0.01 and abs(n.var() - 1) < 0.02 and abs((n**4).mean() - 3) < 0.1
    for lag in (1, 500):  # neighbors are not correlated
        flat = u.flatten() - 0.5
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 0.001
    ones = torch.ones_like(x).requires_grad_()
    kept = F.dropout(ones, 0.3)
    kept.sum().backward()
    assert torch.equal(ones.grad.full_tensor(), kept.full_tensor().detach())
    assert abs((kept.full_tensor() > 0).double().mean() - 0.7) < 0.005
    assert torch.equal(F.dropout(ones, 0.3, training=False).full_tensor(), ones.full_tensor())
    assert F.dropout(ones, 1.0).full_tensor().abs().max() == 0
    e = torch.empty_like(x).exponential_(2.0).full_tensor()
    assert abs(e.mean() - 0.5) < 0.01 and e.min() >= 0
    with pytest.raises((RuntimeError, ValueError)):
        F.dropout(ones, 1.5)
    mean = (ones.detach() * 3).requires_grad_()
    near = torch.normal(mean, ones.detach() * 0.5)
    assert abs(near.mean().item() - 3) < 0.01 and abs(near.std().item() - 0.5) < 0.01
    near.sum().backward()
    assert mean.grad.full_tensor().abs().max() == 0  # as torch's
    p = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
    for dim, replacement in ((0, True), (0, False), (1, True), (1, False)):
        rows = scatter_tensor(p.expand(20000, 4).contiguous(), 0, mesh, [Shard(dim)])
        with strict():
            drawn = torch.multinomial(rows, 2, replacement).full_tensor()
        assert (drawn[:, 0].bincount(minlength=4) / 20000 - p).abs().max() < 0.02
        assert replacement or (drawn[:, 0] != drawn[:, 1]).all()
    line = scatter_tensor(p, 0, mesh, [Shard(0)])
    with strict():
        drawn = torch.multinomial(line, 20000, True)
    assert (drawn.full_tensor().bincount(minlength=4) / 20000 - p).abs().max() < 0.02
    assert not drawn._layout.is_replicated
    bad = scatter_tensor(torch.tensor([[0.5, 0.5], [0.5, -1.0]]), 0, mesh, [Shard(0)])
    zero = scatter_tensor(torch.tensor([[0.5, 0.5], [0.0, 0.0]]), 0, mesh, [Shard(0)])
    refused = [
        lambda: torch.multinomial(bad, 1),
        lambda: torch.multinomial(zero, 1),
        lambda: torch.multinomial(line, 5),
        lambda: torch.multinomial(line, 0),
        lambda: torch.multinomial(line.long(), 1),
        lambda: torch.normal(line, -line),
        lambda: torch.normal(line, -1.0),
    ]
    for call in refused:
        with pytest.raises(RuntimeError):
            call()


def test_distributions():
    run_on_ranks(distributions, 2)
