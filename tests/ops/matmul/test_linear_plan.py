"""`linear` of sharded rows skips the search for a strategy: its layout is the one that the search finds."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor
from shardfield.planning import simulated


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 0, 3), (1, 4, 6, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layout_is_that_of_a_matrix_product(shape, bias):
    weight = torch.ones(4, 3)
    with simulated(4, 1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for placements in (
            (Shard(0), Shard(1)),
            (Shard(0), Replicate()),
            (Replicate(), Shard(0)),
            (Shard(0), Shard(0)),
        ):
            if any(isinstance(p, Shard) and p.dim == len(shape) - 1 for p in placements):
                continue
            full = ShardTensor.from_local(torch.ones(shape), mesh, (Replicate(), Replicate()))
            x = full.redistribute(placements=placements)
            out = F.linear(x, weight, torch.ones(4) if bias else None)
            assert out._layout is torch.matmul(x, weight.t())._layout
            assert out.to_local().shape == out._layout.local_shape
