"""Samples that begin with a random point are equal on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from shardfield import scatter_tensor
from shardfield.virtual import VirtualWorld
from tests.harness import world_mesh
from tests.ops.indexing.cluster_search_cases import fps


def random_samples():
    x = scatter_tensor(torch.arange(50.0).unsqueeze(1), 0, world_mesh((2,)), [Shard(0)])
    torch.manual_seed(dist.get_rank())
    return fps(x, 0.9, random_start=True).full_tensor()


def test_random_samples():
    with VirtualWorld(2) as world:
        first, second = world.run(random_samples)
    assert torch.equal(first, second) and len(first.unique()) == len(first) == 45
