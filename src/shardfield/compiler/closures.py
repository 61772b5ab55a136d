"""Find the state that a callable can reach besides its arguments: modules, user objects, closure cells and globals."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import Untraceable

MAX_DEPTH = 4  # depth of nested objects and containers to which the search goes
LIBRARIES = ("torch", "shardfield", "numpy")  # packages whose objects are not searched
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Captured:
    """Collect what a callable may read: its `self`, closure, globals, default arguments and non-tensor arguments.

    `modules` includes submodules. `objects` are other user objects with attributes. `variables` are pairs (globals
    dict, name) and `cells` are pairs (closure cell, name). `defaults` are default values of arguments. `meshes` are
    those among all of these.
    """

    def __init__(self, target: Any, arguments: Iterable[Any] = ()):
        self.objects: list[Any] = []
        self.variables: list[tuple[dict[str, Any], str]] = []
        self.cells: list[tuple[types.CellType, str]] = []
        self.defaults: list[Any] = []
        self.meshes: list[DeviceMesh] = []
        self._roots: dict[int, nn.Module] = {}
        self._seen: dict[int, Any] = {}  # id -> value; the value is kept alive so that its id stays unique
        self._visit(target, 0, strict=True)
        for value in arguments:
            if not isinstance(value, Tensor):
                self._visit(value, 0)
        self.modules: list[nn.Module] = []
        visited: set[int] = set()
        while self._roots:  # visiting hooks and forward methods may add further roots
            root = self._roots.pop(next(iter(self._roots)))
            for module in root.modules():
                if id(module) not in visited:
                    visited.add(id(module))
                    self.modules.append(module)
                    self._visit_module(module)

    def _visit_module(self, module: nn.Module) -> None:
        own = module.__dict__
        for hooks in HOOKS:
            for hook in own.get(hooks, {}).values():
                self._visit(hook, 1)
        if not _is_library_type(type(module)):
            self._visit(type(module).forward, 1)
            for value in own.values():
                if _is_user_object(value) or isinstance(value, (list, dict)):
                    self._visit(value, 2)

    def _visit(self, value: Any, depth: int, strict: bool = False) -> None:
        """Visit a value and the objects that it refers to.

        strict: raise if a function captures a tensor. Otherwise the trace raises when the tensor is used.
        """
        if depth > MAX_DEPTH or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._roots[id(value)] = self._seen[id(value)] = value
        elif isinstance(value, DeviceMesh):
            self._seen[id(value)] = value
            self.meshes.append(value)
        elif isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                self._visit(inner, depth, strict)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, depth, strict)
            self._visit(value.__func__, depth, strict)
        elif isinstance(value, types.FunctionType):
            self._seen[id(value)] = value
            self._visit_function(value, depth, strict)
        elif hasattr(value, "__wrapped__"):
            self._visit(value.__wrapped__, depth, strict)
        elif isinstance(value, (list, tuple, set, deque)):
            self._seen[id(value)] = value
            for item in value:
                self._visit(item, depth + 1)
        elif isinstance(value, Mapping):
            self._seen[id(value)] = value
            for item in value.values():
                self._visit(item, depth + 1)
        elif _is_user_object(value):
            self._seen[id(value)] = value
            self.objects.append(value)
            if depth == 0 and isinstance(getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004
                self._visit(type(value).__call__, depth, strict)
            for item in value.__dict__.values():
                self._visit(item, depth + 1)

    def _visit_function(self, function: types.FunctionType, depth: int, strict: bool) -> None:
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.defaults.append(value)
            self._visit(value, depth + 1)
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self.cells.append((cell, name))
            self._visit_variable(function, name, value, depth, strict)
        for name, attribute in _global_names(function.__code__):
            namespace = function.__globals__
            if isinstance(namespace.get(name), types.ModuleType):  # `settings.scale`
                namespace, name = namespace[name].__dict__, attribute
            if name in namespace and (not _is_library_namespace(namespace) or namespace is function.__globals__):
                value = namespace[name]
                if not isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
                    self.variables.append((namespace, name))
                    self._visit_variable(function, name, value, depth, strict)

    def _visit_variable(self, function: Any, name: str, value: Any, depth: int, strict: bool) -> None:
        if isinstance(value, Tensor) and strict:
            raise Untraceable(
                f"compile: {function.__qualname__} captures the tensor {name!r}, and the program would always use its "
                "current value. Pass it as an argument, or make it a parameter or buffer of a module"
            )
        if not isinstance(value, types.FunctionType):
            self._visit(value, depth + 1, strict)
        elif not _is_library_namespace(value.__globals__):  # a user function may itself read modules and variables
            self._visit(value, depth, strict and value.__module__ == function.__module__)


def _is_library_namespace(variables: dict[str, Any]) -> bool:
    """Return whether the globals are those of a library module, which is not searched."""
    name, file = str(variables.get("__name__")).partition(".")[0], variables.get("__file__") or ""
    return name in LIBRARIES or name in sys.stdlib_module_names - {"__main__"} or "site-packages" in file


def _is_user_object(value: Any) -> bool:
    """Return whether a value is an instance of a user class, whose attributes the callable may read."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, nn.Module, Tensor)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_library_type(type(value))


def _is_library_type(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Return pairs (global name, attribute read from it, or "") of a function and its nested functions."""
    instructions = list(dis.get_instructions(code))
    names: dict[tuple[str, str], None] = {}
    for load, following in zip(instructions, [*instructions[1:], None], strict=True):
        if load.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads_attribute = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            names[load.argval, str(following.argval) if reads_attribute and following is not None else ""] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)
