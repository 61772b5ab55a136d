"""What belongs to a rank and is global in a process: it is exchanged when another virtual rank begins to run."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import runtime
from .._compat.virtual import RankState, swap_rank_state
from ..distributed.manager import DistributedManager
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
_OF_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")  # what `warnings.catch_warnings` replaces


class ProcessState:
    """The state of the process while one rank runs."""

    def __init__(self, rank: int, pager: Pager | None):
        self.rank, self._pager = rank, pager
        self.torch_world: Any = RankState()
        self.runtime = runtime.active.successor()
        self.manager: dict[str, Any] = {}
        self._outside: tuple[Any, ...] = ()
        self.begin()

    def begin(self) -> None:
        """Take over the random numbers and flags of the caller, at the beginning of a run."""
        self.generators, self.flags, self.warnings = get_generators(), _flags(), _warning_state()

    def enter(self) -> None:
        """Make this rank's state that of the process."""
        outside_world = swap_rank_state(self.torch_world, True)
        self._outside = outside_world, runtime.active, DistributedManager._shared_state
        self._callers = get_generators(), _flags(), _warning_state()
        runtime.active = self.runtime
        DistributedManager._shared_state = self.manager
        _restore(self.generators, self.flags, self.warnings)

    def leave(self) -> None:
        """Store this rank's state and restore that of the process."""
        if self._pager is not None:
            self._pager.rank_parks(self.rank)
        self.generators, self.flags, self.warnings = get_generators(), _flags(), _warning_state()
        self.runtime = runtime.active
        outside_world, runtime.active, DistributedManager._shared_state = self._outside
        self.torch_world = swap_rank_state(outside_world, False)
        self._outside = ()
        _restore(*self._callers)


def get_generators() -> tuple[Any, ...]:
    """Return the states of the default generators of torch, numpy and `random`."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), devices, random.getstate(), np.random.get_state()


def set_generators(states: tuple[Any, ...]) -> None:
    """Restore the states of the default generators."""
    host, devices, python, numpy = states
    torch.set_rng_state(host)
    if devices is not None:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(python)
    np.random.set_state(numpy)


def _flags() -> list[Any]:
    return [get() for get, _ in _FLAGS]


def _warning_state() -> dict[str, Any]:
    return {name: getattr(warnings, name, None) for name in _OF_WARNINGS}


def _restore(generators: tuple[Any, ...], flags: list[Any], of_warnings: dict[str, Any]) -> None:
    set_generators(generators)
    for (get, change), value in zip(_FLAGS, flags, strict=True):
        if get() != value:
            change(value)
    for name, value in of_warnings.items():
        if value is not None:
            setattr(warnings, name, value)
