"""3-D segmentation: a UNet finds bright bodies in noisy volumes that are sharded along depth and height.

torchrun --standalone --nproc-per-node 4 examples/gallery_segmentation.py
"""

import argparse

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import parallelize
from shardfield.data import ShardedLoader
from shardfield.distributed import DistributedManager


def volume(seed, size):
    """Return a synthetic volume `x`, six ellipsoids in noise, and `y`, which is 1 inside them."""
    random = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, size)] * 3, indexing="ij"))
    centers, radii = torch.rand(2, 6, 3, 1, 1, 1, generator=random)
    inside = ((grid - centers) / (0.1 + 0.15 * radii)).square().sum(1).amin(0, keepdim=True) < 1
    return {"x": inside + 0.9 * torch.randn(inside.shape, generator=random), "y": inside.float()}


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enter, self.norm = nn.Conv3d(1, width, 3, padding=1), nn.GroupNorm(2, width)
        self.down, self.low = nn.Conv3d(width, 2 * width, 2, stride=2), nn.Conv3d(2 * width, 2 * width, 3, padding=1)
        self.up, self.head = nn.ConvTranspose3d(2 * width, width, 2, stride=2), nn.Conv3d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        x = F.gelu(self.norm(self.enter(x)))
        return self.head(torch.cat([x, self.up(F.gelu(self.low(F.gelu(self.down(x)))))], 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--volumes", 24), ("--epochs", 3), ("--size", 40)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="segmentation.png")
    args = parser.parse_args()
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((1, -1, 2 if dm.world_size == 4 else 1), mesh_dim_names=("data", "depth", "height"))
    options = {"placements": [Shard(1), Shard(2)]}  # of one sample: channel, depth, height, width
    train = ShardedLoader([volume(seed, args.size) for seed in range(args.volumes)], 2, mesh, **options)
    test = ShardedLoader([volume(seed, args.size) for seed in (1001, 1002)], 2, mesh, shuffle=False, **options)
    torch.manual_seed(0)
    model = parallelize(UNet(), mesh, domain=("depth", "height"))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(args.epochs):
        for batch in train:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    with torch.no_grad():
        batch = next(iter(test))
        found, true = model(batch["x"]) > 0, batch["y"] > 0
        dice = 2 * (found & true).sum().item() / (found.sum() + true.sum()).item()
    volumes = [t[0, 0].full_tensor().float().cpu() for t in (batch["x"], true, found)]
    best = volumes[1].sum((1, 2)).argmax()  # the slice with the largest bodies
    if dm.rank == 0:
        figure = Figure(figsize=(8, 2.8), layout="constrained")
        axes = figure.subplots(1, 3)
        for axis, image, name in zip(axes, volumes, ("a slice of the volume", "truth", "prediction"), strict=True):
            axis.imshow(image[best], cmap="gray")
            axis.set(title=name, xticks=[], yticks=[])
        figure.savefig(args.out, dpi=80)
        print(f"{dm.world_size} ranks: Dice score {dice:.3f}; picture {args.out}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
