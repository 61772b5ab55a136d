"""Copies where one device has a view: after a write into the source, a copy is computed from it again.

Where a view would need communication (an integer index into a sharded dim, a reshape across shards) the result is a
copy. On one device a later write into the source is visible in the view. Here the write turns the copy into a deferred
value, which takes the view again at every read. It does so at the read, not at the write, because taking the view
communicates: all ranks read the same tensors, but one of them may keep a copy alive that others have dropped.

A write into the copy of a dim that was split across shards, or into a view of this copy, changes the source: the new
value of the copy is computed, and written into the source. Other copies are not written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .. import runtime
from ..comm.consensus import any_rank
from ..errors import ShardingError
from ..tensor import Deferred, ShardTensor, wrap
from ..trace_state import same_memory
from .plan import process_groups
from .write_tracking import set_copied_view


class CopiedView(Deferred):
    """The copy `tensor` of a view of `source`; `take_view(source)` takes the view again. Held by the tensor.

    merges: strides decide whether torch returns a view or a copy, which does not see the write. votes: whether those of
    this rank allow a view, and whether they need a copy; both, if they are not those of one device. splits: the view
    only splits dims, so that the source is a reshape of it.
    """

    volatile = True

    def __init__(
        self,
        tensor: ShardTensor,
        source: ShardTensor,
        take_view: Callable[[ShardTensor], ShardTensor],
        merges: bool = False,
        votes: tuple[bool, bool] = (True, False),
        splits: bool = False,
    ):
        self.layout, self.source, self.take_view = tensor._layout, source, take_view
        self.merges, self.votes, self.splits = merges, votes, splits
        self.grad_enabled = torch.is_grad_enabled()
        self.tensor = weakref.ref(tensor)
        former = source.__dict__.get("_copy_of")
        self.memory: list[Tensor] = [source._local_tensor, *(former.memory if former is not None else ())]
        self.before: Tensor | None = None  # the value before the first write
        tensor._copy_of = self
        runtime.active.write_observers.add(self)

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and self.source.requires_grad

    def before_write(self, target: Tensor) -> None:
        """Turn the copy into a deferred value if `target` is its source, or shares memory with it."""
        tensor = self.tensor()
        if tensor is None:
            return
        held = self.source.__dict__.get("_local_tensor")  # not the tensor in `memory` if a Partial was reduced
        if not any(same_memory(target, m) for m in (*self.memory, *(() if held is None else (held,)))):
            return
        self.version += 1
        local = tensor.__dict__.get("_local_tensor")
        if local is None:
            return
        for observer in list(runtime.active.write_observers):  # lazy values of the copy need its present value
            if not isinstance(observer, CopiedView):
                observer.before_write(local)
        if self.merges:
            self.before = local.clone() if same_memory(local, target) else local
        del tensor.__dict__["_local_tensor"]
        tensor._deferred = self

    def materialize(self) -> ShardTensor:
        """Take the view of the source as it is now. Communicates."""
        with torch.set_grad_enabled(self.grad_enabled and torch.is_grad_enabled()):
            if self.merges and not self._is_view():
                assert self.before is not None
                return wrap(self.before, self.layout)
            return self.take_view(self.source)

    def _is_view(self) -> bool:
        groups = process_groups(self.layout, range(self.layout.mesh.ndim))
        views, copies = any_rank(self.votes, groups)
        if views and copies:
            raise ShardingError(
                "the source of this reshaped tensor was written since, and its strides differ between ranks, or from "
                "one device: there the result may be a view, which sees the write, or a copy. Use reshape(...).clone()"
            )
        return views

    def accepts_writes(self) -> bool:
        """Return whether `write` can change the source. The answer is the same on all ranks."""
        if self.source._layout.partial:
            return False
        if self.source._copied_view is False:
            return self.splits
        former = self.source.__dict__.get("_copy_of")
        return self.source._copied_view is True and not self.merges and former is not None and former.accepts_writes()

    def write(self, value: ShardTensor) -> None:
        """Write a new value of the copy into the source. Communicates."""
        if self.splits:
            new = value.reshape(self.source.shape)
        else:  # the source is a copy too, and this is a local view of it
            new = self.source.clone()
            view = self.take_view(new)
            view._check_writable()
            view.copy_(value)
        if self.source._copied_view is True:
            self.source._copy_of.write(new)
        else:
            self.source._write(new)


def of_copied_view(view: ShardTensor, source: ShardTensor, take_view: Callable) -> ShardTensor:
    """Return `view`, which shares all of its memory with `source`; if that is a copied view, `view` is one too."""
    if source._copied_view is not False:
        set_copied_view(view, source._copied_view)
    if source._copied_view is True:
        CopiedView(view, source, take_view)
    return view


def write_through(target: ShardTensor, write: Callable[[ShardTensor], object]) -> bool:
    """Write into a copy of a split dim so that the write reaches its source; return False for any other tensor.

    `write` writes into the tensor that it is called with.
    """
    copy = target.__dict__.get("_copy_of") if target._copied_view is True else None
    if copy is None or not copy.accepts_writes():
        return False
    new = target.clone()
    write(new)
    copy.write(new)
    return True
