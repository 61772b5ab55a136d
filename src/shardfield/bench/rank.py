"""A rank among many against plain torch on a field of the rank's own size: what a user of P devices pays per device.

One process simulates a rank of P: its tensors and kernels are real, its messages are counted and not sent. So the times
contain everything that the rank itself does, and no network. Ops: host time of forward, sum and backward on 4
x 8 x 8 values a rank, so small that the cost of the call dominates; the mean over all ops is geometric. Models: forward
and backward; on a device also the time on the host until the step is queued, the time of its kernels, and their number.
The ViT on plain tensors repeats keys and values P times, so that its attention computes as much as a rank of P does.
First step: planning included, of a rank that has planned nothing before.

What the profile shows. An eager rank is host-bound. On the host of an H200, plain torch needs 25 to 35 us of host time
per kernel, and a rank 45 to 65 us, of which the launch is a third and Python the rest. The 256 x 2048 UNet: 343 kernels
(plain 209), 15.6 ms on the host, 8.1 ms on the device, where plain torch needs 17.2 ms for its slower norms. The 64 x
512 and the 3-D UNet have as many kernels and less work, so the host decides: about 40 % of it are the sharded norms (15
launches each), 35 % the convolutions (12 more launches each). The Transolver's kernels take as long as plain torch's;
its host time is that of 57 messages, 40 of them for gradients of parameters, which `parallelize` defers. The ViT visits
the keys of all other ranks together, and its kernels take 23 ms, plain torch's 20; 217 messages, their buffers and
copies take the host. The figures of the H200 are older than those of CPUs.

On a CPU, forward, sum and backward of a group norm take 44 torch calls (plain torch: 9) and 175 calls of Python and
built-in functions; a batch norm 38 and 170, a convolution 31 and 190, a softmax 19 and 130, a truncated transform 31
and 630. The sum is 5 of these torch calls in all rows: its value is on its way to every rank before it is read.
Called from Python, one takes 1 us in a loop and 2 to 3 us among others, with cold caches.

`shardfield build` compiles the torch calls between the messages of norms, routes and softmax. The times of CPUs below
are with it. On the same idle machine, without it and with it, over plain torch: convolution 3.40 and 3.11, group norm
4.10 and 3.26, batch norm 3.54 and 2.88, max_pool 4.61 and 3.83, interpolate 4.30 and 3.77, roll 3.48 and 2.90,
softmax 3.55 and 3.39, the mean of 11 ops 3.48 and 3.14. A torch call from C++ still takes most of 1 us, and about 40
% of a group norm is Python: for a mean of 3, nodes of autograd and the dispatch of a call would have to be compiled
too.

Compiled, the 64 x 512 UNet of a rank of 8 has 122 Triton kernels, 22 convolutions and 28 messages; plain torch has 85
and 16. The rest of the host time over `torch.compile` (12.6 ms against 4.3) is that of the messages: 42 to 44 us each
if called in a loop, 100 to 150 us inside the step, where their torch calls find cold caches. The gradient of a weight
is a call of its own, so that it overlaps with the message of a halo. 22 of the messages have nothing to overlap with
and are one op since; this has not been measured on a device yet. `CUDA graph` is the whole step, captured as plain
torch's is: 1.20 ms against 1.55, with 0.25 ms on the host. `compile(graphs=True)` leaves zero_grad, guards, the loss
and copies of the gradients to the host: 1.9 ms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..compiler import compile
from ..planning import simulated
from ..tensor import ShardTensor
from . import models
from .compile import capture_graph
from .measure import Times, busy_seconds, count_traffic, interleave, ratios, synchronize
from .ranks import train_step
from .table import Table

PLAIN = "plain torch"
GUARDED = "compile(graphs=True)"  # forward and backward as graphs, behind guards; loss and zero_grad outside
NEAR, FAR = 8, 4096  # numbers of ranks that are compared: the cost of a call should not depend on them


@dataclass(frozen=True)
class Settings:
    ranks_of: tuple[int, ...] = (1, 2, NEAR, 64, 512, FAR)
    compiled_of: tuple[int, ...] = (NEAR,)  # numbers of ranks at which steps are also compiled and captured
    rounds: int = 15
    only: str = "all"  # a part of a case's name: run these cases alone

    quick: ClassVar[dict[str, Any]] = {"ranks_of": (1, NEAR), "compiled_of": (), "rounds": 3}
    cuda: ClassVar[dict[str, Any]] = {"rounds": 20}

    def selects(self, name: str) -> bool:
        return self.only == "all" or self.only in name


def rank_of(ranks: int) -> str:
    return f"rank of {ranks:,}"


# ---------------------------------------------------------------------- simulated ranks


@contextmanager
def simulated_meshes(sizes: tuple[int, ...], device: str) -> Iterator[dict[int, DeviceMesh]]:
    """Simulate one rank of the largest world; yield a mesh of each size in which it is the rank in the middle."""
    largest = max(sizes)
    rank = largest // 2
    with simulated(largest, rank):
        yield {n: DeviceMesh(device, torch.arange(n) + rank - n // 2, mesh_dim_names=("domain",)) for n in sizes}


def shard_of(mesh: DeviceMesh, local: Tensor, dim: int) -> ShardTensor:
    """Return a field of which every rank holds as much as `local`."""
    shape = [n * mesh.size() if d == dim else n for d, n in enumerate(local.shape)]
    return ShardTensor.from_local(local.clone(), mesh, [Shard(dim)], "chunk", tuple(shape))


# ---------------------------------------------------------------------- ops


class OpCase(NamedTuple):
    """An op on a field and its parameters; `grows`: the number of its messages grows with the number of ranks."""

    run: Callable[..., Tensor]
    parameters: tuple[tuple[int, ...], ...] = ()
    grows: bool = False


def keep_modes(x: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(x)[..., :3, :3], s=x.shape[-2:])


OPS = {
    "conv 3x3": OpCase(lambda x, w, b: F.conv2d(x, w, b, padding=1), ((4, 4, 3, 3), (4,))),
    "group_norm": OpCase(lambda x, w, b: F.group_norm(x, 2, w, b), ((4,), (4,))),
    "batch_norm": OpCase(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), ((4,), (4,))),
    "max_pool 3": OpCase(lambda x: F.max_pool2d(x, 3, 1, 1)),
    "interpolate": OpCase(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "roll": OpCase(lambda x: x.roll(1, 2)),
    "softmax along the sharded dim": OpCase(lambda x: torch.softmax(x, 2)),
    "attention": OpCase(lambda x: F.scaled_dot_product_attention(x, x, x), grows=True),
    "rfft2, 3 x 3 modes, irfft2": OpCase(keep_modes),
    "linear": OpCase(F.linear, ((8, 8), (8,))),
    "layer_norm": OpCase(lambda x, w, b: F.layer_norm(x, (8,), w, b), ((8,), (8,))),
}


def run_op(op: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None
    op(*leaves).sum().backward()


def op_calls(case: OpCase, meshes: Mapping[int, DeviceMesh], device: str) -> dict[str, Callable[[], None]]:
    """Return forward, sum and backward of an op, on plain tensors and as a rank of each mesh."""
    torch.manual_seed(0)
    local = torch.randn(1, 4, 8, 8, device=device)
    fields = {PLAIN: local} | {
        rank_of(n): shard_of(mesh, local, 2) for n, mesh in meshes.items() if n <= NEAR or not case.grows
    }
    return {
        name: partial(
            run_op,
            case.run,
            [field.requires_grad_(), *(torch.rand(s, device=device, requires_grad=True) for s in case.parameters)],
        )
        for name, field in fields.items()
    }


def messages_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, int]:
    """Return the messages that the rank sends in each call that sends any."""
    sent = {}
    for name, call in calls.items():
        call()
        with count_traffic() as count:
            call()
        sent[name] = count.messages
    return {name: n for name, n in sent.items() if n}


def measure_ops(settings: Settings, device: str, table: Table) -> None:
    chosen = {name: case for name, case in OPS.items() if settings.selects(name)}
    if not chosen:
        return
    times: dict[str, Times] = {}
    with simulated_meshes(settings.ranks_of, device) as meshes:
        for name, case in chosen.items():
            calls = op_calls(case, meshes, device)
            sent = messages_of(calls)
            clock = partial(busy_seconds, device=device, repeats=20)
            times[name] = interleave(calls, settings.rounds, clock)
            bars = {rank_of(NEAR): 4.0} if device == "cpu" and name in ("conv 3x3", "group_norm", "batch_norm") else {}
            table.add_times(name, times[name], PLAIN, "us", bars)
            if not case.grows:
                compare_far(table, name, times[name])
            if sent:
                table.add_counts(f"{name}: sent", sent, "messages")
    for n in settings.ranks_of:
        measured = [t for t in times.values() if rank_of(n) in t]
        logs = zip(*([math.log(r) for r in ratios(t, rank_of(n), PLAIN)] for t in measured), strict=True)
        means = [math.exp(sum(row) / len(row)) for row in logs]
        bar = 3.0 if device == "cpu" and n == NEAR and len(chosen) == len(OPS) else None
        table.add_ratio(f"{len(measured)} ops, geometric mean", rank_of(n), means, PLAIN, bar)


def compare_far(table: Table, name: str, times: Times) -> None:
    near, far = rank_of(NEAR), rank_of(FAR)
    if near in times and far in times:
        table.add_ratio(f"{name}, {FAR:,} ranks", far, ratios(times, far, near), near, 1.1)


# ---------------------------------------------------------------------- models


class ModelCase(NamedTuple):
    """A model and the field of one rank, sharded along `dim`.

    bars: eager over plain torch, compiled over torch.compile, CUDA graph over CUDA graph; at NEAR ranks on a device.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int = 2
    dtype: torch.dtype = torch.float32
    bars: tuple[float | None, ...] = (None, 1.25, 1.05)
    grows: bool = False


MODELS = {
    "cpu": {
        "UNet 2-D, 8 channels, 32 x 64": ModelCase(partial(models.unet, 8), (1, 3, 32, 64)),
        "UNet 3-D, 4 channels, 8 x 16 x 16": ModelCase(partial(models.unet, 4, 3), (1, 3, 8, 16, 16)),
        "Transolver x 4, 32 channels, 256 points": ModelCase(partial(models.transolver, 32, 4), (1, 256, 32), 1),
        "ViT, 32 channels, 2 layers, 64 tokens": ModelCase(
            partial(models.token_mixer, 32, 2), (1, 64, 32), 1, grows=True
        ),
    },
    "cuda": {
        "UNet 2-D, 32 channels, 256 x 2048": ModelCase(
            partial(models.unet, 32), (1, 3, 256, 2048), bars=(1.1, 1.25, 1.05)
        ),
        "UNet 2-D, 32 channels, 64 x 512": ModelCase(partial(models.unet, 32), (1, 3, 64, 512), bars=(2.5, 1.25, 1.05)),
        "UNet 3-D, 16 channels, 32 x 128 x 128": ModelCase(
            partial(models.unet, 16, 3), (1, 3, 32, 128, 128), bars=(1.15, 1.25, 1.05)
        ),
        "Transolver x 4, 128 channels, 16,384 points": ModelCase(
            partial(models.transolver, 128, 4), (1, 16384, 128), 1, bars=(1.3, None, None)
        ),
        "Transolver x 4, 128 channels, 262,144 points": ModelCase(
            partial(models.transolver, 128, 4), (1, 262144, 128), 1, bars=(1.3, None, None)
        ),
        "ViT, 512 channels, 8 layers, 4,096 tokens, bf16": ModelCase(
            partial(models.token_mixer, 512, 8),
            (1, 4096, 512),
            1,
            torch.bfloat16,
            bars=(1.3, None, None),
            grows=True,
        ),
    },
}


class Step(NamedTuple):
    """A step, the kind of its execution, and the candidate it is compared with."""

    call: Callable[[], Any]
    against: str | None = None
    bar: float | None = None


def model_steps(
    case: ModelCase, meshes: Mapping[int, DeviceMesh], compiled_of: tuple[int, ...], device: str
) -> dict[str, Step]:
    """Return the steps of a model: plain, and as a rank of each mesh; eager, compiled, and as a CUDA graph."""
    torch.manual_seed(0)
    model, field = case.build().to(device, case.dtype), torch.randn(case.shape, device=device, dtype=case.dtype)
    graphs = device == "cuda"
    eager_bar, compiled_bar, graph_bar = case.bars if device != "cpu" else (None, None, None)

    def plain_steps(name: str, plain: nn.Module) -> dict[str, Step]:
        steps = {name: Step(partial(train_step, plain, field))}
        if not set(compiled_of) & set(meshes):
            return steps
        steps[f"{name}, torch.compile"] = Step(partial(train_step, torch.compile(plain), field))
        if graphs:
            steps[f"{name}, CUDA graph"] = Step(CapturedStep(partial(train_step, plain, field)))
        return steps

    steps = {} if case.grows else plain_steps(PLAIN, model)
    for n, mesh in meshes.items():
        if case.grows and n > NEAR:
            continue
        plain = PLAIN
        if case.grows:
            plain = f"{PLAIN}, keys of {n} ranks"
            widened = case.build().to(device, case.dtype)
            for block in widened.modules():
                if hasattr(block, "copies_of_keys"):
                    block.copies_of_keys = n
            steps |= (
                plain_steps(plain, widened) if n in compiled_of else {plain: Step(partial(train_step, widened, field))}
            )
        name, sharded = rank_of(n), shard_of(mesh, field, case.dim)
        at_near = n == NEAR
        steps[name] = Step(partial(train_step, model, sharded), plain, eager_bar if at_near else None)
        if n not in compiled_of:
            continue
        compiled_step = partial(train_step, compile(model), sharded)
        steps[f"{name}, compiled"] = Step(compiled_step, f"{plain}, torch.compile", compiled_bar if at_near else None)
        if graphs:
            against, bar = f"{plain}, CUDA graph", graph_bar if at_near else None
            steps[f"{name}, CUDA graph"] = Step(CapturedStep(compiled_step), against, bar)
            steps[f"{name}, {GUARDED}"] = Step(partial(train_step, compile(model, graphs=True), sharded), against, bar)
    return steps


class CapturedStep:
    """A step that is captured as a CUDA graph when it is first called, and replayed in later calls."""

    def __init__(self, step: Callable[[], Any]):
        self._step = step
        self._replay: Callable[[], Any] | None = None

    def __call__(self) -> None:
        if self._replay is None:
            self._replay = capture_graph(self._step)
        self._replay()


def profile_device(call: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds and the number of the kernels, copies and fills of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in kernels) / 1e6, len(kernels)


def host_seconds(call: Callable[[], Any], device: str) -> float:
    """Return the seconds until a call has queued its work on an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    synchronize(device)
    return seconds


def measure_model(name: str, case: ModelCase, settings: Settings, device: str, table: Table) -> None:
    with simulated_meshes(settings.ranks_of, device) as meshes:
        steps = model_steps(case, meshes, settings.compiled_of, device)
        for candidate in list(steps):
            try:
                steps[candidate].call()
            except Exception as error:  # Dynamo, inductor and captures refuse some models; eager steps must run
                if ", " not in candidate.replace(f"{PLAIN}, keys", ""):
                    raise
                del steps[candidate]
                table.add_skipped(candidate, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}", name)
        calls = {candidate: step.call for candidate, step in steps.items()}
        sent = messages_of(calls)
        times = interleave(calls, settings.rounds, partial(busy_seconds, device=device), warmup=2)
        for candidate, step in steps.items():
            against = step.against if step.against in times else None
            pair = {key: times[key] for key in (against, candidate) if key is not None}
            bars = {} if step.bar is None else {candidate: step.bar}
            table.add_times(name, pair, against, bars=bars, exclude=() if against is None else (against,))
        if not case.grows:
            compare_far(table, name, times)
        if sent:
            table.add_counts(f"{name}: sent", sent, "messages")
        if device == "cpu":
            return
        host = interleave(calls, max(settings.rounds // 3, 1), partial(host_seconds, device=device))
        table.add_times(f"{name}: host", host)
        profiled = {candidate: profile_device(call) for candidate, call in calls.items()}
        table.add_counts(f"{name}: kernels' time", {c: seconds for c, (seconds, _) in profiled.items()}, "ms")
        table.add_counts(f"{name}: kernels", {c: float(n) for c, (_, n) in profiled.items()}, "kernels")


def measure_first_steps(settings: Settings, device: str, table: Table) -> None:
    """Time the first step of a UNet in a world in which nothing was planned yet."""
    model, field = models.unet(8).to(device), torch.randn(1, 3, 16, 32, device=device)
    train_step(model, field)  # torch's own first calls
    seconds: Times = {}
    for n in settings.ranks_of:
        for _ in range(3):
            with simulated_meshes((n,), device) as meshes:
                x = shard_of(meshes[n], field, 2)
                seconds.setdefault(rank_of(n), []).append(host_seconds(partial(train_step, model, x), device))
    case = "UNet 2-D, first step"
    table.add_times(case, {name: [min(s)] for name, s in seconds.items()})
    if FAR in settings.ranks_of:
        table.add_ratio(
            f"{case}, {FAR:,} ranks", rank_of(FAR), [min(seconds[rank_of(FAR)]) / 0.5], "half a second", 1.0
        )


def run(settings: Settings, device: str, table: Table) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measure_ops(settings, device, table)
        for name, case in MODELS[device].items():
            if settings.selects(name):
                measure_model(name, case, settings, device, table)
        if settings.selects("first step"):
            measure_first_steps(settings, device, table)
    finally:
        torch.set_num_threads(threads)
