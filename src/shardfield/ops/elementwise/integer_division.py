"""Division of integers by zero, which torch refuses on CPUs: all ranks raise, though one alone has the divisor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...dispatch.registry import to_full_tensor
from ...tensor import ShardTensor
from .._common.value_checks import raise_if


def raise_for_zero_divisors(args: Any, kwargs: Any) -> None:
    """Raise torch's error on all ranks if integers are divided by zero. Communicates if the divisor is sharded."""
    operands = [*args[:2], *(kwargs[name] for name in ("input", "self", "other") if name in kwargs)]
    if len(operands) != 2 or not any(isinstance(x, Tensor) for x in operands) or not all(map(_is_integer, operands)):
        return
    divisor = operands[1]
    if any(isinstance(x, Tensor) and (x.device.type != "cpu" or not x.numel()) for x in operands):
        return  # other devices have results, and no quotient of an empty tensor is computed
    if isinstance(divisor, Tensor):
        if isinstance(divisor, DTensor):
            divisor = ShardTensor.from_dtensor(divisor)
        found = (divisor == 0).any()
        raise_if(to_full_tensor(found) if isinstance(found, ShardTensor) else found, RuntimeError, "ZeroDivisionError")
    elif divisor == 0:
        raise RuntimeError("ZeroDivisionError")


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, int)
