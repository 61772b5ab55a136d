"""Segments of a model whose activations are recomputed in backward, on one rank at a time and without messages.

The forward of a segment saves no activation: only its arguments are kept, and what the rank receives inside it, which
is small (rows of halos, statistics, modes). The first tensor that backward reads is computed again from these, with all
others that are still needed. Ranks need not wait for each other meanwhile. Gradients are sent as ever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import runtime
from ..dispatch.arguments import map_tensors
from ..errors import WorldError
from ..tensor import ShardTensor, wrap
from .block_state import BlockState
from .message_log import MessageLog

# In the forward of a block that is recomputed after every wait of its backward. Tensors that are moved out once stay
# clean until they are read, which costs less than so many recomputations.
MOST_MESSAGES = 8
INSTEAD = 'memory="keep", "offload" or a larger budget computes it once'


class _Saved:
    """The place of a tensor that a segment has saved: the segment, the number of the tensor, its shape and dtype."""

    __slots__ = ("segment", "number", "kind", "__weakref__")

    def __init__(self, segment: Segment, number: int, kind: tuple[torch.Size, torch.dtype]):
        self.segment, self.number, self.kind = segment, number, kind


class _AllSaved(BaseException):
    """Every tensor that backward still needs has been recomputed. (No Exception: nobody in between may handle it.)"""


def recomputed(block: nn.Module) -> Callable:
    """Return the forward of a block as a segment. A layer that writes its argument in place is left as it is."""
    forward, numpy = block.forward, None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal numpy
        if runtime.active.message_log is not None or not torch.is_grad_enabled():  # a part of another segment
            return forward(*args, **kwargs)
        state = BlockState(block, numpy)
        numpy = None if state.generators is None else state.generators.numpy
        return Segment(block, forward, args, kwargs, state).run()

    return forward if getattr(block, "inplace", False) else run


class Segment:
    """One call of a block. It lives as long as the autograd graph that needs it."""

    def __init__(self, block: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any], state: BlockState):
        self._block, self._forward = block, forward
        self._given = args, kwargs
        self._arguments: tuple[tuple, dict[str, Any]] | None = None  # those of a recomputation, after the forward
        self._versions: list[tuple[Tensor, int]] = []
        self._log = MessageLog()
        self._saved: list[weakref.ref[_Saved]] = []
        self._values: dict[int, tuple[Tensor, int]] = {}  # what was recomputed and has not been read, with its version
        self._state = state

    def run(self) -> Any:
        """Compute the block without saving its activations."""
        args, kwargs = self._given
        again = map_tensors((args, kwargs), self._remember)
        with _logging(self._log), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            out = self._forward(*args, **kwargs)
        self._arguments, self._given = again, ((), {})
        self._state.forward_ends()
        return out

    def _remember(self, value: Tensor) -> Tensor:
        """Return an argument for a recomputation, and note its version."""
        local = _local(value)
        if not local.is_inference():
            self._versions.append((local, local._version))
        return _without_later_caches(value)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, len(self._saved), (tensor.shape, tensor.dtype))
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.number not in self._values:
            self._recompute()
        value, version = self._values.pop(saved.number, (None, 0))
        if value is None or (value.shape, value.dtype) != saved.kind:
            raise WorldError(f"virtual ranks: {self._describe()} saves other tensors when it is recomputed; {INSTEAD}")
        if _local(value)._version != version:
            raise WorldError(f"virtual ranks: {self._describe()} writes a tensor in place that its backward reads")
        return value

    def _recompute(self) -> None:
        """Compute the block again, as far as the last tensor that is still needed."""
        if self._arguments is None:
            raise WorldError(f"virtual ranks: {self._describe()} computes gradients in its forward; {INSTEAD}")
        if any(tensor._version != version for tensor, version in self._versions):
            raise WorldError(f"virtual ranks: an argument of {self._describe()} was written after the call; {INSTEAD}")
        if self._state.parameters_written:
            raise WorldError(f"virtual ranks: a parameter of {self._describe()} was written before its gradient")
        last = max(number for number, saved in enumerate(self._saved) if saved() is not None)
        count = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal count
            number, count = count, count + 1
            kept = tensor.detach()  # or else the graph of a saved result would hold itself
            if number < len(self._saved) and self._saved[number]() is not None:
                self._values[number] = kept, _local(kept)._version
            if number == last:
                raise _AllSaved
            return kept

        self._log.replay()
        args, kwargs = map_tensors(self._arguments, _without_later_caches)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with self._state.restored(), _logging(self._log), hooks, torch.enable_grad(), contextlib.suppress(_AllSaved):
            self._forward(*args, **kwargs)
        pager = None if runtime.active.virtual is None else runtime.active.virtual.pager
        if pager is not None and len(self._log) <= MOST_MESSAGES:
            values = (_local(value) for value, _ in self._values.values())
            pager.recomputable(values, self, (tensor for tensor, _ in self._versions))

    def drop(self) -> None:
        """Forget what was recomputed and has not been read: the next tensor that is read is recomputed again."""
        self._values.clear()

    def _describe(self) -> str:
        return f"a {type(self._block).__name__} of the model"


@contextlib.contextmanager
def _logging(log: MessageLog) -> Iterator[None]:
    """Write what this rank receives to a log, or read it there. Messages that are not sent are not counted."""
    rt = runtime.active
    meter, before = rt.meter, rt.message_log
    rt.message_log = log
    if log.replaying:
        rt.meter = None
    try:
        yield
    finally:
        runtime.active.message_log, runtime.active.meter = before, meter


def _without_later_caches(value: Tensor) -> Tensor:
    """Return an argument without what a call may cache in it: a recomputation makes the calls of the forward."""
    if not isinstance(value, ShardTensor):
        return value
    again = wrap(value._local_tensor, value._layout)
    again._reduced_cache = value._reduced_cache
    return again


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor
