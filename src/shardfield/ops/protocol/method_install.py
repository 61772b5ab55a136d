"""Methods of ShardTensor that call the dispatcher directly.

The first argument of `x.sum()` or `x + y` is a ShardTensor before torch looks at the arguments. Skipping torch's search
for overrides saves a third of the cost of such a call. Functions (`torch.sum(x)`, `plain + x`) enter through torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import runtime
from ..._compat import dynamo_disable, override_modes, overrides_on
from ...dispatch.registry import torch_function
from ...tensor import ShardTensor

# No reflected operator such as __radd__: Python would call it before the plain operand's own __add__.
OPERATORS = "__add__ __sub__ __mul__ __truediv__ __pow__ __matmul__ __neg__ __getitem__".split()


def direct_method(func: Any) -> Callable:
    """Return the method that dispatches `func` on the ShardTensor it is called on."""
    types = (ShardTensor,)

    def method(self, *args, **kwargs):
        if self.__class__ is ShardTensor and not override_modes() and overrides_on():
            return torch_function(ShardTensor, func, types, (self, *args), kwargs)
        return func(self, *args, **kwargs)

    method.__name__, method.__doc__ = func.__name__, func.__doc__
    return dynamo_disable(method)


def install_methods() -> None:
    """Add a direct method to ShardTensor for each method of Tensor that has a handler."""
    handlers = runtime.active.handlers
    for name in dir(torch.Tensor):
        func = getattr(torch.Tensor, name)
        if (name in OPERATORS or not name.startswith("_")) and getattr(ShardTensor, name) is func and func in handlers:
            setattr(ShardTensor, name, direct_method(func))
