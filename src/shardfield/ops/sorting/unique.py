"""unique and unique_consecutive. Result shapes depend on the data, so these are handlers and not rules.

Each rank first finds the distinct elements of its own shard and sends only those. If they are few, `unique` gathers
them and returns replicated values. If they exceed a rank's share of the elements, each rank receives one range of the
global order and finds the distinct elements in it, so that the values are sharded. The inverse has the input's layout.
`unique_consecutive` keeps the first element of every run on its rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat.autocast import concatenate
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
    """Return those of the three outputs that the call requests."""
    outputs = (values, *((inverse,) if return_inverse else ()), *((counts,) if return_counts else ()))
    return outputs if len(outputs) > 1 else values


def _raise_torch_errors(fn: Any, value: ShardTensor, dim: int | None) -> None:
    """Raise on all ranks the errors that torch raises for such a tensor."""
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

    local_values, local_inverse, local_counts = torch.unique(local, return_inverse=True, return_counts=True, dim=dim)
    along = dim or 0
    sizes = gather_counts(local_values.shape[along], layout, blocks.axes, local.device)
    slices = layout.numel if dim is None else layout.shape[dim]
    if sum(sizes) * blocks.count <= slices or not layout.numel:
        candidates = blocks.all_gather(local_values, along, sizes)
        values, position = torch.unique(candidates, sorted=sorted, return_inverse=True, dim=dim)
        inverse = position[sum(sizes[: blocks.index]) :][local_inverse]
        count = values.shape[along]
        value_sharding = DimSharding(count)
        counts = torch.bincount(inverse.flatten(), minlength=count)
        partial = [(a, "sum") for a in layout.nontrivial_axes(blocks.axes)]
    else:
        values, position, counts, shard_sizes = _unique_by_range(local_values, local_counts, along, sizes, blocks)
        inverse = position[local_inverse]
        value_sharding = DimSharding(sum(shard_sizes), blocks.axes, shard_sizes)
        partial = []
    dims = [(value_sharding,)] if dim is None else layout.unshard(range(layout.ndim)).with_dim(dim, value_sharding).dims
    inverse_layout = layout if dim is None else Layout.make(mesh, [layout.dims[dim]])
    return _select_outputs(
        wrap(values, Layout.make(mesh, dims)),
        wrap(inverse, inverse_layout),
        wrap(counts, Layout.make(mesh, [(value_sharding,)], partial)),
        return_inverse,
        return_counts,
    )


def _unique_by_range(
    local_values: Tensor, counts_in: Tensor, dim: int, sizes: Sequence[int], blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Find the distinct slices of all blocks, of which this rank receives one range of the global order.

    Returns the slices, the global position of each of `local_values`, the count of elements equal to each slice, and
    the shard sizes of the result.
    """
    rows = local_values.movedim(dim, 0)
    # slices sort by their first element first, so the first element alone may determine the destination
    first = sortable_key(rows.flatten(1)[:, 0] if rows.ndim > 1 else rows).contiguous()
    exchanges = plan_exchanges(assign_buckets(first, sizes, blocks), blocks)
    for hop in exchanges:
        rows, counts_in = hop.exchange(rows), hop.exchange(counts_in)
    values, position = torch.unique(
        rows.movedim(0, dim), return_inverse=True, dim=dim if local_values.ndim > 1 else None
    )
    counts = counts_in.new_zeros(values.shape[dim]).index_add(0, position, counts_in)
    shard_sizes = gather_counts(values.shape[dim], blocks.layout, blocks.axes, local_values.device)
    position = position + sum(shard_sizes[: blocks.index])
    for hop in reversed(exchanges):
        position = hop.exchange_back(position)
    return values, position, counts, shard_sizes


def _shard_only_along(layout: Layout, dim: int) -> tuple[Layout, int]:
    """Return the layout in which `dim` is sharded by all sharding axes, so that each of its slices is on one rank."""
    dim %= layout.ndim
    others = [a for d in range(layout.ndim) if d != dim for a in layout.axes_of(d)[::-1]]
    if not others:
        return layout, dim
    sizes = [layout.mesh.size(a) for a in others]
    shard_sizes = [n for size in layout.shard_sizes(dim) for n in nested_balanced(size, sizes)]
    axes = (*layout.axes_of(dim), *others)
    other_dims = [d for d in range(layout.ndim) if d != dim]
    return layout.unshard(other_dims).with_dim(dim, DimSharding(layout.shape[dim], axes, tuple(shard_sizes))), dim


@handler("unique_consecutive")
def unique_consecutive(func, types, args, kwargs):
    outputs, return_inverse, return_counts = _unique_consecutive(*args, **kwargs)
    if func not in (torch.unique_consecutive, torch.Tensor.unique_consecutive):
        return outputs  # the C function behind them returns all three
    values, inverse, counts = outputs
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
    """Return the first slice of every run of equal slices along `dim`, the run of each slice, and the run lengths."""
    layout, dim, _ = simplify_dim(value._layout, dim)
    local = value._redistribute_to(layout)._local_tensor
    blocks, n = Blocks.along(layout, dim), layout.shape[dim]
    is_start = _run_starts(local, dim, blocks)

    first = is_start.nonzero().flatten()
    counts = gather_counts(len(first), layout, blocks.axes, local.device)
    run_sharding = DimSharding(sum(counts), blocks.axes, counts if blocks.axes else ())
    values = wrap(local.index_select(dim, first), layout.with_dim(dim, run_sharding))
    run = is_start.cumsum(0) - 1 + sum(counts[: blocks.index])
    inverse = wrap(run, Layout.make(layout.mesh, [layout.dims[dim]]))

    # a run ends where the next one begins, possibly in a later block
    run_starts = first + blocks.start
    end = run_starts.new_full((1,), n)
    block_starts = torch.cat([blocks.all_gather_unit(run_starts[:1] if len(run_starts) else end, 0), end])
    ends = torch.cat([run_starts[1:], block_starts[blocks.index + 1 :].amin(0, keepdim=True)])
    lengths = ends[: len(run_starts)] - run_starts
    return values, inverse, wrap(lengths, Layout.make(layout.mesh, [(run_sharding,)]))


def _run_starts(local: Tensor, dim: int, blocks: Blocks) -> Tensor:
    """Return the mask of this block's slices along `dim` that start a run, that is, differ from the slice before."""
    layout, length = blocks.layout, local.shape[dim]
    local = local.detach()
    shape = [1 if d == dim else m for d, m in enumerate(local.shape)]
    lasts = blocks.all_gather_unit(local.narrow(dim, length - 1, 1) if length else local.new_zeros(shape), dim)
    nonempty = [i for i in range(blocks.index) if blocks.shard_sizes[i]]
    previous = [lasts.narrow(dim, nonempty[-1], 1)] if nonempty else []
    extended = concatenate([*previous, local], dim)
    steps = extended.shape[dim] - 1 if extended.shape[dim] else 0
    differs = extended.narrow(dim, min(1, extended.shape[dim]), steps) != extended.narrow(dim, 0, steps)
    differs = differs.movedim(dim, 0).reshape(steps, math.prod(shape)).any(1)
    if not nonempty:
        differs = torch.cat([differs.new_ones(min(length, 1)), differs])
    others = [a for a in layout.shard_axes if a not in blocks.axes]
    for group in process_groups(layout, others):
        differs = collectives.all_reduce(differs, group, "max")
    return differs
