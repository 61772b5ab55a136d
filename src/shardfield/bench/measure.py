"""Time, memory and traffic of calls, taken so that they can be compared.

Candidates take turns (A, B, B, A, ...), so that a busy machine slows all of them, and a ratio is taken in each round.
What is told is the median over rounds and the quartiles around it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..comm import collectives

Times = dict[str, list[float]]
"""By candidate, what each round took, in seconds."""


class Spread(NamedTuple):
    """The median of some rounds and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([4.0, 1.0, 2.0, 3.0, 100.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(times: Mapping[str, Sequence[float]], candidate: str, against: str) -> list[float]:
    """A candidate's time over another's, round by round."""
    return [a / b for a, b in zip(times[candidate], times[against], strict=True)]


def synchronize(device: str) -> None:
    """Wait for what the device has been given to do; a CPU has done it."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def wall_seconds(call: Callable[[], Any], device: str) -> float:
    """Seconds by the clock until the slowest rank is done."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    dist.barrier()
    return time.perf_counter() - start


def rank_times(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds that this rank takes by the clock, and processor seconds, which other programs lengthen less."""
    dist.barrier()
    synchronize(device)
    start, begun = time.perf_counter(), time.process_time()
    call()
    synchronize(device)
    return time.perf_counter() - start, time.process_time() - begun


def rank_seconds(call: Callable[[], Any], device: str) -> float:
    """Seconds that this rank takes, to be compared with those of the others: see `max_over_ranks`."""
    return rank_times(call, device)[0]


def busy_seconds(call: Callable[[], Any], device: str, repeats: int = 1) -> float:
    """Seconds a call, of one process that waits for no other.

    On a CPU those of this thread on its core, which other programs do not lengthen; on a device those between two
    events on its stream, so the host's share as well where the device waits for the host.
    """
    for _ in range(1 + repeats // 2):  # not timed: they find the caches full of what ran before
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
    """What the clock tells of each candidate, in rounds of all of them; the first `warmup` rounds are not counted.

    Each round begins with another one: none comes always after the one that leaves the caches worst.
    """
    found: dict[str, list[Any]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            told = clock(candidates[name])
            if turn >= warmup:
                found[name].append(told)
    return found


def max_over_ranks(told: Sequence[Mapping[str, Sequence[float]]]) -> Times:
    """What several ranks tell, as one: a round lasts as long as on its slowest rank."""
    return {name: [max(at) for at in zip(*(t[name] for t in told), strict=True)] for name in told[0]}


# ---------------------------------------------------------------------- memory


def peak_memory(call: Callable[[], Any], device: str) -> int:
    """The most bytes that tensors made in a call take at a time, by torch's own count.

    What the call frees should be its own: gradients of an earlier step, say, are to be freed before.
    """
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        call()
        module.synchronize()
        return module.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    events = watched.profiler.kineto_results.events()
    held = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += nbytes
        most = max(most, held)
    return most


# ---------------------------------------------------------------------- traffic


class Traffic:
    """What this rank has sent: calls by kind, messages and bytes. `take()` gives bytes since it was last called."""

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
    """Count what shardfield sends from this rank; `watch.watched` counts what torch was seen to send."""
    sent, before = Traffic(), collectives.meter
    collectives.meter = sent.add
    try:
        yield sent
    finally:
        collectives.meter = before


@contextmanager
def delay_messages(seconds: float) -> Iterator[None]:
    """Every exchange and every sum arrives so much later than it was sent; gathers, which nothing hides, do not."""
    real = collectives.start_exchange, collectives.start_all_reduce

    def delayed(start: Callable[..., collectives.Pending]) -> Callable[..., collectives.Pending]:
        def run(*args: Any, **kwargs: Any) -> collectives.Pending:
            pending, due = start(*args, **kwargs), time.perf_counter() + seconds
            arrive = pending._finish

            def finish() -> Any:
                time.sleep(max(0.0, due - time.perf_counter()))
                return arrive()

            pending._finish = finish
            return pending

        return run

    collectives.start_exchange, collectives.start_all_reduce = delayed(real[0]), delayed(real[1])
    try:
        yield
    finally:
        collectives.start_exchange, collectives.start_all_reduce = real
