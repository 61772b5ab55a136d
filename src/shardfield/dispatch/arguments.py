"""The tensors among the arguments of a call: which they are, where they lie, and as what a rule sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ShardingError
from ..layout import Layout
from ..redistribute import redistribute, unmerge_dims

ShardTensor: Any = None  # the class; tensor.py, which stands on this module, sets it
wrap: Any = None  # (local tensor, layout) -> ShardTensor; likewise


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor in its nested lists, tuples and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def mesh_of(args: Any, kwargs: Any) -> Any:
    """The mesh of the first ShardTensor among the arguments."""
    for value in args:
        if isinstance(value, ShardTensor):
            return value._layout.mesh
        if isinstance(value, (list, tuple)):
            mesh = mesh_of(value, None)
            if mesh is not None:
                return mesh
    return mesh_of(tuple(kwargs.values()), None) if kwargs else None


def as_operand(value: Tensor, mesh: Any, partial: bool = False, merged: bool = False) -> tuple[Tensor, Layout]:
    """A tensor argument as (local tensor, layout) on `mesh`: plain ones are Replicate, DTensors are taken over."""
    if not isinstance(value, ShardTensor):
        if not isinstance(value, DTensor):
            return value, Layout.replicate(mesh, value.shape)
        value = ShardTensor.from_dtensor(value)
    layout = value._layout
    if layout.mesh is not mesh and layout.mesh != mesh:
        raise ShardingError(f"tensors on different meshes meet: {mesh} and {layout.mesh}")
    if layout.partial and not partial:
        value = value._reduced_value()
        layout = value._layout
    if not merged and not layout.is_simple:
        goal = unmerge_dims(layout)
        return redistribute(value._local_tensor, layout, goal), goal
    return value._local_tensor, layout


def to_full_tensor(value: Any) -> Tensor:
    """The whole value as a plain tensor on this rank."""
    if isinstance(value, DTensor):
        value = ShardTensor.from_dtensor(value)
    goal = Layout.replicate(value._layout.mesh, value._layout.shape)
    return redistribute(value._local_tensor, value._layout, goal)


def write_out(target: Tensor, value: Any) -> None:
    """Write a result into an `out=` tensor of the same shape."""
    if target.shape != value.shape:
        raise ShardingError(f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}: they must agree")
    if isinstance(target, ShardTensor):
        target._write(value)
    else:
        target.copy_(to_full_tensor(value))
