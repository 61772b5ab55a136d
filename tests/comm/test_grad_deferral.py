"""Gradient sums that a wrapper averages later: which groups they are deferred over."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain, runtime
from shardfield.comm.grad_deferral import defer_to_average
from shardfield.testing import run_on_ranks


def backward_messages(defer: bool) -> tuple[int, float]:
    """Return the messages of backward and the gradient, for a field on one mesh and groups of an equal one."""
    first, second = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")) for _ in range(2))
    placements = [Shard(0), Shard(1)]
    ShardTensor.from_local(torch.ones(2, 3), first, placements)  # layouts of both meshes use the groups of the first
    scale = nn.Parameter(torch.ones(()))
    if defer:
        defer_to_average(scale, [second.get_group(axis) for axis in range(2)])
    try:
        x = ShardTensor.from_local(torch.ones(2, 3), second, placements)
        with explain() as report:
            (x * scale).sum().backward()
    finally:
        runtime.active.deferring_groups.clear()
    return sum(row.back_messages for row in report.rows), scale.grad.item()


def test_groups_of_an_equal_mesh_are_the_same_groups():
    summed, deferred = (run_on_ranks(backward_messages, 4, defer) for defer in (False, True))
    assert all(messages > 0 and grad == 24 for messages, grad in summed)
    assert deferred == [(0, 24.0)] * 4  # 4 times the partial sum of 6, and no message
