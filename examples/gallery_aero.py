"""Surface pressure: a Transolver learns the flow around ellipsoids; the points of each surface are sharded.

torchrun --standalone --nproc-per-node 2 examples/gallery_aero.py
"""

import argparse

import torch
from matplotlib.figure import Figure
from torch.distributed.tensor import Shard

from shardfield import parallelize
from shardfield.data import Ellipsoids, ShardedLoader, area_norm
from shardfield.distributed import DistributedManager
from shardfield.train.recipes.aero_transolver import SurfacePressure, Transolver


def relative_l2(out, batch):
    return area_norm(out - batch["y"], batch["area"]) / area_norm(batch["y"], batch["area"])


def draw(points, fields, path):
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots(1, len(fields), subplot_kw={"projection": "3d"})
    low, high = fields["pressure"].min(), fields["pressure"].max()
    elevation, azimuth = torch.tensor([axes[0].elev, axes[0].azim]).deg2rad()
    viewer = torch.stack([elevation.cos() * azimuth.cos(), elevation.cos() * azimuth.sin(), elevation.sin()])
    normals = points / (points.amax(0) - points.amin(0)) ** 2
    near = normals.float() @ viewer > 0  # not the far side
    for axis, (name, values) in zip(axes, fields.items(), strict=True):
        style = {"cmap": "viridis"} if name == "error" else {"cmap": "coolwarm", "vmin": low, "vmax": high}
        drawn = axis.scatter(*points[near].T, c=values[near], s=85, linewidths=0, depthshade=False, **style)
        figure.colorbar(drawn, ax=axis, shrink=0.6)
        axis.set_title(name, fontsize=10)
        axis.set_box_aspect((points.amax(0) - points.amin(0)).tolist(), zoom=1.2)
        axis.set_axis_off()
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--bodies", 240), ("--epochs", 6), ("--points", 512), ("--test-points", 2048)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="aero.png")
    args = parser.parse_args()
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((1, -1), mesh_dim_names=("data", "points"))

    def loader(n, points, start, **options):
        bodies = Ellipsoids(n, points=points, start=start)
        return ShardedLoader(bodies, 8, mesh, placements=[Shard(0)], **options)

    train = loader(args.bodies, args.points, 0, drop_last=True)
    test = loader(8, args.test_points, args.bodies, shuffle=False)
    torch.manual_seed(0)
    model = SurfacePressure(Transolver(6, 1, width=48, slices=16, heads=4, layers=3))
    model = parallelize(model, mesh, domain="points")
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for _ in range(args.epochs):
        for batch in train:
            optimizer.zero_grad()
            relative_l2(model(batch["x"]), batch).mean().backward()
            optimizer.step()
    with torch.no_grad():
        batch = next(iter(test))
        out = model(batch["x"])
        error = relative_l2(out, batch).mean().item()
    x, y, out = (t[0].full_tensor().cpu() for t in (batch["x"], batch["y"], out))
    if dm.rank == 0:
        y, out = y[:, 0], out[:, 0]
        draw(x[:, :3], {"pressure": y, "prediction": out, "error": (out - y).abs()}, args.out)
        print(f"{dm.world_size} ranks: relative L2 error {error:.3f} on test bodies; picture {args.out}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
