"""Reports, checks and counts of work inside a virtual rank see that rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import explain, scatter_tensor
from shardfield.debug.model_inputs import Inputs
from shardfield.debug.model_run import ModelRun
from shardfield.debug.work import WorkCounter
from shardfield.virtual import VirtualWorld
from tests.harness import world_mesh

SHARED = nn.Tanh()


class Net(nn.Module):
    """A model whose activation is the default of an argument, so that the models of all ranks share it."""

    def __init__(self, act=SHARED):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 4), act, nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.act(self.first(x.roll(1, 0))))


def field():
    return scatter_tensor(torch.randn(7, 4), 0, world_mesh((2,)), [Shard(0)])


def report():
    net = Net()
    with explain() as found:
        net(field())
    return [row.module for row in found.rows]


def run_model():
    run = ModelRun(Net(), Inputs.of(field()), 0, 0)
    return [name for name, _ in run.parts]


def count_work():
    value = torch.ones(64)
    with WorkCounter() as work:
        dist.all_reduce(value)
        value * 2
    return work.total


def test_observers():
    with VirtualWorld(2) as world:
        modules = ["Net", "Net/first", "Net/act", "Net/last"]
        assert world.run(report) == [modules] * 2
        parts = ["first (Linear)", "act (Tanh)", "last (Linear)"]
        assert world.run(run_model) == [parts] * 2
        assert world.run(count_work) == [64] * 2  # not the additions of the message
