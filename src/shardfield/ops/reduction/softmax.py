"""Softmax, log_softmax and logsumexp along a sharded dim: all-reduce the maximum, then a sum."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import runtime
from ...comm import autograd_collectives
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from .._common.autocast import HALF_DTYPES
from .._common.probe import probe
from .common import all_reduce_minmax, gather_stacked, reduced_dims, reduced_layout, sharding_axes
from .minmax import local_minmax


def shifted_exp_sum(input: Tensor, dim: int, over: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Return `input` minus its global maximum along `dim`, the exponential of that, and its sum over all ranks.

    Two small messages. The maximum is treated as a constant: softmax and log_softmax do not depend on it.
    """
    top = all_reduce_minmax(local_minmax(input, (dim,), "max"), over, "max")
    shifted = input - top
    powers = shifted.exp()
    return shifted, powers, autograd_collectives.reduce(powers.sum(dim, keepdim=True), over)


@rule("softmax", "log_softmax", torch.special.softmax, torch.special.log_softmax, merged=True)
def softmax(input: Operand, dim, dtype=None, *, fn):
    """Run locally along an unsharded dim. Along a sharded dim: two small messages forward, one backward."""
    result = probe(fn, input, dim, dtype=dtype).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    wide = torch.float32 if result in HALF_DTYPES else result
    is_log = "log" in fn.__name__
    if not over:
        named = {} if dtype is None else {"dtype": dtype}
        return Plan(local=lambda input: fn(input, dim, **named), layout=layout)

    def local(input):
        shifted, powers, total = shifted_exp_sum(input.to(result).to(wide), dims[0], over)
        (total,) = autograd_collectives.replicate_in([total.log() if is_log else total], over)
        return (shifted - total if is_log else powers / total).to(result)

    return Plan(local=local, layout=layout)


@rule("logsumexp", torch.special.logsumexp, merged=True)
def logsumexp(input: Operand, dim, keepdim=False, *, fn):
    """Gather every rank's maximum and its sum of shifted exponentials: one small message."""
    result = probe(fn, input, dim, keepdim=keepdim).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    axes = sharding_axes(layout, dims)
    out = reduced_layout(layout, dims, keepdim, None)
    wide = torch.float32 if result in HALF_DTYPES else result

    def local(input):
        if not axes:
            return fn(input, dim, keepdim=keepdim)
        value = input.to(wide)
        top = local_minmax(value.real if value.is_complex() else value, dims, "max")
        total = (value - inf_to_zero(top)).exp().sum(dims, keepdim=True)
        tops, parts = gather_stacked(torch.stack([top.to(wide), total]), layout, axes).unbind(1)
        tops = (tops.real if tops.is_complex() else tops).detach()
        most = inf_to_zero(tops.amax(0))
        share = torch.where(tops == -math.inf, 0, (inf_to_zero(tops) - most).exp())  # an empty shard adds 0
        return ((parts * share).sum(0).log() + most).to(result).reshape(out.local_shape)

    return Plan(local=local, layout=out)


def inf_to_zero(top: Tensor) -> Tensor:
    """Replace infinities by 0 in the value to subtract before exponentials: inf - inf would be NaN."""
    return torch.where(top.abs() == math.inf, 0, top)


for _body in (F.softmax, F.log_softmax):  # they have other arguments; torch's body calls the methods above
    runtime.active.registry.unregister(_body)
