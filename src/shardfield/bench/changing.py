"""Points that change: every step has other numbers of points and edges, and neighbor lists are rebuilt.

A step of molecular dynamics on random atoms, a slab of them on each rank: nearest neighbors, the energy by two message
passing blocks, and forces by `torch.autograd.grad`. "fixed sizes" draws new atoms in every step, as many as before, 5 %
more on one rank than on the next; "changing sizes" draws up to 10 % fewer or more on each rank, so that no layout
repeats and every call is planned again. A round is several steps, in CPU seconds of the thread that runs them. Memory
is the largest resident memory of a rank after all steps, divided by that after the first tenth of them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..neighbors import knn
from ..tensor import ShardTensor
from .graph import mlp
from .measure import interleave, max_over_ranks, thread_seconds
from .ranks import domain_mesh, measure_on_ranks, rank_label
from .table import Table


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2,)
    atoms: tuple[int, ...] = (500, 2000)
    width: int = 128
    neighbors: int = 12
    steps: int = 6
    rounds: int = 9
    memory_atoms: int = 40
    memory_steps: int = 2000

    quick: ClassVar[dict[str, Any]] = {"atoms": (40,), "width": 16, "rounds": 2, "memory_atoms": 8, "memory_steps": 20}


class Potential(nn.Module):
    """The energy of atoms from the distances of their neighbors, by two message passing blocks."""

    def __init__(self, width: int):
        super().__init__()
        self.edges = nn.ModuleList(mlp(2 * width + 8, width) for _ in range(2))
        self.nodes = nn.ModuleList(mlp(2 * width, width) for _ in range(2))
        self.energy, self.width = nn.Linear(width, 1), width
        self.register_buffer("centers", torch.linspace(0, 1, 8))

    def forward(self, atoms: Tensor, source: Tensor, target: Tensor) -> Tensor:
        distance = (atoms[source] - atoms[target]).square().sum(1, keepdim=True).add(1e-9).sqrt()
        basis = torch.exp(-8 * (distance - self.centers) ** 2)
        state = torch.zeros_like(atoms[:, :1]).expand(-1, self.width).contiguous()
        for of_edge, of_node in zip(self.edges, self.nodes, strict=True):
            messages = of_edge(torch.cat([state[source], state[target], basis], -1))
            total = torch.zeros_like(state).index_add(0, target, messages)
            state = state + of_node(torch.cat([state, total], -1))
        return self.energy(state).sum()


class Dynamics:
    """Steps on new atoms of every size, and the CPU seconds of their neighbor searches."""

    def __init__(self, device: str, settings: Settings):
        torch.manual_seed(0)
        self.mesh: DeviceMesh = domain_mesh(device)
        self.model, self.k = Potential(settings.width).to(device), settings.neighbors
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.searching = 0.0

    def step(self, atoms: int) -> Tensor:
        """Return the forces on `atoms` new atoms of this rank."""
        local = torch.rand(atoms, 3, generator=self.random).to(self.mesh.device_type)
        local[:, 0] += self.mesh.get_local_rank()
        points = ShardTensor.from_local(local, self.mesh, [Shard(0)])
        start = time.thread_time()
        source, _ = knn(points, points, self.k + 1)  # the first neighbor of an atom is itself
        target = torch.arange(len(points) * self.k, device=local.device) // self.k
        self.searching += time.thread_time() - start
        points.requires_grad_()
        energy = self.model(points, source[:, 1:].reshape(-1), target)
        return torch.autograd.grad(energy, points)[0]

    def run(self, sizes: Sequence[int]) -> None:
        for atoms in sizes:
            self.step(atoms)


def other_sizes(atoms: int, steps: int, random: torch.Generator) -> list[int]:
    """Return numbers of atoms up to 10 % below or above `atoms`, with this mean, for an even number of steps."""
    reach = max(atoms // 10, 1)
    drawn = torch.randint(-reach, reach + 1, (steps // 2,), generator=random).tolist()
    return [atoms + d for some in drawn for d in (some, -some)]


def measure_times(device: str, settings: Settings, atoms: int) -> dict[str, Any]:
    """Return the CPU seconds of a round with fixed and with changing sizes, and the share of the neighbor searches."""
    dynamics, random = Dynamics(device, settings), torch.Generator().manual_seed(100 + dist.get_rank())
    uneven = atoms + atoms // 40 * (-1) ** dist.get_rank()
    candidates = {
        "fixed sizes": lambda: dynamics.run([uneven] * settings.steps),
        "changing sizes": lambda: dynamics.run(other_sizes(atoms, settings.steps, random)),
    }
    times = interleave(candidates, settings.rounds, thread_seconds)
    dynamics.searching = 0.0
    total = thread_seconds(candidates["changing sizes"])
    return {"times": times, "searching": dynamics.searching / total}


def resident_memory(device: str) -> int:
    """Return the largest resident memory of this process so far; on a device, the memory that torch has reserved."""
    if device != "cpu":
        return torch.get_device_module(device).max_memory_reserved()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_memory(device: str, settings: Settings) -> tuple[int, int]:
    """Return the resident memory after a tenth of the steps and after all of them."""
    dynamics, random = Dynamics(device, settings), torch.Generator().manual_seed(100 + dist.get_rank())
    sizes = other_sizes(settings.memory_atoms, settings.memory_steps, random)
    early = settings.memory_steps // 10
    dynamics.run(sizes[:early])
    before = resident_memory(device)
    dynamics.run(sizes[early:])
    return before, resident_memory(device)


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        for atoms in settings.atoms:
            case = f"{rank_label(ranks)}, {atoms:,} atoms a rank, {settings.neighbors} neighbors"
            found = measure_on_ranks(measure_times, ranks, device, settings, atoms)
            times = max_over_ranks([f["times"] for f in found])
            table.add_times(f"{case}: {settings.steps} steps", times, "fixed sizes", bars={"changing sizes": 1.10})
            share = max(f["searching"] for f in found)
            table.add_ratio(f"{case}: neighbor lists", "rebuilt in every step", [share], "the step", 0.10)
        grown = [after / before for before, after in measure_on_ranks(measure_memory, ranks, device, settings)]
        label = f"{rank_label(ranks)}, {settings.memory_steps:,} steps: memory"
        table.add_ratio(label, "changing sizes", [max(grown)], "the first tenth", 1.05)
