"""Methods of a ShardTensor go to their handlers directly.

`x.sum()` and `x + y` are known to be for a ShardTensor before torch looks at the arguments; its search for overrides
costs as much as half of what is done here. Functions (`torch.sum(x)`, `plain + x`) take torch's way in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import runtime
from ..._compat import dynamo_disable, override_modes, overrides_on
from ...dispatch.registry import torch_function
from ...tensor import ShardTensor

# A reflected one, as __radd__, must not be among them: Python would prefer it to the plain operand's own __add__.
OPERATORS = "__add__ __sub__ __mul__ __truediv__ __pow__ __matmul__ __neg__ __getitem__".split()


def direct_method(func: Any) -> Callable:
    """A method that does what `func` does on a ShardTensor, for the tensor it is called on is one."""
    types = (ShardTensor,)

    def method(self, *args, **kwargs):
        if self.__class__ is ShardTensor and not override_modes() and overrides_on():
            return torch_function(ShardTensor, func, types, (self, *args), kwargs)
        return func(self, *args, **kwargs)

    method.__name__, method.__doc__ = func.__name__, func.__doc__
    return dynamo_disable(method)


def install_methods() -> None:
    """Give ShardTensor such a method for each of Tensor's that has a handler."""
    handlers = runtime.active.handlers
    for name in dir(torch.Tensor):
        func = getattr(torch.Tensor, name)
        if (name in OPERATORS or not name.startswith("_")) and name not in vars(ShardTensor) and func in handlers:
            setattr(ShardTensor, name, direct_method(func))
