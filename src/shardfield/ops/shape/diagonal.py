"""diagonal, diag_embed, Tensor.unfold, and the out-of-place scatters into views.

A diagonal of a rank's block is the global diagonal with a shifted offset. The result is sharded over the axes of both
matrix dims, and `diagonal` and `diag_embed` need no communication. For `unfold`, each rank computes the windows that
start in its shard and fetches the rows beyond its shard from its neighbors; the adjoint sends their gradients back.
"""

from __future__ import annotations

import torch

from ...comm import autograd_collectives
from ...comm.route import RowRequest, fetch_route
from ...dispatch.plan import Operand, Plan, ViewKind
from ...dispatch.registry import composed, mesh_of, rule
from ...layout import DimSharding, Layout, outer_shard_sizes, starts
from ...redistribute import unmerge_dims
from ...tensor import ShardTensor, wrap
from .._common.probe import meta_tensor
from ..indexing.basic_index import as_shard_tensor, normalize_dim


def _unmerge_dims(layout: Layout, *dims: int) -> Layout:
    """Return the layout in which each of `dims` has a single factor."""
    for d in dims:
        if len(layout.dims[d]) > 1:
            layout = layout.with_dim(d, *unmerge_dims(layout).dims[d])
    return layout


def _shard_bounds(factor: DimSharding) -> list[tuple[int, int]]:
    """Return the (start, stop) of every shard of a factor."""
    sizes = factor.shard_sizes or (factor.size,)
    return [(a, a + n) for a, n in zip(starts(sizes), sizes, strict=True)]


@rule("diagonal", torch.linalg.diagonal, partial=True, merged=True)
def diagonal(input: Operand, offset=0, dim1=None, dim2=None, *, fn):
    """Take the diagonal of the local block with its offset shifted to the block's position."""
    last = fn is torch.linalg.diagonal
    dim1, dim2 = (-2 if last else 0) if dim1 is None else dim1, (-1 if last else 1) if dim2 is None else dim2
    size = torch.diagonal(meta_tensor(input), offset, dim1, dim2).shape[-1]
    dim1, dim2 = normalize_dim(dim1, input.ndim), normalize_dim(dim2, input.ndim)
    layout = _unmerge_dims(input.layout, dim1, dim2)
    (rows,), (columns,) = layout.dims[dim1], layout.dims[dim2]
    offset = max(-rows.size, min(offset, columns.size))  # the result is empty beyond; local offsets cannot overflow
    top, left = max(0, -offset), max(0, offset)
    shard_sizes = tuple(
        max(0, min(b - top, d - left, size) - max(a - top, c - left, 0))
        for a, b in _shard_bounds(rows)
        for c, d in _shard_bounds(columns)
    )
    axes = rows.axes + columns.axes
    diagonal_sharding = DimSharding(size, axes, shard_sizes if axes else ())
    local_offset = offset + layout.span(dim1).start - layout.span(dim2).start
    kept = [f for d, f in enumerate(layout.dims) if d not in (dim1, dim2)]
    return Plan(
        local=lambda input: input.diagonal(local_offset, dim1, dim2),
        layout=layout.with_dims([*kept, (diagonal_sharding,)]),
        operands={"input": layout},
        view=ViewKind.view(lost=bool(layout.partial) or layout.bare is not input.layout.bare),
    )


@rule("diag_embed", partial=True, merged=True)
def diag_embed(input: Operand, offset=0, dim1=-2, dim2=-1):
    """Shard the rows as the diagonal is sharded; the first and last rank also hold the zero rows around it."""
    shape = torch.diag_embed(meta_tensor(input), offset, dim1, dim2).shape
    ndim = input.ndim + 1
    dim1, dim2 = normalize_dim(dim1, ndim), normalize_dim(dim2, ndim)
    layout = _unmerge_dims(input.layout, input.ndim - 1)
    (factor,) = layout.dims[-1]
    size = shape[dim1]
    top, left = max(0, -offset), max(0, offset)
    rows = DimSharding(size)
    if factor.axes:
        ends = [0, *(end + top for _, end in _shard_bounds(factor)[:-1]), size]
        rows = DimSharding(size, factor.axes, tuple(b - a for a, b in zip(ends, ends[1:], strict=False)))
    result = layout.with_dims([*layout.dims[:-1], (rows,), (DimSharding(size),)])
    local_offset = left - top + result.span(ndim - 2).start
    local_shape = result.local_shape
    kept_dims = [d for d in range(ndim) if d not in (dim1, dim2)]
    order_back = [kept_dims.index(d) if d in kept_dims else ndim - 2 if d == dim1 else ndim - 1 for d in range(ndim)]
    return Plan(
        local=lambda input: (
            input.new_zeros(local_shape).diagonal_scatter(input, local_offset, -2, -1).permute(order_back)
        ),
        layout=result.permute(order_back),
        operands={"input": layout},
    )


@composed("diag")
def diag(input, diagonal=0):
    """Return the matrix with a vector on its diagonal, or the diagonal of a matrix."""
    if input.ndim not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {input.ndim}D")
    return torch.diag_embed(input, diagonal) if input.ndim == 1 else input.diagonal(diagonal).clone()


@composed("diagflat")
def diagflat(input, offset=0):
    """Return the matrix with all elements of the input on its diagonal."""
    return torch.diag_embed(input.reshape(-1), offset)


# ---------------------------------------------------------------------- windows


@rule("unfold", partial=True, merged=True)
def unfold(input: Operand, dimension, size, step):
    """Compute the windows that start in this rank's shard; rows beyond the shard are fetched from neighbors."""
    shape = meta_tensor(input).unfold(dimension, size, step).shape
    if not input.ndim:
        return None
    dim = normalize_dim(dimension, input.ndim)
    layout = _unmerge_dims(input.layout, dim)
    (factor,) = layout.dims[dim]
    axes = layout.nontrivial_axes(factor.axes)
    if not axes:
        result = layout.with_dims([*layout.with_dim(dim, DimSharding(shape[dim])).dims, (DimSharding(size),)])
        return Plan(
            local=lambda input: input.unfold(dim, size, step),
            layout=result,
            operands={"input": layout},
            view=ViewKind.view(lost=bool(layout.partial) or layout.bare is not input.layout.bare),
        )
    if len(axes) > 1:  # an exchange runs along one mesh axis, so the inner axes are unsharded
        sizes = factor.shard_sizes
        for axis in reversed(factor.axes[factor.axes.index(axes[0]) + 1 :]):
            sizes = outer_shard_sizes(sizes, layout.mesh.size(axis))
        factor = DimSharding(factor.size, factor.axes[: factor.axes.index(axes[0]) + 1], sizes)
        layout = layout.with_dim(dim, factor)
    axis = axes[0]
    first_windows = [min(-(-begin // step), shape[dim]) for begin, _ in _shard_bounds(factor)] + [shape[dim]]
    counts = [b - a for a, b in zip(first_windows, first_windows[1:], strict=False)]
    reads = [
        RowRequest(a * step, (n - 1) * step + size if n else 0) for a, n in zip(first_windows, counts, strict=False)
    ]
    me = layout.coords[axis]
    is_local = [
        a <= r.source and r.source + r.length <= b
        for r, (a, b) in zip(reads, _shard_bounds(factor), strict=True)
        if r.length
    ]
    shard_start = _shard_bounds(factor)[me][0]
    group = layout.mesh.get_group(axis)
    route = fetch_route(dim, factor.shard_sizes, me, [[r] for r in reads], [r.length for r in reads])

    def local(input):
        if all(is_local):  # no window crosses a shard boundary on any rank
            block = input.narrow(dim, reads[me].source - shard_start if counts[me] else 0, reads[me].length)
        else:
            block = autograd_collectives.exchange(input, route, group)
        if not counts[me]:
            return block.narrow(dim, 0, 0).unsqueeze(-1).expand(*[-1] * input.ndim, size)
        return block.unfold(dim, size, step)

    window_sharding = DimSharding(shape[dim], factor.axes, tuple(counts))
    return Plan(
        local=local,
        layout=layout.with_dims([*layout.with_dim(dim, window_sharding).dims, (DimSharding(size),)]),
        operands={"input": layout},
        view=ViewKind.view(lost=bool(layout.partial) or layout.bare is not input.layout.bare or not all(is_local)),
    )


# ---------------------------------------------------------------------- out-of-place scatters into views


def _writable_copy(x):
    """Return a writable copy of `x`, in which each dim has a single factor."""
    if not isinstance(x, ShardTensor):
        return x.clone()
    x = x._unmerged_value()
    return wrap(x._local_tensor.clone(), x._layout)


def _check_src_shape(name: str, src, expected) -> None:
    if src.shape != expected:
        raise RuntimeError(
            f"{name}: expected src to have a size equal to the slice: {list(expected)}, not {list(src.shape)}"
        )


@composed("select_scatter")
def select_scatter(input, src, dim, index):
    """Return a copy of the input with one index along `dim` replaced."""
    row = meta_tensor(input).select(dim, index).shape
    _check_src_shape("select_scatter", src, row)
    out = _writable_copy(input)
    out[(slice(None),) * normalize_dim(dim, input.ndim) + (index,)] = src
    return out


@composed("slice_scatter")
def slice_scatter(input, src, dim=0, start=None, end=None, step=1):
    """Return a copy of the input with a slice along `dim` replaced."""
    index = (slice(None),) * normalize_dim(dim, input.ndim) + (slice(start, end, step),)
    _check_src_shape("slice_scatter", src, meta_tensor(input)[index].shape)
    out = _writable_copy(input)
    out[index] = src
    return out


@composed("diagonal_scatter")
def diagonal_scatter(input, src, offset=0, dim1=0, dim2=1):
    """Return a copy of the input with a diagonal replaced."""
    _check_src_shape("diagonal_scatter", src, meta_tensor(input).diagonal(offset, dim1, dim2).shape)
    out = as_shard_tensor(_writable_copy(input), mesh_of((input, src), None))  # a diagonal is no slice of a buffer
    out.diagonal(offset, dim1, dim2).copy_(src)
    return out
