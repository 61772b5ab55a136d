"""Sampling a field at the points of a grid, where either or both are cut.

The grid's cut decides the result's. Along dims of the field that are cut, ranks tell each other which cells their
points look at, in one small message an axis, and get the range from the first to the last of them: little where points
stay near their places, everything where they may be anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ... import trace_state
from ...comm import autograd_collectives, collectives
from ...comm.route import RowRequest, fetch_route
from ...dispatch.arguments import as_operand
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import handler, mesh_of, rule
from ...layout import DimSharding, Layout, Span, shard_sizes_of, starts
from ...tensor import wrap
from .._common.broadcast import Alignment, find_grad_reductions
from .._common.probe import HALF_DTYPES, probe_shapes
from ..shape.flip_roll import shard_by_one_axis
from .grid_sample_local import BICUBIC, GridAxis, Tap, gather_samples


@handler("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(func, types, args, kwargs):
    """`torch.grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)`."""
    names = ("input", "grid", "interpolation_mode", "padding_mode", "align_corners")
    named = dict(zip(names, args, strict=False)) | kwargs
    how = mode, padding, corners = tuple(named[n] for n in names[2:])
    mesh = mesh_of(args, kwargs)
    field, field_layout = as_operand(named["input"], mesh)
    grid, grid_layout = as_operand(named["grid"], mesh)
    dtype = validate(func, field, field_layout.shape, grid, grid_layout.shape, how)
    met = align_layouts(field_layout, grid_layout)
    field, grid = met.redistribute([field.to(dtype), grid.to(dtype)], [field_layout, grid_layout])
    layout = met.targets[0]
    if not any(layout.is_sharded(d) for d in range(2, layout.ndim)):
        return wrap(func(field, grid, *how), met.result)
    narrow = dtype in HALF_DTYPES
    points = (grid.float() if narrow else grid).unbind(-1)[::-1]  # the last coordinate is that of the first dim
    on_cpu = field.device.type == "cpu"
    whole = layout.ndim == 4 and on_cpu
    taps = [
        GridAxis(n, mode, padding, corners, whole, n - 1 if on_cpu and not whole else 0).taps(p)
        for n, p in zip(layout.shape[2:], points, strict=True)
    ]
    field, begins = fetch_cells(field, layout, taps)
    made = gather_samples(field.float() if narrow else field, begins, taps, whole or mode == BICUBIC)
    return wrap(made.to(dtype), met.result)


def validate(
    func: Any, field: Tensor, shape: torch.Size, grid: Tensor, grid_shape: torch.Size, how: tuple
) -> torch.dtype:
    """torch's own errors, which do not depend on what this rank holds; the dtype of the result."""

    def like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.zeros([1], dtype=tensor.dtype, device=tensor.device).expand(shape)

    same = len(shape) > 0 and len(grid_shape) > 0 and shape[0] == grid_shape[0]
    with torch.no_grad(), trace_state.concrete():
        none = [(0, *s[1:]) if same else s for s in (shape, grid_shape)]  # with no samples nothing is computed
        func(like(field, none[0]), like(grid, none[1]), *how)
        one = [1] * len(shape)
        return func(like(field, one), like(grid, [*one[:-1], len(shape) - 2]), *how).dtype


# ---------------------------------------------------------------------- where everything lies


@lru_cache(maxsize=1024)
def align_layouts(field: Layout, grid: Layout) -> Alignment:
    """Where field and grid must lie, and where the result does."""
    last = grid.ndim - 1
    field, grid = shard_by_one_axis(field, range(2, field.ndim)), grid.unshard([last])
    small = grid.numel <= field.numel  # the smaller one gives way
    if grid.axes_of(0) and not field.axes_of(0):
        if set(grid.axes_of(0)) & set(field.shard_axes):
            field, grid = (field, grid.unshard([0])) if small else (_unshard_axes(field, grid.axes_of(0), 1), grid)
        field = field.with_dim(0, *grid.dims[0])
    else:
        grid = _unshard_axes(grid, field.axes_of(0), 1).unshard([0]).with_dim(0, *field.dims[0])
    if set(field.axes_of(1)) & set(grid.shard_axes):
        field, grid = (field, _unshard_axes(grid, field.axes_of(1), 1)) if small else (field.unshard([1]), grid)
    for dim in range(2, field.ndim):
        (factor,) = field.dims[dim]
        used = set(factor.axes) & set(grid.shard_axes)
        if not factor.axes or used == set(factor.axes):
            continue
        free = sorted((d for d in range(1, last) if not grid.axes_of(d)), key=lambda d: (d != dim - 1, -grid.shape[d]))
        if used or not free:
            field = field.unshard([dim])
            continue
        grid = grid.with_dim(free[0], _scale_sharding(factor, grid.shape[free[0]]))
    result = field.with_dims([*field.dims[:2], *grid.dims[1:last]])
    return Alignment((field, grid), find_grad_reductions(result, (field, grid)), result)


def _unshard_axes(layout: Layout, axes: Sequence[int], first: int) -> Layout:
    """The layout with those dims whole, from `first` on, that `axes` cut."""
    return layout.unshard([d for d in range(first, layout.ndim) if set(layout.axes_of(d)) & set(axes)])


def _scale_sharding(factor: DimSharding, size: int) -> DimSharding:
    """A dim of another size cut in the same proportions."""
    marks = [round(start * size / factor.size) for start in (*starts(factor.shard_sizes), factor.size)]
    return DimSharding(size, factor.axes, tuple(b - a for a, b in pairwise(marks)))


# ---------------------------------------------------------------------- what travels


def fetch_cells(field: Tensor, layout: Layout, taps: Sequence[Sequence[Tap]]) -> tuple[Tensor, list[int]]:
    """The cells of the field from the first to the last that this rank's points look at, and where they begin.

    One dim after the other travels, so along the first ones a rank asks for what its peers on the later axes need too.
    """
    cut = [d for d in range(2, layout.ndim) if layout.is_sharded(d)]
    axes = [layout.nontrivial_axes(layout.axes_of(d))[0] for d in cut]
    bounds = torch.stack([torch.stack(_bounds(taps[d - 2])) for d in cut])
    for axis in reversed(axes):  # -> [coord on the first axis, on the second, ..., dim, first or last cell]
        shape = [layout.mesh.size(axis), *bounds.shape]
        heard = collectives.gather_ints(bounds.flatten().tolist(), layout.mesh.get_group(axis), field.device)
        bounds = torch.tensor(heard).view(shape)
    begins = [0] * (layout.ndim - 2)
    for i, (dim, axis) in enumerate(zip(cut, axes, strict=True)):
        later = tuple(range(1, len(axes) - i))
        asked = bounds[..., i, :]
        lows, highs = asked[..., 0], asked[..., 1]
        if later:
            lows, highs = lows.amin(later), highs.amax(later)
        spans = [Span(a, b + 1) if b >= 0 else Span(0, 0) for a, b in zip(lows.tolist(), highs.tolist(), strict=True)]
        coord = layout.coords[axis]
        (factor,) = layout.dims[dim]
        requests = [[RowRequest(start, stop - start)] for start, stop in spans]
        route = fetch_route(dim, shard_sizes_of(factor), coord, requests, [stop - start for start, stop in spans])
        field = autograd_collectives.exchange(field, route, layout.mesh.get_group(axis))
        begins[dim - 2] = spans[coord].start
        bounds = bounds[coord]
    return field, begins


def _bounds(taps: Sequence[Tap]) -> list[Tensor]:
    """The first and the last cell that any point looks at; the last is -1 if there is none."""
    if not taps[0].cell.numel():
        return [taps[0].cell.new_tensor(2**62), taps[0].cell.new_tensor(-1)]
    first = torch.stack([torch.where(t.in_bounds, t.cell, 2**62).amin() for t in taps]).amin()
    last = torch.stack([torch.where(t.in_bounds, t.cell, -1).amax() for t in taps]).amax()
    return [first, last]


# ---------------------------------------------------------------------- making grids


@rule("affine_grid_generator")
def affine_grid_generator(theta: Operand, size, align_corners, *, fn):
    """Each rank makes the grids of its own samples."""
    shape = probe_shapes(fn, theta, list(size), align_corners).shape
    layout = theta.layout.unshard([1, 2])
    here = [layout.local_shape[0], *size[1:]]
    result = layout.with_dims([layout.dims[0], *((DimSharding(n),) for n in shape[1:])])
    return Plan(local=lambda theta: fn(theta, here, align_corners), operands={"theta": layout}, layout=result)
