"""Get the shapes, dtypes and errors of a call from torch while planning.

All ranks plan the same call, so an error of torch is raised on all of them. The local call on an empty shard might not
raise it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ..._compat.autocast import autocast_state
from ...dispatch.plan import Operand

HALF_DTYPES = (torch.float16, torch.bfloat16)


def probe(fn: Callable, *args: Any, meta: bool = False, single: bool = False, **kwargs: Any) -> Any:
    """Call `fn` with a stand-in for each operand, without gradients or warnings; return its result or raise its error.

    The kind of stand-in determines what is checked:

    - Default: tensors on the operand's device with at most 2 elements per dim. The kernel and autocast run, so dtypes
      of results and errors about dtypes, dims and empty dims are those of the real call. Sizes are not checked.
    - `single=True`: the same with exactly 1 element per dim, for kernels that refuse empty tensors or check sizes.
    - `meta=True`: meta tensors of the global shape. Shapes of results and errors about shapes are those of the real
      call. No kernel runs, so errors about dtypes may be missing.
    - A call that needs another shape passes `stand_in(operand, shape)` itself.

    Operands in lists are replaced too. Keyword arguments that are None are left out: not every overload has them.

        result = probe(torch.sum, input, dim=dim, dtype=dtype).dtype
        out = probe(F.conv2d, input, weight, bias, stride, padding, meta=True).shape
        probe(F.max_pool2d, stand_in(input, (1, 1, 1, 1)), 1)
    """

    def replace(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
            return type(value)(map(replace, value))
        if meta:
            return _meta_stand_in(value) if isinstance(value, (Operand, Tensor)) else value
        if not isinstance(value, Operand):
            return value
        return stand_in(value, [1 if single else min(n, 2) for n in value.shape])

    passed = {key: value for key, value in kwargs.items() if value is not None}
    key: Any = () if meta else _stand_in_key(fn, single, args, passed)
    found = runtime.active.plans[key] if key else None
    if found is not None:
        return found
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fn(*map(replace, args), **{name: replace(value) for name, value in passed.items()})
    if key and isinstance(found, Tensor):
        runtime.active.plans[key] = found
    return found


# What stand-ins take the place of, and values that can be a part of a key: 1, 1.0 and True are equal.
_CONSTANTS = frozenset([int, float, bool, str, complex, type(None), torch.dtype])


def _stand_in_key(fn: Callable, single: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """Return what the result for stand-ins depends on: not the sizes, which may differ in every step. Else ()."""
    key: list[Any] = [fn, single, torch.get_default_dtype(), *autocast_state()]
    for name, value in (*(("", value) for value in args), *kwargs.items()):
        if value.__class__ is Operand:
            key += (name, value.dtype, value.device, value.ndim if single else tuple([min(n, 2) for n in value.shape]))
        elif value.__class__ in _CONSTANTS:
            key += (name, value.__class__, value)
        elif value.__class__ in (tuple, list) and all(v.__class__ is int for v in value):
            key += (name, value.__class__, *value, None)
        else:
            return ()
    return tuple(key)


def stand_in(value: Operand | Tensor, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Return a tensor of another shape in the operand's dtype, on its device: ones, or zeros of an integer dtype.

    Integers may be indices, and 0 is in range for any dim that is not empty.
    """
    make = torch.ones if value.dtype.is_floating_point or value.dtype.is_complex else torch.zeros
    return make(tuple(shape), dtype=value.dtype, device=value.device if device is None else device)


def meta_tensor(operand: Operand | Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Return a meta tensor with the operand's global shape and dtype, for calls that autocast leaves alone."""
    if strides is None:
        return torch.empty(operand.shape, dtype=operand.dtype, device="meta")
    return torch.empty_strided(operand.shape, strides, dtype=operand.dtype, device="meta")


def _meta_stand_in(value: Operand | Tensor) -> Tensor:
    """Return a meta tensor in the dtype that autocast computes in.

    Autocast does not act on meta tensors: a half input and a float weight, valid together under autocast, would raise.
    """
    if value.dtype in HALF_DTYPES and torch.is_autocast_enabled(value.device.type):
        return torch.empty(value.shape, device="meta", dtype=torch.float32)
    return meta_tensor(value)
