"""What a ShardTensor holds: a layout, and a local tensor or a `Deferred` value that computes one when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._compat import saved_tensor_hooks
from ..dispatch.write_tracking import SavedTensor, WriteObserver
from ..layout import Layout

if TYPE_CHECKING:
    from .shard_tensor import ShardTensor


class Deferred(WriteObserver):
    """A value that is computed when its local tensor is first read: a lazy spectrum, a lazily padded field.

    A deferred value holds its source. `before_write` and `before_export` (see `WriteObserver`) let it take a snapshot
    before the source is written; both must send nothing, since ranks may differ in which deferred values are alive.
    """

    layout: Layout  # of the value
    graph_local: Tensor | None = None  # where backward starts, if it does not need the value
    volatile = False  # computed at every read, not once
    repeatable = False  # `materialize` may be called again, by a checkpoint that recomputes
    version: Any = 0
    saved_hooks: tuple[Any, Any] | None = None  # those of saved tensors when the value was made

    @property
    def requires_grad(self) -> bool:
        """Whether the value will require grad; must be the same on all ranks, without a message."""
        raise NotImplementedError

    def materialize(self) -> ShardTensor:
        """Compute the value in `layout`. Communicates: all ranks must call it."""
        raise NotImplementedError

    def metadata_local(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor that answers for the local one what is asked of its kind (`is_sparse`, `is_contiguous`)."""
        return torch.empty((1,) * self.layout.ndim, dtype=dtype, device=device)


# Attributes of a deferred tensor that are read without materializing it. Every other read of its local tensor
# materializes, which communicates: all ranks must then read it.
DEFERRED_ATTRIBUTES: Mapping[str, Callable[[Deferred], Any]] = MappingProxyType(
    {
        "requires_grad": lambda deferred: deferred.requires_grad,
        "is_leaf": lambda deferred: not deferred.requires_grad,
        "grad": lambda deferred: None,
        "retains_grad": lambda deferred: False,
        "_version": lambda deferred: deferred.version,
    }
)


class _MaterializeOnRead:
    """The descriptor `_local_tensor`: it materializes a deferred value when the local tensor is first read.

    It is not a data descriptor, so a local tensor in `__dict__` takes precedence and is read at no extra cost. A
    `__getattr__` would slow down every attribute of every ShardTensor.
    """

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        deferred = None if tensor is None else tensor._deferred
        if deferred is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute '_local_tensor'")
        if deferred.volatile:
            return deferred.materialize()._local_tensor
        with _without_later_hooks(deferred):
            local = deferred.materialize()._local_tensor
        tensor._local_tensor = local
        del tensor.__dict__["_deferred"]
        return local


def has_later_hooks(deferred: Deferred) -> bool:
    """Return whether saved-tensor hooks were entered since the value was made, by a checkpoint that reads it."""
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks != deferred.saved_hooks


def _without_later_hooks(deferred: Deferred) -> AbstractContextManager[Any]:
    """Return a context in which later hooks do not see the tensors that the computation of the value saves.

    A checkpoint does not repeat the computation of a value that was made before it. Had it saved tensors of that
    computation, it would find fewer when it recomputes.
    """
    if not has_later_hooks(deferred):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(SavedTensor, SavedTensor.checked_tensor)


class LocalState:
    """The attributes of a ShardTensor. Its base classes, one for each group of methods, share them."""

    _local_tensor: Tensor = _MaterializeOnRead()  # type: ignore[assignment]
    _deferred: Deferred | None = None  # instead of a local tensor
    _layout: Layout
    _dtype: torch.dtype  # dtype and device of the local tensor; reading them from it takes longer
    _device: torch.device


def local_attribute(name: str, doc: str) -> property:
    """Build the property that reads `name` from the local tensor, or from the deferred value if that has it."""
    read, answer = attrgetter(f"_local_tensor.{name}"), DEFERRED_ATTRIBUTES.get(name)
    if answer is None:
        return property(read, doc=f"{doc} Communicates if the tensor is deferred.")

    def get(self: LocalState) -> Any:
        deferred = self._deferred
        return read(self) if deferred is None else answer(deferred)

    return property(get, doc=doc)
