"""Host overhead of calls: plain torch, DTensor and shardfield on tiny tensors on one rank, with gradients enabled.

Measured are ops on 8 x 8 numbers, ten (linear, relu), and the training step (forward and backward) of a small CNN, a
UNet and a ViT. On a CPU, time is the CPU time of the thread, which other load does not lengthen; on a device, it is the
time between two events on its stream. Plain torch and shardfield are interleaved with each other first, and with
DTensor and other libraries afterwards: a DTensor call (its convolution takes half a millisecond of host time) slows the
calls that follow it, and no user program has such calls in between. The times of DTensor for stencil ops are only the
cost of its calls: on more than one rank its results would be wrong. In models, DTensor shards the batch dim, which it
supports.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from ..tensor import ShardTensor
from . import models
from .measure import Times, busy_seconds, interleave, ratios
from .ranks import domain_mesh, measure_on_ranks, train_step
from .table import Table

PLAIN, DTENSOR, OURS, NEMO = "plain torch", "DTensor", "shardfield", "PhysicsNeMo"

OPS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda t: torch.relu(t.x),
    "gelu": lambda t: F.gelu(t.x),
    "add": lambda t: t.x + t.y,
    "mul": lambda t: t.x * t.y,
    "mul scalar": lambda t: t.x * 2.0,
    "add bias": lambda t: t.x + t.b,
    "where": lambda t: torch.where(t.m, t.x, t.y),
    "sum": lambda t: t.x.sum(),
    "mean dim": lambda t: t.x.mean(-1),
    "softmax": lambda t: torch.softmax(t.x, -1),
    "view": lambda t: t.x.view(2, 4, 8),
    "transpose": lambda t: t.x.transpose(0, 1),
    "slice": lambda t: t.x[:, 2:6],
    "cat": lambda t: torch.cat([t.x, t.y], -1),
    "linear": lambda t: F.linear(t.x, t.w, t.b),
    "matmul": lambda t: t.x @ t.w,
}
POINTWISE = ["relu", "gelu", "add", "mul", "mul scalar", "add bias", "where"]
FIELD_OPS: dict[str, Callable[[Any], Any]] = {
    "conv2d 3x3": lambda t: F.conv2d(t.image, t.kernel, padding=1),
    "max_pool2d": lambda t: F.max_pool2d(t.image, 2),
    "group_norm": lambda t: F.group_norm(t.image, 2),
    "layer_norm": lambda t: F.layer_norm(t.x, (8,)),
}
STACK_CASE = "ten (linear, relu), forward + backward"
ATTRIBUTES = {name: (lambda t, name=name: getattr(t.x, name)) for name in ("shape", "ndim", "dtype", "device")}


@dataclass(frozen=True)
class Settings:
    rounds: int = 30
    sizes: tuple[int, ...] = (64,)  # sizes of the fields for the models
    channels: int = 8

    quick: ClassVar[dict[str, Any]] = {"rounds": 5, "sizes": (32,)}
    cuda: ClassVar[dict[str, Any]] = {"rounds": 60, "sizes": (64, 512), "channels": 32}


class Operands:
    """Operands of the ops: fields x, y and a mask m of (8, 8), sharded along dim 0; an image of 4 channels, sharded
    along its rows; parameters.
    """

    def __init__(self, place: Callable[[Tensor, int], Tensor], parameter: Callable[[Tensor], Tensor], device: str):
        torch.manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        self.x, self.y = (place(random(8, 8), 0).requires_grad_() for _ in range(2))
        self.image = place(random(1, 4, 8, 8), 2).requires_grad_()
        self.w, self.b, self.kernel = (parameter(random(*s)) for s in ((8, 8), (8,), (4, 4, 3, 3)))
        self.m = place(random(8, 8) > 0.0, 0)
        self.layers = [(parameter(random(8, 8)), parameter(random(8))) for _ in range(10)]


def linear_relu_stack(t: Operands, backward: bool) -> None:
    h = t.x
    for w, b in t.layers:
        h = torch.relu(F.linear(h, w, b))
    if backward:
        h.sum().backward()


def make_operands(device: str) -> tuple[dict[str, Operands], dict[str, str]]:
    """Return the operands of each library, and the reasons why a library is missing."""
    mesh = domain_mesh(device)

    operands = {
        PLAIN: Operands(lambda t, d: t, nn.Parameter, device),
        DTENSOR: Operands(
            lambda t, d: distribute_tensor(t, mesh, [Shard(d)]),
            lambda t: nn.Parameter(distribute_tensor(t, mesh, [Replicate()])),
            device,
        ),
        OURS: Operands(lambda t, d: ShardTensor.from_local(t, mesh, [Shard(d)]), nn.Parameter, device),
    }
    if find_spec("physicsnemo") is None:
        return operands, {NEMO: "not installed"}
    try:
        from physicsnemo.domain_parallel import ShardTensor as NemoShardTensor

        operands[NEMO] = Operands(lambda t, d: NemoShardTensor.from_local(t, mesh, [Shard(d)]), nn.Parameter, device)
    except Exception as error:  # any failure of another library must not stop the benchmark
        return operands, {NEMO: summarize_error(error)}
    return operands, {}


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error, without network addresses and file names."""
    first = (str(error) or "no message").splitlines()[0]
    first = re.sub(r"\[[^\]]*/[^\]]*\]|\([^()]*\d+(\.\d+){3}[^()]*\)?|\S*/\S+/\S*", "", first)
    return f"{type(error).__name__}: {first.strip()[:120]}"


def runnable_calls(calls: dict[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the calls that succeed, and the errors of the others. Raise if plain torch or shardfield fails."""
    runnable, errors = {}, {}
    for name, call in calls.items():
        try:
            call()
            runnable[name] = call
        except Exception as error:
            if name in (PLAIN, OURS):
                raise
            errors[name] = summarize_error(error)
    return runnable, errors


# Case -> times of plain torch and shardfield interleaved; times of all libraries interleaved, empty without others.
CaseTimes = dict[str, tuple[Times, Times]]
Skipped = list[tuple[str, str, str]]


def time_calls(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[Callable], float]
) -> tuple[Times, Times]:
    two = interleave({name: calls[name] for name in (PLAIN, OURS)}, rounds, clock)
    return two, interleave(calls, rounds, clock) if len(calls) > 2 else {}


def time_ops(device: str, rounds: int) -> tuple[CaseTimes, Skipped]:
    """Return seconds per call by op and library, and the calls that failed, on one rank."""
    all_operands, missing = make_operands(device)
    skipped = [(name, reason, "") for name, reason in missing.items()]
    times: CaseTimes = {}
    cases: list[tuple[str, Callable[[Any], Any], int]] = [(n, f, 20) for n, f in (OPS | FIELD_OPS).items()]
    cases += [
        ("ten (linear, relu), forward", partial(linear_relu_stack, backward=False), 5),
        (STACK_CASE, partial(linear_relu_stack, backward=True), 5),
    ]
    cases += [(f"x.{n}", f, 200) for n, f in ATTRIBUTES.items()]
    for case, fn, repeats in cases:
        calls, errors = runnable_calls({name: partial(fn, operands) for name, operands in all_operands.items()})
        skipped += [(name, reason, case) for name, reason in errors.items()]
        times[case] = time_calls(calls, rounds, partial(busy_seconds, device=device, repeats=repeats))
    return times, skipped


def time_steps(device: str, size: int, channels: int, rounds: int) -> tuple[CaseTimes, Skipped]:
    """Return seconds of a training step by model and library, on one rank."""
    mesh = domain_mesh(device)
    models_and_channels: dict[str, tuple[nn.Module, int]] = {
        "CNN": (models.cnn(channels), 3),
        "UNet": (models.unet(channels), 3),
        "ViT": (models.vit(size), 1),
    }
    times: CaseTimes = {}
    skipped: Skipped = []
    for name, (model, inputs) in models_and_channels.items():
        case = f"{name} step, {size} x {size}"
        model = model.to(device)
        field = torch.randn(1, inputs, size, size, device=device)
        calls: dict[str, Callable[[], Any]] = {
            PLAIN: partial(train_step, model, field),
            OURS: partial(train_step, copy.deepcopy(model), ShardTensor.from_local(field, mesh, [Shard(2)])),
        }
        dtensor_model = distribute_module(copy.deepcopy(model), mesh)
        calls[DTENSOR] = partial(train_step, dtensor_model, DTensor.from_local(field, mesh, [Shard(0)]))
        calls, errors = runnable_calls({name: calls[name] for name in (PLAIN, DTENSOR, OURS)})
        skipped += [(library, reason, case) for library, reason in errors.items()]
        times[case] = time_calls(calls, rounds, partial(busy_seconds, device=device, repeats=1))
    return times, skipped


def add_rows(table: Table, case: str, times: tuple[Times, Times], unit: str, bars: dict[str, float]) -> None:
    two, all_libraries = times
    table.add_times(case, two, PLAIN, unit, bars)
    table.add_times(case, all_libraries, PLAIN, unit, exclude=two)


def run(settings: Settings, device: str, table: Table) -> None:
    on_device = device != "cpu"
    by_case, skipped = measure_on_ranks(time_ops, 1, device, settings.rounds)[0]
    for case, times in by_case.items():
        bars = {}
        if on_device:
            bars = {OURS: 1.5} if case in POINTWISE else {OURS: 1.3} if case.startswith("conv") else {}
        elif case == STACK_CASE:
            bars = {OURS: 1.5}
        add_rows(table, case, times, "us", bars)
    with_dtensor = {case: times for case, (_, times) in by_case.items() if DTENSOR in times}
    common = [times for case, times in with_dtensor.items() if case in OPS]
    logs = zip(*([math.log(r) for r in ratios(times, OURS, DTENSOR)] for times in common), strict=True)
    means = [math.exp(sum(row) / len(row)) for row in logs]
    table.add_ratio(f"{len(common)} common ops, geometric mean", OURS, means, DTENSOR, 0.5)
    pointwise = {case: ratios(with_dtensor[case], OURS, DTENSOR) for case in POINTWISE if case in with_dtensor}
    worst = max(pointwise, key=lambda case: sorted(pointwise[case])[len(pointwise[case]) // 2])
    table.add_ratio(f"the slowest pointwise op ({worst})", OURS, pointwise[worst], DTENSOR, 1.0)
    for size in settings.sizes:
        by_case, skipped_steps = measure_on_ranks(time_steps, 1, device, size, settings.channels, settings.rounds)[0]
        skipped += skipped_steps
        for case, times in by_case.items():
            bars = {OURS: 1.05 if size >= 512 else 1.5} if on_device and case.startswith("UNet") else {}
            add_rows(table, case, times, "ms", bars)
    for candidate, reason, case in skipped:
        table.add_skipped(candidate, reason, case)
