"""Tensors of the modules that a callable uses: they become inputs of its program, with guards on their metadata."""

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
    """Return whether a tensor may hold indices, the edges of a graph for example: integers with at least one dim."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim > 0


def version(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written.

    An inference tensor has no version counter; the number is a hash of its data.
    """
    if not tensor.is_inference():
        return tensor._version
    return hash(to_local(tensor).cpu().contiguous().view(torch.uint8).numpy().tobytes())


def to_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a ShardTensor, and a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor


class ModuleState:
    """Collect the tensors of modules, and check whether a program traced for them is still valid."""

    def __init__(self, captured: Captured, constant_indices: bool = False):
        """`constant_indices`: integer tensors are constants of the program, not inputs."""
        self.modules = modules = captured.modules
        self.guards = ReadGuards(captured)
        self.meshes = [mesh for mesh in captured.meshes if mesh.get_coordinate() is not None]
        # The container of each tensor and its key there: a dict and a name, or a list and an index.
        self._slots: list[tuple[Any, Any]] = []
        self._empty_slots: list[tuple[Any, Any]] = []  # parameters and buffers that are None
        self.constants: list[tuple[Any, Any, Tensor, int]] = []
        for module in modules:
            own = module.__dict__
            lists = [value for value in own.values() if isinstance(value, list)]
            for table in (own["_parameters"], own["_buffers"], own, *lists):
                items = list(enumerate(table) if isinstance(table, list) else table.items())
                for name, value in items:
                    if isinstance(value, Tensor) and constant_indices and is_index(value):
                        self.constants.append((table, name, value, version(value)))
                    elif isinstance(value, Tensor):
                        self._slots.append((table, name))
                if table is own["_parameters"] or table is own["_buffers"]:
                    self._empty_slots += [(table, name) for name, value in items if value is None]
        # A tensor in several slots is one input.
        self._input_index: list[int] = []
        first: dict[int, int] = {}
        for table, name in self._slots:
            self._input_index.append(first.setdefault(id(table[name]), len(first)))
        self._unique = [self._input_index.index(i) for i in range(len(first))]
        children = [m.__dict__["_modules"] for m in modules]
        self._children = [(table, list(table.values())) for table in children if table]
        tables = [m.__dict__[name] for m in modules for name in ("_parameters", "_buffers", "_modules")]
        self._containers, self._counts = tables, list(map(len, tables))
        self._expected = self._tensor_facts()

    def tensors(self) -> list[Tensor]:
        """Return the tensors, each once."""
        slots = self._slots
        return [slots[i][0][slots[i][1]] for i in self._unique]

    def _tensor_facts(self) -> tuple:
        tensors = [table[name] for table, name in self._slots]
        marks = [getattr(t, "_averaged_later", None) for t in tensors]
        kinds = list(map(type, tensors))
        layouts = [t._layout for t in tensors if t.__class__ is ShardTensor] if ShardTensor in kinds else []
        return list(map(_tensor_meta, tensors)), kinds, layouts, marks, self._sharing_pattern(tensors)

    def _sharing_pattern(self, tensors: list[Tensor]) -> list[int]:
        """Return for each slot the first slot that holds the same tensor; empty if all tensors are distinct."""
        if len(self._unique) == len(tensors):
            return []
        return [next(j for j, u in enumerate(tensors) if u is t) for t in tensors]

    def guards_pass(self) -> bool:
        """Return whether the modules, the attributes that were read, and the metadata of the tensors are unchanged."""
        try:
            return self._guards_pass()
        except (KeyError, IndexError, AttributeError, ValueError):  # an attribute, variable or item was removed
            return False

    def _guards_pass(self) -> bool:
        if list(map(len, self._containers)) != self._counts or any(
            table[name] is not None for table, name in self._empty_slots
        ):
            return False
        for children, before in self._children:
            if not all(map(is_, children.values(), before)):
                return False
        for table, name, tensor, traced_version in self.constants:
            if table[name] is not tensor or version(tensor) != traced_version:
                return False
        return self._tensor_facts() == self._expected and self.guards.guards_pass()

    @contextmanager
    def with_tensors(self, tensors: list[Tensor]) -> Iterator[None]:
        """Replace the tensors of the modules inside the context, and undo all changes of the modules at its end."""
        originals = [table[name] for table, name in self._slots]
        for (table, name), index in zip(self._slots, self._input_index, strict=True):
            table[name] = tensors[index]
        before = [dict(m.__dict__) for m in self.modules]
        try:
            yield
            for (table, name), index in zip(self._slots, self._input_index, strict=True):
                if table[name] is not tensors[index]:
                    raise Untraceable(f"compile: a module assigns a new tensor to {name!r}: write into it in place")
            for module, own in zip(self.modules, before, strict=True):
                _check_new_attributes(module, own)
            self.guards.check()
        finally:
            self.guards.restore()
            for module, own in zip(self.modules, before, strict=True):
                module.__dict__.clear()  # a cached attribute of the trace would hold a fake tensor
                module.__dict__.update(own)
            for (table, name), tensor in zip(self._slots, originals, strict=True):
                table[name] = tensor


def _check_new_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    for name, value in module.__dict__.items():
        if name not in before and isinstance(value, Tensor):
            raise Untraceable(
                f"compile: {type(module).__name__} stores a tensor as {name!r}: return it or use a buffer"
            )
