"""Patches of a field as columns, and columns added up to a field: F.unfold and F.fold.

Columns lie where the centres of their patches do. A patch that reaches over a cut fetches the cells it lacks; a column
that does is added up where it lies, and the sums of cells that belong to a neighbour go there: never a column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding
from .._common.probe import probe_shapes
from ..shape.flip_roll import shard_by_one_axis
from .conv import to_ntuple
from .pad import dim_paddings_of, padded_operand
from .padded_block import PaddedBlockPlan, empty_result
from .pool import keep_partial_sums, result_dtype
from .window import Window


def unfold_windows(size: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[Window]:
    """The windows of F.unfold along its two dims."""
    found = []
    for n, k, d, p, s in zip(size, *(to_ntuple(a, 2) for a in (kernel, dilation, padding, stride)), strict=True):
        found.append(Window(n, (n + 2 * p - d * (k - 1) - 1) // s + 1, k, s, p, d))
    return found


@rule(F.unfold, exact=True, partial=True, merged=True)
def unfold(input: Operand, kernel_size, dilation=1, padding=0, stride=1, *, pre_pad=()):
    """The columns of cut rows are cut as a merged dim remembers it: by row and by place in the row."""
    source, input = input.layout, padded_operand(input, pre_pad)
    probe_shapes(F.unfold, input, kernel_size, dilation, padding, stride)
    dtype = result_dtype(input, 2, lambda x: F.unfold(x, 1))
    dims = (input.ndim - 2, input.ndim - 1)
    layout = shard_by_one_axis(keep_partial_sums(source), dims)
    looks = unfold_windows(input.shape[-2:], kernel_size, dilation, padding, stride)
    frame = PaddedBlockPlan(layout, dict(zip(dims, looks, strict=True)), dim_paddings=dim_paddings_of(layout, pre_pad))
    *lead, channels, rows, columns = frame.result(layout).dims
    cells = DimSharding(math.prod(w.kernel for w in looks))
    result = layout.with_dims([*lead, (*channels, cells), (*rows, *columns)])
    shape = result.local_shape
    inner = [0 if layout.is_sharded(d) else w.padding for d, w in zip(dims, looks, strict=True)]

    def local(input):
        block = frame.gather_block(input)
        if not shape.numel():
            return empty_result(block, shape, dtype)
        return F.unfold(block, kernel_size, dilation, inner, stride)

    return Plan(local=local, operands={"input": layout}, layout=result)


@composed(F.fold, exact=True)
def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Columns seen as rows of them, then added up."""
    how = (kernel_size, dilation, padding, stride)
    F.fold(torch.empty(input.shape, dtype=input.dtype, device="meta"), output_size, *how)
    size = torch.Size(to_ntuple(output_size, 2))
    looks = unfold_windows(size, *how)
    *lead, patch, _ = input.shape
    cells = math.prod(w.kernel for w in looks)
    columns = input.reshape(*lead, patch // cells, cells, *(w.out for w in looks))
    return _run_fold(F.fold, (), (columns, size, *how), {})


def _plan_fold(input: Operand, size: torch.Size, kernel_size, dilation, padding, stride) -> Plan:
    """Columns (..., channels, cells, rows, places in a row) added up to a field of `size`."""
    dtype = result_dtype(input, 1, lambda x: F.fold(x, 1, 1))
    dims = (input.ndim - 2, input.ndim - 1)
    source = shard_by_one_axis(keep_partial_sums(input.layout).unshard([-3]), dims)
    looks = dict(
        zip((dims[0] - 1, dims[1] - 1), unfold_windows(size, kernel_size, dilation, padding, stride), strict=True)
    )
    field, made = source.drop_dims([-3]), {}
    sizes, inner = [], []  # of the field that this rank's columns add up to
    for dim, look in looks.items():
        (factor,) = field.dims[dim]
        made[dim] = source.shard_sizes(dim + 1)
        back = Window(look.out, look.size, look.kernel, look.stride, look.padding, look.dilation, transposed=True)
        field = field.with_dim(dim, DimSharding(look.size, factor.axes, back.owned(made[dim]) if factor.axes else ()))
        begin, end = look.receptive_field(*source.span(dim + 1)) if field.is_sharded(dim) else (0, look.size)
        sizes.append(end - begin)
        inner.append(0 if field.is_sharded(dim) else look.padding)
    frame = PaddedBlockPlan(field, looks, made)
    columns = source.local_shape

    def local(input: Tensor) -> Tensor:
        *lead, channels, cells, rows, places = columns
        if not columns.numel():
            return frame.scatter_add_block(empty_result(input, (*lead, channels, *sizes), dtype))
        flat = input.reshape(*lead, channels * cells, rows * places)
        return frame.scatter_add_block(F.fold(flat, sizes, kernel_size, dilation, inner, stride))

    return Plan(local=local, operands={"input": source}, layout=field)


_run_fold = make_handler(_plan_fold, partial=True, merged=True)
