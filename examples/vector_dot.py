"""Example 1 of "new layers": the dot product, and how to register your own handler for a torch function.

torchrun --nproc-per-node 2 examples/vector_dot.py
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardfield.distributed import DistributedManager, ShardTensor, scatter_tensor

N = 1_000_000


def f(x, y):
    return torch.dot(x, y)


def sharded_dot_product(func, types, args, kwargs):
    # NOTE: all functions overloaded and used by __torch_function__ will have
    # the same input signature.  You can use python argument unpacking to
    # extract what you need:
    def extract_args(x, y, *args, **kwargs):
        return x, y

    x, y = extract_args(*args, **kwargs)

    # Each tensor has a _spec attribute, which contains information about the tensor's placement
    # and the devices it lives on:
    x_spec = x._spec
    y_spec = y._spec

    # It's usually good to ensure the tensor placements work:
    if not x_spec.placements == y_spec.placements:
        raise NotImplementedError("Tensors must be sharded on the same device")

    if not x_spec.mesh == y_spec.mesh:
        raise NotImplementedError("Tensors must be sharded on the same mesh")

    # Extract the mesh - we'll want it for the all reduce:
    mesh = x_spec.mesh

    # Get the local values of each tensor; this is a purely single-device operation:
    local_dot_product = torch.dot(x.to_local(), y.to_local())

    # SUM_Reduce the local result across all ranks:
    dist.all_reduce(local_dot_product, op=dist.ReduceOp.SUM, group=mesh.get_group())

    # We do want to return the result as a ShardTensor, for consistency.
    return ShardTensor.from_local(local_tensor=local_dot_product, device_mesh=mesh, placements=(Replicate(),))


def main():
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])
    torch.manual_seed(0)
    a, b = torch.randn(N, device=dm.device), torch.randn(N, device=dm.device)
    a_sharded, b_sharded = (scatter_tensor(t, 0, mesh, (Shard(0),)) for t in (a, b))

    built_in = f(a_sharded, b_sharded)  # shardfield has a rule of its own for dot
    ShardTensor.register_function_handler(torch.dot, sharded_dot_product)
    own = f(a_sharded, b_sharded)
    if dm.rank == 0:
        print(f"one device {f(a, b).item():.2f}")
    print(f"rank {dm.rank}: built in {built_in.item():.2f}, own handler {own.item():.2f} {own.placements}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
