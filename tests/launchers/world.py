"""Script that every launcher starts: print the rank, sum over the ranks, train one step with DDP."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardfield.distributed import DistributedManager

DistributedManager.initialize()
dm = DistributedManager()

total = torch.tensor([dm.rank + 1.0], device=dm.device)
model = torch.nn.Linear(4, 2).to(dm.device)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
net = model
if dm.distributed:
    dist.all_reduce(total)
    net = DistributedDataParallel(model, device_ids=[dm.device] if dm.cuda else None)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
net(torch.full((3, 4), dm.rank + 1.0, device=dm.device)).sum().backward()
optimizer.step()

names = {"rank", "local_rank", "world_size", "distributed", "method"}
said = {n: getattr(dm, n) for n in names} | {
    "device": str(dm.device),
    "total": total.item(),
    "weight": model.weight[0, 0].item(),
    "mesh": list(dm.initialize_mesh((-1,), mesh_dim_names=["domain"]).shape),
    "variables": sorted(os.environ.keys() & {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}),
}
# One write, so that the lines of several ranks do not mix.
sys.stdout.write(json.dumps(said, sort_keys=True) + "\n")
