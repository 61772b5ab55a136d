"""A proxy of a module: it shares the module's `__dict__` (parameters, attributes, hooks) and has another `forward`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


class _ForwardDescriptor:
    """The `forward` of a proxy class. A data descriptor takes precedence over the `__dict__` shared with the module."""

    def __init__(self, forward: Callable):
        self.forward = forward

    def __get__(self, proxy: Any, kind: type | None = None) -> Callable:
        return self.forward

    def __set__(self, proxy: Any, forward: Callable) -> None:
        self.forward = forward


def make_proxy(module: nn.Module, rewrap: Callable[[nn.Module], Any], forward: Callable) -> Any:
    """Return a proxy of `module` that runs `forward`. `rewrap(module)` builds the proxy of a copied module.

    An attribute or flag that is set on either is set on both: `model.eval()` also applies to the compiled proxy.
    """
    kind = type(module)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)  # a slice of a Sequential, for example, is an ordinary module, not a proxy

    def deepcopy(self: Any, memo: dict) -> Any:
        memo[id(self)] = copied = rewrap(copy.deepcopy(module, memo))
        return copied

    def reduce_ex(self: Any, protocol: Any) -> Any:
        return rewrap, (module,)

    own = {"forward": _ForwardDescriptor(forward), "__new__": new, "__deepcopy__": deepcopy, "__reduce_ex__": reduce_ex}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    proxy: Any = object.__new__(type(kind.__name__, (kind,), {**own, **names}))
    object.__setattr__(proxy, "__dict__", module.__dict__)
    return proxy
