"""Whether a program is traced rather than run (see `compiler`), and whether tensors have data (see `planning`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from . import _compat, runtime
from ._compat import storage, without_modes
from ._compat.fake import drop_from_fake_memo, has_no_data
from ._compat.storage import unwrap_functional

_UNCHANGED = nullcontext()


def concrete() -> AbstractContextManager[None]:
    """Use real tensors and real collectives inside the context, even while a program is traced.

    For values that follow from layouts and sizes and are the same in every run of the program: plans, tables,
    consensus.
    """
    rt = runtime.active
    return _UNCHANGED if rt.tracer is None and not rt.fake_tensors else _concrete(rt)


@contextmanager
def _concrete(rt: runtime.Runtime) -> Iterator[None]:
    before = rt.tracer, rt.fake_tensors
    rt.tracer, rt.fake_tensors = None, False
    try:
        with without_modes():
            yield
    finally:
        rt.tracer, rt.fake_tensors = before


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory, or will when the program runs."""
    if runtime.active.tracer is not None:
        a, b = unwrap_functional(a), unwrap_functional(b)
    return storage.same_memory(a, b)


def is_concrete(tensor: Tensor) -> bool:
    """Return whether a program is traced and this tensor has values: it is a constant of the program."""
    return runtime.active.tracer is not None and unwrap_functional(tensor) is tensor and not _compat.is_fake(tensor)


def concrete_for(tensor: Tensor) -> AbstractContextManager[None]:
    """Return `concrete()` for a constant of the program, and a context that does nothing for a traced tensor."""
    return concrete() if is_concrete(tensor) else nullcontext()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain: of no subclass, or of one in which a trace or simulation wraps all tensors."""
    if tensor.__class__ is Tensor:
        return True
    rt = runtime.active
    if rt.fake_tensors and has_no_data(tensor):
        return True
    return rt.tracer is not None and unwrap_functional(tensor) is not tensor


def drop_fake_reference(tensor: Tensor) -> None:
    """Drop torch's references to a tensor without data whose contents are about to be replaced."""
    if runtime.active.fake_tensors:
        drop_from_fake_memo(tensor)


def values_unknown() -> bool:
    """Return whether tensor values cannot be read now."""
    return runtime.active.fake_tensors or runtime.active.tracer is not None
