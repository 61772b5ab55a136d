"""Which attributes, variables and containers a trace has read, and whether they are still as they were.

While a program is traced, modules and the user's objects tell which of their attributes are read: the program depends
on these, and on no others, so that a counter nobody reads in the step costs no retrace.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Untraceable
from .closures import MAX_DEPTH, Captured

# What is known again by its value; anything else by what it is.
VALUE_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, dict, set, deque)
IGNORED_ATTRS = {"_parameters", "_buffers", "_modules", "__dict__", "__class__"}  # which `state` sees to
HOOKS = {name for name, value in nn.Module().__dict__.items() if isinstance(value, dict)}  # dicts that modules keep
MAX_ARRAY_BYTES = 1 << 20  # bytes of an array that is known by what it is, not by what is in it
MISSING = object()


def same_value(now: Any, before: Any) -> bool:
    """Whether two values are the same to a program: 2 is not 2.0, and nan is nan."""
    if now is before:
        return True
    if type(now) is not type(before):
        return isinstance(now, Tensor) and isinstance(before, Tensor)
    if isinstance(now, float):
        return now.hex() == before.hex()
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(same_value, now, before))
    if isinstance(now, Tensor):  # those that a program may read are its inputs
        return True
    return isinstance(now, VALUE_TYPES) and now == before


def is_array(value: Any) -> bool:
    """Whether a value is one of numpy's arrays, and not so large that looking at it would cost more than the step."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.nbytes <= MAX_ARRAY_BYTES


def _same_or_tensors(now: Any, before: Any) -> bool:
    both = now, before
    return (
        now is before
        or all(isinstance(x, Tensor) for x in both)
        or (all(isinstance(x, bytes) for x in both) and now == before)
    )


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return [container.tobytes()] if is_array(container) else list(container)


class ReadGuards:
    """What a trace reads of some modules, objects and variables."""

    def __init__(self, captured: Captured):
        self._captured = captured
        self._tracked = {id(o): o for o in [*captured.modules, *captured.objects]}
        self._before = {key: dict(o.__dict__) for key, o in self._tracked.items()}
        self._own_reads: dict[tuple[int, str], Any] = {}  # what was read of an object's own attributes
        self._class_reads: dict[tuple[int, str], Any] = {}  # what was read off its class, or not found there either
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        self._variables = [(held, name, held[name]) for held, name in captured.variables]
        self._cells = [(cell, name, cell.cell_contents) for cell, name in captured.cells]
        for value in [*(v for *_, v in [*self._variables, *self._cells]), *captured.defaults]:
            self._snapshot(value, 0)
        for value in captured.objects:
            if not _is_patchable(type(value)):
                self._snapshot(value.__dict__, 0)

    # ------------------------------------------------------------------ tracing

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, what is read of modules and objects is noted."""
        kinds = dict.fromkeys([nn.Module, *(type(o) for o in self._captured.objects if _is_patchable(type(o)))])
        undo = [self._patch_getattribute(kind) for kind in kinds]
        try:
            yield
        finally:
            for put_back in reversed(undo):
                put_back()

    def _patch_getattribute(self, kind: Any) -> Callable[[], None]:
        read, own = kind.__getattribute__, kind.__dict__.get("__getattribute__")

        def tell(this: Any, name: str) -> Any:
            try:
                value = read(this, name)
            except AttributeError:
                value = MISSING
            if id(this) in self._tracked and name not in IGNORED_ATTRS:
                self._record_read(this, name, value)
            return read(this, name) if value is MISSING else value

        kind.__getattribute__ = tell

        def put_back() -> None:
            if own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own

        return put_back

    def _record_read(self, this: Any, name: str, value: Any) -> None:
        key, before = (id(this), name), self._before[id(this)]
        if key in self._own_reads or key in self._class_reads:
            return
        if name in before:
            if before[name] is value and not isinstance(value, Tensor):
                self._own_reads[key] = value
                self._snapshot(value, 0)
        elif name not in object.__getattribute__(this, "__dict__") and not _is_module_internal(this, name, before):
            held = isinstance(value, (VALUE_TYPES, CONTAINERS)) and not _is_descriptor(type(this), name)
            if value is MISSING or held:
                self._class_reads[key] = value
                self._snapshot(value, 0)

    def _snapshot(self, value: Any, depth: int) -> None:
        """Remember what is in a container, and in those in it."""
        kept = isinstance(value, CONTAINERS) or is_array(value)
        if kept and id(value) not in self._containers and depth <= MAX_DEPTH:
            items = _items(value)
            if not isinstance(value, tuple):
                self._containers[id(value)] = value, items
            for item in items:
                self._snapshot(item, depth + 1)

    def check(self) -> None:
        """What the callable has changed is put back; where that would be missed, it is refused."""
        changed = self.restore()
        if changed:
            raise Untraceable(f"compile: {changed}: the program would not do that when it runs. Return it instead")

    def restore(self) -> str:
        """As it was before the trace; returns what the callable has changed, if that would be missed."""
        changed = ""
        modules = {id(m) for m in self._captured.modules}
        for key, this in self._tracked.items():
            before, now = self._before[key], this.__dict__
            for name in [n for n in now if n not in before or now[n] is not before[n]]:
                old, new = before.get(name), now[name]
                counted = (
                    isinstance(new, (bool, int, float)) and (key, name) in self._own_reads and not same_value(new, old)
                )
                # where nothing was, something is put away for next time; and made in the program, whenever it runs
                kept = key in modules or (old is None and (name in before or not isinstance(new, Tensor)))
                if counted or not kept:
                    changed = f"{type(this).__name__} writes its attribute {name!r}"
            if key not in modules:  # `state` has the others
                now.clear()
                now.update(before)
        mine = [v for m in modules for v in self._before[m].values() if isinstance(v, dict)]
        for container, items in self._containers.values():
            now = _items(container)
            if len(now) == len(items) and all(map(_same_or_tensors, now, items)):
                continue
            # what a module puts away in a dict of its own is made in the program, whenever it runs
            kept = any(container is d for d in mine) and all(k in container for k in items[: len(items) // 2])
            if not kept:
                changed = f"a {type(container).__name__} that is kept outside is written into"
            _restore_container(container, items)
        for held, name, value in self._variables:
            if held[name] is not value:
                held[name], changed = value, f"the variable {name!r} is given a new value"
        for cell, name, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents, changed = value, f"the variable {name!r} is given a new value"
        return changed

    # ------------------------------------------------------------------ running

    def finalize(self) -> None:
        """The trace is over: be quick from now on."""
        by_object: dict[int, list[str]] = {}
        for key, name in self._own_reads:
            if name in HOOKS and isinstance(self._tracked[key], nn.Module):
                continue  # what is in it is looked at
            by_object.setdefault(key, []).append(name)
        self._getters = []
        for key, names in by_object.items():
            getter = itemgetter(*names, names[0])  # two at least, so that it gives a tuple
            own = self._tracked[key].__dict__
            self._getters.append((own, getter, getter(self._before[key])))
        self._class_guards = [
            (self._tracked[k].__dict__, name, type(self._tracked[k]), v) for (k, name), v in self._class_reads.items()
        ]
        held = list(self._containers.values())
        self._empty = [container for container, items in held if not items]
        self._full = [(container, items) for container, items in held if items]

    def guards_pass(self) -> bool:
        """Whether all that was read is as it was. Raises KeyError where something is gone."""
        for own, getter, before in self._getters:
            now = getter(own)
            if not all(map(is_, now, before)) and not all(map(same_value, now, before)):
                return False
        for own, name, kind, value in self._class_guards:
            if name in own or not same_value(getattr(kind, name, MISSING), value):
                return False
        if any(self._empty):
            return False
        for container, items in self._full:
            now = _items(container)
            if len(now) != len(items) or not (all(map(is_, now, items)) or all(map(same_value, now, items))):
                return False
        return all(same_value(held[name], value) for held, name, value in self._variables) and all(
            same_value(cell.cell_contents, value) for cell, _, value in self._cells
        )


def _is_patchable(kind: type) -> bool:
    """Whether a class can be made to tell what is read of its objects."""
    return bool(kind.__flags__ & (1 << 9)) and kind.__module__ != "builtins"  # made by a class statement


def _is_descriptor(kind: type, name: str) -> bool:
    return any(
        name in c.__dict__ and isinstance(c.__dict__[name], (property, types.FunctionType)) for c in kind.__mro__
    )


def _is_module_internal(this: Any, name: str, own: dict[str, Any]) -> bool:
    """Whether a name is a module's parameter, buffer or child, which `state` sees to, or part of what a module is."""
    if not isinstance(this, nn.Module):
        return False
    return name in nn.Module.__dict__ or any(name in own[held] for held in ("_parameters", "_buffers", "_modules"))


def _restore_container(container: Any, items: list[Any]) -> None:
    if is_array(container):
        container.data.cast("B")[:] = items[0]
    elif isinstance(container, dict):
        half = len(items) // 2
        container.clear()
        container.update(zip(items[:half], items[half:], strict=True))
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(items)
