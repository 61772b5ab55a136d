"""Which mesh: the ways to lay a number of ranks over data and domain, each counted, the fastest that fits first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import ShardfieldError
from .cost import Cost, Device, Network, predict
from .recorder import Seen
from .simulate import Subject, count, representative_ranks, time_step

HEADROOM = 0.9  # of a device's memory that tensors may take; the rest is for libraries and gaps between tensors


@dataclass
class Option:
    """A mesh of data x domain ranks, and what a step costs on it: the most of any rank that was looked at."""

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
    ranks: list[int]  # that were looked at
    efficiency: float = math.nan

    @property
    def label(self) -> str:
        return " x ".join(map(str, self.mesh))


@dataclass
class MeshRanking:
    """For one number of GPUs: the options, the best first."""

    gpus: int
    options: list[Option] = field(default_factory=list)

    @property
    def best(self) -> Option:
        return self.options[0]


def candidate_meshes(gpus: int, batch: int, sizes: Sequence[int], exhaustive: bool = False) -> list[tuple[int, ...]]:
    """The meshes (data, domain, ...) of `gpus` ranks that a batch and the dims of a field allow.

    Not `exhaustive` one: the three largest data axes, and for each the domain along the longest dim, and as tiles
    that are as square as can be.
    """
    shares = [d for d in range(gpus, 0, -1) if gpus % d == 0 and batch % d == 0]
    found: list[tuple[int, ...]] = []
    for data in shares if exhaustive else shares[:3]:
        cuts = [
            c for c in _factorizations(gpus // data, len(sizes)) if all(a <= b for a, b in zip(c, sizes, strict=True))
        ]
        if not exhaustive:
            lines = [c for c in cuts if sum(n > 1 for n in c) <= 1]
            tiles = [c for c in cuts if sum(n > 1 for n in c) == 2]
            cuts = [min(some, key=lambda c: _halo_fraction(c, sizes)) for some in (lines, tiles) if some]
        for cut in cuts:
            while len(cut) > 1 and cut[-1] == 1:
                cut = cut[:-1]
            found.append((data, *cut))
    return list(dict.fromkeys(found))


def _halo_fraction(cut: Sequence[int], sizes: Sequence[int]) -> float:
    """How much of a piece lies at cuts, as a share of it."""
    return sum(n / size for n, size in zip(cut, sizes, strict=True) if n > 1)


def _factorizations(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a product of so many."""
    if dims == 1:
        yield (ranks,)
        return
    for first in range(ranks, 0, -1):
        if ranks % first == 0:
            for rest in _factorizations(ranks // first, dims - 1):
                yield (first, *rest)


class Planner:
    """Counts meshes and compares them. `device` None: computation is measured on this machine."""

    def __init__(self, subject: Subject, memory: float, device: Device | None, network: Network, fallback: Device):
        self.subject, self.memory, self.network = subject, memory, network
        self.measured, self.device = device is None, device or fallback
        self._single_gpu: Option | None = None

    def evaluate(self, mesh: tuple[int, ...], ranks: Sequence[int]) -> Option:
        """One mesh, by some of its ranks."""
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
        """One GPU with all of the batch, whether it has the memory or not: what efficiency is measured by."""
        if self._single_gpu is None:
            self._single_gpu = self.evaluate((1, 1), [0])
            self._single_gpu.efficiency = 1.0
        return self._single_gpu

    def rank_meshes(
        self, gpus: int, exhaustive: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> MeshRanking:
        """The best mesh for a number of GPUs, and the others."""
        ways = candidate_meshes(gpus, self.subject.batch, self.subject.sizes(), exhaustive)
        if not ways:
            raise ShardfieldError(
                f"no mesh of {gpus} GPUs: {self.subject.batch} samples and a field of "
                f"{' x '.join(map(str, self.subject.sizes()))} points cannot be cut into so many pieces"
            )
        answer = MeshRanking(gpus)
        for mesh in ways:
            say(f"{gpus} GPUs: {' x '.join(map(str, mesh))}")
            answer.options.append(self.evaluate(mesh, representative_ranks(mesh)[:1]))
        while True:  # the middle rank has led the way; the first and the last may have more to do
            answer.options.sort(key=_sort_key)
            best = answer.best
            ranks = representative_ranks(best.mesh)
            if len(best.ranks) == len(ranks):
                break
            answer.options[0] = self.evaluate(best.mesh, ranks)
        for option in answer.options:
            option.efficiency = self.single_gpu().cost.seconds / (gpus * option.cost.seconds)
        return answer


def _sort_key(option: Option) -> tuple:
    return (not option.fits, option.cost.seconds if option.fits else option.peak)
