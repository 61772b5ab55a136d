"""What a callable reads besides its arguments: modules' tensors, which become inputs, and attributes (see `guards`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Untraceable
from ..tensor import ShardTensor
from .closures import Captured
from .guards import ReadGuards

_tensor_meta = attrgetter("requires_grad", "shape", "dtype", "device")


def is_index(tensor: Tensor) -> bool:
    """Whether a tensor may be the edges of a graph or the like: integers, and more than a count."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim > 0


def version(tensor: Tensor) -> int:
    """A number that changes when a tensor is written; of one made in inference mode, which counts no writes, a hash."""
    if not tensor.is_inference():
        return tensor._version
    return hash(to_local(tensor).cpu().contiguous().view(torch.uint8).numpy().tobytes())


def to_local(tensor: Tensor) -> Tensor:
    """A tensor as it lies on this rank."""
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor


class ModuleState:
    """The tensors of some modules as they are now, and how to tell that a program for them still holds."""

    def __init__(self, captured: Captured, constant_indices: bool = False):
        """`constant_indices`: tensors of integers are part of the program, not inputs of it."""
        self.modules = modules = captured.modules
        self.guards = ReadGuards(captured)
        # where each tensor is: in a dict under a name, or in a list
        self._slots: list[tuple[Any, Any]] = []
        self._empty_slots: list[tuple[Any, Any]] = []  # and where one could be
        self.constants: list[tuple[Any, Any, Tensor, int]] = []
        for module in modules:
            own = module.__dict__
            lists = [value for value in own.values() if isinstance(value, list)]
            for held in (own["_parameters"], own["_buffers"], own, *lists):
                items = list(enumerate(held) if isinstance(held, list) else held.items())
                found = [(name, value) for name, value in items if isinstance(value, Tensor)]
                self._slots += [(held, name) for name, value in found if not (constant_indices and is_index(value))]
                self.constants += [
                    (held, name, value, version(value)) for name, value in found if constant_indices and is_index(value)
                ]
                if held is own["_parameters"] or held is own["_buffers"]:
                    self._empty_slots += [(held, name) for name, value in items if value is None]
        # What is there twice is one input.
        self._input_index: list[int] = []
        first: dict[int, int] = {}
        for held, name in self._slots:
            self._input_index.append(first.setdefault(id(held[name]), len(first)))
        self._unique = [self._input_index.index(i) for i in range(len(first))]
        children = [m.__dict__["_modules"] for m in modules]
        self._children = [(held, list(held.values())) for held in children if held]
        held = [m.__dict__[name] for m in modules for name in ("_parameters", "_buffers", "_modules")]
        self._containers, self._counts = held, list(map(len, held))
        self._expected = self._tensor_facts()

    def tensors(self) -> list[Tensor]:
        """The tensors, each once."""
        slots = self._slots
        return [slots[i][0][slots[i][1]] for i in self._unique]

    def _tensor_facts(self) -> tuple:
        tensors = [held[name] for held, name in self._slots]
        marks = [getattr(t, "_averaged_later", None) for t in tensors]
        kinds = list(map(type, tensors))
        layouts = [t._layout for t in tensors if t.__class__ is ShardTensor] if ShardTensor in kinds else []
        return list(map(_tensor_meta, tensors)), kinds, layouts, marks, self._sharing_pattern(tensors)

    def _sharing_pattern(self, tensors: list[Tensor]) -> list[int]:
        """Which of the tensors are the same one, if any are."""
        if len(self._unique) == len(tensors):
            return []
        return [next(j for j, u in enumerate(tensors) if u is t) for t in tensors]

    def guards_pass(self) -> bool:
        """Whether modules, what was read of them and the kinds of their tensors are as they were."""
        try:
            return self._guards_pass()
        except (KeyError, IndexError, AttributeError, ValueError):  # something is gone
            return False

    def _guards_pass(self) -> bool:
        if list(map(len, self._containers)) != self._counts or any(
            held[name] is not None for held, name in self._empty_slots
        ):
            return False
        for children, as_before in self._children:
            if not all(map(is_, children.values(), as_before)):
                return False
        for held, name, tensor, written in self.constants:
            if held[name] is not tensor or version(tensor) != written:
                return False
        return self._tensor_facts() == self._expected and self.guards.guards_pass()

    @contextmanager
    def with_tensors(self, tensors: list[Tensor]) -> Iterator[None]:
        """The modules with other tensors in place of their own."""
        kept = [held[name] for held, name in self._slots]
        for (held, name), place in zip(self._slots, self._input_index, strict=True):
            held[name] = tensors[place]
        before = [dict(m.__dict__) for m in self.modules]
        try:
            yield
            for (held, name), place in zip(self._slots, self._input_index, strict=True):
                if held[name] is not tensors[place]:
                    raise Untraceable(f"compile: {name!r} of a module is given a new tensor: write into it in place")
            for module, own in zip(self.modules, before, strict=True):
                _check_new_attributes(module, own)
            self.guards.check()
        finally:
            self.guards.restore()
            for module, own in zip(self.modules, before, strict=True):
                module.__dict__.clear()  # what it has put away for next time is the trace's
                module.__dict__.update(own)
            for (held, name), tensor in zip(self._slots, kept, strict=True):
                held[name] = tensor


def _check_new_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    for name, value in module.__dict__.items():
        if name not in before and isinstance(value, Tensor):
            raise Untraceable(f"compile: {type(module).__name__} keeps a tensor as {name!r}: return it or use a buffer")
