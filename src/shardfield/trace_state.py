"""Whether a program is being written down rather than run (see `compiled`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from . import _compat, runtime
from ._compat import unwrap_functional, without_modes
from ._compat.fake import drop_from_fake_memo, has_no_data


@contextmanager
def concrete() -> Iterator[None]:
    """Work on real tensors and send real messages even while a program is traced.

    For what follows from layouts and sizes, and so is the same whenever the program runs: plans, tables, agreement.
    """
    rt = runtime.active
    if rt.tracer is None and not rt.fake_tensors:
        yield
        return
    before = rt.tracer, rt.fake_tensors
    rt.tracer, rt.fake_tensors = None, False
    try:
        with without_modes():
            yield
    finally:
        rt.tracer, rt.fake_tensors = before


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory, or will when the program runs."""
    if runtime.active.tracer is not None:
        a, b = unwrap_functional(a), unwrap_functional(b)
    return _compat.same_memory(a, b)


def is_concrete(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers though a program is traced: it is part of the program."""
    return runtime.active.tracer is not None and unwrap_functional(tensor) is tensor and not _compat.is_fake(tensor)


def concrete_for(tensor: Tensor) -> AbstractContextManager[None]:
    """Work on a tensor: at once if it is real, as part of the program if it is traced."""
    return concrete() if is_concrete(tensor) else nullcontext()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a tensor: of no subclass but the one that a trace makes of all."""
    if tensor.__class__ is Tensor:
        return True
    rt = runtime.active
    if rt.fake_tensors and has_no_data(tensor):
        return True
    return rt.tracer is not None and unwrap_functional(tensor) is not tensor


def drop_fake_reference(tensor: Tensor) -> None:
    """Have torch itself know nothing of a tensor without data that is to become another."""
    if runtime.active.fake_tensors:
        drop_from_fake_memo(tensor)


def values_unknown() -> bool:
    """Whether tensors hold no numbers that could be looked at now."""
    return runtime.active.fake_tensors or runtime.active.tracer is not None
