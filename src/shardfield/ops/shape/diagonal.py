"""Diagonals, windows along a dim, and views written out of place.

A diagonal of a block is a diagonal of the whole, shifted: cut rows and cut columns give a cut diagonal, and nothing is
sent. Windows that reach over a cut are fetched from the neighbours.
"""

from __future__ import annotations

import torch

from ...comm import autograd_collectives
from ...comm.route import RowRequest, fetch_route
from ...dispatch.plan import Operand, Plan, ViewKind
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, outer_shard_sizes, starts
from ...redistribute import unmerge_dims
from ...tensor import ShardTensor, wrap
from ..indexing.basic_index import normalize_dim
from ..indexing.gather_rows import meta_tensors


def _unmerge_dims(layout: Layout, *dims: int) -> Layout:
    """The layout with some dims laid out simply."""
    for d in dims:
        if len(layout.dims[d]) > 1:
            layout = layout.with_dim(d, *unmerge_dims(layout).dims[d])
    return layout


def _shard_bounds(factor: DimSharding) -> list[tuple[int, int]]:
    """Where each piece of a factor begins and ends."""
    lengths = factor.shard_sizes or (factor.size,)
    return [(a, a + n) for a, n in zip(starts(lengths), lengths, strict=True)]


@rule("diagonal", torch.linalg.diagonal, partial=True, merged=True)
def diagonal(input: Operand, offset=0, dim1=None, dim2=None, *, fn):
    """Each rank's part of a diagonal lies on a diagonal of its block."""
    last = fn is torch.linalg.diagonal
    dim1, dim2 = (-2 if last else 0) if dim1 is None else dim1, (-1 if last else 1) if dim2 is None else dim2
    size = torch.diagonal(*meta_tensors(input), offset, dim1, dim2).shape[-1]
    dim1, dim2 = normalize_dim(dim1, input.ndim), normalize_dim(dim2, input.ndim)
    layout = _unmerge_dims(input.layout, dim1, dim2)
    (rows,), (columns,) = layout.dims[dim1], layout.dims[dim2]
    offset = max(-rows.size, min(offset, columns.size))  # beyond these there is nothing, and numbers stay small
    top, left = max(0, -offset), max(0, offset)
    cut = tuple(
        max(0, min(b - top, d - left, size) - max(a - top, c - left, 0))
        for a, b in _shard_bounds(rows)
        for c, d in _shard_bounds(columns)
    )
    axes = rows.axes + columns.axes
    along = DimSharding(size, axes, cut if axes else ())
    here = offset + layout.span(dim1).start - layout.span(dim2).start
    kept = [f for d, f in enumerate(layout.dims) if d not in (dim1, dim2)]
    return Plan(
        local=lambda input: input.diagonal(here, dim1, dim2),
        layout=layout.with_dims([*kept, (along,)]),
        operands={"input": layout},
        view=ViewKind.view(lost=bool(layout.partial) or layout is not input.layout),
    )


@rule("diag_embed", partial=True, merged=True)
def diag_embed(input: Operand, offset=0, dim1=-2, dim2=-1):
    """Matrices whose rows are cut as the diagonals are; the first and last rank hold the rows above and below."""
    shape = torch.diag_embed(*meta_tensors(input), offset, dim1, dim2).shape
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
    made = layout.with_dims([*layout.dims[:-1], (rows,), (DimSharding(size),)])
    here = left - top + made.span(ndim - 2).start
    block = made.local_shape
    order = [d for d in range(ndim) if d not in (dim1, dim2)]
    place = [order.index(d) if d in order else ndim - 2 if d == dim1 else ndim - 1 for d in range(ndim)]
    return Plan(
        local=lambda input: input.new_zeros(block).diagonal_scatter(input, here, -2, -1).permute(place),
        layout=made.permute(place),
        operands={"input": layout},
    )


@composed("diag")
def diag(input, diagonal=0):
    """A vector as the diagonal of a matrix, or the diagonal of a matrix."""
    if input.ndim not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {input.ndim}D")
    return torch.diag_embed(input, diagonal) if input.ndim == 1 else input.diagonal(diagonal).clone()


@composed("diagflat")
def diagflat(input, offset=0):
    """All elements as the diagonal of a matrix."""
    return torch.diag_embed(input.reshape(-1), offset)


# ---------------------------------------------------------------------- windows


@rule("unfold", partial=True, merged=True)
def unfold(input: Operand, dimension, size, step):
    """Windows along one dim. Each rank has those that begin in its part and fetches what they reach over to."""
    shape = meta_tensors(input)[0].unfold(dimension, size, step).shape
    if not input.ndim:
        return None
    dim = normalize_dim(dimension, input.ndim)
    layout = _unmerge_dims(input.layout, dim)
    (factor,) = layout.dims[dim]
    wide = layout.nontrivial_axes(factor.axes)
    if not wide:
        result = layout.with_dims([*layout.with_dim(dim, DimSharding(shape[dim])).dims, (DimSharding(size),)])
        return Plan(
            local=lambda input: input.unfold(dim, size, step),
            layout=result,
            operands={"input": layout},
            view=ViewKind.view(lost=bool(layout.partial) or layout is not input.layout),
        )
    if len(wide) > 1:  # a route goes along one axis: the inner ones give up their cut of this dim
        lengths = factor.shard_sizes
        for axis in reversed(factor.axes[factor.axes.index(wide[0]) + 1 :]):
            lengths = outer_shard_sizes(lengths, layout.mesh.size(axis))
        factor = DimSharding(factor.size, factor.axes[: factor.axes.index(wide[0]) + 1], lengths)
        layout = layout.with_dim(dim, factor)
    axis = wide[0]
    marks = [min(-(-begin // step), shape[dim]) for begin, _ in _shard_bounds(factor)] + [shape[dim]]
    counts = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    reads = [RowRequest(a * step, (n - 1) * step + size if n else 0) for a, n in zip(marks, counts, strict=False)]
    me = layout.coords[axis]
    own = [
        a <= r.source and r.source + r.length <= b
        for r, (a, b) in zip(reads, _shard_bounds(factor), strict=True)
        if r.length
    ]
    begin = _shard_bounds(factor)[me][0]
    group = layout.mesh.get_group(axis)
    route = fetch_route(dim, factor.shard_sizes, me, [[r] for r in reads], [r.length for r in reads])

    def local(input):
        if all(own):  # no window reaches over a cut
            block = input.narrow(dim, reads[me].source - begin if counts[me] else 0, reads[me].length)
        else:
            block = autograd_collectives.exchange(input, route, group)
        if not counts[me]:
            return block.narrow(dim, 0, 0).unsqueeze(-1).expand(*[-1] * input.ndim, size)
        return block.unfold(dim, size, step)

    cut = DimSharding(shape[dim], factor.axes, tuple(counts))
    return Plan(
        local=local,
        layout=layout.with_dims([*layout.with_dim(dim, cut).dims, (DimSharding(size),)]),
        operands={"input": layout},
        view=ViewKind.view(lost=bool(layout.partial) or layout is not input.layout or not all(own)),
    )


# ---------------------------------------------------------------------- copies of views, and views written out of place


def _writable_copy(x):
    """A copy of a tensor that can be written."""
    if not isinstance(x, ShardTensor):
        return x.clone()
    x = x._unmerged_value()
    return wrap(x._local_tensor.clone(), x._layout)


def _check_src_shape(name: str, src, part) -> None:
    if src.shape != part:
        raise RuntimeError(
            f"{name}: expected src to have a size equal to the slice: {list(part)}, not {list(src.shape)}"
        )


@composed("select_scatter")
def select_scatter(input, src, dim, index):
    """A copy with one row replaced."""
    row = torch.empty(input.shape, device="meta").select(dim, index).shape
    _check_src_shape("select_scatter", src, row)
    made = _writable_copy(input)
    made[(slice(None),) * normalize_dim(dim, input.ndim) + (index,)] = src
    return made


@composed("slice_scatter")
def slice_scatter(input, src, dim=0, start=None, end=None, step=1):
    """A copy with a slice replaced."""
    index = (slice(None),) * normalize_dim(dim, input.ndim) + (slice(start, end, step),)
    _check_src_shape("slice_scatter", src, torch.empty(input.shape, device="meta")[index].shape)
    made = _writable_copy(input)
    made[index] = src
    return made


@composed("diagonal_scatter")
def diagonal_scatter(input, src, offset=0, dim1=0, dim2=1):
    """A copy with a diagonal replaced."""
    _check_src_shape(
        "diagonal_scatter", src, torch.empty(input.shape, device="meta").diagonal(offset, dim1, dim2).shape
    )
    made = _writable_copy(input)
    made.diagonal(offset, dim1, dim2).copy_(src)
    return made


def _register_copy(name: str) -> None:
    view = getattr(torch.Tensor, name)
    composed(name + "_copy")(lambda input, *args, **kwargs: view(input, *args, **kwargs).clone())


for _name in ("select", "narrow", "diagonal", "unfold"):
    _register_copy(_name)


@composed("slice_copy")
def slice_copy(input, dim=0, start=None, end=None, step=1):
    """A copy of a slice."""
    return input[(slice(None),) * normalize_dim(dim, input.ndim) + (slice(start, end, step),)].clone()
