"""Example 0 of "new layers": vector addition, on one device and sharded.

torchrun --nproc-per-node 2 examples/vector_add.py
"""

import time

import torch
from torch.distributed.tensor.placement_types import Shard

from shardfield.distributed import DistributedManager, ShardTensor, scatter_tensor

N = 1_000_000


def f(a, b):
    # This is a truly local operation: no communication is needed.
    return a + b


def time_per_call(fn, *args, runs=10):
    fn(*args)
    start = time.perf_counter()
    for _ in range(runs):
        fn(*args)
    return (time.perf_counter() - start) / runs * 1e3


def main():
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])

    # Rank 0 has the vectors, and sends every rank its shard.
    torch.manual_seed(0)
    a, b = torch.randn(N, device=dm.device), torch.randn(N, device=dm.device)
    a_sharded = scatter_tensor(a, 0, mesh, (Shard(0),), requires_grad=False)
    b_sharded = scatter_tensor(b, 0, mesh, (Shard(0),), requires_grad=False)

    c_sharded = f(a_sharded, b_sharded)
    assert isinstance(c_sharded, ShardTensor)
    agree = torch.allclose(c_sharded.full_tensor(), f(a, b))
    ms = time_per_call(f, a_sharded, b_sharded)
    if dm.rank == 0:
        print(
            f"{dm.world_size} ranks: c is {tuple(c_sharded.shape)} {c_sharded.placements}, agrees: {agree}, {ms:.2f} ms"
        )


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
