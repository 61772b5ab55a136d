"""Measure time, memory and traffic of calls so that they can be compared.

Candidates are interleaved (A, B, B, A, ...), so that other load on the machine affects all of them, and ratios are
computed within a round. Results are the median over the rounds and its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import runtime
from ..comm import collectives

Times = dict[str, list[float]]
"""Candidate -> seconds of each round."""


class Spread(NamedTuple):
    """The median and the quartiles of some rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of values.

    >>> spread([4.0, 1.0, 2.0, 3.0, 100.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(times: Mapping[str, Sequence[float]], candidate: str, against: str) -> list[float]:
    """Return the ratio of two candidates' times in each round."""
    return [a / b for a, b in zip(times[candidate], times[against], strict=True)]


def synchronize(device: str) -> None:
    """Block until the device has finished its queued work; a no-op on a CPU."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def wall_seconds(call: Callable[[], Any], device: str) -> float:
    """Return the wall-clock seconds until the slowest rank has finished a call."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    dist.barrier()
    return time.perf_counter() - start


def rank_times(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of a call on this rank. Other load affects CPU seconds less."""
    dist.barrier()
    synchronize(device)
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    call()
    synchronize(device)
    return time.perf_counter() - wall_start, time.process_time() - cpu_start


def rank_seconds(call: Callable[[], Any], device: str) -> float:
    """Return the wall-clock seconds of a call on this rank; `max_over_ranks` combines those of all ranks."""
    return rank_times(call, device)[0]


def thread_seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of this thread: waiting, and the threads of gloo that poll, do not count."""
    dist.barrier()
    start = time.thread_time()
    call()
    return time.thread_time() - start


def busy_seconds(call: Callable[[], Any], device: str, repeats: int = 1) -> float:
    """Return the seconds per call in a process that does not communicate.

    On a CPU it is the CPU time of this thread, which other load does not lengthen. On a device it is the time between
    two events on its stream, which includes the time in which the device is idle because it is host-bound.
    """
    for _ in range(1 + repeats // 2):  # not timed: warm the caches, which hold data of the previous candidate
        call()
    synchronize(device)
    if device == "cpu":
        start = time.thread_time()
        for _ in range(repeats):
            call()
        return (time.thread_time() - start) / repeats
    first, last = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def interleave(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[Callable[[], Any]], Any], warmup: int = 1
) -> dict[str, list[Any]]:
    """Time all candidates in each round. Return the readings of `clock` by candidate, without `warmup` rounds.

    Each round begins with another candidate, so that none always runs after the one that leaves the coldest caches.
    """
    readings: dict[str, list[Any]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            reading = clock(candidates[name])
            if turn >= warmup:
                readings[name].append(reading)
    return readings


def max_over_ranks(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> Times:
    """Return the maximum over the ranks for each candidate and round: a round takes as long as its slowest rank."""
    return {name: [max(at) for at in zip(*(t[name] for t in by_rank), strict=True)] for name in by_rank[0]}


# ---------------------------------------------------------------------- memory


def peak_memory(call: Callable[[], Any], device: str) -> int:
    """Return the peak of the bytes that a call allocates for tensors, as counted by torch.

    The call must not free tensors that existed before it: free gradients of an earlier step first.
    """
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        call()
        module.synchronize()
        return module.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    allocated = peak = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        allocated += nbytes
        peak = max(peak, allocated)
    return peak


# ---------------------------------------------------------------------- traffic


class Traffic:
    """Messages and bytes that this rank sent, in total and by kind. `take()` returns the bytes since its last call."""

    def __init__(self) -> None:
        self.calls = self.messages = self.bytes = self._taken = 0
        self.kinds: dict[str, list[int]] = {}

    def add(self, kind: str, messages: int, nbytes: int) -> None:
        self.calls += 1
        self.messages += messages
        self.bytes += nbytes
        row = self.kinds.setdefault(kind, [0, 0])
        row[0] += messages
        row[1] += nbytes

    def take(self) -> int:
        taken, self._taken = self._taken, self.bytes
        return self.bytes - taken


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the messages that shardfield sends from this rank. `traffic.CommCounter` counts those of torch."""
    sent = Traffic()
    with runtime.observing(meter=sent.add):
        yield sent


@contextmanager
def delay_messages(seconds: float) -> Iterator[None]:
    """Delay the arrival of every exchange and all_reduce. Gathers, which nothing overlaps with, are not delayed."""
    real = collectives.start_sends, collectives.start_all_reduce

    def delayed(start: Callable[..., collectives.Pending]) -> Callable[..., collectives.Pending]:
        def run(*args: Any, **kwargs: Any) -> collectives.Pending:
            pending, due = start(*args, **kwargs), time.perf_counter() + seconds
            arrive = pending._finish

            def finish() -> Any:
                time.sleep(max(0.0, due - time.perf_counter()))
                return pending.recv_buffers if arrive is None else arrive()

            pending._finish = finish
            return pending

        return run

    collectives.start_sends, collectives.start_all_reduce = delayed(real[0]), delayed(real[1])
    try:
        yield
    finally:
        collectives.start_sends, collectives.start_all_reduce = real
