"""natten's own functions and module on sharded fields, against one device.

natten without its kernels, which have no build for CPUs, runs on `flex_attention`, which has no backward there.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardfield
from shardfield.virtual import VirtualWorld

natten = pytest.importorskip("natten")
OPTIONS = (
    {"kernel_size": 3},
    {"kernel_size": 7, "scale": 0.3},
    {"kernel_size": (3, 5), "dilation": (2, 1)},
    {"kernel_size": (4, 3), "stride": (2, 1), "is_causal": (False, True)},
)


def attend(fields, shape, module):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("h", "w")[: len(shape)])
    sharded = [shardfield.scatter_tensor(t, 0, mesh, [Shard(1), Shard(2)][: len(shape)]) for t in fields]
    with torch.no_grad(), shardfield.strict(), shardfield.explain() as report:
        found = [natten.na2d(*sharded, **options) for options in OPTIONS]
        found.append(module(sharded[0].flatten(3)))
    assert not any("flex" in row.op for row in report.rows)  # natten's kernel gets plain tensors
    return [t.full_tensor() for t in found], found[0]._layout


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(2,), (5,), (2, 2)], ids=str)
def test_na2d(shape):
    fields = [torch.randn(1, 9, 8, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    module = natten.NeighborhoodAttention2D(16, 2, 3, dilation=2)
    with torch.no_grad():
        expected = [natten.na2d(*fields, **options) for options in OPTIONS] + [module(fields[0].flatten(3))]
    with VirtualWorld(math.prod(shape)) as world:
        for results, layout in world.run(attend, fields, shape, module):
            assert layout.shard_axes
            for ours, one_device in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, one_device)
    for options in OPTIONS[:3]:
        ours = shardfield.neighborhood_attention(*fields, **options)
        torch.testing.assert_close(ours, natten.na2d(*fields, **options))
