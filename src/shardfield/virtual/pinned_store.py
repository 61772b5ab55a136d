"""Bytes of pages of a GPU in pinned host memory, copied on two side streams.

All copies are ordered by events on streams; the host does not wait. A copy out begins after the kernels that were
launched before it, and the memory of its page is released on the stream of the kernels, which waits for the copy first.
A copy in begins after the kernels that may still use the memory that its page was given.
"""

from __future__ import annotations

import bisect
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import ShardfieldError

CHUNK, LARGEST_CHUNK = 1 << 30, 1 << 33  # bytes of host memory that are pinned at once
ALIGNMENT = 512
HOST_RESERVE = 0.06  # of the host memory stays free


class HostMemoryFull(ShardfieldError):
    """No host memory is left for a page."""


class Region(NamedTuple):
    """A range of bytes of a chunk of pinned memory."""

    chunk: int
    start: int
    stop: int


class PinnedArena:
    """Pinned host memory in chunks, of which regions of any size are taken and given back.

    torch's allocator of pinned memory would round sizes up to powers of two. Pinning takes long, so that chunks are
    kept until the arena is closed.
    """

    def __init__(self, limit: int | None = None, pin: bool = True):
        self._limit, self._pin = limit, pin
        self._chunks: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []  # of each chunk: (start, stop), in order, never adjacent
        self.size = self.taken = self.peak = 0
        self.close = weakref.finalize(self, _unpin, self._chunks)

    def take(self, nbytes: int) -> Region | None:
        """Return a region of at least `nbytes`, None if no free one is that large."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for number, free in enumerate(self._free):
            for at, (start, stop) in enumerate(free):
                if stop - start >= nbytes:
                    free[at : at + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                    self.taken += nbytes
                    self.peak = max(self.peak, self.taken)
                    return Region(number, start, start + nbytes)
        return None

    def give_back(self, region: Region) -> None:
        """Make a region free, and join it with free neighbors."""
        number, start, stop = region
        self.taken -= stop - start
        free = self._free[number]
        at = bisect.bisect(free, (start, stop))
        if at < len(free) and free[at][0] == stop:
            stop = free.pop(at)[1]
        if at and free[at - 1][1] == start:
            at -= 1
            start = free.pop(at)[0]
        free.insert(at, (start, stop))

    def grow(self, nbytes: int) -> bool:
        """Allocate a chunk that has room for `nbytes`; return False if the host has no memory for it."""
        least = max(CHUNK, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        limit = available_host_memory() if self._limit is None else self._limit - self.size
        if least > limit:
            return False
        # Large chunks lose less at their ends: a page of 0.6 GiB fits a chunk of 1 GiB once, one of 8 GiB 13 times.
        size = min(max(least, min(self.size, LARGEST_CHUNK)), limit // ALIGNMENT * ALIGNMENT)
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return False
        memory.madvise(mmap.MADV_HUGEPAGE)
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        if self._pin:
            chunk.zero_()  # several threads allocate its pages; pinning them would do so in one
            if int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), size, 0)):
                return False
        self._chunks.append(chunk)
        self._free.append([(0, size)])
        self.size += size
        return True

    def bytes_of(self, region: Region, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` of a region."""
        return self._chunks[region.chunk][region.start : region.start + nbytes]


def _unpin(chunks: list[torch.Tensor]) -> None:
    for chunk in chunks if torch.cuda.is_initialized() else ():
        torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())
    chunks.clear()


def available_host_memory() -> int:
    """Return the bytes of host memory that a process may still take: of the machine, and of its container."""
    total, available = (_meminfo(name) for name in ("MemTotal", "MemAvailable"))
    for limit, used in _container_memory():
        total = min(total, limit)
        available = min(available, limit - used)
    return int(available - HOST_RESERVE * total)


def _meminfo(name: str) -> int:
    return int(Path("/proc/meminfo").read_text().split(f"{name}:")[1].split()[0]) * 1024


def _container_memory() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of memory of control groups, without files that the system may drop."""
    folder = Path("/sys/fs/cgroup")
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bound = int((folder / limit).read_text())
            stat = (folder / limit).with_name("memory.stat").read_text().split()
            yield bound, int((folder / used).read_text()) - int(stat[stat.index(cache) + 1])
        except (OSError, ValueError):  # no such group, or "max"
            continue


class StreamTransfer:
    """A copy on a side stream of a GPU."""

    def __init__(self, device: torch.device, event: Any):
        self._device, self.event = device, event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)  # later kernels wait, the host does not


class Place:
    """A region of pinned memory with the bytes of a page, and the event of the last copy from or to it."""

    __slots__ = ("region", "event")

    def __init__(self, region: Region):
        self.region = region
        self.event: Any = None


class PinnedStore:
    """Bytes of pages in pinned host memory."""

    def __init__(self, device: torch.device, arena: PinnedArena | None = None):
        self._device, self.arena = device, arena or PinnedArena()
        self._out, self._into = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ending: list[Place] = []  # places that are released, whose last copy may still run

    def write(self, storage: Any) -> tuple[Place, StreamTransfer]:
        nbytes = storage.nbytes()
        place = Place(self._take(nbytes))
        return place, self._start(self._out, self.arena.bytes_of(place.region, nbytes), _bytes_of(storage), place)

    def read(self, place: Place, storage: Any) -> StreamTransfer:
        source = self.arena.bytes_of(place.region, storage.nbytes())
        return self._start(self._into, _bytes_of(storage), source, place)

    def release(self, place: Place) -> None:
        self._ending.append(place)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._ending.clear()
        self.arena.close()

    def _take(self, nbytes: int) -> Region:
        self._reuse(lambda event: event.query())
        region = self.arena.take(nbytes)
        if region is None and self.arena.grow(nbytes):
            region = self.arena.take(nbytes)
        if region is None and self._ending:
            # The write that follows runs on this stream: it waits for the copies that still read the regions.
            self._reuse(lambda event: self._out.wait_event(event) is None)
            region = self.arena.take(nbytes)
        if region is None:
            raise HostMemoryFull(
                f"virtual ranks: no host memory is left for {nbytes} bytes: {self.arena.taken} bytes were moved out, "
                f'{self.arena.size} bytes are pinned; use a smaller field, or memory="recompute"'
            )
        return region

    def _reuse(self, ended: Any) -> None:
        """Give back the regions of released places whose last copy has `ended`."""
        left = []
        for place in self._ending:
            if place.event is None or ended(place.event):
                self.arena.give_back(place.region)
            else:
                left.append(place)
        self._ending = left

    def _start(self, stream: Any, target: torch.Tensor, source: torch.Tensor, place: Place) -> StreamTransfer:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            place.event = stream.record_event()
        return StreamTransfer(self._device, place.event)


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
