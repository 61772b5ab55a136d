"""Measure latency and bandwidth between pairs of ranks, while all other pairs send too, as in a halo exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..comm import collectives
from ..comm.consensus import gather_texts
from .checks import Finding

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 24)  # bytes of a message
REPEATS = {1 << 10: 12, 1 << 14: 12, 1 << 18: 6, 1 << 20: 4, 1 << 24: 2}
ALL_PAIRS = 16  # ranks up to which every pair is measured
SLOW = 4.0  # a link is slow if its time is this multiple of the median of its kind


class LinkTime(NamedTuple):
    """Seconds in which ranks a < b exchange messages of `nbytes` in both directions: the fastest of some repeats."""

    a: int
    b: int
    nbytes: int
    seconds: float


def rounds_of(ranks: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs.

    Up to 16 ranks every pair is in one round (the circle method); of more ranks those whose distance is a power of two.

    >>> rounds_of(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    if ranks <= ALL_PAIRS:
        players = list(range(ranks + ranks % 2))
        rounds = []
        for _ in range(len(players) - 1):
            half = len(players) // 2
            met = zip(players[:half], reversed(players[half:]), strict=True)
            rounds.append(sorted((min(p), max(p)) for p in met if max(p) < ranks))
            players = [players[0], players[-1], *players[1:-1]]
        return rounds
    rounds = []
    for bit in range((ranks - 1).bit_length()):
        rounds.append([(a, a ^ 1 << bit) for a in range(ranks) if a < a ^ 1 << bit < ranks])
    return rounds


def measure_pairs(
    device: torch.device, sizes: Sequence[int] = SIZES, clock: Callable[[], float] = time.perf_counter
) -> list[LinkTime]:
    """Measure the pairs of all rounds. All ranks call it; each returns the times of all pairs."""
    world = dist.group.WORLD
    assert world is not None
    rank, own = dist.get_rank(), []
    for pairs in rounds_of(dist.get_world_size()):
        pair = next((p for p in pairs if rank in p), None)
        for nbytes in sizes:
            seconds = _exchange_seconds(pair, nbytes, device, REPEATS.get(nbytes, 5), clock)
            if pair is not None:
                own.append(f"{pair[0]} {pair[1]} {nbytes} {seconds!r}")
    found: dict[tuple[int, int, int], float] = {}
    for text in gather_texts("\n".join(own), world):
        for line in text.splitlines():
            a, b, nbytes_text, seconds_text = line.split()
            key = int(a), int(b), int(nbytes_text)
            found[key] = max(found.get(key, 0.0), float(seconds_text))  # of the two ranks' clocks
    return [LinkTime(*key, seconds) for key, seconds in sorted(found.items())]


def _exchange_seconds(
    pair: tuple[int, int] | None, nbytes: int, device: torch.device, repeats: int, clock: Callable[[], float]
) -> float:
    """Return the fastest exchange with the other rank of a pair. A rank without one takes part in the barriers."""
    world = dist.group.WORLD
    assert world is not None
    rank, best = dist.get_rank(), float("inf")
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    peers = [other for other in pair or () if other != rank]
    for i in range(repeats + 2):
        collectives.all_reduce(torch.zeros(1, device=device), world)  # all pairs begin together
        _synchronize(device)
        begun = clock()
        sends, receives = [(peer, buffer) for peer in peers], [(peer, buffer.shape) for peer in peers]
        collectives.start_sends(sends, receives, world, buffer).wait()
        _synchronize(device)
        if i > 1:
            best = min(best, clock() - begun)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def check_links(times: Sequence[LinkTime], hosts: Sequence[str]) -> list[Finding]:
    """Return a finding for each pair that is much slower than the median of pairs of its kind.

    hosts: the host of each rank. Pairs on one host are one kind, pairs on two hosts another. A kind needs three pairs.
    """
    slow: dict[tuple[int, int], str] = {}
    for nbytes in {t.nbytes for t in times}:
        for one_host in (True, False):
            kind = [t for t in times if t.nbytes == nbytes and (hosts[t.a] == hosts[t.b]) is one_host]
            median = statistics.median([t.seconds for t in kind]) if len(kind) >= 3 else float("inf")
            for t in kind:
                if t.seconds > SLOW * median and t.seconds > 1e-3:
                    ratio = t.seconds / median
                    slow[t.a, t.b] = (
                        f"{format_bytes(nbytes)} take {t.seconds * 1e3:.3g} ms, {ratio:.1f} times the median"
                    )
    findings = [
        Finding("links", "warning", f"ranks {a} and {b} ({hosts[a]}, {hosts[b]}): {text}", _MEND)
        for (a, b), text in sorted(slow.items())
    ]
    pairs = len({(t.a, t.b) for t in times})
    fine = "1 pair of ranks" if pairs == 1 else f"{pairs} pairs, all about as fast"
    return findings or [Finding("links", "ok", fine)]


_MEND = (
    "run it again; if the pair stays slow, other work shares its cores or its network, or the messages take another "
    "interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)


def link_table(times: Sequence[LinkTime]) -> list[str]:
    """Return the lines of a table: size, median and slowest time of a pair, bandwidth in one direction."""
    lines = [f"{'message':>9}  {'median':>9}  {'slowest':>9}  {'bandwidth':>10}  slowest pair"]
    for nbytes in sorted({t.nbytes for t in times}):
        each = sorted((t for t in times if t.nbytes == nbytes), key=lambda t: t.seconds)
        median, last = statistics.median([t.seconds for t in each]), each[-1]
        cells = f"{format_bytes(nbytes):>9}  {_format_seconds(median):>9}  {_format_seconds(last.seconds):>9}"
        lines.append(f"{cells}  {nbytes / median / 1e9:>7.3g} GB/s  {last.a}-{last.b}")
    return lines


def format_bytes(nbytes: int) -> str:
    """Format a size in the units of SIZES.

    >>> format_bytes(1 << 14)
    '16 KiB'
    """
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
