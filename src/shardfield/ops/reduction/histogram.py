"""Histograms and bincount: each rank counts its shard into bins that are equal on all ranks; the counts are Partial."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import as_operand, handler, mesh_of, rule, to_full_tensor
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.blockwise import move_shard_off
from .._common.probe import probe, stand_in
from .common import shard_groups


def counts_layout(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout of the counts of a tensor with `layout`: Partial over its shard axes."""
    partial = [(a, "sum") for a in layout.nontrivial_axes(layout.shard_axes)]
    return Layout.make(layout.mesh, [(DimSharding(n),) for n in shape], partial)


def global_range(input: Tensor, over: Groups) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum over the rows of all ranks, one per column; NaN if a column has one."""
    top = float("inf") if input.is_floating_point() else torch.iinfo(input.dtype).max
    bottom = float("-inf") if input.is_floating_point() else torch.iinfo(input.dtype).min
    low = input.amin(0) if len(input) else input.new_full(input.shape[1:], top)
    high = input.amax(0) if len(input) else input.new_full(input.shape[1:], bottom)
    for group in over:
        low, high = collectives.all_reduce(low, group, "min"), collectives.all_reduce(high, group, "max")
    return low, high


@rule("histc", merged=True)
def histc(input: Operand, bins=100, min=0, max=0, *, fn):
    """Count between `min` and `max`; if they are equal, between the extremes of the data."""
    probe(fn, input, bins, min, max)
    layout, over = input.layout, shard_groups(input.layout)

    def local(input):
        low, high = min, max
        if low == high and layout.numel:
            low, high = (t.item() for t in global_range(input.detach().flatten(), over))
        if low == high:
            low, high = low - 1, high + 1
        return fn(input, bins, low, high)

    return Plan(local=local, layout=counts_layout(layout, [bins]))


@rule("histogram", merged=True)
def histogram(input: Operand, bins, *, range=None, weight=None, density=False, fn):
    """Return (counts, edges). A density needs the sum of all counts, so it is replicated."""
    layout = weight.layout if weight is not None and input.layout.is_replicated else input.layout
    over = shard_groups(layout)
    if weight is not None and weight.shape != input.shape:
        raise RuntimeError(f"torch.histogram: weight has shape {tuple(weight.shape)}, the input {tuple(input.shape)}")
    has_edges = isinstance(bins, Operand)
    probe(fn, input, bins, range=range, weight=weight)
    edges = Layout.replicate(layout.mesh, bins.shape if has_edges else (bins + 1,))
    counts = counts_layout(layout, (edges.shape[0] - 1,))
    operands = {"input": layout} | ({"bins": edges} if has_edges else {})
    operands |= {"weight": layout} if weight is not None else {}

    def local(input, bins, weight):
        limits = {} if has_edges else {"range": range or _default_range(input.flatten(), layout, over)}
        values, bin_edges = fn(input, bins, **limits, weight=weight)
        if density:
            values = _density(values, [bin_edges], over)
        return torch.return_types.histogram((values, bin_edges))

    return Plan(local=local, operands=operands, layout=(counts.with_partial(()) if density else counts, edges))


def _default_range(rows: Tensor, layout: Layout, over: Groups) -> list[float]:
    """Return torch's default range, low and high for each column: the extremes, widened where they are equal."""
    low, high = (t.reshape(-1).tolist() for t in global_range(rows.detach(), over))
    if not layout.numel:
        return [0.0, 1.0] * len(low)
    return [edge for a, b in zip(low, high, strict=True) for edge in ((a - 0.5, b + 0.5) if a == b else (a, b))]


def _density(counts: Tensor, edges: Sequence[Tensor], over: Groups) -> Tensor:
    """Convert partial counts to a density, replicated on every rank."""
    counts = autograd_collectives.reduce(counts, over)
    counts = counts / counts.sum()
    for d, at in enumerate(edges):
        counts = counts / at.diff().reshape([-1] + [1] * (counts.ndim - 1 - d))
    return counts


@handler("histogramdd")
def histogramdd(func, types, args, kwargs):
    return _histogramdd(func, mesh_of(args, kwargs), *args, **kwargs)


def _histogramdd(func, mesh, input, bins, range=None, weight=None, density=False):
    """Count points, of shape (..., coordinates), on the rank that holds them; the last dim must be unsharded."""
    local, layout = as_operand(input, mesh)
    edges = (
        [to_full_tensor(b) if isinstance(b, ShardTensor) else b for b in bins] if isinstance(bins, Sequence) else bins
    )
    last = layout.ndim - 1
    few = local.new_ones([min(n, 2) for n in layout.shape[:-1]] + list(layout.shape[-1:]))
    shaped = func(few.detach(), edges, range=range)  # raises torch's error on all ranks
    if weight is not None and weight.shape != layout.shape[:-1]:
        raise RuntimeError(f"torch.histogramdd: weight has shape {tuple(weight.shape)}, input {tuple(layout.shape)}")
    target = (move_shard_off(layout, last) or layout.unshard([last])) if layout.is_sharded(last) else layout
    local, over = redistribute(local, layout, target), shard_groups(target)
    if weight is not None:
        weight, where = as_operand(weight, mesh)
        weight = redistribute(weight, where, target.drop_dims([last]))
    if range is None and not any(isinstance(b, Tensor) for b in (edges if isinstance(edges, Sequence) else ())):
        range = _default_range(local.flatten(0, -2) if local.ndim > 1 else local, target, over)
    counts, at = func(local, edges, range=range, weight=weight)
    if density:
        counts = _density(counts, at, over)
    layout = counts_layout(target, shaped[0].shape)
    return torch.return_types.histogramdd(
        (
            wrap(counts, layout.with_partial(()) if density else layout),
            tuple(wrap(e, Layout.replicate(mesh, e.shape)) for e in at),
        )
    )


@handler("bincount")
def bincount(func, types, args, kwargs):
    return _bincount(mesh_of(args, kwargs), *args, **kwargs)


def _bincount(mesh, input, weights=None, minlength=0):
    """All-reduce the largest element, which is the number of bins, then count locally."""
    local, layout = as_operand(input, mesh, merged=True)
    weight, where = (None, layout) if weights is None else as_operand(weights, mesh, merged=True)
    if layout.is_replicated and where.shape == layout.shape:
        local, layout = redistribute(local, layout, where), where
    if layout.ndim == 1 and where.shape != layout.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    one = [min(n, 1) for n in layout.shape]
    weight_one = None if weight is None else stand_in(weight, one)
    dtype = probe(torch.bincount, stand_in(local, one), weight_one, minlength).dtype
    low, high = global_range(local, shard_groups(layout)) if layout.numel else (torch.tensor(0), torch.tensor(-1))
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(int(high) + 1, minlength)
    if weight is not None:
        weight = redistribute(weight, where, layout)
    counts = torch.bincount(local, weight, size).to(
        dtype
    )  # of an empty tensor torch returns integers, even with weights
    return wrap(counts, counts_layout(layout, [size]))
