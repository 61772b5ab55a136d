"""TorchScript functions on sharded fields: their Python source runs by the rules, with gradients."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import ignore_gather_warnings, local_shard, world_mesh

SHAPE = (2, 3, 7)


def attract(x: Tensor, alpha: float = 300.0, gamma: int = 2) -> Tensor:
    return x.div(1 + alpha * x.pow(gamma))


def smooth(parts: list[Tensor]) -> Tensor:
    return F.avg_pool1d(torch.cat(parts, 1), 3, 1, 1)


def wave(x: Tensor) -> Tensor:
    return x.sin() * x


def compared() -> list[str]:
    """Return, on each of two ranks, functions that differ from one device, or that gather despite their source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        scripted, of_lists, without = map(torch.jit.script, (attract, smooth, wave))
        traced = torch.jit.trace(attract, torch.ones(SHAPE))
    del without._torchdynamo_inline  # as for a function loaded from a file
    calls = {
        "scripted": lambda x: scripted(x, alpha=2.0),
        "of lists": lambda x: of_lists([x, 2 * x]),
        "traced": traced,
        "without": without,
    }
    layout = Layout.of(world_mesh((2,)), (Shard(2),), SHAPE, {2: [5, 2]})
    full, wrong = torch.randn(SHAPE, dtype=torch.float64), []
    for name, call in calls.items():
        x, y = full.clone().requires_grad_(), ShardTensor(local_shard(full, layout).requires_grad_(), layout)
        wanted = call(x)
        with ignore_gather_warnings(), explain() as report:
            found = call(y)
        wanted.square().sum().backward()
        found.square().sum().backward()
        same = torch.allclose(found.full_tensor(), wanted) and torch.allclose(y.grad.full_tensor(), x.grad)
        if not same or bool(report.gathers) != (name == "without"):
            wrong.append(name)
    return wrong


def test_scripted_functions():
    assert run_on_ranks(compared, 2) == [[], []]
