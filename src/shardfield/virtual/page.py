"""A page: the memory of one storage of a virtual rank, and the copy of its bytes outside the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .._compat.storage import storage_of
from .page_store import Transfer


class Source(Protocol):
    """What computes the tensors of pages again."""

    def drop(self) -> None:
        """Forget these tensors."""


class Page:
    """The memory of one storage, and the copy of its bytes.

    `place` is where the copy is, None without one; `transfer` is the copy in flight, out of a resident page or into
    one. A resident page with a place is clean: its memory can be released. So can that of a page which its `source`
    computes again.
    """

    __slots__ = (
        "storage",
        "nbytes",
        "device",
        "rank",
        "place",
        "transfer",
        "incoming",
        "kept",
        "source",
        "previous",
        "__weakref__",
    )

    def __init__(self, storage: Any, rank: int, previous: Page | None, gone: Callable[[Page], None]):
        self.nbytes, self.device, self.rank = storage.nbytes(), storage.device, rank
        self.place: Any = None
        self.transfer: Transfer | None = None
        self.incoming = False  # the direction of the transfer
        self.kept: Any = None  # the storage, while a transfer reads or writes its memory
        self.source: weakref.ref[Source] | None = None
        self.previous = None if previous is None else weakref.ref(previous)
        me = weakref.ref(self)

        def ended(_: Any) -> None:
            page = me()
            if page is not None:
                gone(page)

        self.storage = weakref.ref(storage, ended)

    def made_before(self) -> Page | None:
        """Return the newest page of the same rank that is older and has not ended."""
        page: Page | None = self
        while page is not None:
            page = None if page.previous is None else page.previous()
            if page is not None and page.storage() is not None:
                break
        return page

    def settle(self) -> None:
        """Wait for the copy in flight. It stays in flight if the wait is interrupted."""
        if self.transfer is not None:
            try:
                self.transfer.wait()
            except Exception:  # it has ended
                self.transfer = self.kept = None
                raise
            self.transfer = self.kept = None
            self.incoming = False


def storage_or_none(tensor: Tensor) -> Any:
    """Return the storage of a tensor; None without one."""
    try:
        return storage_of(tensor) if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError):  # a wrapper
        return None


def key_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, by which its page is known; 0 without one."""
    storage = storage_or_none(tensor)
    return 0 if storage is None else storage._cdata
