"""Private names for simulating a step: tensors without data, and a world in which the other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from .attention import flash_cpu, flash_cpu_backward


def start_fake_world(rank: int, size: int) -> None:
    """Initialize a default process group of any size in which this process is one rank and the others do not exist.

    torch 2.11-2.15: the backend "fake" is torch's own, for its tests, and registered by importing this module.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def fake_tensor_mode() -> Any:
    """Return a context in which tensors have a shape, dtype and device and no data.

    torch 2.11-2.15: documented, under no public name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> Any:
    """Return a context inside `fake_tensor_mode` in which new tensors have data.

    torch 2.11-2.15: it has no public name.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def drop_from_fake_memo(tensor: Any) -> None:
    """Drop the fake tensor mode's weak reference to a tensor: `swap_tensors` refuses tensors with weak references.

    torch 2.15 keeps a reference to the first result of each kind. 2.11-2.15 have the table; no public name empties it.
    """
    mode = getattr(tensor, "fake_mode", None)
    if mode is not None:
        memo = mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [key for key, value in memo.items() if value is tensor]:
            del memo[key]


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a call whose result depends on values, which fake tensors lack. torch 2.11-2.15."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating point operations of an aten call: products, convolutions, attention; 0 for all others.

    torch 2.11-2.15: `torch.utils.flop_counter` has a formula for each operator, by its packet, which has no public
    name; it lacks the attention kernel of the CPU, whose first arguments are those of CUDA's.
    """
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    packet = func._overloadpacket
    if packet is flash_cpu._overloadpacket:
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if packet is flash_cpu_backward._overloadpacket:
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    count = formula(*args, **kwargs, out_val=out)
    first = out[0] if isinstance(out, (tuple, list)) else out
    return 4 * count if first is not None and first.is_complex() else count


def is_fake(kind: type) -> bool:
    """Return whether a class is that of tensors without data. torch 2.11-2.15: it has no public name."""
    return kind.__module__ == "torch._subclasses.fake_tensor"


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made in `fake_tensor_mode`."""
    return is_fake(tensor.__class__)


@contextmanager
def fast_fsdp_chunks() -> Iterator[None]:
    """Let FSDP2 shard parameters over a thousand ranks without making a thousand empty tensors for each parameter.

    torch 2.11-2.15: FSDP2 uses this rank's chunk only; making each of the others as a fake tensor takes as long as a
    real call. If the name is missing, sharding is slow.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param as module

    before = getattr(module, "_chunk_with_empty", None)

    def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        found = list(torch.chunk(tensor, count, dim=dim))
        return found + [tensor.new_empty(0)] * (count - len(found))

    if before is not None:
        module._chunk_with_empty = chunks
    try:
        yield
    finally:
        if before is not None:
            module._chunk_with_empty = before
