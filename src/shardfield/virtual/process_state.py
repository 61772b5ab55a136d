"""What belongs to a rank and is global in a process: it is exchanged when another virtual rank begins to run."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import runtime, trace_state
from .._compat.virtual import RankState, current_world, set_rank_state
from ..distributed.manager import DistributedManager
from ..errors import WorldError
from .paging import Pager

# Flags that a program may set for a while, also around a wait: with `sdpa_kernel` or `set_default_dtype`, for example.
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *(
        (functools.partial(getattr, backend, name), functools.partial(setattr, backend, name))
        for backend, name in (
            (torch.backends.mkldnn, "enabled"),
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "benchmark"),
            (torch.backends.cudnn, "deterministic"),
        )
    ),
)
MT19937_BYTES = 625 * 4  # 624 words and a position
_OF_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")  # what `warnings.catch_warnings` replaces


class ProcessState:
    """The state of the process while one rank runs.

    Ranks follow each other without the state of the caller in between: `caller_state` stores and restores that. Reading
    the state of numpy's generator takes longer than the rest together, so it is read when its memory has changed.
    `shown` is the one that numpy has, shared by all ranks of a world.
    """

    def __init__(self, rank: int, pager: Pager | None, shown: NumpyState):
        self.rank, self._pager, self._shown = rank, pager, shown
        self.torch_world: Any = RankState()
        self.runtime = runtime.active.successor()
        self.manager: dict[str, Any] = {}

    def begin(self, generators: Generators) -> None:
        """Take over the random numbers and flags of the caller, at the beginning of a run."""
        self.generators, self.flags, self.warnings = generators, get_flags(), _warning_state()

    def enter(self) -> None:
        """Make this rank's state that of the process."""
        set_rank_state(self.torch_world, True)
        runtime.active = self.runtime
        DistributedManager._shared_state = self.manager
        _restore(self.generators, self.flags, self.warnings, self._shown)

    def leave(self) -> None:
        """Store this rank's state."""
        if self._pager is not None:
            self._pager.rank_parks(self.rank)
        self.generators = get_generators(self.generators.numpy)
        self.flags, self.warnings = get_flags(), _warning_state()
        self._shown.value = self.generators.numpy
        self.runtime = runtime.active


@contextmanager
def caller_state(states: Sequence[ProcessState], shown: NumpyState, exchange: Any) -> Iterator[None]:
    """Begin a run of ranks with the state of the caller; restore it at the end. `exchange`: the ranks' messages."""
    active, manager = runtime.active, DistributedManager._shared_state
    if active.virtual is not None:
        raise WorldError(
            "a virtual rank cannot run virtual ranks of its own, and virtual ranks cannot run in two threads of a "
            "process at the same time: each has the state of the process while it runs"
        )
    generators, flags, of_warnings = get_generators(), get_flags(), _warning_state()
    shown.value = generators.numpy
    for state in states:
        state.begin(generators)
    world = current_world()
    try:
        active.virtual = exchange
        yield
    finally:
        active.virtual = None
        set_rank_state(world, False)
        runtime.active, DistributedManager._shared_state = active, manager
        _restore(generators, flags, of_warnings, shown)


class NumpyState:
    """The state that numpy's generator has: a value of `Generators.numpy`."""

    value: Any = None


class Generators(NamedTuple):
    """The states of the default generators. numpy: the memory of its generator, and its state."""

    host: Tensor
    devices: list[Tensor]
    python: tuple[Any, ...]
    numpy: tuple[bytes, Any]


def get_generators(before: tuple[bytes, Any] | None = None) -> Generators:
    """Return the states of the default generators of torch, numpy and `random`. `before`: an earlier one of numpy."""
    devices = [g.get_state() for g in torch.cuda.default_generators] if torch.cuda.is_initialized() else []
    memory = _numpy_memory()
    if before is None or memory != before[0] or before[1][3]:  # [3]: it has a normal number in reserve
        before = memory, np.random.get_state()
    return Generators(torch.get_rng_state(), devices, random.getstate(), before)


def equal(a: Generators, b: Generators) -> bool:
    """Return whether two states of the generators are the same. numpy's: `b.numpy` was passed when `a` was read."""
    tensors = zip((a.host, *a.devices), (b.host, *b.devices), strict=False)
    same = a.numpy is b.numpy and a.python == b.python and len(a.devices) == len(b.devices)
    with trace_state.concrete():  # the states are real, also where fields have no data
        return same and all(torch.equal(x, y) for x, y in tensors)


def set_generators(states: Generators, shown: NumpyState | None = None) -> None:
    """Restore the states of the default generators. `shown`: what numpy has."""
    torch.set_rng_state(states.host)
    for generator, state in zip(torch.cuda.default_generators, states.devices, strict=False):
        generator.set_state(state)
    random.setstate(states.python)
    if shown is None or shown.value is not states.numpy:
        np.random.set_state(states.numpy[1])
    if shown is not None:
        shown.value = states.numpy


def _numpy_memory() -> bytes:
    """Return the memory of numpy's global generator: its key and the position in it, if it is numpy's own."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return os.urandom(16)  # counts as changed
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)


def get_flags() -> list[Any]:
    """Return the flags of torch that a program may set for a while."""
    return [get() for get, _ in _FLAGS]


def set_flags(flags: list[Any]) -> None:
    """Restore flags of torch."""
    for (get, change), value in zip(_FLAGS, flags, strict=True):
        if get() != value:
            change(value)


def _warning_state() -> dict[str, Any]:
    return {name: getattr(warnings, name, None) for name in _OF_WARNINGS}


def _restore(generators: Generators, flags: list[Any], of_warnings: dict[str, Any], shown: NumpyState) -> None:
    set_generators(generators, shown)
    set_flags(flags)
    for name, value in of_warnings.items():
        if value is not None:
            setattr(warnings, name, value)
