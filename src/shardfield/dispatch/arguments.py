"""The tensors among the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError
from ..tensor import ShardTensor, to_full_tensor
from ..tensor import as_operand as as_operand


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to every tensor in its nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def mark_consumed(values: Any) -> None:
    """Record that a call reads the ShardTensors among `values`, and may save them for backward."""
    for value in values.values() if isinstance(values, dict) else values:
        if value.__class__ is ShardTensor:
            value._consumed = True
        elif isinstance(value, (list, tuple, dict)):
            mark_consumed(value)


def mesh_of(args: Any, kwargs: Any) -> Any:
    """Return the mesh of the first ShardTensor among the arguments."""
    for value in args:
        if isinstance(value, ShardTensor):
            return value._layout.mesh
        if isinstance(value, (list, tuple)):
            mesh = mesh_of(value, None)
            if mesh is not None:
                return mesh
    return mesh_of(tuple(kwargs.values()), None) if kwargs else None


def scalar_tensors_to_numbers(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Return the call with numbers in place of 0-dim tensors, except the first argument; None if there are none.

    torch accepts a 0-dim tensor instead of a number: `x.reshape(n, -1)` with a computed `n`. A rule cannot plan with an
    operand there.
    """
    found = []

    def read(value: Any) -> Any:
        if value.ndim or value.requires_grad or value.dtype is torch.bool:
            return value
        found.append(value)
        return value.item()

    named = {k: v if k in ("input", "tensors") else map_tensors(v, read) for k, v in kwargs.items()}
    given = (*args[:1], *map_tensors(args[1:], read))
    return (given, named) if found else None


def write_out(target: Tensor, value: Any) -> None:
    """Write a result into an `out=` tensor of the same shape."""
    if target.shape != value.shape:
        raise ShardingError(f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}: they must agree")
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
    if isinstance(target, ShardTensor):
        target._write(value)
    else:
        target.copy_(to_full_tensor(value))
