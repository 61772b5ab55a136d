"""A page: the memory of one storage of a virtual rank, and the copy of its bytes outside the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .page_store import Transfer


class Page:
    """The memory of one storage, and the copy of its bytes.

    `place` is where the copy is, None without one; `transfer` is the copy in flight, out of a resident page or into
    one. A resident page with a place is clean: its memory can be released.
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
        "previous",
        "__weakref__",
    )

    def __init__(self, storage: Any, rank: int, previous: Page | None, gone: Callable[[Page], None]):
        self.nbytes, self.device, self.rank = storage.nbytes(), storage.device, rank
        self.place: Any = None
        self.transfer: Transfer | None = None
        self.incoming = False  # the direction of the transfer
        self.kept: Any = None  # the storage, while a transfer reads or writes its memory
        self.previous = None if previous is None else weakref.ref(previous)
        me = weakref.ref(self)

        def ended(_: Any) -> None:
            page = me()
            if page is not None:
                gone(page)

        self.storage = weakref.ref(storage, ended)

    def settle(self) -> None:
        """Wait for the copy in flight. It stays in flight if the wait is interrupted."""
        if self.transfer is not None:
            try:
                self.transfer.wait()
            except Exception:  # it has ended
                self.transfer = self.kept = None
                raise
            self.transfer = self.kept = None
