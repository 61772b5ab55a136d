"""(x - mean) / std with statistics over several ranks: one small message per axis forward, one backward.

In forward, each rank computes the mean of its elements and the sum of squared deviations. Merging these (Welford,
Chan) loses no digits if the mean is large. Backward sends two sums for each statistic, and the gradients of the
parameters in the same message. The input and the statistics are saved. A double backward differentiates the same
function composed of autograd collectives (`composite`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Collective, detach_view
from ...dispatch.plan import process_groups
from ...layout import Layout
from ...triton_kernels.merge import merge_moments
from .._common.autocast import HALF_DTYPES, autocast_disabled
from .stat_groups import BatchStats, RowStats, StatGrouping


class ShardedNorm:
    """A planned normalization: call it with the local input, weight and bias (or None).

    Returns the local result and the global mean and variance, in the shape of the scheme's statistics. Without
    `centered` these are zeros and the mean square. Both have no gradient.
    """

    def __init__(self, scheme: StatGrouping, eps: float, result: torch.dtype, device: torch.device,
                 param_layout: Layout, centered: bool = True):  # fmt: skip
        layout = scheme.layout
        self.scheme, self.eps, self.result, self.centered = scheme, eps, result, centered
        self.merge_steps = scheme.merge_steps(device)
        self.batch = isinstance(scheme, BatchStats)
        count = scheme.count
        self.count = count.to(device) if isinstance(count, Tensor) else float(count)
        self.count_or_one = self.count.clamp_min(1) if isinstance(self.count, Tensor) else max(self.count, 1.0)
        shard_axes = set(layout.nontrivial_axes(layout.shard_axes))
        self.stat_axes = set(scheme.axes)
        self.param_axes = shard_axes - set(param_layout.shard_axes)
        self.axes = sorted(self.stat_axes | self.param_axes)
        self.stat_groups = process_groups(layout, sorted(self.stat_axes))
        self.param_groups = process_groups(layout, sorted(self.param_axes))
        self.group = layout.mesh.get_group

    def __call__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return _ShardedNormFunction.apply(self, input, weight, bias)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the scheme's view of a tensor, in the dtype of the computation."""
        return self.scheme.view(tensor.float() if tensor.dtype in HALF_DTYPES else tensor)

    # ------------------------------------------------------------------ forward

    def moments(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return this rank's mean and squared deviations, an offset near the mean, and `v` minus that offset.

        The mean is in fp64: the offset plus its rounding error. Deviations from a mean of 1000 that is rounded to fp32
        would have four digits left.
        """
        scheme = self.scheme
        offset = (scheme.stat_sums(v) / self.count_or_one).to(v.dtype)
        off = v - scheme.expand_stat(offset)
        error, squares = (t.double() for t in scheme.moments(off))
        deviations = (squares - error.square() / self.count_or_one).clamp_min(0)
        return offset + error / self.count_or_one, deviations, offset, off

    def merge_ranks(self, mean: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Merge mean and squared deviations over all ranks: one message per axis."""
        for group, weights in self.merge_steps:
            mean, deviations = merge_moments(
                collectives.all_gather_even(torch.stack([mean, deviations]), group), weights
            )
        return mean, deviations

    def forward(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        scheme, v = self.scheme, self.view(input)
        off: Tensor | None
        if self.centered:
            mean, deviations, offset, off = self.moments(v)
            mean, deviations = self.merge_ranks(mean, deviations)
            shift = (mean - offset).to(v.dtype)  # from this rank's offset to the mean: small, so it keeps its digits
        else:
            offset = shift = None
            off, deviations = None, scheme.stat_sums(v.square()).double()
            for group, _ in self.merge_steps:
                deviations = collectives.all_reduce(deviations, group)
            mean = torch.zeros_like(deviations)
        variance = deviations / scheme.total
        rstd = (variance + self.eps).rsqrt().to(v.dtype)
        ctx.save_for_backward(input, weight, offset, shift, rstd)
        ctx.bias = None if bias is None else bias.detach()  # for its shape and dtype only: its values may change
        out = self.apply_affine(v if off is None else off, shift, rstd, weight, bias, off)
        return out.view(input.shape).to(self.result), mean, variance

    def apply_affine(self, off: Tensor, shift, rstd, weight, bias, into: Tensor | None) -> Tensor:
        """Return (off - shift) * rstd * weight + bias, written to `into` if it is not None."""
        lift, spread = self.scheme.expand_param, self.scheme.expand_stat
        scale = spread(rstd)
        extra = None if shift is None else -spread(shift) * scale
        weight, bias = (None if p is None else lift(p).to(off.dtype) for p in (weight, bias))
        if self.scheme.stats_are_small:
            if weight is not None:
                scale, extra = scale * weight, extra * weight
            return torch.addcmul(extra if bias is None else extra + bias, off, scale, out=into)
        out = torch.mul(off, scale, out=into) if extra is None else torch.addcmul(extra, off, scale, out=into)
        if weight is None:
            return out if bias is None else out.add_(bias)
        return out.mul_(weight) if bias is None else torch.addcmul(bias, out, weight, out=out)

    # ------------------------------------------------------------------ backward

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, offset, shift, rstd = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        scheme, v = self.scheme, self.view(input)
        g = self.view(grad.to(v.dtype))
        off = v if offset is None else v - scheme.expand_stat(offset)
        w = None if weight is None else scheme.expand_param(weight).to(v.dtype)
        by = scheme.expand_stat(rstd)
        if scheme.stats_are_small:
            sums, by, weighted = self.channel_sums(g, off, shift, rstd, w), by if w is None else by * w, g
        else:
            weighted = g if w is None else g * w
            sums = self.row_sums(g, weighted, off, shift, rstd, w)
        first, second, *grads = self.all_reduce_sums(sums, w, want_input, want_weight, want_bias)
        grad_input = None
        if want_input:
            slope = second * rstd * rstd / -scheme.total
            into = None if off is v else off
            if offset is None:
                grad_input = torch.mul(off, slope, out=into)
            else:
                level = first * rstd / -scheme.total - slope * shift
                grad_input = torch.addcmul(scheme.expand_stat(level), off, scheme.expand_stat(slope), out=into)
            grad_input = grad_input.addcmul_(weighted, by).view(input.shape).to(input.dtype)
        params = zip(grads, (weight, ctx.bias), (want_weight, want_bias), strict=True)
        return grad_input, *(g.view(p.shape).to(p.dtype) if want else None for g, p, want in params)

    def row_sums(self, g: Tensor, weighted: Tensor, off: Tensor, shift, rstd, w: Tensor | None) -> list[Tensor]:
        """Return the row sums of grad * weight and of that times the normalized value, and the parameters' sums."""
        scheme = self.scheme
        shift = torch.zeros_like(rstd) if shift is None else shift
        level, slope = scheme.grad_sums(weighted, off, shift, rstd)
        if w is None or not g.numel():
            return [level, slope, g.new_zeros(g.shape[1]), g.sum(0)]
        args = (g, off, scheme.shape[1:], shift, rstd, w, w, [False, True, True])
        return [level, slope, *torch.ops.aten.native_layer_norm_backward(*args)[1:]]

    def channel_sums(self, g: Tensor, off: Tensor, shift, rstd, w: Tensor | None) -> list[Tensor]:
        """Return the sums of `row_sums` from sums per channel, per sample if samples do not share a mean."""
        scheme = self.scheme
        level, slope = scheme.grad_sums(g, off, scheme.expand_stat(shift), scheme.expand_stat(rstd))
        if self.batch:  # one statistic per channel: its sums are also the parameters' sums
            return [level, slope]
        pair = [level, slope] if w is None else [level * w, slope * w]
        return [*map(scheme.sum_to_stats, pair), scheme.param_sums(slope), scheme.param_sums(level)]

    def all_reduce_sums(self, values: list[Tensor], w: Tensor | None, *wanted: bool) -> list[Tensor]:
        """Sum over all ranks that share a statistic or a parameter: one message per axis."""
        for axis in self.axes:
            if self.batch:
                chosen = [0, 1]
            else:
                stats = ([0, 1] if self.centered else [1]) if wanted[0] and axis in self.stat_axes else []
                chosen = stats + [i for i in (2, 3) if wanted[i - 1] and axis in self.param_axes]
            if not chosen:
                continue
            flat = torch.cat([values[i].reshape(-1) for i in chosen])
            parts = collectives.all_reduce(flat, self.group(axis)).split([values[i].numel() for i in chosen])
            for i, part in zip(chosen, parts, strict=True):
                values[i] = part.view(values[i].shape)
        if not self.batch:
            return values
        level, slope = values
        return [level if w is None else level * w, slope if w is None else slope * w, slope, level]

    # ------------------------------------------------------------------ composed of autograd collectives

    def statistics(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the global mean and 1 / std, and `v` minus that mean: two small messages per axis."""
        scheme, over = self.scheme, self.stat_groups
        mean = v.new_zeros(())
        if self.centered:
            # The derivatives do not depend on the offset.
            offset = (scheme.stat_sums(v.detach()) / self.count_or_one).to(v.dtype)
            v = v - scheme.expand_stat(offset)
            mean = (
                autograd_collectives.reduce(offset.double() * self.count + scheme.stat_sums(v).double(), over)
                / scheme.total
            )
            shift = autograd_collectives.replicate_in([mean], over)[0] - offset
            v = v - scheme.expand_stat(shift.to(v.dtype))
        variance = autograd_collectives.reduce(scheme.stat_sums(v.square()), over) / scheme.total
        return mean, (variance + self.eps).rsqrt(), v

    def composite(self, input: Tensor, weight: Tensor | None) -> Tensor:
        """Return the result without the bias, differentiable to any order."""
        _, rstd, v = self.statistics(self.view(input))
        (rstd,) = autograd_collectives.replicate_in([rstd], self.stat_groups)
        out = v * self.scheme.expand_stat(rstd)
        if weight is not None:
            out = out * self.scheme.expand_param(autograd_collectives.replicate_in([weight], self.param_groups)[0]).to(
                v.dtype
            )
        return out.view(input.shape).to(self.result)

    def double_backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute `backward` as a function that is itself differentiable."""
        input, weight = ctx.saved_tensors[:2]
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        # New views without history: the weight may be a function of the input.
        input, weight = (None if t is None else t.view_as(t) for t in (input, weight))
        wanted = [t for t, want in ((input, want_input), (weight, want_weight)) if want]
        out = self.composite(input, weight) if wanted else None
        computed = iter(torch.autograd.grad(out, wanted, grad, create_graph=True) if wanted else ())
        grads = [next(computed) if want else None for want in (want_input, want_weight)]
        grad_bias = None
        if want_bias:
            sums = (
                self.view(grad).sum(0)
                if isinstance(self.scheme, RowStats)
                else self.scheme.param_sums(self.scheme.sum_inner(self.view(grad)))
            )
            grad_bias = autograd_collectives.reduce(sums, self.param_groups).view(ctx.bias.shape).to(ctx.bias.dtype)
        return grads[0], grads[1], grad_bias


class _ShardedNormFunction(Collective):
    """Forward: normalize with merged statistics. Adjoint: `ShardedNorm.backward`."""

    @staticmethod
    def forward(ctx, norm, input, weight, bias):
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        with autocast_disabled(input):
            out, mean, variance = norm.forward(ctx, input, weight, bias)
        ctx.mark_non_differentiable(mean, variance)
        return detach_view(out), mean, variance

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:
            return None, None, None, None
        with autocast_disabled(grad):
            return None, *(ctx.norm.double_backward if torch.is_grad_enabled() else ctx.norm.backward)(ctx, grad)
