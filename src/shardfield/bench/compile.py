"""A compiled training step: the remaining overhead of ShardTensors, and how much of delayed messages is overlapped.

Overhead: ten layers of linear and relu on tiny tensors, so that the step is host-bound, on one rank, against
`torch.compile` on plain tensors. Delayed messages: a UNet's step on two ranks with every message 5 ms late, against the
same step uncompiled. Passes: the step of two branches of convolutions on one field, with all passes and with each of
them left out. On a device: a UNet's and a TFNO's step on one rank against `torch.compile` on plain tensors, and as a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..compiler import compile
from ..compiler.graphs import WARMUPS, memory_pool, record, run_on_capture_stream
from ..compiler.lowering import PASS_NAMES
from .measure import Times, count_traffic, delay_messages, interleave, max_over_ranks, rank_seconds
from .models import branches, tfno, unet
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, train_step
from .table import Table

PLAIN = "torch.compile, plain tensors"
OURS = "shardfield.compile"
EAGER = "shardfield, uncompiled"
NO_PASSES = "no passes"
Candidates = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (2,)
    size: int = 256
    channels: int = 16
    rounds: int = 7
    delay_ms: float = 5.0
    backend: str = "inductor"  # backend of the step in which passes are left out

    quick: ClassVar[dict[str, Any]] = {"size": 64, "channels": 8, "rounds": 3, "backend": "aot_eager"}
    cuda: ClassVar[dict[str, Any]] = {"ranks": (1,), "channels": 32, "rounds": 20}


def time_tiny(device: str, rounds: int) -> Times:
    """Time 50 steps of ten layers of linear and relu, on one rank."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x = make_sharded_field(domain_mesh(device), (4, 8), dim=0)
    compiled, plain = compile(model), torch.compile(model)

    def run_steps(call: Callable[[Tensor], Tensor], value: Tensor) -> None:
        for _ in range(50):
            train_step(call, value)

    candidates = {
        PLAIN: partial(run_steps, plain, x.to_local()),
        OURS: partial(run_steps, compiled, x),
        EAGER: partial(run_steps, model, x),
    }
    return interleave(candidates, rounds, partial(rank_seconds, device=device), warmup=2)


def time_delayed(device: str, size: int, channels: int, rounds: int, seconds: float) -> tuple[Times, dict[str, int]]:
    """Return seconds and messages of a UNet's step with delayed messages, on a rank."""
    x = make_sharded_field(domain_mesh(device), (1, 3, size, size))
    model = unet(channels).to(device)
    candidates: Candidates = {EAGER: partial(train_step, model, x), OURS: partial(train_step, compile(model), x)}
    candidates[NO_PASSES] = partial(train_step, compile(model, passes=[]), x)
    return time_with_delay(candidates, device, rounds, seconds)


def time_ablations(
    device: str, size: int, channels: int, rounds: int, seconds: float, backend: str
) -> tuple[Times, dict[str, int]]:
    """Return seconds and messages of a step with all passes, with none, and with each left out, on a rank."""
    x = make_sharded_field(domain_mesh(device), (1, 3, size, size))
    model = branches(channels).to(device)
    chosen = {OURS: PASS_NAMES, NO_PASSES: ()} | {
        f'without "{p}"': tuple(q for q in PASS_NAMES if q != p) for p in PASS_NAMES
    }
    candidates: Candidates = {
        name: partial(train_step, compile(model, passes=passes, backend=backend), x) for name, passes in chosen.items()
    }
    return time_with_delay(candidates, device, rounds, seconds)


def time_with_delay(candidates: Candidates, device: str, rounds: int, seconds: float) -> tuple[Times, dict[str, int]]:
    """Return seconds and messages of each candidate with delayed messages, on a rank."""
    sent = {}
    for name, call in candidates.items():
        call()
        with count_traffic() as count:
            call()
        sent[name] = count.messages

    def timed(call: Callable[[], Any]) -> float:
        with delay_messages(seconds):
            return rank_seconds(call, device)

    return interleave(candidates, rounds, timed), sent


def time_one_rank(device: str, name: str, size: int, channels: int, rounds: int) -> Times:
    """Time the step of a model, on one rank."""
    model = (unet(channels) if name == "UNet" else tfno(channels, 32)).to(device)
    x = make_sharded_field(domain_mesh(device), (1, 3 if name == "UNet" else 1, size, size))
    compiled, plain = compile(model), torch.compile(model)
    step_args = {PLAIN: (plain, x.to_local()), OURS: (compiled, x), EAGER: (model, x)}
    candidates: dict[str, Callable[[], Any]] = {name: partial(train_step, *args) for name, args in step_args.items()}
    try:
        candidates[PLAIN]()
    except Exception:  # Dynamo cannot trace every model
        del candidates[PLAIN]
    if device == "cuda":
        candidates["as a CUDA graph"] = capture_graph(partial(train_step, compiled, x))
    return interleave(candidates, rounds, partial(rank_seconds, device=device), warmup=3)


def capture_graph(call: Callable[[], Any], graph: torch.cuda.CUDAGraph | None = None) -> Callable[[], Any]:
    """Capture a call as a CUDA graph and return a function that replays it."""
    for _ in range(WARMUPS):
        run_on_capture_stream(call)
    return record(call, memory_pool(), graph)[1]


def run(settings: Settings, device: str, table: Table) -> None:
    (times,) = measure_on_ranks(time_tiny, 1, device, settings.rounds)
    table.add_times("10 x (linear, relu), 50 steps, 1 rank", times, PLAIN, bars={OURS: 1.1})
    size, channels, rounds = settings.size, settings.channels, settings.rounds
    for ranks in settings.ranks:
        if ranks > 1:
            by_rank = measure_on_ranks(time_delayed, ranks, device, size, channels, rounds, settings.delay_ms / 1e3)
            case = f"UNet {size} x {size}, {ranks} ranks, messages {settings.delay_ms:g} ms late"
            table.add_times(case, max_over_ranks([t for t, _ in by_rank]), EAGER, bars={OURS: 0.8})
            table.add_counts(f"{case}: sent by a rank", by_rank[0][1], "messages", EAGER)
            by_rank = measure_on_ranks(
                time_ablations, ranks, device, size, channels, rounds, settings.delay_ms / 1e3, settings.backend
            )
            case = f"two runs of convolutions on {size} x {size}, {ranks} ranks, {settings.delay_ms:g} ms late"
            table.add_times(case, max_over_ranks([t for t, _ in by_rank]), OURS)
            table.add_counts(f"{case}: sent by a rank", by_rank[0][1], "messages", OURS)
    if device != "cpu":
        for name in ("UNet", "TFNO"):
            (times,) = measure_on_ranks(time_one_rank, 1, device, name, size, channels, rounds)
            if PLAIN in times:
                table.add_times(f"{name} {size} x {size}, 1 rank", times, PLAIN, bars={OURS: 1.05})
            else:
                table.add_times(f"{name} {size} x {size}, 1 rank ({PLAIN}: fails)", times, EAGER)
