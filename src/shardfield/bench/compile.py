"""A step as one program: what is left of the wrapper's cost, and how much of late messages hides behind the work.

Tiny: ten layers of linear and relu on tensors so small that only calls cost, against `torch.compile` on plain tensors,
on one rank. Late messages: a UNet's step on two ranks with every message 5 ms late, against the same step uncompiled;
and what each pass brings: the step of two runs of convolutions on one field, with all passes and without each of them.
On a device: a UNet's and a TFNO's step on one rank against `torch.compile` on plain tensors, and as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..compiled import compile
from ..compiled.graph import NAMES
from .measure import Times, counted, late, own, slowest, turns
from .models import branches, tfno, unet
from .ranks import cut_field, domain, measured, step
from .table import Table

PLAIN = "torch.compile, plain tensors"
OURS = "shardfield.compile"
EAGER = "shardfield, uncompiled"
NONE = "no passes"
Candidates = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2,)
    size: int = 256
    channels: int = 16
    rounds: int = 7
    delay_ms: float = 5.0
    backend: str = "inductor"  # of the step with passes left out

    quick: ClassVar[dict[str, Any]] = {"size": 64, "channels": 8, "rounds": 3, "backend": "aot_eager"}
    cuda: ClassVar[dict[str, Any]] = {"ranks": (1,), "channels": 32, "rounds": 20}


def tiny(device: str, rounds: int) -> Times:
    """On one rank: seconds of a step of linear and relu, ten times."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x = cut_field(domain(device), (4, 8), dim=0)
    known, plain = compile(model), torch.compile(model)

    def many(call: Callable[[Tensor], Tensor], value: Tensor) -> None:
        for _ in range(50):
            step(call, value)

    candidates = {
        PLAIN: partial(many, plain, x.to_local()),
        OURS: partial(many, known, x),
        EAGER: partial(many, model, x),
    }
    return turns(candidates, rounds, partial(own, device=device), warm=2)


def hidden(device: str, size: int, channels: int, rounds: int, seconds: float) -> tuple[Times, dict[str, int]]:
    """On a rank: seconds of a UNet's step with late messages, and how many it sends."""
    x = cut_field(domain(device), (1, 3, size, size))
    model = unet(channels).to(device)
    candidates: Candidates = {EAGER: partial(step, model, x), OURS: partial(step, compile(model), x)}
    candidates[NONE] = partial(step, compile(model, passes=[]), x)
    return with_late(candidates, device, rounds, seconds)


def left_out(
    device: str, size: int, channels: int, rounds: int, seconds: float, backend: str
) -> tuple[Times, dict[str, int]]:
    """On a rank: seconds of the step of two runs of convolutions, with all passes, with none, and without each."""
    x = cut_field(domain(device), (1, 3, size, size))
    model = branches(channels).to(device)
    chosen = {OURS: NAMES, NONE: ()} | {f'without "{p}"': tuple(q for q in NAMES if q != p) for p in NAMES}
    candidates: Candidates = {
        name: partial(step, compile(model, passes=passes, backend=backend), x) for name, passes in chosen.items()
    }
    return with_late(candidates, device, rounds, seconds)


def with_late(candidates: Candidates, device: str, rounds: int, seconds: float) -> tuple[Times, dict[str, int]]:
    """On a rank: what candidates take with late messages, and how many they send."""
    sent = {}
    for name, call in candidates.items():
        call()
        with counted() as count:
            call()
        sent[name] = count.messages

    def timed(call: Callable[[], Any]) -> float:
        with late(seconds):
            return own(call, device)

    return turns(candidates, rounds, timed), sent


def alone(device: str, name: str, size: int, channels: int, rounds: int) -> Times:
    """On one rank: seconds of a model's step."""
    model = (unet(channels) if name == "UNet" else tfno(channels, 32)).to(device)
    x = cut_field(domain(device), (1, 3 if name == "UNet" else 1, size, size))
    known, plain = compile(model), torch.compile(model)
    given = {PLAIN: (plain, x.to_local()), OURS: (known, x), EAGER: (model, x)}
    candidates: dict[str, Callable[[], Any]] = {name: partial(step, *what) for name, what in given.items()}
    try:
        candidates[PLAIN]()
    except Exception:  # Dynamo cannot follow all that a model does
        del candidates[PLAIN]
    if device == "cuda":
        candidates["as a CUDA graph"] = captured(partial(step, known, x))
    return turns(candidates, rounds, partial(own, device=device), warm=3)


def captured(call: Callable[[], Any], graph: torch.cuda.CUDAGraph | None = None) -> Callable[[], Any]:
    """A step as a CUDA graph, which is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = graph or torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def run(settings: Settings, device: str, table: Table) -> None:
    (times,) = measured(tiny, 1, device, settings.rounds)
    table.times("10 x (linear, relu), 50 steps, 1 rank", times, PLAIN, bars={OURS: 1.1})
    size, channels, rounds = settings.size, settings.channels, settings.rounds
    for ranks in settings.ranks:
        if ranks > 1:
            told = measured(hidden, ranks, device, size, channels, rounds, settings.delay_ms / 1e3)
            case = f"UNet {size} x {size}, {ranks} ranks, messages {settings.delay_ms:g} ms late"
            table.times(case, slowest([t for t, _ in told]), EAGER, bars={OURS: 0.8})
            table.counts(f"{case}: sent by a rank", told[0][1], "messages", EAGER)
            told = measured(left_out, ranks, device, size, channels, rounds, settings.delay_ms / 1e3, settings.backend)
            case = f"two runs of convolutions on {size} x {size}, {ranks} ranks, {settings.delay_ms:g} ms late"
            table.times(case, slowest([t for t, _ in told]), OURS)
            table.counts(f"{case}: sent by a rank", told[0][1], "messages", OURS)
    if device != "cpu":
        for name in ("UNet", "TFNO"):
            (times,) = measured(alone, 1, device, name, size, channels, rounds)
            if PLAIN in times:
                table.times(f"{name} {size} x {size}, 1 rank", times, PLAIN, bars={OURS: 1.05})
            else:
                table.times(f"{name} {size} x {size}, 1 rank ({PLAIN}: fails)", times, EAGER)
