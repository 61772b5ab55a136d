"""`shardfield plan --virtual`: the smallest number of virtual ranks with which a step fits one device.

Virtual ranks keep in memory what the running operator needs; everything else can be moved out (`shardfield.virtual`).
So a step fits if the tensors that stay (parameters, gradients, optimizer state, buffers, the batch) and the tensors of
the largest operator do. Both are counted, on tensors without data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .._compat import DispatchMode
from ..comm.grad_deferral import defer_to_average
from .cost import Device, Link, Network, predict
from .fake_world import simulated, without_data
from .mesh_search import HEADROOM
from .recorder import watch
from .simulate import Subject, make_batch, values_refused

OPTIMIZER_STATES = 2  # of Adam, each as large as the parameters


@dataclass
class VirtualOption:
    """A number of virtual ranks: bytes that stay, of the largest operator, and of everything; seconds of computing.

    `moved` is what is moved out and in again at least, in bytes.
    """

    ranks: int
    stays: int
    operator: int
    everything: int
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


def count_virtual(subject: Subject, ranks: int, device: Device, memory: float) -> VirtualOption:
    """Count a step of `virtualize` on `ranks` virtual ranks, by the largest of its first, middle and last rank."""
    counted = []
    with values_refused(subject.name):
        for rank in sorted({0, ranks // 2, ranks - 1}):
            with simulated(ranks, rank):
                counted.append(_count(subject, ranks, device, memory))
    return max(counted, key=lambda option: option.operator)


def _count(subject: Subject, ranks: int, device: Device, memory: float) -> VirtualOption:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    largest = LargestOperator()
    with without_data(), watch() as seen:
        before = torch.get_default_dtype()
        torch.set_default_dtype(subject.dtype)
        try:
            outline = subject.outline()
        finally:
            torch.set_default_dtype(before)
        model = outline.model.train()
        for parameter in model.parameters():
            defer_to_average(parameter, [mesh.get_group()])
        shapes = {name: (subject.batch, *shape) for name, shape in outline.sample_shapes.items()}
        batch = {n: make_batch(mesh, s, subject, n in outline.integer_keys) for n, s in shapes.items()}
        seen.restart()
        held = seen.memory.now
        with largest:
            outline.loss(model(next(iter(batch.values()))), batch).backward()
        activations = seen.peak - held
    parameters = sum(_nbytes(p) for p in model.parameters())
    fields = sum(math.prod(s) * subject.dtype.itemsize for s in shapes.values())
    buffers = sum(_nbytes(b) for b in model.buffers())
    stays = (2 + OPTIMIZER_STATES) * parameters + fields + (1 + ranks) * buffers
    everything = stays + ranks * activations
    available = HEADROOM * memory
    return VirtualOption(
        ranks=ranks,
        stays=stays,
        operator=largest.bytes,
        everything=everything,
        seconds=ranks * predict(seen, device, Network(Link(0.0, math.inf))).compute,
        fits=stays + largest.bytes <= available,
        moved=max(0, int(everything - available)),
    )


def smallest_that_fits(
    subject: Subject, device: Device, memory: float, show: Callable[[str], None] = lambda text: None
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
