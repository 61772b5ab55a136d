"""Create 2-D process groups by hand. device_mesh.py does the same in two lines, with a DeviceMesh.

torchrun --standalone --nproc-per-node 8 examples/device_mesh_2d.py
"""

import os

import torch
import torch.distributed as dist

# Understand world topology
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
print(f"Running example on {rank=} in a world with {world_size=}")

# Create process groups to manage 2-D like parallel pattern
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

# Create shard groups (e.g. (0, 1, 2, 3), (4, 5, 6, 7))
# and assign the correct shard group to each rank
num_node_devices = torch.cuda.device_count() if torch.cuda.is_available() else world_size
rows = 2 if num_node_devices % 2 == 0 else 1
shard_factor = num_node_devices // rows
shard_rank_lists = [list(range(row * shard_factor, (row + 1) * shard_factor)) for row in range(rows)]
shard_groups = [dist.new_group(ranks) for ranks in shard_rank_lists]
current_shard_group = shard_groups[rank // shard_factor]

# Create replicate groups (for example, (0, 4), (1, 5), (2, 6), (3, 7))
# and assign the correct replicate group to each rank
current_replicate_group = None
for i in range(shard_factor):
    replicate_group_ranks = list(range(i, num_node_devices, shard_factor))
    replicate_group = dist.new_group(replicate_group_ranks)
    if rank in replicate_group_ranks:
        current_replicate_group = replicate_group

shard_ranks = dist.get_process_group_ranks(current_shard_group)
replicate_ranks = dist.get_process_group_ranks(current_replicate_group)
print(f"{rank=} shards with {shard_ranks} and replicates with {replicate_ranks}")
dist.barrier()  # a rank that ends while another still connects to it would break that connection
dist.destroy_process_group()
