"""Run an unmodified UNet on a field that is sharded along height and width; compare with one process.

torchrun --standalone --nproc-per-node 4 examples/unet.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import explain, scatter_tensor, strict, sync_module_over_mesh
from shardfield.distributed import DistributedManager


class UNet(nn.Module):
    def __init__(self, channels: int = 8):
        super().__init__()
        self.down = nn.Conv2d(3, channels, 3, padding=1)
        self.bottom = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.head = nn.Conv2d(2 * channels, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        skip = F.gelu(self.down(x))
        low = F.gelu(self.norm(self.bottom(F.max_pool2d(skip, 2))))
        return self.head(torch.cat([skip, self.up(low)], dim=1))


DistributedManager.initialize()
dm = DistributedManager()
# Four ranks shard the field as 2 x 2; any other number shards its rows only.
mesh = dm.initialize_mesh((2, 2) if dm.world_size == 4 else (-1, 1), mesh_dim_names=("h", "w"))

torch.manual_seed(0)
model = UNet().to(dm.device)
sync_module_over_mesh(model, mesh)
image = torch.randn(1, 3, 96, 128, device=dm.device)
field = scatter_tensor(image, 0, mesh, (Shard(2), Shard(3)))

with explain() as report, strict():  # strict: a fallback to a gather raises
    loss = model(field).square().mean()
    loss.backward()

reference = UNet().to(dm.device)
reference.load_state_dict(model.state_dict())
expected = reference(image).square().mean()
expected.backward()
pairs = zip(model.parameters(), reference.parameters(), strict=True)
error = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
value = loss.item()  # the global value, on every rank
if dm.rank == 0:
    print(report)
    print(f"loss {value:.6f}, on one process {expected.item():.6f}; gradients within 1e-5: {error < 1e-5}")
