"""Mean and variance over several ranks, by one message. Backward sends none.

For fp32 and half precision, the sums of x and x^2 are all-reduced in fp64: their difference loses digits that the input
does not have. For fp64 it would lose them, so every rank's mean and sum of squared deviations are gathered and merged
(Welford, Chan); the counts follow from the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from ... import runtime
from ..._compat.autocast import stack
from ...comm import autograd_collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import Layout
from .._common.autocast import HALF_DTYPES
from .._common.probe import probe
from .common import gather_stacked, reduced_dims, reduced_layout, safe_sqrt, sharding_axes


@runtime.memo
def shard_counts(layout: Layout, dims: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    """Return the element count along `dims` of each rank over `axes`, in the order of `gather_stacked`."""
    found = []
    for at in product(*(range(layout.mesh.size(a)) for a in reversed(axes))):
        coords = list(layout.coords)
        for axis, coord in zip(reversed(axes), at, strict=True):
            coords[axis] = coord
        shape = layout.local_shape_at(coords)
        found.append(math.prod(shape[d] for d in dims))
    return found


def moments(input: Tensor, dims: Sequence[int], layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the global mean along `dims` (kept as 1) and the sum of squared deviations from it. Real input only.

    Half precision is computed in fp32, and fp32 is merged in fp64: a mean of 1000 rounded to fp32 would cost four
    digits.
    """
    axes = sharding_axes(layout, dims)
    value = input.float() if input.dtype in HALF_DTYPES else input
    if axes and value.dtype is not torch.float64:
        return _reduce_moments(value, dims, layout, axes)
    wide = torch.float64 if axes else value.dtype
    count = math.prod(value.shape[d] for d in dims)
    # Subtract a value near the local mean first, so that the local mean keeps its digits too. The moments do not
    # depend on that value.
    offset = value.detach().mean(dims, keepdim=True) if value.numel() else value.new_zeros(())
    centered = value - offset
    if value.numel():
        variance, mean = torch.var_mean(centered, dims, correction=0, keepdim=True)
    else:
        variance = mean = centered.sum(dims, keepdim=True) / (1 if axes else count)  # NaN if all ranks are empty
    mean, deviations = offset.to(wide) + mean.to(wide), variance.to(wide) * count
    if not axes:
        return mean, deviations
    means, all_deviations = gather_stacked(stack([mean, deviations]), layout, axes).unbind(1)
    weights = torch.tensor(shard_counts(layout, tuple(dims), axes), dtype=wide, device=value.device)
    weights = weights.view(-1, *[1] * mean.ndim)
    number = weights.sum()
    start = means[:1].detach()
    mean = start[0] + ((means - start) * weights).sum(0) / number
    deviations = (all_deviations + weights * (means - mean).square()).sum(0)
    return mean, deviations


def _reduce_moments(value: Tensor, dims: Sequence[int], layout: Layout, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return `moments` of fp32 values from sums in fp64."""
    count, total = (math.prod(shape[d] for d in dims) for shape in (value.shape, layout.shape))
    # Deviations from a value near the local mean are summed: fp32 has too few digits for sums of the values themselves.
    # The result does not depend on that value.
    offset = value.detach().mean(dims, keepdim=True) if count and value.numel() else value.new_zeros(())
    centered = value - offset
    offset = offset.double()
    first, second = centered.sum(dims, keepdim=True).double(), centered.square().sum(dims, keepdim=True).double()
    sums = stack([first + offset * count, second + offset * (2 * first + offset * count)])
    first, second = autograd_collectives.reduce(sums, process_groups(layout, axes)).unbind()
    mean = first / total
    deviations = second - first * mean
    floor = mean.detach().square() * (total * 2.0**-50)  # the rounding error: equal values have no deviation
    return mean, torch.where(deviations <= floor, 0, deviations)  # keeps NaN


class VarArgs:
    """The arguments of var, std, var_mean and std_mean, parsed from their overloads."""

    def __init__(self, dim, unbiased, keepdim, correction):
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        self.dim, self.keepdim = dim, bool(keepdim)
        self.correction = 1 if correction is None else correction
        if unbiased is not None:
            self.correction = int(unbiased)

    def validate(self, fn: Callable, input: Operand) -> torch.dtype:
        out = probe(fn, input, dim=self.dim, correction=self.correction, keepdim=self.keepdim)
        return (out[0] if isinstance(out, tuple) else out).dtype


@rule("var", "std", "var_mean", "std_mean", merged=True)
def var(input: Operand, dim=None, unbiased=None, keepdim=False, *, correction=None, fn):
    """Merge the moments of all ranks; a complex variance is the sum of the variances of both parts."""
    call = VarArgs(dim, unbiased, keepdim, correction)
    result = call.validate(fn, input)
    layout = input.layout
    dims = reduced_dims(layout.ndim, call.dim)
    out = reduced_layout(layout, dims, call.keepdim, None)
    name = fn.__name__
    count = math.prod(layout.shape[d] for d in dims)
    freedom = max(0.0, count - call.correction)
    sharded = sharding_axes(layout, dims)

    def local(input):
        if not sharded and input.numel():  # torch would warn about an empty shard, which the user cannot avoid
            return fn(input, dim=call.dim, correction=call.correction, keepdim=call.keepdim)
        parts = torch.view_as_real(input.resolve_conj()) if input.is_complex() else input
        mean, deviations = moments(parts, dims, layout)
        if input.is_complex():
            mean, deviations = torch.view_as_complex(mean), deviations.sum(-1)
        spread = (deviations / freedom).to(result)
        spread = (safe_sqrt(spread) if name.startswith("std") else spread).reshape(out.local_shape)
        return (spread, mean.to(input.dtype).reshape(out.local_shape)) if name.endswith("mean") else spread

    return Plan(local=local, layout=(out, out) if name.endswith("mean") else out)
