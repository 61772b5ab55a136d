"""`F.grid_sample` of a sharded field at the points of a sharded grid.

The result is sharded like the grid. Along each sharded spatial dim of the field, the ranks all-gather the range of
cells that their points read (two integers per rank and dim), and each rank then receives this range of the field. The
range is small if points are near the cells of their own rank, and at most the full dim. The adjoint of the exchange
sends the gradients of the received cells back to their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime, trace_state
from ...comm import autograd_collectives, collectives
from ...comm.route import RowRequest, fetch_route
from ...dispatch.arguments import as_operand
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import handler, mesh_of, rule
from ...layout import DimSharding, Layout, Span, rescale, shard_sizes_of
from ...tensor import wrap
from .._common.autocast import HALF_DTYPES
from .._common.broadcast import Alignment, find_grad_reductions
from .._common.probe import probe, stand_in
from ..shape.flip_roll import shard_by_one_axis
from .grid_sample_local import BICUBIC, GridAxis, Tap, gather_samples


@handler("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(func, types, args, kwargs):
    """Run `torch.grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)`."""
    names = ("input", "grid", "interpolation_mode", "padding_mode", "align_corners")
    named = dict(zip(names, args, strict=False)) | kwargs
    options = mode, padding, corners = tuple(named[n] for n in names[2:])
    mesh = mesh_of(args, kwargs)
    field, field_layout = as_operand(named["input"], mesh)
    grid, grid_layout = as_operand(named["grid"], mesh)
    dtype = validate(func, field, field_layout.shape, grid, grid_layout.shape, options)
    alignment = align_layouts(field_layout, grid_layout)
    field, grid = alignment.redistribute([field.to(dtype), grid.to(dtype)], [field_layout, grid_layout])
    layout = alignment.targets[0]
    if not any(layout.is_sharded(d) for d in range(2, layout.ndim)):
        return wrap(_sample(func, field, grid, options), alignment.result)
    half = dtype in HALF_DTYPES
    # The grid lists coordinates from the last dim to the first.
    points = (grid.float() if half else grid).unbind(-1)[::-1]
    on_cpu = field.device.type == "cpu"
    cpu_2d = layout.ndim == 4 and on_cpu
    taps = [
        GridAxis(n, mode, padding, corners, cpu_2d, n - 1 if on_cpu and not cpu_2d else 0).taps(p)
        for n, p in zip(layout.shape[2:], points, strict=True)
    ]
    field, block_start = fetch_cells(field, layout, taps)
    samples = gather_samples(field.float() if half else field, block_start, taps, cpu_2d or mode == BICUBIC)
    return wrap(samples.to(dtype), alignment.result)


def _sample(func: Any, field: Tensor, grid: Tensor, options: tuple) -> Tensor:
    """Sample an unsharded field; for no points, without torch's kernel, whose second derivative raises."""
    if grid.numel():
        return func(field, grid, *options)
    of_field = field.flatten(2).sum(2)
    return (of_field.view(*of_field.shape, *[1] * (grid.ndim - 2)) + grid.sum(-1).unsqueeze(1)).square()


def validate(
    func: Any, field: Tensor, shape: torch.Size, grid: Tensor, grid_shape: torch.Size, options: tuple
) -> torch.dtype:
    """Raise torch's errors on all ranks, also on ranks with empty shards; return the result dtype."""

    same_batch = len(shape) > 0 and len(grid_shape) > 0 and shape[0] == grid_shape[0]
    with trace_state.concrete():
        # With batch size 0 nothing is computed; other shapes are expanded and take no memory.
        empty = [(0, *s[1:]) if same_batch else s for s in (shape, grid_shape)]
        probe(func, *(stand_in(t, [1]).expand(s) for t, s in zip((field, grid), empty, strict=True)), *options)
        one = [1] * len(shape)
        return probe(func, stand_in(field, one), stand_in(grid, [*one[:-1], len(shape) - 2]), *options).dtype


# ---------------------------------------------------------------------- layouts


@runtime.memo
def align_layouts(field: Layout, grid: Layout) -> Alignment:
    """Choose the layouts that field and grid are redistributed to, and the layout of the result."""
    last = grid.ndim - 1
    field, grid = shard_by_one_axis(field, range(2, field.ndim)), grid.unshard([last])
    grid_is_smaller = grid.numel <= field.numel  # on a conflict of mesh axes the smaller tensor is unsharded
    if grid.axes_of(0) and not field.axes_of(0):
        if set(grid.axes_of(0)) & set(field.shard_axes):
            field, grid = (
                (field, grid.unshard([0])) if grid_is_smaller else (_unshard_axes(field, grid.axes_of(0), 1), grid)
            )
        field = field.with_dim(0, *grid.dims[0])
    else:
        grid = _unshard_axes(grid, field.axes_of(0), 1).unshard([0]).with_dim(0, *field.dims[0])
    if set(field.axes_of(1)) & set(grid.shard_axes):
        field, grid = (
            (field, _unshard_axes(grid, field.axes_of(1), 1)) if grid_is_smaller else (field.unshard([1]), grid)
        )
    for dim in range(2, field.ndim):
        (sharding,) = field.dims[dim]
        used = set(sharding.axes) & set(grid.shard_axes)
        if not sharding.axes or used == set(sharding.axes):
            continue
        free = sorted((d for d in range(1, last) if not grid.axes_of(d)), key=lambda d: (d != dim - 1, -grid.shape[d]))
        if used or not free:
            field = field.unshard([dim])
            continue
        size = grid.shape[free[0]]
        grid = grid.with_dim(free[0], DimSharding(size, sharding.axes, rescale(sharding.shard_sizes, size)))
    result = field.with_dims([*field.dims[:2], *grid.dims[1:last]])
    return Alignment((field, grid), find_grad_reductions(result, (field, grid)), result)


def _unshard_axes(layout: Layout, axes: Sequence[int], first: int) -> Layout:
    """Return the layout with the dims from `first` on unsharded that are sharded over any of `axes`."""
    return layout.unshard([d for d in range(first, layout.ndim) if set(layout.axes_of(d)) & set(axes)])


# ---------------------------------------------------------------------- exchange


def fetch_cells(field: Tensor, layout: Layout, taps: Sequence[Sequence[Tap]]) -> tuple[Tensor, list[int]]:
    """Return the block of the field that this rank's points read, and its start along each spatial dim.

    The exchange goes dim by dim. Along an earlier dim, a rank also requests the cells that its peers on the later axes
    need, as they receive them from this rank.
    """
    sharded = [d for d in range(2, layout.ndim) if layout.is_sharded(d)]
    axes = [layout.nontrivial_axes(layout.axes_of(d))[0] for d in sharded]
    bounds = torch.stack([torch.stack(_bounds(taps[d - 2])) for d in sharded])
    for axis in reversed(axes):  # -> [coord on the first axis, on the second, ..., dim, first or last cell]
        shape = [layout.mesh.size(axis), *bounds.shape]
        gathered = collectives.gather_ints(bounds.flatten().tolist(), layout.mesh.get_group(axis), field.device)
        bounds = torch.tensor(gathered).view(shape)
    block_start = [0] * (layout.ndim - 2)
    for i, (dim, axis) in enumerate(zip(sharded, axes, strict=True)):
        later = tuple(range(1, len(axes) - i))
        dim_bounds = bounds[..., i, :]
        lows, highs = dim_bounds[..., 0], dim_bounds[..., 1]
        if later:
            lows, highs = lows.amin(later), highs.amax(later)
        spans = [Span(a, b + 1) if b >= 0 else Span(0, 0) for a, b in zip(lows.tolist(), highs.tolist(), strict=True)]
        coord = layout.coords[axis]
        (sharding,) = layout.dims[dim]
        requests = [[RowRequest(start, stop - start)] for start, stop in spans]
        route = fetch_route(dim, shard_sizes_of(sharding), coord, requests, [stop - start for start, stop in spans])
        field = autograd_collectives.exchange(field, route, layout.mesh.get_group(axis))
        block_start[dim - 2] = spans[coord].start
        bounds = bounds[coord]
    return field, block_start


def _bounds(taps: Sequence[Tap]) -> list[Tensor]:
    """Return the first and the last cell that any point reads; the last is -1 if no point reads a cell."""
    if not taps[0].cell.numel():
        return [taps[0].cell.new_tensor(2**62), taps[0].cell.new_tensor(-1)]
    first = torch.stack([torch.where(t.in_bounds, t.cell, 2**62).amin() for t in taps]).amin()
    last = torch.stack([torch.where(t.in_bounds, t.cell, -1).amax() for t in taps]).amax()
    return [first, last]


# ---------------------------------------------------------------------- affine grids


@rule("affine_grid_generator")
def affine_grid_generator(theta: Operand, size, align_corners, *, fn):
    """Generate on each rank the grids of its own samples."""
    shape = probe(fn, theta, list(size), align_corners, meta=True).shape
    layout = theta.layout.unshard([1, 2])
    local_size = [layout.local_shape[0], *size[1:]]
    result = layout.with_dims([layout.dims[0], *((DimSharding(n),) for n in shape[1:])])
    return Plan(local=lambda theta: fn(theta, local_size, align_corners), operands={"theta": layout}, layout=result)
