"""Measure latency and bandwidth of each kind of collective between the ranks of a world, for `planning.predict`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .._compat.world import reduce_scatter_flat
from ..comm import collectives
from ..planning import Link, Network

FEW, MANY = 64, 1 << 20  # elements of a message
LinkTimes = dict[str, dict[int, tuple[float, float]]]  # kind -> number of ranks -> (latency, bandwidth)
Clock = Callable[[], float]


def shortest(call: Callable[[], Any], rounds: int, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of the fastest round; a round takes as long as its slowest rank."""
    times = []
    for i in range(rounds + 2):
        dist.barrier()
        start = clock()
        call()
        seconds = torch.tensor(clock() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if i > 1:
            times.append(seconds.item())
    return min(times)


def measure_links(rounds: int, clock: Clock = time.perf_counter) -> LinkTimes:
    """Measure each kind of collective among all ranks and among pairs of ranks. Runs on every rank."""
    ranks = dist.get_world_size()
    assert dist.group.WORLD is not None
    if ranks % 2:
        return measure_group(dist.group.WORLD, rounds, clock)
    pairs = [dist.new_group([a, a + 1]) for a in range(0, ranks, 2)]
    links = measure_group(pairs[dist.get_rank() // 2], rounds, clock)
    if ranks > 2:
        for kind, of_world in measure_group(dist.group.WORLD, rounds, clock).items():
            links[kind] |= of_world
    return links


def measure_group(group: dist.ProcessGroup, rounds: int, clock: Clock) -> LinkTimes:
    """Measure each kind of collective in a group. An exchange is keyed by its number of peers.

    Each call is timed between two convolutions, and the time of these is subtracted. After waiting for a message, a
    rank computes with cold caches; that time belongs to the message.
    """
    size, rank = group.size(), group.rank()
    neighbors = {(rank + 1) % size, (rank - 1) % size}

    def exchange(n: int) -> tuple[Callable[[], Any], float]:
        sends = [torch.zeros(n if c in neighbors else 0) for c in range(size)]
        return lambda: collectives.exchange(sends, [t.shape for t in sends], group), 4 * n * len(neighbors)

    def all_reduce(n: int) -> tuple[Callable[[], Any], float]:
        x = torch.zeros(n)
        return lambda: collectives.all_reduce(x, group), 8 * n * (size - 1) / size

    def all_gather(n: int) -> tuple[Callable[[], Any], float]:
        x = torch.zeros(n // size)
        return lambda: collectives.all_gather(x, [x.shape] * size, group), 4 * (n // size) * (size - 1)

    def reduce_scatter(n: int) -> tuple[Callable[[], Any], float]:
        x, out = torch.zeros(n // size * size), torch.zeros(n // size)
        return lambda: reduce_scatter_flat(out, x, group=group), 4 * (n // size) * (size - 1)

    field, weight = torch.randn(1, 16, 64, 128), torch.randn(16, 16, 3, 3)

    def between(call: Callable[[], Any] | None) -> Callable[[], Any]:
        def run() -> None:
            torch.conv2d(field, weight, padding=1)
            if call is not None:
                call()
            torch.conv2d(field, weight, padding=1)

        return run

    links: LinkTimes = {}
    kinds = {"exchange": exchange, "all_reduce": all_reduce, "all_gather": all_gather}
    kinds["reduce_scatter"] = reduce_scatter
    base = shortest(between(None), 4 * rounds, clock)
    for kind, make in kinds.items():
        (small, small_bytes), (large, large_bytes) = make(FEW), make(MANY)
        fast, slow = shortest(between(small), 4 * rounds, clock), shortest(between(large), rounds, clock)
        link = max(fast - base, 1e-6), (large_bytes - small_bytes) / max(slow - fast, 1e-9)
        links[kind] = {len(neighbors) if kind == "exchange" else size: link}
    return links


def network_of(links: LinkTimes) -> Network:
    """Return the network of measured links. Messages of gloo take the cores that compute: nothing overlaps."""
    calls = {kind: {n: Link(*link) for n, link in by_count.items()} for kind, by_count in links.items()}
    return Network(calls["exchange"][min(calls["exchange"])], calls=calls, overlap=False)
