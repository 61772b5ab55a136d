"""Rank the meshes of data x domain ranks for a number of GPUs: simulate a step on each, the fastest that fits first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import ShardfieldError
from .cost import Cost, Device, Network, predict
from .recorder import Seen
from .simulate import Subject, count, representative_ranks, time_step

HEADROOM = 0.9  # fraction of a device's memory for tensors; the rest is for libraries and fragmentation


@dataclass
class Option:
    """A mesh of data x domain ranks, and the cost of a step on it: the maximum over the simulated ranks."""

    mesh: tuple[int, ...]
    fits: bool
    peak: int
    cost: Cost
    messages: int
    bytes: int
    flops: int
    kinds: dict[str, list[int]]
    modules: dict[str, list[int]]
    gathers: list[str]
    ranks: list[int]  # the simulated ranks
    efficiency: float = math.nan

    @property
    def label(self) -> str:
        return " x ".join(map(str, self.mesh))


@dataclass
class MeshRanking:
    """The options for one number of GPUs, the best first."""

    gpus: int
    options: list[Option] = field(default_factory=list)

    @property
    def best(self) -> Option:
        return self.options[0]


def candidate_meshes(gpus: int, batch: int, sizes: Sequence[int], exhaustive: bool = False) -> list[tuple[int, ...]]:
    """Return the meshes (data, domain, ...) of `gpus` ranks that the batch and the sizes of the sharded dims allow.

    If not `exhaustive`, only the three largest data axes are considered. For each, the domain is sharded along one dim,
    and along two dims with shards as square as possible.
    """
    data_sizes = [d for d in range(gpus, 0, -1) if gpus % d == 0 and batch % d == 0]
    meshes: list[tuple[int, ...]] = []
    for data in data_sizes if exhaustive else data_sizes[:3]:
        domains = [
            c for c in _factorizations(gpus // data, len(sizes)) if all(a <= b for a, b in zip(c, sizes, strict=True))
        ]
        if not exhaustive:
            along_one = [c for c in domains if sum(n > 1 for n in c) <= 1]
            along_two = [c for c in domains if sum(n > 1 for n in c) == 2]
            domains = [min(some, key=lambda c: _halo_fraction(c, sizes)) for some in (along_one, along_two) if some]
        for domain in domains:
            while len(domain) > 1 and domain[-1] == 1:
                domain = domain[:-1]
            meshes.append((data, *domain))
    return list(dict.fromkeys(meshes))


def _halo_fraction(domain: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the fraction of a shard within a given distance of its boundaries, up to a constant factor."""
    return sum(n / size for n, size in zip(domain, sizes, strict=True) if n > 1)


def _factorizations(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `dims` factors whose product is `ranks`."""
    if dims == 1:
        yield (ranks,)
        return
    for first in range(ranks, 0, -1):
        if ranks % first == 0:
            for rest in _factorizations(ranks // first, dims - 1):
                yield (first, *rest)


class Planner:
    """Evaluate and compare meshes. With `device=None`, computation is timed on this machine."""

    def __init__(self, subject: Subject, memory: float, device: Device | None, network: Network, fallback: Device):
        self.subject, self.memory, self.network = subject, memory, network
        self.measured, self.device = device is None, device or fallback
        self._single_gpu: Option | None = None

    def evaluate(self, mesh: tuple[int, ...], ranks: Sequence[int]) -> Option:
        """Evaluate a mesh by simulating a step of some of its ranks."""
        seens: list[Seen] = []
        costs: list[Cost] = []
        for rank in ranks:
            seen = count(self.subject, mesh, rank)
            computes = min(time_step(self.subject, mesh, rank)) if self.measured else None
            seens.append(seen)
            costs.append(predict(seen, self.device, self.network, computes))
        busiest = max(seens, key=lambda s: s.bytes)
        peak = max(s.peak for s in seens)
        return Option(
            mesh=mesh,
            fits=peak <= HEADROOM * self.memory,
            peak=peak,
            cost=max(costs, key=lambda c: c.seconds),
            messages=max(s.messages for s in seens),
            bytes=busiest.bytes,
            flops=max(s.flops for s in seens),
            kinds=busiest.kinds,
            modules=busiest.modules,
            gathers=sorted({g for s in seens for g in s.gathers}),
            ranks=list(ranks),
        )

    def single_gpu(self) -> Option:
        """Evaluate one GPU with the global batch, even if it does not fit: the reference for efficiency."""
        if self._single_gpu is None:
            self._single_gpu = self.evaluate((1, 1), [0])
            self._single_gpu.efficiency = 1.0
        return self._single_gpu

    def rank_meshes(
        self, gpus: int, exhaustive: bool = False, show: Callable[[str], None] = lambda text: None
    ) -> MeshRanking:
        """Rank the meshes for a number of GPUs, the best first. `show` receives progress messages."""
        meshes = candidate_meshes(gpus, self.subject.batch, self.subject.sizes(), exhaustive)
        if not meshes:
            raise ShardfieldError(
                f"no mesh of {gpus} GPUs: {self.subject.batch} samples and a field of "
                f"{' x '.join(map(str, self.subject.sizes()))} points cannot be sharded over so many ranks"
            )
        ranking = MeshRanking(gpus)
        for mesh in meshes:
            show(f"{gpus} GPUs: {' x '.join(map(str, mesh))}")
            ranking.options.append(self.evaluate(mesh, representative_ranks(mesh)[:1]))
        # So far each mesh was evaluated by its middle rank. Its first and last rank may take longer, so evaluate the
        # best mesh again with all representative ranks, until the best mesh is one that has been evaluated so.
        while True:
            ranking.options.sort(key=_sort_key)
            best = ranking.best
            ranks = representative_ranks(best.mesh)
            if len(best.ranks) == len(ranks):
                break
            ranking.options[0] = self.evaluate(best.mesh, ranks)
        for option in ranking.options:
            option.efficiency = self.single_gpu().cost.seconds / (gpus * option.cost.seconds)
        return ranking


def _sort_key(option: Option) -> tuple:
    return (not option.fits, option.cost.seconds if option.fits else option.peak)
