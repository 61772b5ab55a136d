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
from .message_log import MessageLog

Buffers = list[tuple[dict[str, Tensor | None], str, Tensor]]  # (table of a module, name, value before the forward)
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
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if runtime.active.message_log is not None or not torch.is_grad_enabled():  # a part of another segment
            return forward(*args, **kwargs)
        return Segment(block, forward, args, kwargs).run()

    return forward if getattr(block, "inplace", False) else run


class Segment:
    """One call of a block. It lives as long as the autograd graph that needs it."""

    def __init__(self, block: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]):
        self._block, self._forward = block, forward
        self._given = args, kwargs
        self._arguments: tuple[tuple, dict[str, Any]] | None = None  # those of a recomputation, after the forward
        self._versions: list[tuple[Tensor, int]] = []
        self._log = MessageLog()
        self._saved: list[weakref.ref[_Saved]] = []
        self._values: dict[int, Tensor] = {}  # what was recomputed and has not been read
        self._generators = _generators()
        self._autocast = _autocast()
        self._buffers: Buffers = []

    def run(self) -> Any:
        """Compute the block without saving its activations."""
        found = [(m._buffers, k, b, b._version, b.clone()) for m in self._block.modules() for k, b in _buffers_of(m)]
        args, kwargs = self._given
        again = map_tensors((args, kwargs), self._without_later_caches)
        with _logging(self._log), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            out = self._forward(*args, **kwargs)
        self._arguments, self._given = again, ((), {})
        self._buffers = [(table, name, was) for table, name, b, version, was in found if b._version != version]
        return out

    def _without_later_caches(self, value: Tensor) -> Tensor:
        """Return an argument without what a call may cache in it: a recomputation makes the calls of the forward."""
        local = value._local_tensor if isinstance(value, ShardTensor) else value
        if not local.is_inference():
            self._versions.append((local, local._version))
        if not isinstance(value, ShardTensor):
            return value
        again = wrap(local, value._layout)
        again._reduced_cache = value._reduced_cache
        return again

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, len(self._saved), (tensor.shape, tensor.dtype))
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.number not in self._values:
            self._recompute()
        value = self._values.pop(saved.number, None)
        if value is None or (value.shape, value.dtype) != saved.kind:
            raise WorldError(f"{self._describe()} saves other tensors when it is recomputed; {INSTEAD}")
        return value

    def _recompute(self) -> None:
        """Compute the block again, as far as the last tensor that is still needed."""
        if self._arguments is None:
            raise WorldError(f"{self._describe()} computes gradients in its forward, which is recomputed; {INSTEAD}")
        if any(tensor._version != version for tensor, version in self._versions):
            raise WorldError(f"an argument of {self._describe()} was written after the call; {INSTEAD}")
        last = max(number for number, saved in enumerate(self._saved) if saved() is not None)
        count = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal count
            number, count = count, count + 1
            tensor = tensor.detach()  # or else the graph of a saved result would hold itself
            if number < len(self._saved) and self._saved[number]() is not None:
                self._values[number] = tensor
            if number == last:
                raise _AllSaved
            return tensor

        now = [table[name] for table, name, _ in self._buffers]
        generators = _generators()
        self._log.replay()
        args, kwargs = map_tensors(self._arguments, self._without_later_caches)
        try:
            for table, name, was in self._buffers:
                table[name] = was.clone()
            _set_generators(self._generators)
            with contextlib.ExitStack() as stack:
                for context in _changes(self._autocast):
                    stack.enter_context(torch.autocast(**context))
                stack.enter_context(_logging(self._log))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
                stack.enter_context(torch.enable_grad())
                with contextlib.suppress(_AllSaved):
                    self._forward(*args, **kwargs)
        finally:
            _set_generators(generators)
            for (table, name, _), buffer in zip(self._buffers, now, strict=True):
                table[name] = buffer

    def _describe(self) -> str:
        return f"virtual ranks: a {type(self._block).__name__} of the model"


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


def _generators() -> list[tuple[torch.Generator, Tensor]]:
    """Return torch's default generators and their states."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(generator, generator.get_state()) for generator in (torch.default_generator, *devices)]


def _set_generators(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _autocast() -> list[dict[str, Any]]:
    """Return the arguments of autocast, for each kind of device."""
    cache = torch.is_autocast_cache_enabled()
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": cache,
        }
        for kind in ("cpu", "cuda")
    ]


def _changes(autocast: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kinds that differ from what they are now."""
    return [then for then, now in zip(autocast, _autocast(), strict=True) if then != now]


def _buffers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
