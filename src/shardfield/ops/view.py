"""Views. A cut goes where its dim goes; a merged dim remembers its tiles, so merging and splitting are free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..dispatch import rule
from ..layout import Factor, Layout, chunk, regroup
from ..plan import Operand, Plan


def resolved_shape(shape: Sequence[int], numel: int) -> list[int]:
    """A view's shape with its -1 worked out, or torch's error."""
    shape = [int(n) for n in shape]
    if shape.count(-1) > 1:
        raise RuntimeError("only one dimension can be inferred")
    known = math.prod(n for n in shape if n != -1)
    if -1 in shape:
        if known == 0 or numel % known:
            raise RuntimeError(f"shape '{shape}' is invalid for input of size {numel}")
        shape[shape.index(-1)] = numel // known
    if math.prod(shape) != numel:
        raise RuntimeError(f"shape '{shape}' is invalid for input of size {numel}")
    return shape


def viewed(layout: Layout, shape: Sequence[int]) -> tuple[Layout, Layout]:
    """(where the operand must lie, where the view lies): the operand stays where the cuts allow."""
    factors = [f for d in layout.dims for f in d]
    groups = regroup(factors, shape)
    if groups is not None:
        return layout, layout.with_dims(groups)
    # A cut falls inside a new dim: move it to the nearest multiple of the inner part, or give it up.
    for dim in layout.cut_dims:
        for source in _shifted(layout, dim, shape):
            groups = regroup([f for d in source.dims for f in d], shape)
            if groups is not None:
                return source, source.with_dims(groups)
    source = layout
    for dim in layout.cut_dims:
        source = source.uncut([dim])
        groups = regroup([f for d in source.dims for f in d], shape)
        if groups is not None:
            return source, source.with_dims(groups)
    source = layout.uncut(range(layout.ndim))
    return source, Layout.make(layout.mesh, [(Factor(n),) for n in shape], layout.partial)


def _shifted(layout: Layout, dim: int, shape: Sequence[int]):
    """Layouts whose cut of `dim` falls on multiples of a product of trailing new sizes."""
    if len(layout.dims[dim]) != 1 or len(layout.axes_of(dim)) != 1:
        return
    (factor,) = layout.dims[dim]
    inner = 1
    for size in reversed(shape):
        inner *= size
        if inner > 1 and inner <= factor.size and factor.size % inner == 0:
            cut = tuple(n * inner for n in chunk(factor.size // inner, len(factor.lengths)))
            yield layout.with_dim(dim, Factor(factor.size, factor.axes, cut))


@rule("view", "reshape", partial=True, merged=True)
def view(input: Operand, *shape, fn):
    """Local, where every cut falls between the new dims."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    if shape and isinstance(shape[0], torch.dtype):
        return None
    source, result = viewed(input.layout, resolved_shape(shape, input.numel()))
    local_shape = result.local_shape
    return Plan(
        local=lambda input: input.reshape(local_shape),
        operands={"input": source},
        layout=result,
        copied=source is not input.layout,
    )


@rule("permute", partial=True, merged=True)
def permute(input: Operand, *dims):
    """The cut goes with its dim."""
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    order = [d % input.ndim for d in dims]
    if sorted(order) != list(range(input.ndim)):
        raise RuntimeError(f"permute(dims): {dims} is not an order of {input.ndim} dims")
    return Plan(local=lambda input: input.permute(order), layout=input.layout.permute(order))
