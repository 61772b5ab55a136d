"""What a step costs in seconds: a rank's tape, on a device and a network that are given or measured.

A call takes as long as its arithmetic or its memory traffic, whichever is more, and no less than it takes to issue. A
message takes its latency, and its bytes over the bandwidth; one link carries one message at a time. Messages of the
library are waited for where the program waits for them, so that those sent ahead (blocks of a ring, a halo while the
inner part is computed) hide behind what is computed meanwhile. Messages of FSDP and DDP hide behind all computation
but for the first and the last of them, where the network carries messages beside computation at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .recorder import Seen, Send, Wait, Work


@dataclass(frozen=True)
class Device:
    """A device by its published numbers, per second; `share` of them is what calls are taken to reach."""

    name: str
    memory: float
    bandwidth: float
    fp32: float
    half: float
    fp64: float
    share: float = 0.7
    issue: float = 6e-6  # seconds in which the host issues a call

    def seconds(self, work: Work) -> float:
        return max(
            work.flops / (self.share * self._peak(work.dtype)), work.bytes / (self.share * self.bandwidth), self.issue
        )

    def _peak(self, dtype: torch.dtype) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return self.half
        return self.fp64 if dtype in (torch.float64, torch.complex128) else self.fp32


# Of the SXM modules; fp32 without TF32, half precision without sparsity, fp64 on its tensor cores.
DEVICES = {
    "a100": Device("a100", 80e9, 2.04e12, 19.5e12, 312e12, 19.5e12),
    "h100": Device("h100", 80e9, 3.35e12, 67e12, 989e12, 67e12),
    "h200": Device("h200", 141e9, 4.8e12, 67e12, 989e12, 67e12),
}


@dataclass(frozen=True)
class Link:
    """Seconds before the first byte, and bytes a second after it."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, rounds: float = 1.0) -> float:
        return rounds * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The links between ranks: one kind between nodes, another within a node of `node` neighbouring ranks.

    calls: whole calls of a kind as they were measured, by how many ranks take part (of an exchange: by how many peers
    there are), in place of what follows from links; the nearest number counts. beside: messages travel while the device
    computes.
    """

    between: Link
    within: Link | None = None
    node: int = 8
    calls: Mapping[str, Mapping[int, Link]] = field(default_factory=dict)
    beside: bool = True

    def seconds(self, send: Send, rank: int) -> float:
        """How long a rank's messages of one call take."""
        if send.kind in self.calls:
            told = self.calls[send.kind]
            nearest = min(told, key=lambda count: abs(count - len(send.to)))
            return told[nearest].seconds(send.bytes) if send.to else 0.0
        if send.kind in ("exchange", "deliver"):  # one after the other
            return sum(self._link(rank, peer).seconds(nbytes) for peer, nbytes in send.to)
        ranks = [peer for peer, _ in send.to]
        link = self._link(min(ranks), max(ranks))
        rounds = math.ceil(math.log2(max(len(ranks), 2)))  # up a tree, and down it again
        return link.seconds(send.bytes, 2 * rounds if send.kind == "all_reduce" else rounds)

    def _link(self, a: int, b: int) -> Link:
        return self.within if self.within is not None and a // self.node == b // self.node else self.between


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, and how much of them is computation, waiting for the domain, and waiting for parameters."""

    seconds: float
    compute: float
    domain: float
    parameters: float


def predict(seen: Seen, device: Device, network: Network, computes: float | None = None) -> Cost:
    """What a rank's step costs. `computes`: seconds of its computation as they were measured, in place of the device's
    numbers, which then only say how they are spread over the calls."""
    works = [e for e in seen.tape if isinstance(e, Work)]
    given = sum(map(device.seconds, works))
    scale = 1.0 if computes is None else computes / max(given, 1e-12)
    clock = free = 0.0
    ready: dict[int, float] = {}
    behind: list[float] = []
    for entry in seen.tape:
        if isinstance(entry, Work):
            clock += scale * device.seconds(entry)
        elif isinstance(entry, Wait):
            clock = max(clock, ready[entry.id])
        elif entry.overlapped:
            behind.append(network.seconds(entry, seen.rank))
        else:
            begins = max(clock, free)
            ready[entry.id] = free = begins + network.seconds(entry, seen.rank)
            if not network.beside:
                clock = free
    compute = scale * given
    exposed = sum(behind)
    if network.beside and behind:
        exposed = min(exposed, max(exposed - compute, behind[0] + behind[-1]))
    return Cost(clock + exposed, compute, clock - compute, exposed)
