"""Run and record one training step of a model on one rank of a mesh, as `shardfield train` runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import runtime
from .._compat.fake import data_dependent_errors
from ..comm import collectives
from ..errors import ShardfieldError
from ..layout import DimSharding, Layout, balanced
from ..tensor import ShardTensor, wrap
from ..train.complex_params import real_pairs
from ..train.config import DOMAIN_AXES, UsageError
from ..train.loop import to_full_tensor
from ..train.parallel import LocalGrads, Strategy, parallelize
from ..train.task import TaskSpec
from .fake_world import build_with_data, simulated, without_data
from .recorder import Seen, watch


@contextmanager
def values_refused(name: str) -> Iterator[None]:
    """Turn the error of a call that depends on values, in a model's __init__ or in a step, into one line."""
    try:
        yield
    except data_dependent_errors() as error:
        raise ShardfieldError(
            f"{name}: the result of a call depends on tensor values, and planning runs without data: {error}"
        ) from error


@dataclass
class Subject:
    """The training job to plan: a function that builds model and loss, the global batch, and the training options."""

    name: str
    outline: Callable[[], TaskSpec]
    batch: int
    dims: tuple[int, ...] = (1, 2)  # dims of a sample that may be sharded, in order of preference
    strategy: Strategy = "fsdp"
    dtype: torch.dtype = torch.float32
    mixed_precision: torch.dtype | None = None
    recompute: bool = False
    reads_values: bool = field(default=False, repr=False)  # found: the model's __init__ depends on tensor values
    field: tuple[int, ...] = field(default=(), repr=False)  # shape of the first tensor of a sample, filled lazily

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the dims that may be sharded."""
        if not self.field:
            with values_refused(self.name), without_data():
                self.field = next(iter(self.build().sample_shapes.values()))
        return tuple(self.field[d] for d in self.dims)

    def build(self) -> TaskSpec:
        """Return the outline with the model in its final dtype, since fake parameters cannot be converted."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            if not self.reads_values:
                try:
                    return self.outline()
                except data_dependent_errors():
                    self.reads_values = True
            return self._build_with_data() if runtime.active.fake_tensors else self.outline()
        finally:
            torch.set_default_dtype(before)

    def _build_with_data(self) -> TaskSpec:
        found: list[TaskSpec] = []

        def build() -> nn.Module:
            found.append(self.outline())
            return found[0].model

        build_with_data(build)
        return found[0]


class Step:
    """A training job on a mesh of data x domain ranks, ready to run steps. All ranks of the mesh create one."""

    def __init__(self, subject: Subject, mesh: DeviceMesh):
        self.subject, self.mesh = subject, mesh
        axes = (mesh.mesh_dim_names or ())[1:]
        outline = subject.build()
        if next(outline.model.parameters(), None) is None:
            raise UsageError(f"{subject.name}: the model has no parameters, so there is no training step to plan")
        self.loss = outline.loss
        self.model: nn.Module = parallelize(
            real_pairs(outline.model).train(),
            mesh,
            domain=axes,
            strategy=subject.strategy,
            mixed_precision=subject.mixed_precision,
            checkpoint=subject.recompute,
            sync=False,  # every rank builds the model from the same seed, or without data
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        samples = subject.batch // mesh.size(0)
        domain = mesh[axes]
        self.batch = {
            name: make_batch(domain, (samples, *shape), subject, name in outline.integer_keys)
            for name, shape in outline.sample_shapes.items()
        }
        # A zero step allocates the optimizer state, which a real run has from its second step on.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> Tensor:
        """Run forward, backward, the all_reduce of loss and gradient norm, gradient clipping, and the optimizer."""
        self.optimizer.zero_grad()
        first = next(iter(self.batch.values()))
        loss = self.loss(self.model(first), self.batch)
        loss.backward()
        total = to_full_tensor(loss.detach()).double()
        grads = LocalGrads(self.model)
        stats = collectives.all_reduce(torch.stack([total, grads.sum_of_squares()]), dist.group.WORLD)
        grads.clip_(stats[1].sqrt(), 1.0)
        self.optimizer.step()
        return stats


def make_batch(domain: DeviceMesh, shape: Sequence[int], subject: Subject, integers: bool) -> ShardTensor:
    """Return a batch of ones. Fields are sharded evenly over the domain, other tensors are replicated."""
    dims: list[tuple[DimSharding, ...]] = [(DimSharding(n),) for n in shape]
    if len(shape) > 2:
        for axis, dim in zip(range(domain.ndim), subject.dims, strict=False):
            if domain.size(axis) > 1:
                n = shape[dim + 1]
                dims[dim + 1] = (DimSharding(n, (axis,), balanced(n, domain.size(axis))),)
    layout = Layout.make(domain, dims)
    dtype = torch.int64 if integers else subject.dtype
    return wrap(torch.ones(layout.local_shape, dtype=dtype), layout)


def record_step(subject: Subject, shape: Sequence[int]) -> Seen:
    """Record one step on this rank of the current world, real or simulated; `shape` is (data, domain, ...)."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("data", *DOMAIN_AXES[: len(shape) - 1]))
    real = dist.get_backend() != "fake"
    with nullcontext() if real else without_data(), watch() as seen:
        step = Step(subject, mesh)
        # Warm-up on real ranks: rules plan in the first step, and DDP broadcasts its rebuilt buckets in the second.
        for _ in range((2 if subject.strategy == "ddp" else 1) if real else 0):
            step.run()
        seen.restart()
        step.run()
    return seen


def count(subject: Subject, shape: Sequence[int], rank: int) -> Seen:
    """Simulate a step of one rank of a mesh (data, domain, ...) without data. Return its record."""
    with values_refused(subject.name), simulated(torch.Size(shape).numel(), rank):
        return record_step(subject, shape)


def time_step(
    subject: Subject,
    shape: Sequence[int],
    rank: int,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds of `repeats` steps of a rank, on real tensors and without communication."""
    with simulated(torch.Size(shape).numel(), rank):
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("data", *DOMAIN_AXES[: len(shape) - 1]))
        step = Step(subject, mesh)
        times: list[float] = []
        for _ in range(repeats + 2):
            start = clock()
            step.run()
            times.append(clock() - start)
    return times[2:]


def representative_ranks(shape: Sequence[int]) -> list[int]:
    """Return the ranks that are simulated: the middle, the first and the last rank of the first domain."""
    domain = shape[1:]

    def rank_at(coords: Sequence[int]) -> int:
        flat = 0
        for coord, size in zip(coords, domain, strict=True):
            flat = flat * size + coord
        return flat

    positions = (lambda n: n // 2, lambda n: 0, lambda n: n - 1)
    return list(dict.fromkeys(rank_at([position(n) for n in domain]) for position in positions))
