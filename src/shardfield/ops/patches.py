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

from ..dispatch import composed, rule
from ..execute import planned
from ..layout import Factor
from ..plan import Operand, Plan
from .across import probe_shapes
from .conv import each
from .frame import Frame, nothing
from .pad import continued, edges_of
from .pool import linear, result_dtype
from .rearrange import one_axis
from .window import Window


def windows(size: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[Window]:
    """The windows of F.unfold along its two dims."""
    found = []
    for n, k, d, p, s in zip(size, *(each(a, 2) for a in (kernel, dilation, padding, stride)), strict=True):
        found.append(Window(n, (n + 2 * p - d * (k - 1) - 1) // s + 1, k, s, p, d))
    return found


@rule(F.unfold, exact=True, partial=True, merged=True)
def unfold(input: Operand, kernel_size, dilation=1, padding=0, stride=1, *, borders=()):
    """The columns of cut rows are cut as a merged dim remembers it: by row and by place in the row."""
    source, input = input.layout, continued(input, borders)
    probe_shapes(F.unfold, input, kernel_size, dilation, padding, stride)
    dtype = result_dtype(input, 2, lambda x: F.unfold(x, 1))
    dims = (input.ndim - 2, input.ndim - 1)
    layout = one_axis(linear(source), dims)
    looks = windows(input.shape[-2:], kernel_size, dilation, padding, stride)
    frame = Frame(layout, dict(zip(dims, looks, strict=True)), edges=edges_of(layout, borders))
    *lead, channels, rows, columns = frame.result(layout).dims
    cells = Factor(math.prod(w.kernel for w in looks))
    result = layout.with_dims([*lead, (*channels, cells), (*rows, *columns)])
    shape = result.local_shape
    inner = [0 if layout.is_cut(d) else w.padding for d, w in zip(dims, looks, strict=True)]

    def local(input):
        block = frame.take(input)
        if not shape.numel():
            return nothing(block, shape, dtype)
        return F.unfold(block, kernel_size, dilation, inner, stride)

    return Plan(local=local, operands={"input": layout}, layout=result)


@composed(F.fold, exact=True)
def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Columns seen as rows of them, then added up."""
    how = (kernel_size, dilation, padding, stride)
    F.fold(torch.empty(input.shape, dtype=input.dtype, device="meta"), output_size, *how)
    size = torch.Size(each(output_size, 2))
    looks = windows(size, *how)
    *lead, patch, _ = input.shape
    cells = math.prod(w.kernel for w in looks)
    columns = input.reshape(*lead, patch // cells, cells, *(w.out for w in looks))
    return _run_fold(F.fold, (), (columns, size, *how), {})


def _fold(input: Operand, size: torch.Size, kernel_size, dilation, padding, stride) -> Plan:
    """Columns (..., channels, cells, rows, places in a row) added up to a field of `size`."""
    dtype = result_dtype(input, 1, lambda x: F.fold(x, 1, 1))
    dims = (input.ndim - 2, input.ndim - 1)
    source = one_axis(linear(input.layout).uncut([-3]), dims)
    looks = dict(zip((dims[0] - 1, dims[1] - 1), windows(size, kernel_size, dilation, padding, stride), strict=True))
    field, made = source.without([-3]), {}
    sizes, inner = [], []  # of the field that this rank's columns add up to
    for dim, look in looks.items():
        (factor,) = field.dims[dim]
        made[dim] = source.lengths(dim + 1)
        back = Window(look.out, look.size, look.kernel, look.stride, look.padding, look.dilation, transposed=True)
        field = field.with_dim(dim, Factor(look.size, factor.axes, back.owned(made[dim]) if factor.axes else ()))
        begin, end = look.covers(*source.span(dim + 1)) if field.is_cut(dim) else (0, look.size)
        sizes.append(end - begin)
        inner.append(0 if field.is_cut(dim) else look.padding)
    frame = Frame(field, looks, made)
    columns = source.local_shape

    def local(input: Tensor) -> Tensor:
        *lead, channels, cells, rows, places = columns
        if not columns.numel():
            return frame.give(nothing(input, (*lead, channels, *sizes), dtype))
        flat = input.reshape(*lead, channels * cells, rows * places)
        return frame.give(F.fold(flat, sizes, kernel_size, dilation, inner, stride))

    return Plan(local=local, operands={"input": source}, layout=field)


_run_fold = planned(_fold, partial=True, merged=True)
