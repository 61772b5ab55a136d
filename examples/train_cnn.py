"""FSDP over the batch and ShardTensor over the image: one CNN on a mesh of data x spatial ranks.

torchrun --standalone --nproc-per-node 4 examples/train_cnn.py
"""

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardfield import sync_module_over_mesh
from shardfield.distributed import DistributedManager
from shardfield.distributed.shard_tensor import ShardTensor

DistributedManager.initialize()
dm = DistributedManager()
# First dimension for data parallel, second for spatial decomposition
mesh = dm.initialize_mesh((-1, min(2, dm.world_size)), mesh_dim_names=["data", "spatial"])
data_mesh = mesh["data"]  # For FSDP
spatial_mesh = mesh["spatial"]  # For spatial decomposition


class SimpleCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, kernel_size=3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.relu(self.conv(x))  # This is automatically parallel
        x = self.pool(x)  # This operation reduces on the parallel dimension.
        x = torch.flatten(x, 1)
        return self.fc(x)


def create_sample_data(batch_size=32, height=32, width=64):
    data = torch.randn(batch_size, 3, height, width, device=dm.device)
    labels = torch.randint(0, 10, (batch_size,), device=dm.device)
    # Each rank creates its own rows of the images; the global images have 2 x height rows.
    data = ShardTensor.from_local(data, device_mesh=spatial_mesh, placements=(Shard(2),))
    # DTensor distributes the labels: all ranks receive those of the first rank.
    labels = ShardTensor.from_dtensor(distribute_tensor(labels, device_mesh=spatial_mesh, placements=(Replicate(),)))
    return data, labels


def setup_model():
    model = SimpleCNN().to(dm.device)
    # All ranks of the spatial mesh get the same weights. `distribute_module` would turn them into DTensors, and FSDP
    # fails on those where the data axis has one rank.
    sync_module_over_mesh(model, spatial_mesh)
    # Without a device_id FSDP looks for an accelerator and fails on a machine that has none.
    return FSDP(model, device_mesh=data_mesh, use_orig_params=True, device_id=dm.device)


def train_epoch(model, optimizer, criterion):
    model.train()
    for i in range(10):  # 10 training steps
        inputs, targets = create_sample_data()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dm.rank == 0 and i % 2 == 0:
            print(f"Step {i}, Loss: {loss.item():.4f}")


if __name__ == "__main__":
    model = setup_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(5):
        if dm.rank == 0:
            print(f"Epoch {epoch + 1}")
        train_epoch(model, optimizer, criterion)
    DistributedManager.cleanup()
