"""`shardfield plan --virtual`: the smallest number of virtual ranks with which a step fits one device.

Virtual ranks keep in memory what the running operator needs; everything else can be moved out (`shardfield.virtual`).
So a step fits if the tensors that stay (parameters, gradients, optimizer state, buffers, the batch) and the tensors of
the largest operator do. Both are counted, on tensors without data.

Ranks run one after the other, each until it waits for a message, so that all of them are at the same place of the
program but for one message: in memory are the tensors of one rank at its peak between two waits, and those that the
others hold while they wait. A rank that recomputes holds the activations of one block, and what it has received.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import runtime
from .._compat import DispatchMode
from ..comm import collectives
from ..comm.grad_deferral import defer_to_average
from ..tensor import ShardTensor
from ..train.task import TaskSpec
from ..virtual.replica import blocks_of
from ..virtual.segment import recomputed
from ..virtual.world import VirtualWorld
from .cost import Device, Link, Network, predict
from .fake_world import simulated, without_data
from .mesh_search import HEADROOM
from .recorder import Seen, watch
from .simulate import Subject, make_batch, values_refused

SAMPLED = 8  # ranks that are planned
OPTIMIZER_STATES = 2  # of Adam, each as large as the parameters


@dataclass
class VirtualOption:
    """A number of virtual ranks: bytes that stay, of the largest operator, and of everything; seconds of computing.

    `recomputed`: bytes of everything if the children of the model are recomputed. `moved` is what is moved out and in
    again at least, in bytes, if they are not.
    """

    ranks: int
    stays: int
    operator: int
    everything: int
    recomputed: int
    seconds: float
    fits: bool
    moved: int

    @property
    def memory(self) -> int:
        """The memory that a step needs at least."""
        return self.stays + self.operator


class LargestOperator(DispatchMode):
    """Find the largest sum of the storages that one operator reads or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {id(s): s for t in _tensors([args, kwargs or {}, out]) for s in [t.untyped_storage()]}
        self.bytes = max(self.bytes, sum(s.nbytes() for s in storages.values()))
        return out


@dataclass
class Run:
    """A step of one rank. waits: bytes at the peak before each wait, and then; grads: of gradients made by then."""

    model: nn.Module
    fields: int
    waits: list[tuple[int, int]]
    grads: list[int]
    operator: int
    seen: Seen


def sample_ranks(ranks: int) -> dict[int, int]:
    """Return the ranks that are planned, and how many ranks each stands for: itself and those that follow.

    >>> sample_ranks(3), sample_ranks(16)
    ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 2, 3: 2, 5: 3, 8: 2, 10: 2, 12: 3, 15: 1})
    """
    between = min(SAMPLED, ranks) - 2
    if between < 1:
        return dict.fromkeys(range(ranks), 1)
    starts = [1 + i * (ranks - 2) // between for i in range(between + 1)]
    return {0: 1, **{a: b - a for a, b in itertools.pairwise(starts)}, ranks - 1: 1}


def peak_of_all(runs: Sequence[tuple[Run, int]]) -> int:
    """Return the peak memory of all ranks. runs: those that were planned, and how many ranks each stands for.

    Ranks take turns between waits, and the one that waits last goes on first: every other turn is in reverse order. A
    rank adds its gradients of parameters to those of the ranks before: they exist once.
    """
    each = [run for run, number in runs for _ in range(number)]
    held, grads, largest = [0] * len(each), 0, 0
    waits = max(len(run.waits) for run in each)
    for i in range(waits):
        for rank in range(len(each)) if i % 2 == 0 else reversed(range(len(each))):
            places = each[rank].waits
            # Ranks without a neighbor wait a few times less.
            for at in range(i * len(places) // waits, (i + 1) * len(places) // waits):
                peak, now = places[at]
                grads = max(grads, each[rank].grads[at])
                largest = max(largest, sum(held) - held[rank] + peak + grads)
                held[rank] = now
    return largest


def count_virtual(subject: Subject, ranks: int, device: Device | None, memory: float) -> VirtualOption:
    """Count a step of `virtualize` on `ranks` virtual ranks, from the steps of at most `SAMPLED` of them.

    device: None measures the seconds of computing on this machine.
    """
    found: dict[bool, list[tuple[Run, int]]] = {False: [], True: []}
    with values_refused(subject.name):
        for recompute, runs in found.items():
            for rank, number in sample_ranks(ranks).items():
                with simulated(ranks, rank):
                    runs.append((_run(subject, ranks, recompute), number))
    run = max((run for run, _ in found[False]), key=lambda each: each.operator)
    parameters = sum(_nbytes(p) for p in run.model.parameters())
    buffers = sum(_nbytes(b) for b in run.model.buffers())
    stays = (2 + OPTIMIZER_STATES) * parameters + run.fields + (1 + ranks) * buffers
    kept, recomputed_peak = (stays - parameters + run.fields + peak_of_all(runs) for runs in found.values())
    available = HEADROOM * memory
    return VirtualOption(
        ranks=ranks,
        stays=stays,
        operator=run.operator,
        everything=kept,
        recomputed=recomputed_peak,
        seconds=time_virtual(subject, ranks) if device is None else ranks * _computing(run.seen, device),
        fits=stays + run.operator <= available,
        moved=max(0, int(kept - available)),
    )


def _computing(seen: Seen, device: Device) -> float:
    return predict(seen, device, Network(Link(0.0, math.inf))).compute


def time_virtual(
    subject: Subject, ranks: int, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of a step of `virtualize(memory="keep")`, from timed steps of the planned ranks.

    The steps run on real tensors and without messages, which are timed by themselves.
    """
    seconds, of_message = 0.0, time_message(clock)
    for rank, number in sample_ranks(ranks).items():
        with simulated(ranks, rank):
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
            outline, batch = _prepare(subject, mesh)
            times = []
            for _ in range(repeats + 1):
                start = clock()
                with _counting_messages() as sent:
                    outline.loss(outline.model(next(iter(batch.values()))), batch).backward()
                times.append(clock() - start)
            seconds += number * (min(times[1:]) + of_message * sum(sent))  # rules plan in the first step
    return seconds


def time_message(clock: Callable[[], float], count: int = 100) -> float:
    """Return the seconds of a small message between virtual ranks: mostly those of changing to another rank."""

    def program() -> None:
        number, group = torch.ones(1), dist.group.WORLD
        for _ in range(count):
            collectives.all_reduce_(number, group)

    with VirtualWorld(2) as world:
        world.run(program)
        start = clock()
        world.run(program)
        return (clock() - start) / (2 * count)


def _prepare(
    subject: Subject, mesh: DeviceMesh, on_grad: Callable[[Tensor], None] | None = None
) -> tuple[TaskSpec, dict[str, ShardTensor]]:
    """Return the model of a rank and its loss, and a batch of ones. `on_grad` is called with parameters in backward."""
    outline = subject.build()

    def drop_gradient(parameter: Tensor) -> None:  # it is added to that of all ranks
        parameter.grad = None
        if on_grad is not None:
            on_grad(parameter)

    for parameter in outline.model.train().parameters():
        defer_to_average(parameter, [mesh.get_group()])
        parameter.register_post_accumulate_grad_hook(drop_gradient)
    shapes = {name: (subject.batch, *shape) for name, shape in outline.sample_shapes.items()}
    return outline, {n: make_batch(mesh, s, subject, n in outline.integer_keys) for n, s in shapes.items()}


def _run(subject: Subject, ranks: int, recompute: bool = False) -> Run:
    """Run a step of this rank of a simulated world."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    largest = LargestOperator()
    with without_data(), watch() as seen:
        grads: list[tuple[int, int]] = []  # waits before it, bytes
        outline, batch = _prepare(subject, mesh, lambda p: grads.append((len(seen.memory.waits), _nbytes(p))))
        model = outline.model
        for block in blocks_of(model) if recompute else ():
            block.forward = recomputed(block)  # type: ignore[method-assign]
        seen.restart()
        held = seen.memory.now
        with largest:
            outline.loss(outline.model(next(iter(batch.values()))), batch).backward()
        seen.memory.wait()  # the last part of the step
    waits = [(peak - held, now - held) for peak, now in seen.memory.waits]
    made = [sum(nbytes for at, nbytes in grads if at <= i) for i in range(len(waits))]
    fields = sum(math.prod(x.shape) * subject.dtype.itemsize for x in batch.values())
    return Run(model, fields, waits, made, largest.bytes, seen)


@contextmanager
def _counting_messages() -> Iterator[list[int]]:
    """Yield the numbers of messages that the rank sends."""
    found: list[int] = []
    with runtime.observing(meter=lambda kind, messages, nbytes: found.append(messages)):
        yield found


def smallest_that_fits(
    subject: Subject, device: Device | None, memory: float, show: Callable[[str], None] = lambda text: None
) -> list[VirtualOption]:
    """Return the options that were tried, by number of ranks; the first that fits is the smallest, if one does."""
    tried: dict[int, VirtualOption] = {}

    def fits(ranks: int) -> bool:
        show(f"{ranks} virtual ranks")
        tried[ranks] = count_virtual(subject, ranks, device, memory)
        return tried[ranks].fits

    limit = subject.sizes()[0]
    low, high = 0, 1
    while not fits(high) and high < limit:
        low, high = high, min(2 * high, limit)
    while tried[high].fits and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return [tried[ranks] for ranks in sorted(tried)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for v in values for t in _tensors(v)]
