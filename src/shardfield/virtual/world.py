"""A world of virtual ranks: all ranks of a mesh in one process, on one device, one after the other."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import runtime
from .._compat.virtual import RankState, register_threaded_backend, swap_rank_state
from .._compat.world import clear_dtensor_caches
from ..comm.transport import DIRECT
from ..distributed.manager import DistributedManager
from ..errors import WorldError
from .group import VirtualGroup, VirtualStore
from .messages import Exchange
from .scheduler import Scheduler


class ProcessState:
    """What belongs to a rank and is global in a process: torch.distributed, the Runtime, random numbers."""

    def __init__(self, seeds: Any):
        self.torch_world: Any = RankState()
        self.runtime = runtime.active.successor()
        self.manager: dict[str, Any] = {}
        self.generators = seeds
        self._outside: tuple[Any, ...] = ()

    def enter(self) -> None:
        """Make this rank's state that of the process."""
        outside_world = swap_rank_state(self.torch_world, True)
        self._outside = outside_world, runtime.active, DistributedManager._shared_state, get_generators()
        runtime.active = self.runtime
        DistributedManager._shared_state = self.manager
        set_generators(self.generators)

    def leave(self) -> None:
        """Store this rank's state and restore that of the process."""
        self.generators, self.runtime = get_generators(), runtime.active
        outside_world, runtime.active, DistributedManager._shared_state, generators = self._outside
        self.torch_world = swap_rank_state(outside_world, False)
        self._outside = ()
        set_generators(generators)


def get_generators() -> tuple[Any, ...]:
    """Return the states of the default generators of torch, numpy and `random`."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), device, random.getstate(), np.random.get_state()


def set_generators(states: tuple[Any, ...]) -> None:
    """Restore the states of the default generators."""
    host, device, python, numpy = states
    torch.set_rng_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)
    random.setstate(python)
    np.random.set_state(numpy)


class VirtualWorld:
    """Ranks of a world in one process. `run` calls a function on each of them, as a launcher would start a program.

    Inside the function `torch.distributed` is initialized, with this rank and `size` ranks. Random generators are those
    of the caller on every rank.

    >>> import torch.distributed as dist
    >>> with VirtualWorld(3) as world:
    ...     world.run(dist.get_rank)
    [0, 1, 2]
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"VirtualWorld: {size} ranks: expected at least 1")
        if runtime.active.virtual is not None:
            raise WorldError("a virtual rank cannot have virtual ranks of its own")
        self.size, self.exchange = size, Exchange()
        generators = get_generators()
        self._states = [ProcessState(generators) for _ in range(size)]
        self._values: dict[str, bytes] = {}
        self.scheduler = self.exchange.scheduler = Scheduler(self._states)
        self._started = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank and return the results, by rank."""
        return self.run_each([functools.partial(function, *args, **kwargs)] * self.size)

    def run_each(self, jobs: list[Callable[[], Any]]) -> list[Any]:
        """Call `jobs[i]` on rank i and return the results. An error of a rank is raised when all have ended."""
        if not self._started:
            register_threaded_backend(_create_group)
            clear_dtensor_caches()
            self.scheduler.run([functools.partial(self._start_rank, rank) for rank in range(self.size)])
            self._started = True
        generators = get_generators()
        for state in self._states:
            state.generators = generators
        modes = _thread_modes()
        try:
            results = self.scheduler.run([functools.partial(_call_in, modes, job) for job in jobs])
        except BaseException:
            self.exchange.clear()
            raise
        left = self.exchange.unfinished()
        if left:
            self.exchange.clear()
            raise WorldError(f"the virtual ranks have ended, and messages have not: {'; '.join(left[:4])}")
        set_generators(self._states[0].generators)
        return results

    def close(self) -> None:
        """End the threads of the ranks and their process groups."""
        if self._started:
            self.scheduler.run([_end_rank] * self.size)
            self._started = False
            clear_dtensor_caches()
        self.scheduler.close()

    def __enter__(self) -> VirtualWorld:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _start_rank(self, rank: int) -> None:
        rt = runtime.active
        rt.virtual, rt.transport_override = self.exchange, DIRECT
        rt.world_thread = self.scheduler.ranks[rank].ident
        torch.autograd.set_multithreading_enabled(False)  # a device's thread would be shared by all ranks
        store = VirtualStore(self.exchange, self._values)
        dist.init_process_group("threaded", store=store, rank=rank, world_size=self.size)


def _create_group(store: Any, coord: int, size: int, timeout: Any) -> VirtualGroup:
    exchange = runtime.active.virtual
    if exchange is None:
        raise WorldError('the backend "threaded" is for virtual ranks: use a VirtualWorld')
    return VirtualGroup(exchange, coord, size)


def _end_rank() -> None:
    DistributedManager.cleanup()
    if dist.is_initialized():
        dist.destroy_process_group()


def _thread_modes() -> tuple[Any, ...]:
    """Return the modes of the caller's thread, which a new thread does not inherit."""
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _call_in(modes: tuple[Any, ...], job: Callable[[], Any]) -> Any:
    grad, inference, autocast = modes
    if inference:
        with torch.inference_mode():
            return _call_in((grad, False, autocast), job)
    if autocast:
        (kind, enabled, dtype), *rest = autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return _call_in((grad, False, rest), job)
    with torch.set_grad_enabled(grad):
        return job()
