"""Guards on the attributes, variables and containers that a trace read: a program is valid while they are unchanged.

While a program is traced, `__getattribute__` of modules and user objects records which attributes are read. Only these
are guarded, so that a change of any other attribute, a step counter for example, causes no retrace.
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

# Compared by value; objects of any other type are compared by identity.
VALUE_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, dict, set, deque)
IGNORED_ATTRS = {"_parameters", "_buffers", "_modules", "__dict__", "__class__"}  # guarded by `module_state`
HOOKS = {name for name, value in nn.Module().__dict__.items() if isinstance(value, dict)}  # dicts of hooks
MAX_ARRAY_BYTES = 1 << 20  # larger arrays are compared by identity, not by value
MISSING = object()


def same_value(now: Any, before: Any) -> bool:
    """Return whether a program for `before` is valid for `now`. 2 differs from 2.0, and nan equals nan."""
    if now is before:
        return True
    if type(now) is not type(before):
        return isinstance(now, Tensor) and isinstance(before, Tensor)
    if isinstance(now, float):
        return now.hex() == before.hex()
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(same_value, now, before))
    if isinstance(now, Tensor):  # a tensor that a program reads is an input of it, not guarded here
        return True
    return isinstance(now, VALUE_TYPES) and now == before


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array small enough to be compared by value on every call."""
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
    """Record which attributes and variables a trace reads, and check them before a program is run again."""

    def __init__(self, captured: Captured):
        self._captured = captured
        self._tracked = {id(o): o for o in [*captured.modules, *captured.objects]}
        self._before = {key: dict(o.__dict__) for key, o in self._tracked.items()}
        self._own_reads: dict[tuple[int, str], Any] = {}  # (id, name) -> value of an instance attribute
        self._class_reads: dict[tuple[int, str], Any] = {}  # (id, name) -> value of a class attribute, or MISSING
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        self._variables = [(namespace, name, namespace[name]) for namespace, name in captured.variables]
        self._cells = [(cell, name, cell.cell_contents) for cell, name in captured.cells]
        for value in [*(v for *_, v in [*self._variables, *self._cells]), *captured.defaults]:
            self._snapshot(value, 0)
        for value in captured.objects:
            if not _is_patchable(type(value)):
                self._snapshot(value.__dict__, 0)

    # ------------------------------------------------------------------ tracing

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the attributes of modules and user objects that are read inside the context."""
        kinds = dict.fromkeys([nn.Module, *(type(o) for o in self._captured.objects if _is_patchable(type(o)))])
        undo = [self._patch_getattribute(kind) for kind in kinds]
        try:
            yield
        finally:
            for unpatch in reversed(undo):
                unpatch()

    def _patch_getattribute(self, kind: Any) -> Callable[[], None]:
        read, own = kind.__getattribute__, kind.__dict__.get("__getattribute__")

        def record_and_read(this: Any, name: str) -> Any:
            try:
                value = read(this, name)
            except AttributeError:
                value = MISSING
            if id(this) in self._tracked and name not in IGNORED_ATTRS:
                self._record_read(this, name, value)
            return read(this, name) if value is MISSING else value

        kind.__getattribute__ = record_and_read

        def unpatch() -> None:
            if own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own

        return unpatch

    def _record_read(self, this: Any, name: str, value: Any) -> None:
        key, before = (id(this), name), self._before[id(this)]
        if key in self._own_reads or key in self._class_reads:
            return
        if name in before:
            if before[name] is value and not isinstance(value, Tensor):
                self._own_reads[key] = value
                self._snapshot(value, 0)
        elif name not in object.__getattribute__(this, "__dict__") and not _is_module_internal(this, name, before):
            is_data = isinstance(value, (VALUE_TYPES, CONTAINERS)) and not _is_descriptor(type(this), name)
            if value is MISSING or is_data:
                self._class_reads[key] = value
                self._snapshot(value, 0)

    def _snapshot(self, value: Any, depth: int) -> None:
        """Store the items of a container, and of the containers in it."""
        has_items = isinstance(value, CONTAINERS) or is_array(value)
        if has_items and id(value) not in self._containers and depth <= MAX_DEPTH:
            items = _items(value)
            if not isinstance(value, tuple):
                self._containers[id(value)] = value, items
            for item in items:
                self._snapshot(item, depth + 1)

    def check(self) -> None:
        """Undo the changes that the callable made to its state. Raise if the program would have to repeat one."""
        change = self.restore()
        if change:
            raise Untraceable(f"compile: {change}, which the compiled program would not do. Return the value instead")

    def restore(self) -> str:
        """Restore the state from before the trace. Return a description of a change that a program cannot repeat.

        The description is empty if there was none. A change that only fills a cache is undone and not reported.
        """
        change = ""
        modules = {id(m) for m in self._captured.modules}
        for key, this in self._tracked.items():
            before, now = self._before[key], this.__dict__
            for name in [n for n in now if n not in before or now[n] is not before[n]]:
                old, new = before.get(name), now[name]
                is_counter = (
                    isinstance(new, (bool, int, float)) and (key, name) in self._own_reads and not same_value(new, old)
                )
                # A new attribute, or one that was None, is a cache entry: the program computes the value in each run.
                is_cache = key in modules or (old is None and (name in before or not isinstance(new, Tensor)))
                if is_counter or not is_cache:
                    change = f"{type(this).__name__} writes its attribute {name!r}"
            if key not in modules:  # `ModuleState.with_tensors` restores the modules
                now.clear()
                now.update(before)
        module_dicts = [v for m in modules for v in self._before[m].values() if isinstance(v, dict)]
        for container, items in self._containers.values():
            now = _items(container)
            if len(now) == len(items) and all(map(_same_or_tensors, now, items)):
                continue
            # A new key in a dict of a module is a cache entry too.
            keys = items[: len(items) // 2]
            is_cache = any(container is d for d in module_dicts) and all(k in container for k in keys)
            if not is_cache:
                change = f"it writes into a {type(container).__name__} from outside"
            _restore_container(container, items)
        for namespace, name, value in self._variables:
            if namespace[name] is not value:
                namespace[name], change = value, f"it assigns the outer variable {name!r}"
        for cell, name, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents, change = value, f"it assigns the outer variable {name!r}"
        return change

    # ------------------------------------------------------------------ running

    def finalize(self) -> None:
        """Build the getters that `guards_pass` uses, after the trace has ended."""
        by_object: dict[int, list[str]] = {}
        for key, name in self._own_reads:
            if name in HOOKS and isinstance(self._tracked[key], nn.Module):
                continue  # its items are compared instead
            by_object.setdefault(key, []).append(name)
        self._getters = []
        for key, names in by_object.items():
            getter = itemgetter(*names, names[0])  # at least two names, so that it returns a tuple
            own = self._tracked[key].__dict__
            self._getters.append((own, getter, getter(self._before[key])))
        self._class_guards = [
            (self._tracked[k].__dict__, name, type(self._tracked[k]), v) for (k, name), v in self._class_reads.items()
        ]
        snapshots = list(self._containers.values())
        self._empty = [container for container, items in snapshots if not items]
        self._full = [(container, items) for container, items in snapshots if items]

    def guards_pass(self) -> bool:
        """Return whether all that the trace read is unchanged. Raise KeyError if an attribute or variable is gone."""
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
        return all(same_value(namespace[name], value) for namespace, name, value in self._variables) and all(
            same_value(cell.cell_contents, value) for cell, _, value in self._cells
        )


def _is_patchable(kind: type) -> bool:
    """Return whether `__getattribute__` of a class can be replaced."""
    return bool(kind.__flags__ & (1 << 9)) and kind.__module__ != "builtins"  # a heap type: from a class statement


def _is_descriptor(kind: type, name: str) -> bool:
    return any(
        name in c.__dict__ and isinstance(c.__dict__[name], (property, types.FunctionType)) for c in kind.__mro__
    )


def _is_module_internal(this: Any, name: str, own: dict[str, Any]) -> bool:
    """Return whether a name is an attribute of nn.Module, or a parameter, buffer or child that `ModuleState` guards."""
    if not isinstance(this, nn.Module):
        return False
    return name in nn.Module.__dict__ or any(name in own[table] for table in ("_parameters", "_buffers", "_modules"))


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
