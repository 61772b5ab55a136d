"""A layer of one's own, as the PhysicsNeMo tutorial on new layers builds it: an overridable function and a ring.

The handler calls the function itself on local tensors, and describes results with more dims and other trailing sizes by
the `sharding_shapes` of its queries.
"""

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.overrides import handle_torch_function, has_torch_function

from shardfield import runtime
from shardfield.distributed import DistributedManager, ShardTensor, scatter_tensor
from shardfield.distributed.shard_utils.ring import RingPassingConfig, perform_ring_iteration
from shardfield.testing import run_on_ranks


def nearest(points, queries, count):
    """Return the `count` nearest points of each query, and their distances."""
    if has_torch_function((points, queries)):
        return handle_torch_function(nearest, (points, queries), points, queries, count)
    distances, index = torch.topk(torch.norm(points[None] - queries[:, None], dim=2), count, dim=1, largest=False)
    return points[index], distances


def ring_of_points(func, types, args, kwargs):
    """Pass the points around the ring before each local search, as the tutorial does."""
    points, queries, count = args
    mesh, shapes = points._spec.mesh, points._spec.sharding_shapes()[0]
    size, rank = mesh.size(0), mesh.get_local_rank()
    config = RingPassingConfig(mesh_dim=0, mesh_size=size, ring_direction="forward", communication_method="p2p")
    block, local = points.to_local(), queries.to_local()
    found, best = None, None
    for step in range(size):
        following = block
        if step != size - 1:
            following = perform_ring_iteration(block, mesh, config, recv_shape=shapes[(rank - step - 1) % size])
        near, distances = func(block, local, count)
        if best is not None:
            near, distances = torch.cat([found, near], 1), torch.cat([best, distances], 1)
            distances, order = torch.topk(distances, count, dim=1, largest=False)
            near = torch.gather(near, 1, order.unsqueeze(-1).expand(-1, -1, 3))
        found, best, block = near, distances, following
    options = {"device_mesh": mesh, "placements": queries._spec.placements}
    return tuple(
        ShardTensor.from_local(t, sharding_shapes=queries._spec.sharding_shapes(), **options) for t in (found, best)
    )


def agrees(ring: bool) -> list[bool]:
    """Return, on each rank, whether the sharded search equals that of one device."""
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh([-1], ["domain"])
    torch.manual_seed(0)
    a, b = torch.randn(301, 3), torch.randn(57, 3)
    expected = nearest(a, b, 5)
    with runtime.fresh(registry=runtime.active.registry.copy()):
        ShardTensor.register_function_handler(nearest, ring_of_points if ring else lambda f, t, args, kw: plain(*args))
        got = nearest(*(scatter_tensor(t, 0, mesh, (Shard(0),)) for t in (a, b)), 5)
        same = [torch.allclose(g.full_tensor(), e) for g, e in zip(got, expected, strict=True)]
    DistributedManager.cleanup()
    return [*same, got[0].shape == (57, 5, 3)]


def plain(points, queries, count):
    """Search by broadcasting, in torch's functions on ShardTensors."""
    distances, index = torch.topk(torch.norm(points[None] - queries[:, None], dim=2), count, dim=1, largest=False)
    return points[index], distances


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "broadcasting"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_search_of_the_tutorial(ranks, ring):
    assert run_on_ranks(agrees, ranks, ring, timeout=60) == [[True] * 3] * ranks
