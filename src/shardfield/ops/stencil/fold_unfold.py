"""F.unfold (patches of a field to columns) and F.fold (columns summed to a field) of sharded tensors.

The rank that holds the center of a patch holds its column. unfold: each rank receives the halo cells of its patches.
fold: each rank sums its own columns to a block, then sends the sums of halo cells to their owners; columns are never
sent. Each exchange is the adjoint of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.empty_shards import connected
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding
from .._common.probe import meta_tensor, probe, stand_in
from ..shape.flip_roll import shard_by_one_axis
from .conv import to_ntuple
from .lazy_pad import accept_lazy_pad
from .pad import dim_paddings_of, padded_operand
from .padded_block import PaddedBlockPlan, empty_result
from .pool import keep_partial_sums
from .window import Window


def unfold_windows(size: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[Window]:
    """Return the windows of F.unfold along its two dims."""
    windows = []
    for n, k, d, p, s in zip(size, *(to_ntuple(a, 2) for a in (kernel, dilation, padding, stride)), strict=True):
        windows.append(Window(n, (n + 2 * p - d * (k - 1) - 1) // s + 1, k, s, p, d))
    return windows


@rule(F.unfold, exact=True, partial=True, merged=True, accepts_deferred=accept_lazy_pad())
def unfold(input: Operand, kernel_size, dilation=1, padding=0, stride=1, *, pre_pad=()):
    """Return columns along one merged dim (row, column in the row), sharded like the patches' centers."""
    source, input = input.layout, padded_operand(input, pre_pad)
    probe(F.unfold, input, kernel_size, dilation, padding, stride, meta=True)
    dtype = probe(F.unfold, stand_in(input, (1, 1, 1, 1)), 1).dtype
    dims = (input.ndim - 2, input.ndim - 1)
    layout = shard_by_one_axis(keep_partial_sums(source), dims)
    windows = unfold_windows(input.shape[-2:], kernel_size, dilation, padding, stride)
    block_plan = PaddedBlockPlan(
        layout, dict(zip(dims, windows, strict=True)), dim_paddings=dim_paddings_of(layout, pre_pad)
    )
    *lead, channels, rows, cols = block_plan.result(layout).dims
    cells = DimSharding(math.prod(w.kernel for w in windows))
    result = layout.with_dims([*lead, (*channels, cells), (*rows, *cols)])
    shape = result.local_shape
    local_padding = [0 if layout.is_sharded(d) else w.padding for d, w in zip(dims, windows, strict=True)]

    def unfold_block(block):
        if not shape.numel():
            return empty_result(block, shape, dtype)
        return F.unfold(block, kernel_size, dilation, local_padding, stride)

    run = connected(unfold_block, [layout, result])

    def local(input):
        return run(block_plan.gather_block(input))

    return Plan(local=local, operands={"input": layout}, layout=result)


@composed(F.fold, exact=True)
def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Split the dim of columns into (rows, columns in a row), then sum them."""
    options = (kernel_size, dilation, padding, stride)
    F.fold(meta_tensor(input), output_size, *options)
    size = torch.Size(to_ntuple(output_size, 2))
    windows = unfold_windows(size, *options)
    *lead, patch, _ = input.shape
    cells = math.prod(w.kernel for w in windows)
    columns = input.reshape(*lead, patch // cells, cells, *(w.out for w in windows))
    return _run_fold(F.fold, (), (columns, size, *options), {})


def _plan_fold(input: Operand, size: torch.Size, kernel_size, dilation, padding, stride) -> Plan:
    """Plan the sum of columns (..., channels, cells, rows, columns in a row) to a field of `size`."""
    dtype = probe(F.fold, stand_in(input, (1, 1, 1)), 1, 1).dtype
    dims = (input.ndim - 3, input.ndim - 2)  # of the field
    windows = dict(zip(dims, unfold_windows(size, kernel_size, dilation, padding, stride), strict=True))
    # The cells of a patch are all on one rank: an axis must not move to them.
    field = shard_by_one_axis(keep_partial_sums(input.layout).unshard([-3]).drop_dims([-3]), dims)
    source, column_sizes = field.insert(dims[0], input.shape[-3]), {}
    sizes, local_padding = [], []  # of the block that this rank's columns sum to
    for dim, window in windows.items():
        (sharding,) = field.dims[dim]
        column_sizes[dim] = source.shard_sizes(dim + 1)
        transposed_window = Window(
            window.out, window.size, window.kernel, window.stride, window.padding, window.dilation, transposed=True
        )
        field = field.with_dim(
            dim,
            DimSharding(
                window.size, sharding.axes, transposed_window.owned(column_sizes[dim]) if sharding.axes else ()
            ),
        )
        begin, end = window.receptive_field(*source.span(dim + 1)) if field.is_sharded(dim) else (0, window.size)
        sizes.append(end - begin)
        local_padding.append(0 if field.is_sharded(dim) else window.padding)
    block_plan = PaddedBlockPlan(field, windows, column_sizes)
    local_shape = source.local_shape

    def local(input: Tensor) -> Tensor:
        *lead, channels, cells, rows, cols = local_shape
        if not local_shape.numel():
            return block_plan.scatter_add_block(empty_result(input, (*lead, channels, *sizes), dtype))
        flat = input.reshape(*lead, channels * cells, rows * cols)
        return block_plan.scatter_add_block(F.fold(flat, sizes, kernel_size, dilation, local_padding, stride))

    return Plan(local=local, operands={"input": source}, layout=field)


_run_fold = make_handler(_plan_fold, partial=True, merged=True)
