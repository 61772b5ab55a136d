"""Molecules: a network learns the forces between atoms from their distances; atoms and pairs are sharded over ranks.

torchrun --standalone --nproc-per-node 2 examples/gallery_molecules.py
"""

import argparse

import torch
from matplotlib.figure import Figure
from torch import nn

from shardfield import knn, partition_points
from shardfield.distributed import DistributedManager


def morse(distance):
    """Return the force of a Morse bond of length 1, positive where atoms repel."""
    return 6 * (torch.exp(-6 * (distance - 1)) - torch.exp(-3 * (distance - 1)))


class PairForces(nn.Module):
    """Sum learned central forces of the nearest neighbors of each atom."""

    def __init__(self, width=128):
        super().__init__()
        self.size = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0.5, 2.5, 8))

    def forward(self, atoms, source, target, size=None):
        away = atoms[target] - atoms[source]
        distance = away.square().sum(1, keepdim=True).sqrt()
        sizes = self.size(torch.exp(-4 * (distance - self.centers) ** 2)) if size is None else size(distance)
        return torch.zeros_like(atoms).index_add(0, target, sizes * away / distance)


def molecule(n, seed, mesh):
    """Return atoms on a disturbed lattice, sharded, and the pairs of neighbors."""
    random = torch.Generator().manual_seed(seed)
    lattice = torch.cartesian_prod(*(torch.arange(k).float() for k in (-(-n // 16), 4, 4)))[:n]
    _, atoms = partition_points(lattice + 0.08 * torch.randn(n, 3, generator=random), mesh)
    source, _ = knn(atoms, atoms, 13)  # the first neighbor of an atom is itself
    return atoms, source[:, 1:].reshape(-1), torch.arange(n * 12) // 12


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atoms", type=int, default=240)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="molecules.png")
    args = parser.parse_args()
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=("atoms",))
    torch.manual_seed(0)
    model, train = PairForces(), [molecule(args.atoms, seed, mesh) for seed in range(4)]
    labels = [model(*graph, size=morse) for graph in train]
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for step in range(args.steps):
        optimizer.zero_grad()
        (model(*train[step % 4]) - labels[step % 4]).square().mean().backward()
        optimizer.step()
    test = molecule(args.atoms, 99, mesh)
    with torch.no_grad():
        true, found = model(*test, size=morse), model(*test)
        error = ((found - true).square().sum() / true.square().sum()).sqrt().item()
    atoms, true, found = (t.full_tensor() for t in (test[0], true, found))
    if dm.rank == 0:
        figure = Figure(figsize=(7, 3.6))
        axis = figure.add_axes((0, -0.5, 1, 2), projection="3d")  # a color per rank, arrows are the predicted forces
        axis.scatter(*atoms.T, c=torch.arange(len(atoms)) * dm.world_size // len(atoms), s=14, cmap="tab10", vmax=9)
        axis.quiver(*atoms.T, *(found / found.norm(dim=1).max()).T, linewidth=1, color="gray")
        axis.set_box_aspect((atoms.amax(0) - atoms.amin(0)).tolist(), zoom=1.1)
        axis.set_axis_off()
        figure.savefig(args.out, dpi=80)
        print(f"{dm.world_size} ranks: relative error of forces {error:.3f}; picture {args.out}")


if __name__ == "__main__":
    main()
    DistributedManager.cleanup()
