"""A module's twin: the same attributes, parameters and hooks, one dict for both, and another `forward`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


class _ForwardDescriptor:
    """What a twin's class has as `forward`: found before the attributes, which are the original's."""

    def __init__(self, forward: Callable):
        self.forward = forward

    def __get__(self, twin: Any, kind: type | None = None) -> Callable:
        return self.forward

    def __set__(self, twin: Any, forward: Callable) -> None:
        self.forward = forward


def make_proxy(module: nn.Module, rewrap: Callable[[nn.Module], Any], forward: Callable) -> Any:
    """A module that is called by `forward`. again: makes such a twin of a copy of the module.

    Flags and attributes set on either are set on both: `model.eval()` holds for its compiled twin too.
    """
    kind = type(module)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)  # a part of a Sequential, say, is no twin

    def deepcopied(self: Any, memo: dict) -> Any:
        memo[id(self)] = made = rewrap(copy.deepcopy(module, memo))
        return made

    def reduced(self: Any, protocol: Any) -> Any:
        return rewrap, (module,)

    own = {"forward": _ForwardDescriptor(forward), "__new__": new, "__deepcopy__": deepcopied, "__reduce_ex__": reduced}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    twin: Any = object.__new__(type(kind.__name__, (kind,), {**own, **names}))
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin
