"""Broadcast two sharded point clouds against each other, and show the placements of the result.

torchrun --nproc-per-node 2 examples/reshape_subtract.py
"""

import torch
from torch.distributed.tensor.placement_types import Shard

from shardfield.distributed import DistributedManager, scatter_tensor


def main(n_points=234_567, n_targets=12_345, subtract=(2_000, 300)):
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])

    def show(name, t):
        if dm.rank == 0:
            print(f"{name} shape and placement: {t.shape}, {t.placements}")

    def cloud(n):
        return scatter_tensor(torch.randn(n, 3, device=dm.device), 0, mesh, (Shard(0),))

    a_sharded, b_sharded = cloud(n_points), cloud(n_targets)
    show("a_sharded", a_sharded)
    show("b_sharded", b_sharded)

    # With the new dim of size 1, a is sharded along dim 1, and b still along dim 0.
    a_sharded, b_sharded = a_sharded[None, :, :], b_sharded[:, None, :]
    show("a_sharded", a_sharded)
    show("b_sharded", b_sharded)

    # One mesh axis can shard only one dim of the result: the larger operand keeps its sharding, and the smaller one is
    # redistributed. (Slices of the clouds are used: the full displacement field would take 32 GB.)
    distance_vec = a_sharded[:, : subtract[0]] - b_sharded[: subtract[1]]
    show("distance_vec", distance_vec)


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
