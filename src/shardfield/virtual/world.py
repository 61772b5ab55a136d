"""A world of virtual ranks: all ranks of a mesh in one process, on one device, one after the other."""

from __future__ import annotations

import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import runtime
from .._compat.virtual import default_store, register_threaded_backend
from .._compat.world import clear_dtensor_caches
from ..comm.transport import DIRECT
from ..distributed.manager import DistributedManager
from ..errors import WorldError
from .group import VirtualGroup, VirtualStore
from .links import Links
from .messages import Exchange
from .paged_operators import ExposedAddresses, PagedOperators
from .paging import Pager
from .process_state import NumpyState, ProcessState, caller_state, set_generators
from .scheduler import Scheduler

Memory = Literal["keep", "offload", "auto"]
BUDGET = 0.7  # of the memory that is free, if no budget is named: operators need workspace too


def default_budget() -> int:
    """Return the bytes that pages may take by default: a part of the free memory of the device."""
    if torch.cuda.is_available():
        return int(BUDGET * free_device_memory())
    return int(BUDGET * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def free_device_memory() -> int:
    """Return the bytes of the current GPU that this process may still allocate."""
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    return min(free + held, limit) - torch.cuda.memory_allocated()


class VirtualWorld:
    """Ranks of a world in one process. `run` calls a function on each of them, as a launcher would start a program.

    Inside the function `torch.distributed` is initialized, with this rank and `size` ranks. Random generators are those
    of the caller on every rank.

    memory: "keep" leaves all tensors on the device, as P processes on it would. "offload" moves the tensors of a rank
    out while it waits: CUDA tensors to pinned host memory, CPU tensors to a file in `folder`. "auto" moves tensors out
    when those of all ranks exceed `budget` bytes (70 % of the free memory by default), the ones used longest ago first.

    group: the processes that share the world, for example `dist.group.WORLD` of a launcher. Each of them makes a world
    of `size` ranks and calls `run`; process p has the ranks from p * size on. `run` returns the results of this
    process, and an error of one process is raised in all of them.

    >>> import torch.distributed as dist
    >>> with VirtualWorld(3) as world:
    ...     world.run(dist.get_rank)
    [0, 1, 2]
    """

    def __init__(
        self,
        size: int,
        *,
        memory: Memory = "keep",
        budget: int | None = None,
        folder: str | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if memory not in ("keep", "offload", "auto"):
            hint = ": use virtualize, or parallelize(checkpoint=...)" if memory == "recompute" else ""
            raise ValueError(f"VirtualWorld: memory={memory!r} is none of 'keep', 'offload', 'auto'{hint}")
        if size < 1:
            raise ValueError(f"VirtualWorld: {size} ranks: expected at least 1")
        if runtime.active.virtual is not None:
            raise WorldError("a virtual rank cannot have virtual ranks of its own")
        self.size = size
        self.pager: Pager | None = None
        if memory != "keep":
            limit = budget if budget is not None or memory == "offload" else default_budget()
            self.pager = Pager(limit, eager=memory == "offload", folder=folder)
        self._links = Links(group, size) if group is not None and group.size() > 1 else None
        self._first = 0 if self._links is None else self._links.process * size
        self._world_size = size if self._links is None else self._links.processes * size
        self._store = None if self._links is None else dist.PrefixStore("shardfield/virtual", default_store())
        self.paging = True  # False: the pager does not see the next run
        self.exchange = Exchange(self.pager, self._links)
        self._shown = NumpyState()
        self._states = [ProcessState(rank, self.pager, self._shown) for rank in range(size)]
        self._values: dict[str, bytes] = {}
        self.scheduler = self.exchange.scheduler = Scheduler(self._states, self._first)
        if self._links is not None:
            self.scheduler.links, self.scheduler.poll = self._links, self.exchange.poll
        self._started = False
        weakref.finalize(self, self.scheduler.close).atexit = False  # threads end with a world that nobody closes

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank and return the results, by rank."""
        return self.run_each([functools.partial(function, *args, **kwargs)] * self.size)

    def run_each(self, jobs: list[Callable[[], Any]]) -> list[Any]:
        """Call `jobs[i]` on rank i and return the results. An error of a rank is raised when all have ended."""
        if not self._started:
            register_threaded_backend(_create_group)
            clear_dtensor_caches()
            self._run_jobs([functools.partial(self._start_rank, rank) for rank in range(self.size)])
            self._started = True
        modes = _thread_modes()
        self.exchange.pager = self.pager if self.paging else None
        calls = [functools.partial(self._call, rank, modes, job) for rank, job in enumerate(jobs)]
        self.scheduler.at_end = functools.partial(_call_in, modes, self._clean_up)
        try:
            with nullcontext() if self.pager is None else self.pager.watching_resizes():
                results = self._run_jobs(calls)
        except BaseException as error:
            self._clean_up([error])
            raise
        finally:
            self.scheduler.at_end = None
        set_generators(self._states[0].generators)
        return results

    def _clean_up(self, errors: list[BaseException]) -> None:
        """Drop the messages and variables of ranks that failed; make the tensors of all ranks ordinary ones."""
        if errors:
            self.exchange.clear()
        for error in errors:
            traceback.clear_frames(error.__traceback__)  # their variables hold tensors that may be paged out
        if self.pager is not None:
            self.pager.restore_all()

    def _run_jobs(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call `jobs[i]` on rank i. Raise an error of a rank, of another process, or of messages that are left."""
        if self._links is None:
            return self._run_here(jobs)
        self._links.begin_run()
        try:
            results = self._run_here(jobs)
        except BaseException as error:
            self._links.end_run(str(error) or type(error).__name__)
            raise
        elsewhere = self._links.end_run("")
        if elsewhere:
            raise WorldError(f"virtual ranks of another process failed: {elsewhere}")
        return results

    def _run_here(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        with caller_state(self._states, self._shown, self.exchange):
            results = self.scheduler.run(jobs)
        left = self.exchange.unfinished()
        if left:
            raise WorldError(f"the virtual ranks have ended, and messages have not: {'; '.join(left[:4])}")
        return results

    def close(self) -> None:
        """End the threads of the ranks and their process groups."""
        if self._started:
            self._run_jobs([_end_rank] * self.size)
            self._started = False
            clear_dtensor_caches()
        self.scheduler.close()
        if self._links is not None:
            self._links.close()
            self._links = None
        if self.pager is not None:
            self.pager.close()

    def __enter__(self) -> VirtualWorld:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _call(self, rank: int, modes: tuple[Any, ...], job: Callable[[], Any]) -> Any:
        if self.pager is None or not self.paging:
            return _call_in(modes, job)
        with PagedOperators(self.pager, rank), ExposedAddresses(self.pager):
            return _call_in(modes, job)

    def _start_rank(self, rank: int) -> None:
        rt = runtime.active
        rt.virtual, rt.transport_override = self.exchange, DIRECT
        rt.world_thread = self.scheduler.ranks[rank].ident
        torch.autograd.set_multithreading_enabled(False)  # a device's thread would be shared by all ranks
        store = VirtualStore(self.exchange, self._values, self._store)
        hook = sys.excepthook  # init_process_group replaces it by one that names the rank
        dist.init_process_group("threaded", store=store, rank=self._first + rank, world_size=self._world_size)
        sys.excepthook = hook


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
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, stream


def _call_in(modes: tuple[Any, ...], job: Callable[..., Any], *args: Any) -> Any:
    grad, inference, autocast, stream = modes
    if stream is not None:
        with torch.cuda.stream(stream):  # sets the device too
            return _call_in((grad, inference, autocast, None), job, *args)
    if inference:
        with torch.inference_mode():
            return _call_in((grad, False, autocast, None), job, *args)
    if autocast:
        (kind, enabled, dtype), *rest = autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return _call_in((grad, False, rest, None), job, *args)
    with torch.set_grad_enabled(grad):
        return job(*args)
