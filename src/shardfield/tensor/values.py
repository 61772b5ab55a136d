"""The value of a ShardTensor as a global tensor, as Python numbers, lists and arrays, and as text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .. import runtime
from .._compat import has_saved_tensor_hooks
from ..comm.consensus import check_arguments
from ..dispatch.plan import process_groups
from ..layout import Layout
from ..redistribute import redistribute, without_partial
from .metadata import Metadata


def observed_call(method: Callable, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a method that communicates and is not a torch call, as a call that `explain` and `lockstep` observe."""

    def found(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return runtime.active.observer.run_call(method, found, (type(args[0]),), args, kwargs)


READ = "reading a value (all ranks read it, at the same line: `v = x.tolist()`, and one may then print `v`)"


def _call_stack() -> str:
    """Return the lines of the last three calls outside this package, innermost first.

    Not of all calls: the outermost ones differ between ranks if one of them runs in a debugger.
    """
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        if not frame.f_globals.get("__name__", "").startswith("shardfield."):
            lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class Values(Metadata):
    """Methods of ShardTensor that read its value. All communicate unless it is Replicate, but `repr` never does.

    Ranks first compare what they read, and where: the messages of a value that one rank alone reads would otherwise be
    taken for those of the next value of this size that all ranks read.
    """

    # version of the local tensor, and the reduced value of a Partial, computed at that version
    _reduced_cache: tuple[int, Any] | None = None
    _redistribute_to: Callable[[Layout], Any]
    unbind: Callable[[int], Any]  # of torch.Tensor

    def _full_local(self) -> Tensor:
        """Return the global value as a plain tensor. Communicates unless Replicate."""
        goal = Layout.replicate(self._layout.mesh, self._layout.shape)
        return redistribute(self._local_tensor, self._layout, goal)

    def _value_to_read(self) -> Tensor:
        """Return the global value, or raise on all ranks if they read different ones. Communicates unless Replicate."""
        layout = self._layout
        if runtime.active.tracer is None:
            for group in process_groups(layout, (*layout.shard_axes, *layout.partial_axes)):
                check_arguments(READ, group, {"the value": f"{layout} {self._dtype}", "the line": _call_stack()})
        return self._full_local()

    def _reduced_value(self) -> Any:
        """Return this value, reduced by `without_partial`. Communicates; the result is cached until the next write."""
        if not self._layout.partial:
            return self
        local, target = self._local_tensor, without_partial(self._layout)
        if local.is_inference() or self._deferred is not None:  # its version does not show whether it has changed
            return self._redistribute_to(target)
        if target is not self._layout.with_partial(()) and has_saved_tensor_hooks():
            # A reduce_scatter in a checkpoint is repeated: with a cached value, the checkpoint would find fewer saved
            # tensors when it recomputes.
            return self._redistribute_to(target)
        cached = self._reduced_cache
        # Without a graph, a cached value serves only where none is recorded.
        if cached is not None and cached[0] == local._version:
            if cached[1].requires_grad == local.requires_grad or not torch.is_grad_enabled():
                return cached[1]
        reduced = self._redistribute_to(target)
        self._reduced_cache = (local._version, reduced)
        return reduced

    def _read_value(self) -> Tensor:
        """Return the global value for reading numbers, without a graph. It must not be returned to the user."""
        with torch.no_grad():
            value = self._reduced_value() if self._layout.numel == 1 else self
            cls, layout = type(value), value._layout
            if runtime.active.observer is not None and (layout.shard_axes or layout.partial):
                return observed_call(cls.item if layout.numel == 1 else cls.tolist, cls._value_to_read, value)
            return value._value_to_read().detach()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe layout, dtype and the local tensor. Never communicates, so one rank alone may print it."""
        deferred = self._deferred
        local = self._local_tensor if deferred is None else f"deferred {type(deferred).__name__}"
        return f"ShardTensor({self._layout}, dtype={self._dtype}, local={local})"

    def __str__(self) -> str:
        """Return the value of a tensor of no dims, which communicates; `repr` of any other."""
        if self.numel() == 1 and self.ndim == 0:
            return f"ShardTensor({self.item()}, {self._layout})"
        return repr(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.ndim == 0 else object.__format__(str(self), spec)

    def item(self) -> Any:
        """Return the value of a tensor with one element, the same on every rank. Communicates unless Replicate."""
        return self._read_value().item()

    def tolist(self) -> Any:
        """Return the global value as nested lists. Communicates unless Replicate."""
        return self._read_value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the global value as an array on every rank. Communicates unless Replicate."""
        return self._value_to_read().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        full = self._value_to_read().numpy()
        return full if dtype is None else full.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        return bool(self._read_value())

    def __int__(self) -> int:
        return int(self._read_value())

    def __float__(self) -> float:
        return float(self._read_value())

    def __complex__(self) -> complex:
        return complex(self._read_value())

    def __index__(self) -> int:
        return self._read_value().__index__()

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    __hash__ = object.__hash__
