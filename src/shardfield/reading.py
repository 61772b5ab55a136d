"""The arguments of a call at a glance: what its plan is known by, and its local tensors.

Most of what a call costs is looking at its arguments one by one, so it is not done by a loop: for every list of kinds
of arguments that is met (a ShardTensor, a parameter, two tuples, a number) a reader is written once, as a Python
function that takes just these apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import operands

BOUND = 4096  # of plans that one reader remembers

# what stands in a key as itself
STATIC = {int, float, bool, str, complex, type(None), torch.dtype, torch.Size}
INTS = {int}


class Reader:
    """For calls of one function with arguments of these kinds.

    read: called with the arguments (those by name, too, without their names): the key of the call among `plans` and the
        local tensors, in order; None where an argument is anything but ShardTensors, plain tensors and parameters,
        simple values, and lists and tuples of these.
    plans: by key.
    """

    __slots__ = ("read", "plans")

    def __init__(self, kinds: Sequence[type]):
        self.read = _written(kinds)
        self.plans: dict[tuple, Any] = {}

    def remember(self, key: tuple, plan: Any) -> None:
        if len(self.plans) >= BOUND:
            self.plans.clear()
        self.plans[key] = plan


READERS: dict[tuple, Reader] = {}


def reader_of(key: tuple, args: tuple, kwargs: dict) -> Reader:
    """A new reader for the calls with this key: the function, the kinds of arguments, and names of those by name."""
    made = READERS[key] = Reader([type(v) for v in (*args, *kwargs.values())])
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
