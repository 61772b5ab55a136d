"""Molecular dynamics on sharded atoms: neighbors searched in every step, forces by autograd.grad."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain, radius_search
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard

ATOMS, CUTOFF, STEPS, STEP = 30, 1.5, 100, 0.01


class Potential(nn.Module):
    """A many-body potential: radial features summed over neighbors, products of them (MACE's idea), an MLP per atom."""

    def __init__(self, features: int = 6):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.3, CUTOFF, features))
        self.mix, self.energy = nn.Linear(features, features), nn.Linear(2 * features, 1)

    def forward(self, positions):
        index, distance, _ = radius_search(positions, positions, CUTOFF)
        atom = torch.arange(ATOMS)[:, None]
        pair = (index >= 0) & (index != atom)
        r = torch.where(pair, distance, CUTOFF)[..., None]
        smooth = torch.where(pair[..., None], (1 - (r / CUTOFF) ** 2) ** 3, 0.0)
        summed = self.mix((torch.exp(-8 * (r - self.centers) ** 2) * smooth).sum(1))
        repulsion = (smooth * torch.exp(-4 * (r - 0.6))).sum((1, 2))
        return (self.energy(torch.cat([summed, summed * summed], 1)).tanh()[:, 0] + repulsion).sum()


def simulate(potential, positions, velocities):
    """Integrate by velocity Verlet. Return positions, velocities and the energy before and after."""

    def forces(at):
        at = at.detach().requires_grad_()
        energy = potential(at)
        (gradient,) = torch.autograd.grad(energy, at)
        return -gradient, energy.detach() + 0.5 * velocities.square().sum()

    force, first = forces(positions)
    for _ in range(STEPS):
        velocities = velocities + 0.5 * STEP * force
        positions = positions + STEP * velocities
        force, last = forces(positions)
        velocities = velocities + 0.5 * STEP * force
    return positions, velocities, first, last


def start():
    torch.manual_seed(0)
    potential = Potential().double().requires_grad_(False)
    cells = torch.stack(torch.meshgrid(*[torch.arange(4.0)] * 3, indexing="ij"), -1).reshape(-1, 3)[:ATOMS]
    positions = cells.double() + 0.1 * torch.rand(ATOMS, 3, dtype=torch.float64)
    return potential, positions, 0.3 * torch.randn(ATOMS, 3, dtype=torch.float64)


def dynamics_on_ranks():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("atoms",))
    potential, *state = start()
    layout = Layout.of(mesh, [Shard(0)], (ATOMS, 3), {0: (11, 0, 12, 7)})
    placed = [ShardTensor.from_local(local_shard(x, layout).clone(), mesh, [Shard(0)], "infer") for x in state]
    with explain() as report:
        energy = potential(placed[0].detach().requires_grad_())
    assert not report.gathers and energy.ndim == 0
    positions, velocities, first, last = simulate(potential, *placed)
    return [x.full_tensor() for x in (positions, velocities, first, last)]


def test_a_hundred_steps_equal_one_process():
    """Atoms are on four ranks, one of them without any."""
    potential, *state = start()
    expected = simulate(potential, *state)
    moved = (expected[0] - state[0]).abs().max()
    assert moved > 0.1 and abs(expected[3] - expected[2]) < 0.02 * abs(expected[2]), "the atoms move, the energy stays"
    for found in run_on_ranks(dynamics_on_ranks, 4, timeout=120):
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
