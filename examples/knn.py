"""Example 2 of "new layers": nearest neighbors by brute force, on one device, by broadcasting, and with a ring.

torchrun --nproc-per-node 2 examples/knn.py --ring
"""

import argparse
import time

import torch
from torch.distributed.tensor.placement_types import Shard
from torch.overrides import handle_torch_function, has_torch_function

from shardfield.distributed import DistributedManager, ShardTensor, scatter_tensor
from shardfield.distributed.shard_utils.ring import RingPassingConfig, perform_ring_iteration


def knn(x, y, k):
    """Return distances and indices of the k nearest points of x (n, 3) for each point of y (m, 3)."""
    # Make this function overridable like a torch function: ShardTensors are dispatched to the registered handler.
    if has_torch_function((x, y)):
        return handle_torch_function(knn, (x, y), x, y, k)
    return brute_force(x, y, k)


def brute_force(x, y, k):
    displacement_vec = x[None, :, :] - y[:, None, :]
    return torch.topk(torch.sqrt(torch.sum(displacement_vec**2, dim=2)), k=k, dim=1, largest=False)


def knn_ring(func, types, args, kwargs):
    """Pass the points around a ring; each rank keeps its queries. A rank holds one block of points at a time."""
    (x, y, k), mesh = args, args[0]._spec.mesh
    ring = RingPassingConfig(mesh_dim=0, mesh_size=mesh.size(0), ring_direction="forward", communication_method="p2p")
    shapes = x._spec.sharding_shapes()[0]
    starts = torch.tensor([0, *(s[0] for s in shapes)]).cumsum(0)
    local_x, local_y = x.to_local(), y.to_local()
    me, size, best = mesh.get_local_rank(), mesh.size(0), None
    for i in range(size):
        source = (me - i) % size
        values, indices = knn(local_x, local_y, min(k, local_x.shape[0]))  # plain tensors: the local function
        indices = indices + starts[source]
        if best is None:
            best = values, indices
        else:
            values, indices = torch.cat([best[0], values], 1), torch.cat([best[1], indices], 1)
            values, order = torch.topk(values, k=min(k, values.shape[1]), dim=1, largest=False)
            best = values, torch.gather(indices, 1, order)
        if i + 1 < size:
            local_x = perform_ring_iteration(local_x, mesh, ring, recv_shape=shapes[(source - 1) % size])
    y_shapes = y._spec.sharding_shapes()  # the results are sharded as y, with k columns
    return tuple(ShardTensor.from_local(t, mesh, y._spec.placements, y_shapes) for t in best)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--points", 4001), ("--targets", 303), ("--k", 17)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ring", action="store_true")
    args = parser.parse_args()
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])
    torch.manual_seed(0)
    a, b = torch.randn(args.points, 3, device=dm.device), torch.randn(args.targets, 3, device=dm.device)
    a_sharded, b_sharded = (scatter_tensor(t, 0, mesh, (Shard(0),)) for t in (a, b))
    ShardTensor.register_function_handler(knn, knn_ring if args.ring else lambda f, t, a, kw: brute_force(*a, **kw))
    start = time.perf_counter()
    distance, index = knn(a_sharded, b_sharded, args.k)
    ms = (time.perf_counter() - start) * 1e3
    agree = torch.allclose(distance.full_tensor(), knn(a, b, args.k)[0])
    if dm.rank == 0:
        method = "ring" if args.ring else "broadcasting"
        print(method, tuple(index.shape), index.placements, f"agrees: {agree}, {ms:.1f} ms")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
