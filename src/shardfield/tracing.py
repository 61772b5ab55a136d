"""Whether a program is being written down rather than run (see `compiled`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from . import _compat
from ._compat import beneath, without_modes
from ._compat.hollow import has_no_data, out_of_memo

# What writes messages down while a program is traced; None while programs run.
writer: Any = None
# Tensors have no data now: a step is only counted (see `planning`).
hollow = False


@contextmanager
def concrete() -> Iterator[None]:
    """Work on real tensors and send real messages even while a program is traced.

    For what follows from layouts and sizes, and so is the same whenever the program runs: plans, tables, agreement.
    """
    global writer, hollow
    if not unknown():
        yield
        return
    kept = writer, hollow
    writer, hollow = None, False
    try:
        with without_modes():
            yield
    finally:
        writer, hollow = kept


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory, or will when the program runs."""
    return _compat.same_memory(a, b) if writer is None else _compat.same_memory(beneath(a), beneath(b))


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers though a program is traced: it is part of the program."""
    return writer is not None and beneath(tensor) is tensor and not _compat.is_fake(tensor)


def beside(tensor: Tensor) -> AbstractContextManager[None]:
    """Work on a tensor: at once if it is real, as part of the program if it is traced."""
    return concrete() if is_real(tensor) else nullcontext()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a tensor: of no subclass but the one that a trace makes of all."""
    if hollow and has_no_data(tensor):
        return True
    return tensor.__class__ is Tensor or (writer is not None and beneath(tensor) is not tensor)


def let_go(tensor: Tensor) -> None:
    """Have torch itself know nothing of a tensor without data that is to become another."""
    if hollow:
        out_of_memo(tensor)


def unknown() -> bool:
    """Whether tensors hold no numbers that could be looked at now."""
    return hollow or writer is not None
