"""natten's attention with the reach that docs/own-ops.md states, and without it, on sharded fields.

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
from tests.ops.stencil.opaque_cases import reach

functional = pytest.importorskip("natten.functional")
OPTIONS = ({"kernel_size": 3}, {"kernel_size": 7, "scale": 0.3}, {"kernel_size": (3, 5), "dilation": (2, 1)})


def attend(function, fields, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("h", "w")[: len(shape)])
    sharded = [shardfield.scatter_tensor(t, 0, mesh, [Shard(1), Shard(2)][: len(shape)]) for t in fields]
    found = []
    with torch.no_grad(), shardfield.strict():
        for options in OPTIONS:
            found.append(function(*sharded, **options))
    return [t.full_tensor() for t in found], found[0]._layout


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("shape", [(2,), (5,), (2, 2)], ids=str)
def test_na2d(shape, stated):
    fields = [torch.randn(1, 9, 8, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    function = functional.na2d
    if stated:
        function = shardfield.stencil(radius=reach, fields=("query", "key", "value"))(function)
    with VirtualWorld(math.prod(shape)) as world:
        for results, layout in world.run(attend, function, fields, shape):
            assert layout.shard_axes
            for ours, options in zip(results, OPTIONS, strict=True):
                torch.testing.assert_close(ours, functional.na2d(*fields, **options))
                torch.testing.assert_close(ours, shardfield.neighborhood_attention(*fields, **options))
