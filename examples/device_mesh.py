"""Create the process groups of device_mesh_2d.py in two lines, with a DeviceMesh.

torchrun --standalone --nproc-per-node 8 examples/device_mesh.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

rows = 2 if int(os.environ["WORLD_SIZE"]) % 2 == 0 else 1  # 2 x 4 on eight ranks
device_mesh = init_device_mesh(
    "cuda" if torch.cuda.is_available() else "cpu", (rows, int(os.environ["WORLD_SIZE"]) // rows)
)

rank = dist.get_rank()
replicate_ranks = dist.get_process_group_ranks(device_mesh.get_group(0))
shard_ranks = dist.get_process_group_ranks(device_mesh.get_group(1))
print(f"{rank=} shards with {shard_ranks} and replicates with {replicate_ranks}")
dist.barrier()  # a rank that ends while another still connects to it would break that connection
dist.destroy_process_group()
