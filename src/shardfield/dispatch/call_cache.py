"""Read the arguments of a call: build the key of its plan and collect its local tensors.

Most of the host time of a call goes into reading its arguments, so a loop over them is too slow. For every list of
argument types (a ShardTensor, a parameter, two tuples, a number) a reader is generated once: a Python function for
arguments of exactly these types. A reader does not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import runtime
from ..layout import Layout
from ..tensor import ShardTensor

PLAIN_TENSOR_TYPES = frozenset([Tensor, Parameter])
# Values of these types are added to the key unchanged.
CONSTANT_TYPES = frozenset([int, float, bool, str, complex, type(None), torch.dtype, torch.Size, Layout])
INTS = frozenset([int])
NON_TORCH_ARGUMENTS = frozenset(["pre_pad", "smoothing"])  # arguments of rules that torch's functions do not take


class CallType:
    """The first element of a plan key. It identifies the function and the types of its arguments.

    Types must be part of the key, since 1, 1.0 and True are equal.
    """

    __slots__ = ("func",)

    def __init__(self, func: Any):
        self.func = func


class ArgumentReader:
    """Reads calls of one function with arguments of these types.

    read: takes the values of all arguments, positional ones first. Returns the plan key and the local tensors in order,
        or None if an argument is not a ShardTensor, plain tensor, parameter, constant, or a list or tuple of these.
    form: how a mesh of one rank replaces the tensors among the arguments by local tensors to call the function.
        "first": one ShardTensor, then anything without a ShardTensor. "each": all tensors come before all other
        arguments. "list": the first argument is a list of the tensors. "": it cannot.
    """

    __slots__ = ("read", "form")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]):
        self.read = _compile_reader(CallType(func), [type(v) for v in (*args, *kwargs.values())])
        self.form = "" if kwargs.keys() & NON_TORCH_ARGUMENTS else _operand_form(args, list(kwargs.values()))


def make_reader(types: tuple, args: tuple, kwargs: dict) -> ArgumentReader:
    """Build the reader of calls with these `types`: function, argument types, names of keyword arguments."""
    made = runtime.active.readers[types] = ArgumentReader(types[0], args, kwargs)
    return made


def is_inplace(func: Any) -> bool:
    """Return whether a torch function writes its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _compile_reader(call: CallType, kinds: Sequence[type]) -> Callable[..., tuple[tuple, list[Tensor]] | None]:
    if not all(_is_supported(kind) for kind in kinds):
        return lambda *values: None
    names = [f"v{i}" for i in range(len(kinds))]
    written = "v0" if is_inplace(call.func) else ""
    lines, key, given = [], ["call"], []
    nested = any(kind is list or kind is tuple for kind in kinds)
    for name, kind in zip(names, kinds, strict=True):
        if kind is ShardTensor:
            key += [f"{name}._layout", f"{name}._dtype"]
            given.append(f"{name}._local_tensor")
            if name != written:
                lines.append(f"{name}._consumed = True")
        elif kind is Tensor or kind is Parameter:
            key += [f"{name}.shape", f"{name}.dtype"]
            given.append(name)
        elif kind is list or kind is tuple:
            if given:
                lines.append(f"given += {', '.join(given)},")
                given = []
            lines += [f"k{name} = listed({name}, given)", f"if k{name} is None: return None"]
            if kind is tuple:  # strides and paddings: a tuple of ints is its own key
                lines[-2:] = [f"k{name} = {name}", f"if not ints(map(type, {name})):"] + [f" {x}" for x in lines[-2:]]
            key.append(f"k{name}")
        else:
            key.append(name)
    found = f"[{', '.join(given)}]"
    if nested:
        lines = ["given = []", *lines]
        found = f"given + {found}" if given else "given"
    body = "".join(f" {line}\n" for line in [*lines, f"return ({''.join(k + ', ' for k in key)}), {found}"])
    space: dict[str, Any] = {"call": call, "listed": _sequence_key, "ints": INTS.issuperset}
    exec(f"def read({', '.join(names)}):\n{body}", space)
    return space["read"]


def _operand_form(args: Sequence[Any], named: list[Any]) -> str:
    def tensors(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(map(tensors, value))
        return isinstance(value, Tensor)

    if not args:
        return ""
    first, rest = args[0], [*args[1:], *named]
    if first.__class__ is ShardTensor:
        if all(v.__class__ in PLAIN_TENSOR_TYPES or not tensors(v) for v in rest):
            return "first"
    elif isinstance(first, (list, tuple)):
        return "list" if first and len(first) == tensors(first) and not tensors(rest) else ""
    count = tensors(args)
    return "each" if all(isinstance(v, Tensor) for v in args[:count]) and not tensors(named) else ""


def _is_supported(kind: type) -> bool:
    return kind in CONSTANT_TYPES or kind in (ShardTensor, Tensor, Parameter, list, tuple)


def _sequence_key(values: Sequence[Any], given: list[Tensor]) -> tuple | None:
    """Return the part of the key for a list or tuple; append its local tensors to `given`."""
    key: list[Any] = [type(values)]
    for value in values:
        kind = value.__class__
        key.append(kind)
        if kind is ShardTensor:
            key += value._layout, value._dtype
            given.append(value._local_tensor)
            value._consumed = True
        elif kind is Tensor or kind is Parameter:
            key += value.shape, value.dtype
            given.append(value)
        elif kind in CONSTANT_TYPES:
            key.append(value)
        elif kind is tuple and INTS.issuperset(map(type, value)):  # its own key
            key.append(value)
        elif kind is list or kind is tuple:
            inner = _sequence_key(value, given)
            if inner is None:
                return None
            key.append(inner)
        else:
            return None
    return tuple(key)
