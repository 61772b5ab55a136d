"""Counting into bins. Each rank counts what it has, into bins that all agree on; the counts are Partial."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import moves, wire
from ..comm.moves import Groups
from ..dispatch import admit, handler, mesh_of, rule
from ..layout import Factor, Layout
from ..plan import Operand, Plan
from ..redistribute import redistribute
from ..tensor import wrap
from .across import held, probe


def counted(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of counts of a tensor laid out as `layout`."""
    partial = [(a, "sum") for a in layout.wide(layout.shard_axes)]
    return Layout.make(layout.mesh, [(Factor(n),) for n in shape], partial)


def extent(input: Tensor, over: Groups) -> tuple[Tensor, Tensor]:
    """The least and the greatest element of all ranks' rows, column by column: (columns,) each; NaN if there is one."""
    top = float("inf") if input.is_floating_point() else torch.iinfo(input.dtype).max
    bottom = float("-inf") if input.is_floating_point() else torch.iinfo(input.dtype).min
    low = input.amin(0) if len(input) else input.new_full(input.shape[1:], top)
    high = input.amax(0) if len(input) else input.new_full(input.shape[1:], bottom)
    for group in over:
        low, high = wire.all_reduce(low, group, "min"), wire.all_reduce(high, group, "max")
    return low, high


@rule("histc", merged=True)
def histc(input: Operand, bins=100, min=0, max=0, *, fn):
    """Equal limits stand for the range of the data."""
    probe(fn, input, bins, min, max)
    layout, over = input.layout, held(input.layout)

    def local(input):
        low, high = min, max
        if low == high and layout.numel:
            low, high = (t.item() for t in extent(input.detach().flatten(), over))
        if low == high:
            low, high = low - 1, high + 1
        return fn(input, bins, low, high)

    return Plan(local=local, layout=counted(layout, [bins]))


@rule("histogram", merged=True)
def histogram(input: Operand, bins, *, range=None, weight=None, density=False, fn):
    """(counts, edges). A density needs the sum of all counts, so it is whole."""
    layout, over = input.layout, held(input.layout)
    if weight is not None and weight.shape != input.shape:
        raise RuntimeError(f"torch.histogram: weight has shape {tuple(weight.shape)}, the input {tuple(input.shape)}")
    edged = isinstance(bins, Operand)
    probe(fn, input, bins, range=range, weight=weight)
    edges = Layout.replicate(layout.mesh, bins.shape if edged else (bins + 1,))
    counts = counted(layout, (edges.shape[0] - 1,))
    operands = {"weight": layout} if weight is not None else {}
    operands |= {"bins": edges} if edged else {}

    def local(input, bins, weight):
        given = {} if edged else {"range": range or _range(input, layout, over)}
        found, at = fn(input, bins, **given, weight=weight)
        if density:
            found = moves.reduce(found, over)
            found = found / found.sum() / at.diff()
        return torch.return_types.histogram((found, at))

    return Plan(local=local, operands=operands, layout=(counts.with_partial(()) if density else counts, edges))


def _range(input: Tensor, layout: Layout, over: Groups) -> tuple[float, float]:
    """The range torch chooses for data: theirs, widened where all are equal."""
    if not layout.numel:
        return 0.0, 1.0
    low, high = (t.item() for t in extent(input.detach().flatten(), over))
    return (low - 0.5, high + 0.5) if low == high else (low, high)


@handler("bincount")
def bincount(func, types, args, kwargs):
    return _bincount(mesh_of(args, kwargs), *args, **kwargs)


def _bincount(mesh, input, weights=None, minlength=0):
    """The largest element tells how many bins there are: all ranks agree on it first."""
    local, layout = admit(input, mesh, merged=True)
    weight, where = (None, layout) if weights is None else admit(weights, mesh, merged=True)
    if layout.ndim == 1 and where.shape != layout.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    tiny = torch.zeros([min(n, 1) for n in layout.shape], dtype=local.dtype, device=local.device)
    few = None if weight is None else torch.ones_like(tiny, dtype=weight.dtype)
    dtype = torch.bincount(tiny, few, minlength).dtype  # or torch's error
    low, high = extent(local, held(layout)) if layout.numel else (torch.tensor(0), torch.tensor(-1))
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(int(high) + 1, minlength)
    if weight is not None:
        weight = redistribute(weight, where, layout)
    counts = torch.bincount(local, weight, size).to(dtype)  # of nothing torch counts in integers, weights or not
    return wrap(counts, counted(layout, [size]))
