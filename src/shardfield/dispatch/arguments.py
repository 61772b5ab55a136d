"""The tensors among the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def write_out(target: Tensor, value: Any) -> None:
    """Write a result into an `out=` tensor of the same shape."""
    if target.shape != value.shape:
        raise ShardingError(f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}: they must agree")
    if isinstance(target, ShardTensor):
        target._write(value)
    else:
        target.copy_(to_full_tensor(value))
