"""Distinct elements. How many there are only the data tell, so these are handlers, not plans.

Each rank finds what is distinct among its own; only those travel. `unique` gives its values whole on every rank where
they are few. Where they are more than a rank's share of the elements, each rank gets a stretch of their order and
finds what is distinct in it. What points at values lies like the elements. `unique_consecutive` keeps its values where
they are found: the first of every run stays, the others go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import collectives
from ...dispatch.plan import Operand, process_groups
from ...dispatch.registry import handler
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.blockwise import Blocks, nested_balanced, simplify_dim
from .._common.probe import probe
from ..indexing.owners import gather_counts
from .order_statistics import sortable_key
from .samplesort import assign_buckets, plan_exchanges


def _select_outputs(values: Any, inverse: Any, counts: Any, return_inverse: bool, return_counts: bool) -> Any:
    """What torch returns of the three."""
    found = (values, *((inverse,) if return_inverse else ()), *((counts,) if return_counts else ()))
    return found if len(found) > 1 else values


def _raise_torch_errors(fn: Any, value: ShardTensor, dim: int | None) -> None:
    """Its errors for such a tensor, raised on all ranks."""
    probe(fn, Operand(value._layout, value.dtype, value.device, 0), dim=dim)


@handler("unique")
def unique(func, types, args, kwargs):
    return _unique(*args, **kwargs)


def _unique(input, sorted=True, return_inverse=False, return_counts=False, dim=None):
    value = input._reduced_value()
    _raise_torch_errors(torch.unique, value, dim)
    layout = value._layout
    if dim is not None:
        layout, dim = _shard_only_along(value._unmerged_value()._layout, dim)
        value = value._redistribute_to(layout)
    local, mesh = value._local_tensor, layout.mesh
    blocks = Blocks.over_all_shards(layout) if dim is None else Blocks.along(layout, dim)

    mine, inside, often = torch.unique(local, return_inverse=True, return_counts=True, dim=dim)
    along = dim or 0
    sizes = gather_counts(mine.shape[along], layout, blocks.axes, local.device)
    slices = layout.numel if dim is None else layout.shape[dim]
    if sum(sizes) * blocks.count <= slices or not layout.numel:
        candidates = blocks.all_gather(mine, along, sizes)
        values, which = torch.unique(candidates, sorted=sorted, return_inverse=True, dim=dim)
        inverse = which[sum(sizes[: blocks.index]) :][inside]
        number = values.shape[along]
        cut = DimSharding(number)
        counts = torch.bincount(inverse.flatten(), minlength=number)
        partial = [(a, "sum") for a in layout.nontrivial_axes(blocks.axes)]
    else:
        values, which, counts, lengths = _unique_by_range(mine, often, along, sizes, blocks)
        inverse = which[inside]
        cut = DimSharding(sum(lengths), blocks.axes, lengths)
        partial = []
    shape = [(cut,)] if dim is None else layout.unshard(range(layout.ndim)).with_dim(dim, cut).dims
    lies = layout if dim is None else Layout.make(mesh, [layout.dims[dim]])
    return _select_outputs(
        wrap(values, Layout.make(mesh, shape)),
        wrap(inverse, lies),
        wrap(counts, Layout.make(mesh, [(cut,)], partial)),
        return_inverse,
        return_counts,
    )


def _unique_by_range(
    mine: Tensor, often: Tensor, dim: int, sizes: Sequence[int], blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """The distinct slices of every block's, of which this rank gets one stretch of the order.

    Returns them, the global place of each of `mine` among all, how many elements are like them, and what ranks hold.
    """
    rows = mine.movedim(dim, 0)
    # slices sort by their first element first, so that alone may say where they go
    first = sortable_key(rows.flatten(1)[:, 0] if rows.ndim > 1 else rows).contiguous()
    way = plan_exchanges(assign_buckets(first, sizes, blocks), blocks)
    for hop in way:
        rows, often = hop.exchange(rows), hop.exchange(often)
    values, which = torch.unique(rows.movedim(0, dim), return_inverse=True, dim=dim if mine.ndim > 1 else None)
    counts = often.new_zeros(values.shape[dim]).index_add(0, which, often)
    lengths = gather_counts(values.shape[dim], blocks.layout, blocks.axes, mine.device)
    which = which + sum(lengths[: blocks.index])
    for hop in reversed(way):
        which = hop.exchange_back(which)
    return values, which, counts, lengths


def _shard_only_along(layout: Layout, dim: int) -> tuple[Layout, int]:
    """The layout in which `dim` carries every cut, inside its own, so that each of its slices is on one rank."""
    dim %= layout.ndim
    others = [a for d in range(layout.ndim) if d != dim for a in layout.axes_of(d)[::-1]]
    if not others:
        return layout, dim
    sizes = [layout.mesh.size(a) for a in others]
    lengths = [n for piece in layout.shard_sizes(dim) for n in nested_balanced(piece, sizes)]
    axes = (*layout.axes_of(dim), *others)
    rest = [d for d in range(layout.ndim) if d != dim]
    return layout.unshard(rest).with_dim(dim, DimSharding(layout.shape[dim], axes, tuple(lengths))), dim


@handler("unique_consecutive")
def unique_consecutive(func, types, args, kwargs):
    found, return_inverse, return_counts = _unique_consecutive(*args, **kwargs)
    if func not in (torch.unique_consecutive, torch.Tensor.unique_consecutive):
        return found  # the C function behind them returns all three
    values, inverse, counts = found
    return _select_outputs(values, inverse, counts, return_inverse, return_counts)


def _unique_consecutive(input, return_inverse=False, return_counts=False, dim=None):
    _raise_torch_errors(torch.unique_consecutive, input, dim)
    if dim is None:
        merged = input.reshape(-1)
        values, inverse, counts = _find_runs(merged._unmerged_value(), 0)
        back = redistribute(inverse._local_tensor, inverse._layout, merged._layout.with_partial(()))
        inverse = wrap(back, merged._layout.with_partial(())).reshape(input.shape)
    else:
        values, inverse, counts = _find_runs(input._reduced_value(), dim)
    return (values, inverse, counts), return_inverse, return_counts


def _find_runs(value: ShardTensor, dim: int) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    """The first slice of every run of equal slices along `dim`, which run each is in, and how long the runs are."""
    layout, dim, _ = simplify_dim(value._layout, dim)
    local = value._redistribute_to(layout)._local_tensor
    blocks, n = Blocks.along(layout, dim), layout.shape[dim]
    fresh = _run_starts(local, dim, blocks)

    first = fresh.nonzero().flatten()
    counts = gather_counts(len(first), layout, blocks.axes, local.device)
    cut = DimSharding(sum(counts), blocks.axes, counts if blocks.axes else ())
    values = wrap(local.index_select(dim, first), layout.with_dim(dim, cut))
    run = fresh.cumsum(0) - 1 + sum(counts[: blocks.index])
    inverse = wrap(run, Layout.make(layout.mesh, [layout.dims[dim]]))

    # a run ends where the next one begins, perhaps in a later block
    at = first + blocks.start
    end = at.new_full((1,), n)
    begins = torch.cat([blocks.all_gather_unit(at[:1] if len(at) else end, 0), end])
    ends = torch.cat([at[1:], begins[blocks.index + 1 :].amin(0, keepdim=True)])
    lengths = ends[: len(at)] - at
    return values, inverse, wrap(lengths, Layout.make(layout.mesh, [(cut,)]))


def _run_starts(local: Tensor, dim: int, blocks: Blocks) -> Tensor:
    """Which slices along `dim` differ from the one before, (this block's slices,); the very first does."""
    layout, length = blocks.layout, local.shape[dim]
    local = local.detach()
    shape = [1 if d == dim else m for d, m in enumerate(local.shape)]
    lasts = blocks.all_gather_unit(local.narrow(dim, length - 1, 1) if length else local.new_zeros(shape), dim)
    filled = [i for i in range(blocks.index) if blocks.shard_sizes[i]]
    before = [lasts.narrow(dim, filled[-1], 1)] if filled else []
    line = torch.cat([*before, local], dim)
    steps = line.shape[dim] - 1 if line.shape[dim] else 0
    unlike = line.narrow(dim, min(1, line.shape[dim]), steps) != line.narrow(dim, 0, steps)
    unlike = unlike.movedim(dim, 0).reshape(steps, math.prod(shape)).any(1)
    if not filled:
        unlike = torch.cat([unlike.new_ones(min(length, 1)), unlike])
    others = [a for a in layout.shard_axes if a not in blocks.axes]
    for group in process_groups(layout, others):
        unlike = collectives.all_reduce(unlike, group, "max")
    return unlike
