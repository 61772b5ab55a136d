"""Darcy flow: a TFNO of neuraloperator learns the pressure in a porous medium; every field is sharded along its rows.

torchrun --standalone --nproc-per-node 2 examples/gallery_darcy.py
"""

import argparse

import torch
from matplotlib.figure import Figure
from neuralop.losses import LpLoss
from neuralop.models import TFNO

from shardfield import parallelize
from shardfield.data import Darcy, ShardedLoader, UnitGaussian
from shardfield.distributed import DistributedManager


def draw(fields, ranks, path):
    """Draw four fields; dashed lines are the borders of the shards."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots(1, 4)
    for axis, (name, field) in zip(axes, fields.items(), strict=True):
        axis.set_title(name, fontsize=10)
        limits = {"vmin": 0, "vmax": fields["pressure"].max()} if name == "prediction" else {}
        figure.colorbar(axis.imshow(field, cmap="viridis", **limits), ax=axis, shrink=0.75)
        rows = -(-len(field) // ranks)
        for rank in range(1, ranks):
            axis.axhline(rank * rows - 0.5, color="white", linestyle="--", linewidth=0.8)
        axis.set_axis_off()
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--fine", type=int, default=127, help="points of the solver")
    parser.add_argument("--out", default="darcy.png")
    args = parser.parse_args()
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((1, -1), mesh_dim_names=("data", "rows"))

    def loader(n, start, **options):
        darcy = Darcy(n, resolution=args.fine // 3 + 1, fine=args.fine, start=start, cache="cache")
        return ShardedLoader(darcy.prepare(mesh), 8, mesh, **options)

    train, test = loader(args.samples, 0), loader(8, args.samples, shuffle=False)
    scale = {key: UnitGaussian.fit(train, key) for key in "xy"}
    torch.manual_seed(0)
    model = TFNO(n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=16, n_layers=3, rank=0.3)
    model = parallelize(model, mesh, domain="rows")
    optimizer, l2 = torch.optim.Adam(model.parameters(), 6e-3), LpLoss(d=2)

    def predict(batch):
        return scale["y"].inverse_transform(model(scale["x"].transform(batch["x"])))

    for _ in range(args.epochs):
        for batch in train:
            optimizer.zero_grad()
            l2(predict(batch), batch["y"]).backward()
            optimizer.step()
    with torch.no_grad():
        batch = next(iter(test))
        out = predict(batch)
        error = (l2(out, batch["y"]) / len(out)).item()
    x, y, out = (t[0, 0].full_tensor().cpu() for t in (batch["x"], batch["y"], out))
    if dm.rank == 0:
        draw({"permeability": x, "pressure": y, "prediction": out, "error": (out - y).abs()}, dm.world_size, args.out)
        print(f"{dm.world_size} ranks: relative L2 error {error:.3f} on test samples; picture {args.out}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
