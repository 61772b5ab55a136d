"""The arguments of a call at a glance: what its plan is known by, and its local tensors.

Most of what a call costs is looking at its arguments one by one, so it is not done by a loop: for every list of kinds
of arguments that is met (a ShardTensor, a parameter, two tuples, a number) a reader is written once, as a Python
function that takes just these apart. On one rank, calls with parameters (so of a module, which gives the same objects
every time) are known by which objects they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import operands
from .layout import Layout

BOUND = 4096  # of plans that one reader remembers, and of calls of one function that are known by their arguments

PLAIN = {Tensor, Parameter}
# what stands in a key as itself
STATIC = {int, float, bool, str, complex, type(None), torch.dtype, torch.Size}
INTS = {int}
OURS = {"borders", "smoothing"}  # arguments that rules know and torch does not


class Reader:
    """For calls of one function with arguments of these kinds.

    read: called with the arguments (those by name, too, without their names): the key of the call among `plans` and the
        local tensors, in order; None where an argument is anything but ShardTensors, plain tensors and parameters,
        simple values, and lists and tuples of these.
    plans: by key.
    form: where the local tensors stand if one rank calls the function with them: "first" is one ShardTensor before
        anything else (plain tensors are local tensors), "each" are they all, before the rest, "list" one list of them
        that is the first argument; "" otherwise.
    lasting: it is a call as modules make them, with objects that are the same every time.
    """

    __slots__ = ("read", "plans", "form", "lasting")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        kinds = [type(v) for v in (*args, *kwargs.values())]
        self.read = _written(kinds)
        self.plans: dict[tuple, Any] = {}
        self.form = "" if kwargs.keys() & OURS else _form(args, list(kwargs.values()))
        self.lasting = self.form == "first" and Parameter in kinds

    def remember(self, key: tuple, plan: Any) -> None:
        if len(self.plans) >= BOUND:
            self.plans.clear()
        self.plans[key] = plan


READERS: dict[tuple, Reader] = {}


def reader_of(key: tuple, args: tuple, kwargs: dict) -> Reader:
    """A new reader for the calls with this key: the function, the kinds of arguments, and names of those by name."""
    made = READERS[key] = Reader(args, kwargs)
    return made


def _written(kinds: Sequence[type]) -> Callable[..., tuple[tuple, list[Tensor]] | None]:
    if not all(_readable(kind) for kind in kinds):
        return lambda *values: None
    names = [f"v{i}" for i in range(len(kinds))]
    lines, key, given = [], [], []
    nested = any(kind is list or kind is tuple for kind in kinds)
    for name, kind in zip(names, kinds, strict=True):
        if kind is operands.ShardTensor:
            key += [f"{name}._layout", f"{name}._dtype"]
            given.append(f"{name}._local_tensor")
        elif kind is Tensor or kind is Parameter:
            key += [f"{name}.shape", f"{name}.dtype"]
            given.append(name)
        elif kind is list or kind is tuple:
            if given:
                lines.append(f"given += {', '.join(given)},")
                given = []
            lines += [f"k{name} = listed({name}, given)", f"if k{name} is None: return None"]
            if kind is tuple:  # how strides and paddings are given
                lines[-2:] = [f"k{name} = {name}", f"if not ints(map(type, {name})):"] + [f" {x}" for x in lines[-2:]]
            key.append(f"k{name}")
        else:
            key.append(name)
    found = f"[{', '.join(given)}]"
    if nested:
        lines = ["given = []", *lines]
        found = f"given + {found}" if given else "given"
    body = "".join(f" {line}\n" for line in [*lines, f"return ({''.join(k + ', ' for k in key)}), {found}"])
    space: dict[str, Any] = {"listed": _listed, "ints": INTS.issuperset}
    exec(f"def read({', '.join(names)}):\n{body}", space)
    return space["read"]


def _form(args: Sequence[Any], named: list[Any]) -> str:
    def tensors(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(map(tensors, value))
        return isinstance(value, Tensor)

    if not args:
        return ""
    first, rest = args[0], [*args[1:], *named]
    if first.__class__ is operands.ShardTensor:
        if all(v.__class__ in PLAIN or not tensors(v) for v in rest):
            return "first"
    elif isinstance(first, (list, tuple)):
        return "list" if first and len(first) == tensors(first) and not tensors(rest) else ""
    count = tensors(args)
    return "each" if all(isinstance(v, Tensor) for v in args[:count]) and not tensors(named) else ""


def _readable(kind: type) -> bool:
    return kind in STATIC or kind in (operands.ShardTensor, Tensor, Parameter, list, tuple)


def _listed(values: Sequence[Any], given: list[Tensor]) -> tuple | None:
    """The part of a key that a list or tuple makes; its tensors are added to `given`."""
    key: list[Any] = [type(values)]
    for value in values:
        kind = value.__class__
        key.append(kind)
        if kind is operands.ShardTensor:
            key += value._layout, value._dtype
            given.append(value._local_tensor)
        elif kind is Tensor or kind is Parameter:
            key += value.shape, value.dtype
            given.append(value)
        elif kind in STATIC:
            key.append(value)
        elif kind is list or kind is tuple:
            inner = _listed(value, given)
            if inner is None:
                return None
            key.append(inner)
        else:
            return None
    return tuple(key)


# ---------------------------------------------------------------------- by identity

# of functions that one rank leaves to torch: the layout of the first argument and who the others are -> the result's
BY_IDENTITY: dict[Any, dict[tuple, Layout]] = {}
_HELD: dict[tuple, tuple] = {}  # what keeps the identities in use, or tells of their end


def recall(func: Any, args: tuple, kwargs: dict[str, Any], layout: Layout) -> None:
    """Know a call of a ShardTensor and plain arguments again by these, while they are there."""
    rest = (*args[1:], *kwargs.values())
    tensors = [v for v in rest if v.__class__ in PLAIN]
    others = [v for v in rest if v.__class__ not in PLAIN]
    calls = BY_IDENTITY.setdefault(func, {})
    if len(calls) >= BOUND:
        forget(func)
        calls = BY_IDENTITY[func] = {}
    key = (args[0]._layout, *map(id, rest))

    def end(_: Any) -> None:
        calls.pop(key, None)
        _HELD.pop((func, key), None)

    calls[key] = layout
    _HELD[func, key] = (others, [weakref.ref(t, end) for t in tensors])


def forget(func: Any) -> None:
    """Know no call of a function by its arguments."""
    for key in BY_IDENTITY.pop(func, ()):
        _HELD.pop((func, key), None)
