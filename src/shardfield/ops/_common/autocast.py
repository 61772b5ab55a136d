"""Apply autocast to functions whose local work is done by other functions, which autocast treats differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .probe import HALF_DTYPES as HALF_DTYPES
from .probe import probe, stand_in

UNCHANGED = nullcontext()


def autocast_disabled(tensor: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off on the tensor's device: dtypes are chosen already."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else UNCHANGED


def autocast_to_fp32(*tensors: Any) -> list[Any]:
    """Return the arguments of a function that autocast runs in fp32, with half-precision tensors cast if it is enabled.

    Autocast recognizes torch's function, but not the ops that it is composed of here.
    """

    def cast(value: Any) -> Any:
        half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
        return value.float() if half and torch.is_autocast_enabled(value.device.type) else value

    return [cast(t) for t in tensors]


def cast_like_autocast(args: Sequence[Any], call: Callable[[Tensor], Tensor], *shape: int) -> tuple[Any, ...]:
    """Return the arguments with half-precision tensors cast to fp32 if autocast runs the function in fp32.

    The functions that autocast runs in fp32 differ between devices, so torch is probed: `call` is the function, called
    on a tensor of `shape`.
    """
    first = args[0]
    if first.dtype not in HALF_DTYPES or not torch.is_autocast_enabled(first.device.type):
        return tuple(args)
    if probe(call, stand_in(first, shape)).dtype not in (torch.float32, torch.complex64):
        return tuple(args)
    return tuple(autocast_to_fp32(*args))


def under_autocast(call: Callable[[Tensor], Tensor], *shape: int) -> Callable[[Callable], Callable]:
    """Return the `around` of a rule that casts the arguments as `cast_like_autocast` does.

    Without it ranks with empty shards, which call other functions, would have another dtype than the others.
    """

    def around(run: Callable) -> Callable:
        def cast(func, types, args, kwargs):
            return run(func, types, cast_like_autocast(args, call, *shape) if args else args, kwargs)

        return cast

    return around
