"""Whether a program is being written down rather than run (see `compiled`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from . import _compat
from ._compat import unwrap_functional, without_modes
from ._compat.fake import drop_from_fake_memo, has_no_data

# What writes messages down while a program is traced; None while programs run.
tracer: Any = None
# Tensors have no data now: a step is only counted (see `planning`).
fake_tensors = False


@contextmanager
def concrete() -> Iterator[None]:
    """Work on real tensors and send real messages even while a program is traced.

    For what follows from layouts and sizes, and so is the same whenever the program runs: plans, tables, agreement.
    """
    global tracer, fake_tensors
    if not values_unknown():
        yield
        return
    kept = tracer, fake_tensors
    tracer, fake_tensors = None, False
    try:
        with without_modes():
            yield
    finally:
        tracer, fake_tensors = kept


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory, or will when the program runs."""
    return (
        _compat.same_memory(a, b) if tracer is None else _compat.same_memory(unwrap_functional(a), unwrap_functional(b))
    )


def is_concrete(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers though a program is traced: it is part of the program."""
    return tracer is not None and unwrap_functional(tensor) is tensor and not _compat.is_fake(tensor)


def concrete_for(tensor: Tensor) -> AbstractContextManager[None]:
    """Work on a tensor: at once if it is real, as part of the program if it is traced."""
    return concrete() if is_concrete(tensor) else nullcontext()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a tensor: of no subclass but the one that a trace makes of all."""
    if fake_tensors and has_no_data(tensor):
        return True
    return tensor.__class__ is Tensor or (tracer is not None and unwrap_functional(tensor) is not tensor)


def drop_fake_reference(tensor: Tensor) -> None:
    """Have torch itself know nothing of a tensor without data that is to become another."""
    if fake_tensors:
        drop_from_fake_memo(tensor)


def values_unknown() -> bool:
    """Whether tensors hold no numbers that could be looked at now."""
    return fake_tensors or tracer is not None
