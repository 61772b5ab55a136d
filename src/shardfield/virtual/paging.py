"""Page tensors of virtual ranks out of the device's memory and in again, like an operating system pages memory.

Only one rank runs at a time, so what the others hold need not be on the device: activations that their backward will
read, and whatever their programs have in variables. A `Pager` sees every operator of torch that a rank calls. Results
above a minimum size become pages. A page that is needed is brought in before the operator runs; the pages that were
used longest ago are moved out when the budget is exceeded. Activations of a forward are read again in reverse order, so
that the oldest are needed last. The tensors keep their identity: only the memory of their storage is released.

Copies overlap with computation. Before the budget is reached, the pages that would leave first are copied in the
background; such a page is clean, and leaves without waiting. It is clean until an operator writes it, so that what is
only read is copied out once. In backward, the pages that were made before the one just read are brought in ahead.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import in_backward, without_modes
from ..errors import ShardfieldError
from .page import Page, Source, key_of, storage_or_none
from .page_store import FileStore, PageStore
from .pinned_store import PinnedStore

MIN_BYTES = 1 << 16  # smaller results stay on the device
PREFETCHED = 2  # pages that are brought in ahead of a backward
AHEAD = 0.125  # of the budget: pages that are copied out before their memory is needed
STRIDE = 1 / 32  # of the budget: new pages after which pages are copied ahead again


class BudgetExceeded(ShardfieldError):
    """A page would have to leave the device, and the pager `refuses` to move pages."""


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
        self._moving: dict[int, Page] = {}  # resident pages with a transfer in flight
        self._exposed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: dict[int, Page] = {}  # rank -> its newest page
        self.result_bytes: dict[Any, int] = {}  # operator and shapes -> bytes of its new pages
        self.written: dict[Any, frozenset[str] | None] = {}  # operator -> the arguments that it writes
        self._stores: dict[torch.device, PageStore] = {}
        self._process = os.getpid()
        self.held = self.peak = self.moved_out = self.moved_in = 0
        self.away = self.away_peak = 0  # bytes of pages that are not on the device
        self.left_clean = self.dropped = 0  # bytes that left without waiting for their copy, and without a copy
        self.active: int | None = None  # the rank that runs
        self._since_clean = 0  # bytes of pages that have come since pages were copied ahead
        self.refuses = False  # raise BudgetExceeded instead of moving a page out
        self.running: dict[int, set[int]] = {}  # rank -> pages that an operator reads while its rank waits inside it
        self._choosing = False
        self._ended: list[tuple[int, Page]] = []  # storages that have ended while pages were chosen

    def make_store(self, device: torch.device) -> PageStore:
        """Return a new store for pages of a device."""
        return FileStore(self._folder) if device.type == "cpu" else PinnedStore(device)

    # Pages.

    def use(self, tensors: Iterable[Tensor]) -> set[int]:
        """Bring in the pages of tensors and return their addresses. They keep their copies: see `will_write`."""
        used: set[int] = set()
        for tensor in tensors:
            storage = storage_or_none(tensor)
            key = 0 if storage is None else storage._cdata
            page = self.resident.get(key)
            if page is not None:
                self.resident.move_to_end(key)
                if page.incoming:
                    self._settle(key, page)
                used.add(key)
            elif key in self._away:
                used.add(key)
                page = self._away[key]
                if storage.nbytes():  # its owner has allocated it anew, as FSDP does: the copy is out of date
                    self._forget(key, page)
                    continue
                self._bring_in(key, page, used)
                self._settle(key, page)
                if in_backward():
                    self._prefetch(page, used)
        return used

    def will_write(self, tensors: Iterable[Tensor]) -> None:
        """Drop the copies of tensors in use, which the next operator makes out of date."""
        for key in map(key_of, tensors):
            if key in self.resident and self.resident[key].place is not None:
                self._make_current(key, self.resident[key])

    def _prefetch(self, page: Page, used: set[int]) -> None:
        """Bring in the pages that were made before this one on the same rank: backward reads them next."""
        for _ in range(PREFETCHED):
            before = page.made_before()
            if before is None or (self.budget is not None and self.held + before.nbytes > self.budget):
                return
            storage = before.storage()
            if storage is not None and self._away.get(storage._cdata) is before and not storage.nbytes():
                self._bring_in(storage._cdata, before, used)
            page = before

    def add(self, tensors: Iterable[Tensor], rank: int) -> int:
        """Make the storages of new tensors pages and return their bytes."""
        added = 0
        for tensor in tensors:
            kind = type(tensor)
            storage = storage_or_none(tensor) if kind is Tensor or kind is nn.Parameter else None
            if storage is None or storage._cdata in self.resident or storage._cdata in self._away:
                continue
            nbytes = storage.nbytes()
            if nbytes < self.minimum or not storage.resizable() or storage.device.type not in ("cpu", "cuda"):
                continue
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
        storage = storage_or_none(tensor)
        if storage is None:
            return
        self.use([tensor])
        self.will_write([tensor])
        self._exposed.add(storage)
        page = self.resident.pop(storage._cdata, None)
        if page is not None:
            self.held -= page.nbytes

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self._since_clean += nbytes
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int, page: Page) -> None:
        """Drop a page whose storage has ended. The garbage collector calls it, between any two instructions."""
        if self._choosing:  # it would change the dict that is read
            self._ended.append((key, page))
            return
        if self.resident.get(key) is page:
            del self.resident[key]
            self.held -= page.nbytes
        elif self._away.get(key) is page:
            del self._away[key]
            self.away -= page.nbytes
        self._moving.pop(key, None)
        self._drop_copy(page)

    # Moving.

    def make_room(self, nbytes: int, used: set[int]) -> None:
        """Move pages out until `nbytes` more fit the budget, those that were used longest ago first."""
        for key, page in [*self._moving.items()] if self._moving else ():
            if page.transfer is not None and page.transfer.done():
                self._settle(key, page)
        if self.budget is None:
            return
        excess = self.held + nbytes - self.budget
        if self.refuses:
            if excess > 0:
                raise BudgetExceeded(f"virtual ranks: the tensors of a step take more than {self.budget} bytes")
            return
        if excess > 0:
            self._move_out(excess, used, lambda page: True)
        if self._since_clean >= STRIDE * self.budget:
            self._since_clean = 0
            self._clean(int(excess + AHEAD * self.budget), used)

    def rank_parks(self, rank: int) -> None:
        """Move out the pages of a rank that waits, if this pager is eager."""
        if self.eager:
            self._move_out(self.held, set(), lambda page: page.rank == rank)

    def evict_all(self, used: set[int]) -> None:
        """Move out all pages but those in use."""
        self._move_out(self.held, used, lambda page: True)

    def _move_out(self, nbytes: int, used: set[int], wanted: Callable[[Page], bool]) -> None:
        chosen = self._oldest(nbytes, used, wanted)
        with without_modes():
            for key, page in chosen:
                if page.place is not None:
                    self.left_clean += page.nbytes if page.transfer is None or page.transfer.done() else 0
                elif not self._drop(page):
                    self._start_copy(key, page)
            for key, page in chosen:
                self._release(key, page)

    def _clean(self, nbytes: int, used: set[int]) -> None:
        """Start to copy the pages that leave next, `nbytes` of them."""
        if nbytes > 0:
            with without_modes():
                for key, page in self._oldest(nbytes, used, lambda page: True):
                    if page.place is None and self._source_of(page) is None:
                        self._start_copy(key, page)

    def _oldest(self, nbytes: int, used: set[int], wanted: Callable[[Page], bool]) -> list[tuple[int, Page]]:
        chosen: list[tuple[int, Page]] = []
        if os.getpid() != self._process:  # a worker of a DataLoader: the file belongs to its parent
            return chosen
        if self.running:
            used = used.union(*self.running.values())
        self._choosing = True
        try:
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
        finally:
            self._choosing = False
        while self._ended:
            self._forget(*self._ended.pop())
        return chosen

    def recomputable(self, tensors: Iterable[Tensor], source: Source, others: Iterable[Tensor]) -> None:
        """Let pages leave without a copy while their rank waits: `source` computes them again, but not `others`."""
        for key in {*map(key_of, tensors)}.difference(map(key_of, others)).intersection(self.resident):
            self.resident[key].source = weakref.ref(source)

    def _source_of(self, page: Page) -> Source | None:
        """Return what computes a page again. A rank that runs keeps its pages: it is about to read them."""
        return None if page.source is None or page.rank == self.active else page.source()

    def _drop(self, page: Page) -> bool:
        """Let a page end that can be computed again, with others of its source. Return False if it is still needed."""
        source, held = self._source_of(page), self.held
        if source is not None:
            source.drop()
        self.dropped += held - self.held
        return page.storage() is None

    def _start_copy(self, key: int, page: Page) -> None:
        storage = page.storage()
        if storage is None:
            return
        store = self._store(page)
        try:
            page.place, page.transfer = store.write(storage)
        except ShardfieldError:  # no host memory
            for other in [p for p in self.resident.values() if p.transfer is None]:
                self._drop_copy(other)  # it is in memory too
            page.place, page.transfer = store.write(storage)
        page.kept, page.incoming = storage, False
        self._moving[key] = page
        self.moved_out += page.nbytes

    def _settle(self, key: int, page: Page) -> None:
        try:
            page.settle()
        except Exception:
            self._moving.pop(key, None)
            self._drop_copy(page)
            raise
        self._moving.pop(key, None)

    def _make_current(self, key: int, page: Page) -> None:
        """Leave a resident page without a copy."""
        try:
            self._settle(key, page)
        except ShardfieldError:
            if page.incoming:
                raise  # a copy that was not written was not needed
        self._drop_copy(page)

    def _drop_copy(self, page: Page) -> None:
        if page.place is not None:
            place, page.place = page.place, None
            self._store(page).release(place)

    def _release(self, key: int, page: Page) -> None:
        """Release the device memory of a page, after its copy."""
        self._settle(key, page)
        storage = page.storage()
        if storage is None or page.place is None:
            return
        _resize(storage, 0)
        del self.resident[key]
        self._away[key] = page
        self.held -= page.nbytes
        self.away += page.nbytes
        self.away_peak = max(self.away_peak, self.away)

    def _bring_in(self, key: int, page: Page, used: set[int]) -> None:
        """Start to bring in a page."""
        self.make_room(page.nbytes, used)
        storage = page.storage()
        assert storage is not None
        with without_modes():
            try:
                _resize(storage, page.nbytes)
            except RuntimeError:  # no memory: workspaces of kernels, or gaps between blocks. More must leave
                if not used:  # every page comes in: none may leave again
                    raise
                self.evict_all(used)
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
                _resize(storage, page.nbytes)
            page.transfer = self._store(page).read(page.place, storage)
        page.kept, page.incoming = storage, True
        del self._away[key]
        self.away -= page.nbytes
        self.resident[key] = self._moving[key] = page
        self.moved_in += page.nbytes
        self._hold(page.nbytes)

    def _store(self, page: Page) -> PageStore:
        if page.device not in self._stores:
            self._stores[page.device] = self.make_store(page.device)
        return self._stores[page.device]

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Let whoever resizes a storage wait for the copy of its memory: FSDP releases storages so."""

        def resize_(storage: Any, size: int) -> Any:
            page = self._moving.get(storage._cdata)
            if page is not None:
                self._settle(storage._cdata, page)
            return _resize(storage, size)

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = _resize

    def restore_all(self) -> None:
        """Bring in every page, ignoring the budget, and forget them: their tensors are ordinary ones from now on.

        An error of one page is raised once the others are in memory.
        """
        if self._away:
            gc.collect()  # cycles keep tensors that no program can reach
        budget, self.budget, peak = self.budget, None, self.peak
        failed: list[Exception] = []
        for key, page in self._pages(self._away):
            if page.storage() is not None:
                _call(self._bring_in, key, page, set(), errors=failed)
        for key, page in self._pages(self.resident):
            _call(self._make_current, key, page, errors=failed)
        self.resident.clear()
        self._moving.clear()
        self._last.clear()
        self.result_bytes.clear()
        self.held, self.budget, self.peak = 0, budget, peak
        if failed:
            raise failed[0]

    def _pages(self, table: Mapping[int, Page]) -> Iterator[tuple[int, Page]]:
        """Yield the pages of a table, without those that end meanwhile."""
        for key in list(table):
            page = table.get(key)
            if page is not None:
                yield key, page

    def close(self) -> None:
        """Close the stores of the pages."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


_resize = torch.UntypedStorage.resize_


def _call(function: Callable[..., None], *args: Any, errors: list[Exception]) -> None:
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - raised by the caller
        errors.append(error)
