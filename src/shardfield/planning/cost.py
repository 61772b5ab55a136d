"""Predict the seconds of a step from a rank's recorded tape, a device model and a network model.

The device model is a roofline: a call takes the time of its arithmetic or of its memory traffic, whichever is longer,
and at least the time of a launch. A message takes its latency plus its bytes over the bandwidth, and a link carries one
message at a time. A wait on the tape blocks until its message has arrived. Messages that are started ahead (blocks of
ring attention, a halo while the interior is computed) therefore overlap with the computation in between. Messages of
FSDP and DDP overlap with all computation except for the first and the last of them, if the network overlaps at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .recorder import Seen, Send, Wait, Work


@dataclass(frozen=True)
class Device:
    """A device by its published peak rates per second. Calls are assumed to reach the fraction `share` of them."""

    name: str
    memory: float
    bandwidth: float
    fp32: float
    half: float
    fp64: float
    share: float = 0.7
    issue: float = 6e-6  # seconds in which the host launches a call

    def seconds(self, work: Work) -> float:
        return max(
            work.flops / (self.share * self._peak(work.dtype)), work.bytes / (self.share * self.bandwidth), self.issue
        )

    def _peak(self, dtype: torch.dtype) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return self.half
        return self.fp64 if dtype in (torch.float64, torch.complex128) else self.fp32


# Figures of the SXM modules: fp32 without TF32, half precision without sparsity, fp64 on tensor cores.
DEVICES = {
    "a100": Device("a100", 80e9, 2.04e12, 19.5e12, 312e12, 19.5e12),
    "h100": Device("h100", 80e9, 3.35e12, 67e12, 989e12, 67e12),
    "h200": Device("h200", 141e9, 4.8e12, 67e12, 989e12, 67e12),
}


@dataclass(frozen=True)
class Link:
    """A network link: latency in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, rounds: float = 1.0) -> float:
        return rounds * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The links between ranks: `between` nodes, and `within` a node of `node` consecutive ranks.

    `calls` holds measured collectives, which replace the link model: kind -> number of ranks (for an exchange, of
    peers) -> Link. The entry with the nearest number is used. `overlap`: messages overlap with computation.
    """

    between: Link
    within: Link | None = None
    node: int = 8
    calls: Mapping[str, Mapping[int, Link]] = field(default_factory=dict)
    overlap: bool = True

    def seconds(self, send: Send, rank: int) -> float:
        """Return the seconds that the messages of one call of a rank take."""
        if send.kind in self.calls:
            measured = self.calls[send.kind]
            nearest = min(measured, key=lambda count: abs(count - len(send.to)))
            return measured[nearest].seconds(send.bytes) if send.to else 0.0
        if send.kind in ("exchange", "deliver"):  # point-to-point messages, one after the other
            return sum(self._link(rank, peer).seconds(nbytes) for peer, nbytes in send.to)
        ranks = [peer for peer, _ in send.to]
        link = self._link(min(ranks), max(ranks))
        rounds = math.ceil(math.log2(max(len(ranks), 2)))  # of a tree; an all_reduce goes up and down
        return link.seconds(send.bytes, 2 * rounds if send.kind == "all_reduce" else rounds)

    def _link(self, a: int, b: int) -> Link:
        return self.within if self.within is not None and a // self.node == b // self.node else self.between


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: in total, computing, waiting for domain messages, and waiting for parameters (FSDP, DDP)."""

    seconds: float
    compute: float
    domain: float
    parameters: float


def predict(seen: Seen, device: Device, network: Network, computes: float | None = None) -> Cost:
    """Predict the cost of a rank's step.

    `computes`: measured seconds of its computation. They replace the total that follows from the device model, which is
    then only used to distribute them over the calls.
    """
    works = [e for e in seen.tape if isinstance(e, Work)]
    modeled = sum(map(device.seconds, works))
    scale = 1.0 if computes is None else computes / max(modeled, 1e-12)
    clock = link_free = 0.0
    arrival: dict[int, float] = {}
    overlapped: list[float] = []
    for entry in seen.tape:
        if isinstance(entry, Work):
            clock += scale * device.seconds(entry)
        elif isinstance(entry, Wait):
            clock = max(clock, arrival[entry.id])
        elif entry.overlapped:
            overlapped.append(network.seconds(entry, seen.rank))
        else:
            start = max(clock, link_free)
            arrival[entry.id] = link_free = start + network.seconds(entry, seen.rank)
            if not network.overlap:
                clock = link_free
    compute = scale * modeled
    exposed = sum(overlapped)
    if network.overlap and overlapped:
        exposed = min(exposed, max(exposed - compute, overlapped[0] + overlapped[-1]))
    return Cost(clock + exposed, compute, clock - compute, exposed)
