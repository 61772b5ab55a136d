"""Where the bytes of pages are while they are not on the device: a file; `pinned_store` has host memory for a GPU.

A store starts a copy and returns; a `Transfer` says when it has ended. So copies overlap with computation: those of a
file run in a thread, those between a GPU and pinned memory on side streams.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from ..errors import ShardfieldError

IN_BACKGROUND = 1 << 20  # bytes from which a copy takes longer than a change of threads
M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 1 << 17  # of glibc's mallopt, and the bytes with which it begins


class Transfer(Protocol):
    """A copy in flight."""

    def done(self) -> bool:
        """Return whether the copy has ended."""

    def wait(self) -> None:
        """Return once the copy has ended, or once kernels that are launched from now on run after it."""


class PageStore(Protocol):
    """Copies of storages outside the device. `place` is what a store knows a copy by."""

    def write(self, storage: Any) -> tuple[Any, Transfer]:
        """Start to copy the bytes of a storage; return their place. The storage must not change until the end."""

    def read(self, place: Any, storage: Any) -> Transfer:
        """Start to copy bytes into a storage of the same size. The place stays valid."""

    def release(self, place: Any) -> None:
        """Forget a copy that is not in flight."""

    def close(self) -> None:
        """Release everything."""


class FileTransfer:
    """A copy in the thread of a FileStore; without a thread, it is made at once."""

    def __init__(self, copy: Callable[[], None], nbytes: int, thread: ThreadPoolExecutor | None):
        self._copy, self._nbytes, self._process = copy, nbytes, os.getpid()
        self._future: Future[None] = Future() if thread is None else thread.submit(copy)
        if thread is None:
            try:
                copy()
                self._future.set_result(None)
            except OSError as error:
                self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        try:
            if not self._future.done() and os.getpid() != self._process:  # a forked process does not have the thread
                self._copy()
            else:
                self._future.result()
        except OSError as error:
            raise ShardfieldError(
                f"virtual ranks: {self._nbytes} bytes cannot be written to disk or read from it: {error}"
            ) from None


class _File:
    """A file without a name, closed with its last user."""

    def __init__(self, folder: str | None):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self.number = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self.number)


class FilePlace(NamedTuple):
    """A region of a file."""

    file: _File
    start: int
    nbytes: int


class FileStore:
    """Bytes of pages in an unnamed file, copied by one thread in the order of the calls.

    Regions of the same size are used again. A forked process (a worker of a DataLoader) reads its pages in the file
    that it shares with its parent: after a fork the parent writes to another file.
    """

    def __init__(self, folder: str | None):
        _return_freed_memory()
        self._folder = folder
        self._thread, self._process = ThreadPoolExecutor(1, "virtual-ranks-io"), os.getpid()
        self._begin_file()
        os.register_at_fork(after_in_parent=functools.partial(_after_fork, weakref.ref(self)))

    def _begin_file(self) -> None:
        self._file = _File(self._folder)
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def write(self, storage: Any) -> tuple[FilePlace, FileTransfer]:
        nbytes = storage.nbytes()
        free = self._free.get(nbytes)
        start = free.pop() if free else self._end
        self._end = max(self._end, start + nbytes)
        place = FilePlace(self._file, start, nbytes)
        return place, self._transfer(os.pwrite, storage, place)

    def read(self, place: FilePlace, storage: Any) -> FileTransfer:
        return self._transfer(_pread_into, storage, place)

    def release(self, place: FilePlace) -> None:
        if place.file is self._file:
            self._free.setdefault(place.nbytes, []).append(place.start)

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    def _transfer(self, step: Callable[[int, memoryview, int], int], storage: Any, place: FilePlace) -> FileTransfer:
        copy = functools.partial(_copy, step, storage, place)
        background = storage.nbytes() >= IN_BACKGROUND and os.getpid() == self._process
        return FileTransfer(copy, storage.nbytes(), self._thread if background else None)


def _after_fork(store: weakref.ref[FileStore]) -> None:
    """Leave the file of a store to a process that was forked from this one."""
    parent = store()
    if parent is not None and parent._end and parent._file.close.alive:
        parent._begin_file()


def _pread_into(file: int, view: memoryview, start: int) -> int:
    return os.preadv(file, [view], start)


def _return_freed_memory() -> None:
    """Let the process return the memory of released pages to the system, for good.

    glibc raises the size from which it does so up to 32 MiB, and has a heap for each thread: every virtual rank would
    keep the memory of the pages that it has moved out.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def _copy(step: Callable[[int, memoryview, int], int], storage: Any, place: FilePlace) -> None:
    """Read or write all bytes of a storage, which lives as long as the copy."""
    file, start, nbytes = place
    if storage.nbytes() != nbytes:
        raise OSError("the memory of a tensor was released while it was copied")
    view = memoryview((ctypes.c_char * nbytes).from_address(storage.data_ptr())).cast("B")
    done = 0
    while done < nbytes:
        moved = step(file.number, view[done:], start + done)
        if moved == 0:
            raise OSError(f"the file of the pages ends after {start + done} bytes")
        done += moved
