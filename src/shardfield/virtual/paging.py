"""Page tensors of virtual ranks out of the device's memory and in again, like an operating system pages memory.

Only one rank runs at a time, so what the others hold need not be on the device: activations that their backward will
read, and whatever their programs have in variables. A `Pager` sees every operator of torch that a rank calls. Results
above a minimum size become pages. A page that is needed is brought in before the operator runs; the pages that were
used longest ago are moved out when the budget is exceeded. Activations of a forward are read again in reverse order, so
that the oldest are needed last. The tensors keep their identity: only the memory of their storage is released.

CUDA pages are copied to pinned host memory on side streams, pages in host memory are written to a file.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._compat import DispatchMode, inside_backward, without_modes
from .._compat.fake import is_fake
from ..errors import ShardfieldError

MIN_BYTES = 1 << 16  # smaller results stay on the device
PREFETCHED = 2  # pages that are brought in ahead of a backward
MOVES_CUDA = False  # refused until the copies between streams have been tested on a GPU
# Calls that give the address of a tensor's memory to code that the pager does not see.
_EXPOSING = frozenset(
    [Tensor.numpy, Tensor.data_ptr, Tensor.tolist, Tensor.storage]
    + [Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.__deepcopy__]
)


class Page:
    """The memory of one storage. `copy` is where its bytes are while it is not resident."""

    __slots__ = ("storage", "nbytes", "device", "rank", "copy", "leaving", "previous", "__weakref__")

    def __init__(self, storage: Any, rank: int, previous: Page | None, gone: Callable[[Page], None]):
        self.nbytes, self.device, self.rank = storage.nbytes(), storage.device, rank
        self.copy: Any = None
        self.leaving = False  # its copy is in flight, and its memory not yet released
        self.previous = None if previous is None else weakref.ref(previous)
        me = weakref.ref(self)

        def ended(_: Any) -> None:
            page = me()
            if page is not None:
                gone(page)

        self.storage = weakref.ref(storage, ended)


class FileStore:
    """Bytes of pages in an unnamed file. Regions of the same size are used again."""

    def __init__(self, folder: str | None):
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def write(self, storage: Any) -> tuple[int, int]:
        """Write the bytes of a storage and return where."""
        nbytes = storage.nbytes()
        free = self._free.get(nbytes)
        start = free.pop() if free else self._end
        view = memoryview((ctypes.c_char * nbytes).from_address(storage.data_ptr())).cast("B")
        done = 0
        while done < nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], start + done)
        self._end = max(self._end, start + nbytes)
        return start, nbytes

    def read(self, place: tuple[int, int], storage: Any) -> None:
        """Read the bytes into a storage and release their region."""
        start, nbytes = place
        view = memoryview((ctypes.c_char * nbytes).from_address(storage.data_ptr())).cast("B")
        done = 0
        while done < nbytes:
            done += os.preadv(self._file.fileno(), [view[done:]], start + done)
        self.release(place)

    def release(self, place: tuple[int, int]) -> None:
        self._free.setdefault(place[1], []).append(place[0])

    def close(self) -> None:
        self._file.close()


class Pager:
    """The pages of all ranks of a world on one device.

    budget: the bytes that pages may take on the device; None: no limit. eager: move out all pages of a rank when it
    stops to wait. folder: where pages in host memory are written.
    """

    def __init__(
        self, budget: int | None = None, eager: bool = False, folder: str | None = None, minimum: int = MIN_BYTES
    ):
        self.budget, self.eager, self._folder, self.minimum = budget, eager, folder, minimum
        self.resident: OrderedDict[int, Page] = OrderedDict()  # address of the storage -> page, used last at the end
        self._away: dict[int, Page] = {}
        self._exposed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._leaving: dict[int, Any] = {}  # address of the storage -> event of the copy
        self._last: dict[int, Page] = {}  # rank -> its newest page
        self._output_bytes: dict[Any, int] = {}
        self._file: FileStore | None = None
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self.held = self.peak = self.moved_out = self.moved_in = 0

    # Pages.

    def use(self, tensors: Iterable[Tensor]) -> set[int]:
        """Bring in the pages of tensors and return their addresses."""
        used: set[int] = set()
        for tensor in tensors:
            storage = _storage(tensor)
            key = 0 if storage is None else storage._cdata
            if key in self.resident:
                self.resident.move_to_end(key)
                if self._leaving:
                    self._leaving.pop(key, None)
                used.add(key)
            elif key in self._away:
                used.add(key)
                page = self._away[key]
                if storage.nbytes():  # its owner has allocated it anew, as FSDP does: the copy is out of date
                    self._forget(key, page)
                    continue
                self._bring_in(key, page, used)
                if page.device.type == "cuda" and inside_backward():
                    self._prefetch(page, used)
        return used

    def _prefetch(self, page: Page, used: set[int]) -> None:
        """Bring in the pages that were made before this one on the same rank: backward reads them next."""
        for _ in range(PREFETCHED):
            before = page.previous() if page.previous is not None else None
            while before is not None and before.storage() is None:
                before = before.previous() if before.previous is not None else None
            if before is None or (self.budget is not None and self.held + before.nbytes > self.budget):
                return
            storage = before.storage()
            if storage is not None and storage._cdata in self._away:
                self._bring_in(storage._cdata, before, used)
            page = before

    def add(self, tensors: Iterable[Tensor], rank: int) -> int:
        """Make the storages of new tensors pages and return their bytes."""
        added = 0
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is None or storage._cdata in self.resident or storage._cdata in self._away:
                continue
            nbytes = storage.nbytes()
            if nbytes < self.minimum or not storage.resizable() or storage.device.type not in ("cpu", "cuda"):
                continue
            if storage.device.type == "cuda" and not MOVES_CUDA:
                raise ShardfieldError(
                    "virtual ranks: tensors of a GPU are not moved out of its memory yet, since this was not tested on "
                    'one; use memory="keep", or the CPU'
                )
            if storage in self._exposed:
                continue
            key = storage._cdata
            page = Page(storage, rank, self._last.get(rank), functools.partial(self._forget, key))
            self.resident[key] = self._last[rank] = page
            self._hold(nbytes)
            added += nbytes
        return added

    def expose(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor where it is from now on: code that the pager does not see has its address."""
        storage = _storage(tensor)
        if storage is None:
            return
        self.use([tensor])
        self._exposed.add(storage)
        page = self.resident.pop(storage._cdata, None)
        if page is not None:
            self.held -= page.nbytes

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int, page: Page) -> None:
        """Drop a page whose storage has ended."""
        if self.resident.get(key) is page:
            del self.resident[key]
            self.held -= page.nbytes
            self._leaving.pop(key, None)
        elif self._away.get(key) is page:
            del self._away[key]
            if self._file is not None and isinstance(page.copy, tuple):
                self._file.release(page.copy)

    # Moving.

    def make_room(self, nbytes: int, used: set[int]) -> None:
        """Move pages out until `nbytes` more fit the budget, those that were used longest ago first."""
        if self.budget is not None and self.held + nbytes > self.budget:
            self._move_out(self.held + nbytes - self.budget, used, lambda page: True)

    def rank_parks(self, rank: int) -> None:
        """Move out the pages of a rank that waits, if this pager is eager."""
        if self.eager:
            self._move_out(self.held, set(), lambda page: page.rank == rank)

    def evict_all(self, used: set[int]) -> None:
        """Move out all pages but those in use."""
        self._move_out(self.held, used, lambda page: True)

    def _move_out(self, nbytes: int, used: set[int], wanted: Callable[[Page], bool]) -> None:
        chosen = []
        for key, page in self.resident.items():
            if nbytes <= 0:
                break
            storage = page.storage()
            if storage is None or storage.nbytes() != page.nbytes:  # its owner has released it, as FSDP does
                continue
            if not storage.resizable():  # numpy shares its memory
                continue
            if key not in used and wanted(page):
                chosen.append((key, page))
                nbytes -= page.nbytes
        with without_modes():
            for key, page in chosen:
                self._start_copy(key, page)
            for key, page in chosen:
                self._release(key, page)

    def _start_copy(self, key: int, page: Page) -> None:
        storage = page.storage()
        if storage is None:
            return
        if page.device.type == "cpu":
            if self._file is None:
                self._file = FileStore(self._folder)
            try:
                page.copy = self._file.write(storage)
            except OSError as error:
                raise ShardfieldError(
                    f"virtual ranks: {page.nbytes} bytes cannot be written to disk: {error}"
                ) from None
        else:
            out, _ = self._streams_of(page.device)
            source = torch.empty(0, dtype=torch.uint8, device=page.device).set_(storage)
            try:
                page.copy = torch.empty(page.nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise ShardfieldError(
                    f"virtual ranks: no host memory is left for {page.nbytes} bytes, after {self.moved_out} bytes that "
                    "were moved out: use a smaller field, or recompute activations with torch.utils.checkpoint"
                ) from error
            out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(out):
                page.copy.copy_(source, non_blocking=True)
                self._leaving[key] = out.record_event()
        self.moved_out += page.nbytes

    def _release(self, key: int, page: Page) -> None:
        """Release the device memory of a page after its copy."""
        storage = page.storage()
        if storage is None or page.copy is None:
            return
        event = self._leaving.pop(key, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)  # kernels that reuse the memory wait, not the host
        storage.resize_(0)
        del self.resident[key]
        self._away[key] = page
        self.held -= page.nbytes

    def _bring_in(self, key: int, page: Page, used: set[int]) -> None:
        storage = page.storage()
        assert storage is not None
        self.make_room(page.nbytes, used)
        with without_modes():
            storage.resize_(page.nbytes)
            if page.device.type == "cpu":
                assert self._file is not None
                self._file.read(page.copy, storage)
            else:
                _, into = self._streams_of(page.device)
                target = torch.empty(0, dtype=torch.uint8, device=page.device).set_(storage)
                into.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(into):
                    target.copy_(page.copy, non_blocking=True)
                torch.cuda.current_stream().wait_stream(into)
        page.copy = None
        del self._away[key]
        self.resident[key] = page
        self.moved_in += page.nbytes
        self._hold(page.nbytes)

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def restore_all(self) -> None:
        """Bring in every page, ignoring the budget, and forget them: their tensors are ordinary ones from now on."""
        if self._away:
            gc.collect()  # cycles keep tensors that no program can reach
        budget, self.budget = self.budget, None
        for key, page in list(self._away.items()):
            self._bring_in(key, page, set())
        self.resident.clear()
        self._last.clear()
        self._output_bytes.clear()
        self.held, self.budget = 0, budget

    def close(self) -> None:
        """Close the file of the pages."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # Operators.

    def call(self, func: Any, args: tuple, kwargs: dict, rank: int) -> Any:
        """Call an operator with its operands in memory."""
        operands = list(_tensors((args, kwargs)))
        used = self.use(operands)
        key = func, tuple((t.shape, t.dtype) for t in operands)
        expected = self._output_bytes.get(key)
        if expected is None:
            expected = max((t.nbytes for t in operands), default=0)
        self.make_room(expected, used)
        try:
            out = func(*args, **kwargs)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self.evict_all(used)
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            out = func(*args, **kwargs)
        if len(self._output_bytes) > 4096:
            self._output_bytes.clear()
        self._output_bytes[key] = self.add(_tensors(out), rank)
        return out


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _storage(tensor: Tensor) -> Any:
    """Return the storage of a plain tensor; None for wrappers, which hold no memory."""
    kind = type(tensor)
    if (kind is Tensor or kind is nn.Parameter) and tensor.layout is torch.strided:
        return tensor.untyped_storage()
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, (Tensor, tuple, list, dict)):
                yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, (Tensor, tuple, list, dict)):
                yield from _tensors(item)


class PagedOperators(DispatchMode):
    """Call the operators of one rank through the pager."""

    def __init__(self, pager: Pager, rank: int):
        super().__init__()
        self._pager, self._rank = pager, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        wrappers = [kind for kind in types if kind is not Tensor and kind is not nn.Parameter]
        if any(is_fake(kind) for kind in wrappers):  # DTensor derives shapes with tensors without data
            return func(*args, **(kwargs or {}))
        if wrappers:
            return NotImplemented  # DTensor: its own operators on local tensors come here again
        return self._pager.call(func, args, kwargs or {}, self._rank)


class ExposedAddresses(TorchFunctionMode):
    """Keep tensors in memory whose address is given to numpy, DLPack or a kernel that is launched directly."""

    def __init__(self, pager: Pager):
        super().__init__()
        self._pager = pager

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _EXPOSING:
            for tensor in _tensors(args[:1]):
                self._pager.expose(tensor)
        return func(*args, **(kwargs or {}))
