"""Shallow water: an SFNO of torch-harmonics learns a flow on the rotating sphere; every state is sharded on two axes.

torchrun --standalone --nproc-per-node 4 examples/gallery_shallow_water.py
"""

import argparse

import torch
from matplotlib.figure import Figure
from torch.distributed.tensor import Shard

from shardfield import parallelize, rollout
from shardfield.data import ShallowWater, ShardedLoader
from shardfield.distributed import DistributedManager
from shardfield.metrics import mse
from shardfield.train.recipes.swe_sfno import NormalizedError, SWEConfig, fit_step, task_spec


def draw(fields, errors, shards, path):
    """Draw maps of the vorticity, dashed lines are the borders of the shards, and the errors by lead time."""
    figure = Figure(figsize=(10, 2.5), layout="constrained")
    *maps, plot = figure.subplots(1, len(fields) + 1)
    limit = fields["truth"].abs().max()
    for axis, (name, field) in zip(maps, fields.items(), strict=True):
        axis.imshow(field, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        for line, size, parts in zip((axis.axhline, axis.axvline), field.shape, shards, strict=True):
            for border in range(1, parts):
                line(border * size / parts - 0.5, color="black", linestyle="--", linewidth=0.8)
        axis.set(title=name, xticks=[], yticks=[])
    for name, values in errors.items():
        plot.plot([6 * (i + 1) for i in range(len(values))], values, label=name)
    plot.set(title="error of the height", xlabel="hours", ylabel="m", ylim=(0, None))
    plot.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--flows", 16), ("--epochs", 6), ("--nlat", 32), ("--records", 20), ("--steps", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="shallow_water.png")
    args = parser.parse_args()
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((1, -1, 2 if dm.world_size == 4 else 1), mesh_dim_names=("data", "lat", "lon"))
    config = SWEConfig(nlat=args.nlat, nlon=2 * args.nlat, width=20, layers=2)
    placements = {"x": [Shard(1), Shard(2)], "y": [Shard(2), Shard(3)]}  # of one sample: (lead,) variable, lat, lon

    def loader(n, start, leads, **options):
        size = {"nlat": args.nlat, "nlon": 2 * args.nlat, "records": args.records, "leads": leads}
        flows = ShallowWater(n, **size, start=start, cache="cache").prepare(mesh)
        return ShardedLoader(flows, 8, mesh, placements=placements, **options)

    train, test = loader(args.flows, 0, 2), loader(1, args.flows, args.steps, shuffle=False)
    torch.manual_seed(0)
    fit_step(step := task_spec(config).model, train)  # the state plus the increment that the SFNO returns
    error = NormalizedError(step, config)  # 1 is the error of the forecast that nothing changes
    model = parallelize(step, mesh, domain=("lat", "lon"))
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for _ in range(args.epochs):
        for batch in train:
            optimizer.zero_grad()
            states = enumerate(rollout(model, batch["x"], 2))
            sum(error.loss(state, {"y": batch["y"][:, i]}) for i, state in states).backward()
            optimizer.step()
    x, y = (tensor[:1] for tensor in next(iter(test)).values())
    rmse = {"SFNO": [], "persistence": []}  # of the height, variable 0
    for state, truth in zip(rollout(model, x, args.steps, grad_steps=0), y.unbind(1), strict=True):
        for name, each in (("SFNO", state), ("persistence", x)):
            rmse[name].append(mse(each, truth, error.weights.to(dm.device))[0, 0].sqrt().item())
    truth, out = (t[0, 1].full_tensor().cpu() for t in (truth, state))  # the vorticity, variable 1
    if dm.rank == 0:
        draw({"truth": truth, "forecast": out, "error": out - truth}, rmse, mesh.shape[1:], args.out)
        ratio = rmse["SFNO"][-1] / rmse["persistence"][-1]
        print(f"{dm.world_size} ranks: error {ratio:.3f} of persistence; picture {args.out}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
