"""What a callable reads besides its arguments: modules' tensors, which become inputs, and their plain attributes."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Untraceable

# Attributes that are part of a program, and by whose values it is known again.
SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_facts = attrgetter("requires_grad", "shape", "dtype", "device")


def modules_of(target: Any, arguments: Iterable[Any]) -> list[nn.Module]:
    """The modules that a callable is, is a method of, closes over, has in its globals, or is given."""
    roots = [a for a in arguments if isinstance(a, nn.Module)]
    _collect(target, roots, set())
    found: dict[int, nn.Module] = {}
    for root in roots:
        found.update((id(m), m) for m in root.modules())
    return list(found.values())


def _collect(target: Any, roots: list[nn.Module], seen: set[int]) -> None:
    if id(target) in seen:
        return
    seen.add(id(target))
    if isinstance(target, nn.Module):
        roots.append(target)
    elif isinstance(target, functools.partial):
        for value in (target.func, *target.args, *target.keywords.values()):
            _collect(value, roots, seen)
    elif isinstance(target, types.MethodType):
        _collect(target.__self__, roots, seen)
        _collect(target.__func__, roots, seen)
    elif hasattr(target, "__wrapped__") and not isinstance(target, types.FunctionType):
        _collect(target.__wrapped__, roots, seen)
    elif isinstance(target, types.FunctionType):
        captured = inspect.getclosurevars(target)
        for name, value in {**captured.globals, **captured.nonlocals}.items():
            if isinstance(value, Tensor):
                raise Untraceable(
                    f"compile: {target.__qualname__} captures the tensor {name!r}, and a program would keep the one "
                    "that is there now: pass it as an argument, or make it a parameter or buffer of a module"
                )
            # functions of the user's own module may use modules too
            if isinstance(value, (nn.Module, functools.partial, types.MethodType)) or (
                isinstance(value, types.FunctionType) and value.__module__ == target.__module__
            ):
                _collect(value, roots, seen)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, nn.Module):
                        _collect(item, roots, seen)


def is_index(tensor: Tensor) -> bool:
    """Whether a tensor may be the edges of a graph or the like: integers, and more than a count."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim > 0


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, SIMPLE + CODE)


class State:
    """The tensors of some modules as they are now, and how to tell that a program for them still holds."""

    def __init__(self, modules: list[nn.Module], fixed: bool = False):
        """`fixed`: tensors of integers are part of the program, not inputs of it."""
        self.modules = modules
        # where each tensor is: in a dict under a name, or in a list
        self._slots: list[tuple[Any, Any]] = []
        self.fixed: list[tuple[Any, Any, Tensor, int]] = []
        self._getters: list[tuple[Callable[[dict], Any], dict[str, Any]]] = []
        for module in modules:
            own = module.__dict__
            lists = [value for value in own.values() if isinstance(value, list)]
            for held in (own["_parameters"], own["_buffers"], own, *lists):
                items = enumerate(held) if isinstance(held, list) else held.items()
                found = [(name, value) for name, value in items if isinstance(value, Tensor)]
                self._slots += [(held, name) for name, value in found if not (fixed and is_index(value))]
                self.fixed += [
                    (held, name, value, value._version) for name, value in found if fixed and is_index(value)
                ]
            names = [n for n, v in own.items() if _is_plain(v)]
            self._getters.append((itemgetter("training", *names), own))
        # What is there twice is one input.
        self._place: list[int] = []
        first: dict[int, int] = {}
        for held, name in self._slots:
            self._place.append(first.setdefault(id(held[name]), len(first)))
        self._unique = [self._place.index(i) for i in range(len(first))]
        self._children = [(m.__dict__["_modules"], dict(m.__dict__["_modules"])) for m in modules]
        self._counts = [(m.__dict__["_parameters"], len(m.__dict__["_parameters"])) for m in modules]
        self._seen = self._now()

    def tensors(self) -> list[Tensor]:
        """The tensors, each once."""
        slots = self._slots
        return [slots[i][0][slots[i][1]] for i in self._unique]

    def _now(self) -> tuple:
        tensors = [held[name] for held, name in self._slots]
        marks = [getattr(t, "_averaged_later", None) for t in tensors]
        return list(map(_facts, tensors)), [getter(own) for getter, own in self._getters], marks, self._pattern(tensors)

    def _pattern(self, tensors: list[Tensor]) -> list[int]:
        """Which of the tensors are the same one, if any are."""
        if len(self._unique) == len(tensors):
            return []
        return [next(j for j, u in enumerate(tensors) if u is t) for t in tensors]

    def holds(self) -> bool:
        """Whether modules, their attributes and the kinds of their tensors are as they were."""
        try:
            return self._holds()
        except (KeyError, IndexError, AttributeError):  # something is gone
            return False

    def _holds(self) -> bool:
        for children, as_before in self._children:
            if len(children) != len(as_before) or not all(map(is_, children.values(), as_before.values())):
                return False
        if any(len(held) != n for held, n in self._counts):
            return False
        for held, name, tensor, version in self.fixed:
            if held[name] is not tensor or tensor._version != version:
                return False
        return self._now() == self._seen

    @contextmanager
    def replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        """The modules with other tensors in place of their own."""
        kept = [held[name] for held, name in self._slots]
        for (held, name), place in zip(self._slots, self._place, strict=True):
            held[name] = tensors[place]
        before = [dict(m.__dict__) for m in self.modules]
        try:
            yield
            for (held, name), place in zip(self._slots, self._place, strict=True):
                if held[name] is not tensors[place]:
                    raise Untraceable(f"compile: {name!r} of a module is given a new tensor: write into it in place")
            for module, own in zip(self.modules, before, strict=True):
                _check_new(module, own)
        finally:
            for module, own in zip(self.modules, before, strict=True):
                module.__dict__.clear()  # what it has put away for next time is the trace's
                module.__dict__.update(own)
            for (held, name), tensor in zip(self._slots, kept, strict=True):
                held[name] = tensor


def _check_new(module: nn.Module, before: dict[str, Any]) -> None:
    for name, value in module.__dict__.items():
        if name not in before and isinstance(value, Tensor):
            raise Untraceable(f"compile: {type(module).__name__} keeps a tensor as {name!r}: return it or use a buffer")
