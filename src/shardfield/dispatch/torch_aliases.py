"""The function objects of one torch operation: `torch.add`, `Tensor.add`, `Tensor.__add__`, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from .._compat import NAMESPACES

# function name -> operator methods of Tensor that do the same
OPERATORS = {
    "add": ["__add__", "__radd__"],
    "sub": ["__sub__"],
    "mul": ["__mul__", "__rmul__"],
    "div": ["__truediv__", "__div__"],
    "remainder": ["__mod__"],
    "pow": ["__pow__"],
    "neg": ["__neg__"],
    "positive": ["__pos__"],
    "abs": ["__abs__"],
    "matmul": ["__matmul__"],
    "bitwise_not": ["__invert__"],
    "bitwise_and": ["__and__", "__rand__"],
    "bitwise_or": ["__or__", "__ror__"],
    "bitwise_xor": ["__xor__", "__rxor__"],
    "bitwise_left_shift": ["__lshift__"],
    "bitwise_right_shift": ["__rshift__"],
    "eq": ["__eq__"],
    "ne": ["__ne__"],
    "lt": ["__lt__"],
    "le": ["__le__"],
    "gt": ["__gt__"],
    "ge": ["__ge__"],
    "add_": ["__iadd__"],
    "sub_": ["__isub__"],
    "mul_": ["__imul__"],
    "div_": ["__itruediv__", "__idiv__"],
    "remainder_": ["__imod__"],
    "pow_": ["__ipow__"],
    "bitwise_and_": ["__iand__"],
    "bitwise_or_": ["__ior__"],
    "bitwise_xor_": ["__ixor__"],
}

# Names of one function, as torch documents them.
SYNONYMS = (
    "abs absolute", "acos arccos", "acosh arccosh", "asin arcsin", "asinh arcsinh", "atan arctan", "atan2 arctan2",
    "atanh arctanh", "cat concat concatenate", "clamp clip", "div divide true_divide", "ge greater_equal", "gt greater",
    "le less_equal", "lt less", "movedim moveaxis", "mul multiply", "ne not_equal", "neg negative", "outer ger",
    "sub subtract", "transpose swapaxes swapdims", "trunc fix", "vstack row_stack",
)  # fmt: skip
_NAMES = {name: line.split() for line in SYNONYMS for name in line.split()}


def aliases(function: Any) -> Iterator[Any]:
    """Yield every function object for the operation of `function` (an object, or a name), itself first."""
    name = function if isinstance(function, str) else function.__name__
    seen = set()
    if not isinstance(function, str):
        seen.add(function)
        yield function
        if _is_namespaced(function):
            return
    for look_up in _LOOKUPS:
        for spelled in (name, *OPERATORS.get(name, ())):
            found = look_up(spelled, None)
            if found is not None and callable(found) and found not in seen:
                seen.add(found)
                yield found


def torch_aliases(function: Any) -> list[Any]:
    """Return the aliases of a torch function under all its names; a function of another library is its only alias."""
    name = getattr(function, "__name__", None)
    if name is None or all(look_up(name, None) is not function for look_up in _LOOKUPS):
        return [function]
    found = dict.fromkeys(aliases(function))
    inplace = name[:-1] in _NAMES and name.endswith("_")
    for other in _NAMES.get(name[:-1] if inplace else name, ()):
        found.update(dict.fromkeys(aliases(other + "_" if inplace else other)))
    return list(found)


def _is_namespaced(function: Any) -> bool:
    """Return whether other namespaces use the name for another operation, as for functions of torch.fft."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith(("torch.fft", "torch.linalg", "torch.special")) or "fft_" in str(function)


def _lookup_in(space: Any) -> Callable[[str, Any], Any]:
    """Return the `get(name, default)` of a namespace. A module's dict is used: `getattr` of a missing name is slow."""
    return vars(space).get if isinstance(space, ModuleType) else partial(getattr, space)


# The namespaces in which the same name means the same operation.
_LOOKUPS = tuple(map(_lookup_in, dict.fromkeys((torch, torch.Tensor, F, *NAMESPACES))))


def function_name(func: Any) -> str:
    """Return the name of a function as users write it."""
    return getattr(func, "__name__", None) or str(func)
