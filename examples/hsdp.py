"""Hybrid sharding: FSDP within a row of the mesh and DDP across the rows.

torchrun --standalone --nproc-per-node 8 examples/hsdp.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


# HSDP: MeshShape(2, 4) on eight ranks
rows = 2 if int(os.environ["WORLD_SIZE"]) % 2 == 0 else 1
device_type = "cuda" if torch.cuda.is_available() else "cpu"
mesh_2d = init_device_mesh(device_type, (rows, int(os.environ["WORLD_SIZE"]) // rows))
# Without a device_id FSDP looks for an accelerator and fails on a machine that has none.
device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
model = FSDP(ToyModel(), device_mesh=mesh_2d, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=device)

# One training step; each rank has its own batch.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 10, device=device)).square().mean().backward()
optimizer.step()

num_local = sum(p.numel() for p in model.parameters())
norm = model.clip_grad_norm_(float("inf")).item()
print(f"rank={dist.get_rank()} holds {num_local} of 165 parameters, gradient norm {norm:.6f}")
dist.barrier()  # a rank that ends while another still connects to it would break that connection
dist.destroy_process_group()
