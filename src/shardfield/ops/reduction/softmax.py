"""Softmax, log_softmax and logsumexp along a sharded dim: all-reduce the maximum, then a sum."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import runtime
from ..._compat.autocast import stack
from ...comm import autograd_collectives, collectives
from ...comm.adjoints import Collective, Groups
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, rule
from ...native import leaf
from .._common.autocast import HALF_DTYPES
from .._common.probe import probe
from .common import gather_stacked, reduced_dims, reduced_layout, sharding_axes
from .minmax import local_minmax


@rule("softmax", "log_softmax", torch.special.softmax, torch.special.log_softmax, merged=True)
def softmax(input: Operand, dim, dtype=None, *, fn):
    """Run locally along an unsharded dim. Along a sharded dim: two small messages forward, one backward."""
    result = probe(fn, input, dim, dtype=dtype).dtype
    layout = input.layout
    dims = reduced_dims(layout.ndim, dim)
    over = process_groups(layout, sharding_axes(layout, dims))
    is_log = "log" in fn.__name__
    if not over:
        named = {} if dtype is None else {"dtype": dtype}
        return Plan(local=lambda input: fn(input, dim, **named), layout=layout)

    def local(input):
        return _Softmax.apply(input if input.dtype is result else input.to(result), dims[0], over, is_log)

    return Plan(local=local, layout=layout)


def _shifted_exp_sum(value: Tensor, dim: int, over: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Return `value` minus its global maximum along `dim`, the exponential of that, and its sum over all ranks.

    The maximum may ignore NaN, since the sum does not.
    """
    top = local_minmax(value, (dim,), "max")
    for group in over:
        top = collectives.all_reduce_(top, group, "max")
    shifted, powers, total = shifted_exp(value, top, dim)
    for group in over:
        total = collectives.all_reduce_(total, group)
    return shifted, powers, total


@leaf
def shifted_exp(value: Tensor, top: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `value` minus `top`, the exponential of that, and its sum along `dim`."""
    shifted = value - top
    powers = shifted.exp()
    return shifted, powers, powers.sum(dim, keepdim=True)


@leaf
def product_sum(wide: Tensor, out: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the product, and its sum along `dim`."""
    part = wide * out
    return part, part.sum(dim, keepdim=True)


def _sum_over_ranks(part: Tensor, over: Groups) -> Tensor:
    """Return the sum over all ranks, which enters work that differs from rank to rank; differentiable."""
    if torch.is_grad_enabled():
        return autograd_collectives.replicate_in([autograd_collectives.reduce(part, over)], over)[0]
    for group in over:
        part = collectives.all_reduce_(part, group)
    return part


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


class _Softmax(Collective):
    """Softmax or log_softmax along a sharded dim. The backward is that of torch, with its sum taken over all ranks."""

    @staticmethod
    def forward(ctx, input, dim, over, is_log):
        shifted, powers, total = _shifted_exp_sum(_widened(input), dim, over)
        out = (shifted.sub_(total.log_()) if is_log else powers.div_(total)).to(input.dtype)
        ctx.how = dim, over, is_log
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        dim, over, is_log = ctx.how
        out, wide = _widened(ctx.saved_tensors[0]), _widened(grad)
        shares = out.exp() if is_log else out
        part, total = (wide, wide.sum(dim, keepdim=True)) if is_log else product_sum(wide, out, dim)
        total = _sum_over_ranks(total, over)
        return torch.addcmul(part, shares, total, value=-1).to(grad.dtype), None, None, None


@composed("_safe_softmax")
def safe_softmax(input, dim, dtype=None):
    """Return the softmax with 0 instead of NaN where all elements along `dim` are -inf, as masked attention needs."""
    masked = input.eq(-math.inf).all(dim, keepdim=True)
    return input.masked_fill(masked, 0).softmax(dim, dtype).masked_fill(masked, 0)


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
        tops, parts = gather_stacked(stack([top.to(wide), total]), layout, axes).unbind(1)
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
