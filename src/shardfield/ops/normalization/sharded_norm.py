"""(x - mean) / std with statistics over several ranks: one small message per axis forward, one backward.

In forward, each rank computes means and variances of its elements, and the ranks sum them, weighted by the number of
elements. For fp32 and half precision, first and second moments are summed in fp64 in one message: their difference
loses digits that the input does not have (with a mean of r standard deviations, fp32 rounds the input to r * 6e-8
of them, and this sum to r * r * 1e-16). For fp64, squared distances from the global mean are summed in a second
message. Backward sends two sums for each statistic, and the gradients of the parameters in the same message. The input
and the statistics are saved. A double backward differentiates the same function composed of autograd collectives
(`composite`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat.autocast import autocast_on, flatten_tensors
from ...comm import autograd_collectives, collectives
from ...comm.adjoints import Collective, detach_view, unpack
from ...dispatch.plan import process_groups
from ...layout import Layout
from ...triton_kernels import norm as kernels
from .._common.autocast import HALF_DTYPES, autocast_disabled
from .small_norm import SmallNorm, is_small
from .stat_groups import BatchStats, GroupStats, InstanceStats, RowStats, StatGrouping


class ShardedNorm:
    """A planned normalization: call it with the local input, weight and bias (or None). Returns the local result."""

    def __init__(self, scheme: StatGrouping, eps: float, result: torch.dtype, param_layout: Layout,
                 centered: bool = True):  # fmt: skip
        layout = scheme.layout
        self.scheme, self.eps, self.result, self.centered = scheme, eps, result, centered
        self.batch, self.rows = isinstance(scheme, BatchStats), isinstance(scheme, RowStats)
        shard_axes = set(layout.nontrivial_axes(layout.shard_axes))
        stat_axes, param_axes = set(scheme.axes), shard_axes - set(param_layout.shard_axes)
        self.stat_groups = process_groups(layout, sorted(stat_axes))
        self.param_groups = process_groups(layout, sorted(param_axes))
        # group of each axis, and whether it shards a statistic, a parameter
        self.grad_sums = [
            (layout.mesh.get_group(a), a in stat_axes, a in param_axes) for a in sorted(stat_axes | param_axes)
        ]

        # Of one sample, the sums of a channel give both those of its statistic and the gradients of its parameters.
        alike = all(of_stats and of_params for _, of_stats, of_params in self.grad_sums)
        self.joint = alike and isinstance(scheme, (GroupStats, InstanceStats)) and layout.shape[0] == 1
        self.alike, self._kernels = alike, dict[tuple[bool, bool], kernels.NormKernels]()
        self.small = SmallNorm(self) if centered and not self.rows else None

    def __call__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return _ShardedNormFunction.apply((self, False), input, weight, bias)

    def with_stats(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return also the global mean and variance in fp64, in the shape of the scheme's statistics.

        Without `centered` these are zeros and the mean square. Both have no gradient.
        """
        value, *stats = _ShardedNormFunction.apply((self, True), input, weight, bias)
        return value, *(t.view(self.scheme.stat_shape) if t.ndim == 1 else t for t in stats)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the scheme's view of a tensor, in the dtype of the computation."""
        return self.scheme.view(tensor.float() if tensor.dtype in HALF_DTYPES else tensor)

    # ------------------------------------------------------------------ forward

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        for group in self.stat_groups:
            value = collectives.all_reduce_(value, group)
        return value

    def merge_ranks(self, mean: Tensor, variance: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Merge mean and variance of each rank's elements over all ranks."""
        scheme = self.scheme
        share = scheme.count / scheme.total
        if dtype is not torch.float64:
            both = scheme.merge(torch.stack([mean, torch.addcmul(variance, mean, mean)])).mul_(share)
            mean, second = self.sum_over_ranks(both).unbind()
            return mean, torch.addcmul(second, mean, mean, value=-1).clamp_min_(0)
        center = self.sum_over_ranks(scheme.merge(mean.unsqueeze(0)) * share)[0]
        distance = mean - scheme.expand_stat(center)
        deviations = torch.addcmul(variance, distance, distance).unsqueeze(0)
        return center, self.sum_over_ranks(scheme.merge(deviations) * share)[0].clamp_min_(0)

    def forward(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.kernels, ctx.small = self.kernels_for(input, weight, bias), None
        if ctx.kernels is not None:
            return self.forward_by_kernels(ctx, input, weight, bias)
        if self.small is not None and is_small(input):
            ctx.small = self.small
            out, mean, variance = self.small.forward(ctx, input, weight, bias)
            return shaped(out, input.shape, self.result), mean, variance
        scheme, v = self.scheme, self.view(input)
        center = shift = None
        if self.centered:
            center, off, mean, variance = scheme.moments(v)
            mean, variance = self.merge_ranks(mean, variance, v.dtype)
            # From the mean to this rank's center: small, so it keeps its digits.
            shift = (center - scheme.expand_stat(mean)).to(v.dtype)
        else:
            off, variance = v, self.sum_over_ranks(scheme.sum_inner(v * v).double() / scheme.total)
            mean = torch.zeros_like(variance)
        rstd = (variance + self.eps).rsqrt_().to(v.dtype)
        ctx.save_for_backward(input, weight, center, shift, rstd)
        out = self.apply_affine(off, shift, rstd, weight, bias)
        return shaped(out, input.shape, self.result), mean, variance

    def kernels_for(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> kernels.NormKernels | None:
        """Return the Triton kernels of this norm if they support the tensors: fewer launches, the same messages."""
        rows = self.scheme.kernel_rows
        if rows is None or self.scheme.is_empty or not kernels.supports(input, weight, bias):
            return None
        given = weight is not None, bias is not None
        if given not in self._kernels:
            self._kernels[given] = kernels.NormKernels(rows, self.eps, *given)
        return self._kernels[given]

    def forward_by_kernels(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        values, out = collectives.contiguous(input), torch.empty_like(input, dtype=self.result)
        moments = self.sum_over_ranks(ctx.kernels.moments(values))
        variance, table = ctx.kernels.normalize(values, moments, weight, bias, out)
        ctx.save_for_backward(input, weight, table)
        return out, moments, variance  # the first moments are the means

    def backward_by_kernels(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, table = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        values, grad, grad_input = collectives.contiguous(input), collectives.contiguous(grad), None
        sums = ctx.kernels.grad_sums(values, grad, table, weight)
        sums, *params = self.all_reduce_packed(ctx.kernels, sums, want_input, want_weight or want_bias)
        if want_input:
            grad_input = ctx.kernels.grad_input(values, grad, table, sums, weight)
        return self.finish_grads(ctx, input, weight, grad_input, params)

    def apply_affine(self, off: Tensor, shift: Tensor | None, rstd: Tensor, weight, bias) -> Tensor:
        """Return (off + shift) * rstd * weight + bias, written to `off` if there is a shift."""
        w, b = self.scheme.expand_param(weight, off.dtype), self.scheme.expand_param(bias, off.dtype)
        scale = self.scheme.expand_stat(rstd)
        if self.rows:
            out = off * scale if shift is None else off.add_(shift).mul_(scale)
            out = out if w is None else out.mul_(w)
            return out if b is None else out.add_(b)
        scale = scale if w is None else scale * w
        b = shift * scale if b is None else torch.addcmul(b, shift, scale)
        return torch.addcmul(b, off, scale, out=off) if off.device.type != "cpu" else off.mul_(scale).add_(b)

    # ------------------------------------------------------------------ backward

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kernels is not None:
            return self.backward_by_kernels(ctx, grad)
        if ctx.small is not None:
            return ctx.small.backward(ctx, grad)
        input, weight, center, shift, rstd = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        scheme, dtype = self.scheme, rstd.dtype
        g = self.view(grad if grad.dtype is dtype else grad.to(dtype))
        v = self.view(input)
        off = v if center is None else v - center
        by_off = g * off
        w = scheme.expand_param(weight, dtype)
        want_params = want_weight or want_bias
        if self.rows:
            stats, params = self.all_reduce_sums(*self.row_sums(g, by_off, shift, rstd, w), want_input, want_params)
        else:
            sums = self.channel_sums(g, by_off, shift, rstd)
            stats, params = self.reduce_channel_sums(sums, w, want_input, want_params)
        grad_input = self.grad_input(g, off, stats, shift, rstd, w, by_off) if want_input else None
        return self.finish_grads(ctx, input, weight, grad_input, params.reshape(2, -1).unbind())

    def finish_grads(
        self, ctx: Any, input: Tensor, weight: Any, grad_input: Tensor | None, params: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Return the wanted gradients in the shapes and dtypes of their tensors.

        `torch.utils.checkpoint` lets a backward read its saved tensors once, so they are passed on.
        """
        _, _, want_weight, want_bias = ctx.needs_input_grad
        of_bias, of_weight = params
        return (
            None if grad_input is None else shaped(grad_input, input.shape, input.dtype),
            shaped(of_weight, weight.shape, weight.dtype) if want_weight else None,
            shaped(of_bias, *ctx.bias) if want_bias else None,
        )

    def grad_input(self, g: Tensor, off: Tensor, stats: Tensor, shift, rstd: Tensor, w, into: Tensor) -> Tensor:
        """Return (g * w - level / n - (off + shift) * rstd * slope / n) * rstd, written to `into`."""
        spread = self.scheme.expand_stat
        scale = spread(rstd)
        if w is not None and not self.rows:
            scale = scale * w
        level, slope = (stats * ((scale if self.batch else rstd) * (-1 / self.scheme.total))).unbind()
        slope, fused = spread(slope * rstd), g.device.type != "cpu"
        if shift is not None and not self.rows and fused:
            return torch.addcmul(torch.addcmul(spread(level), slope, shift), off, slope, out=off).addcmul_(g, scale)
        out = torch.mul(g, scale, out=into)
        if self.rows and w is not None:
            out.mul_(w)
        if shift is not None:
            out.add_(torch.addcmul(spread(level), slope, shift))
        if fused:
            return out.addcmul_(off, slope)
        return out.add_(off * slope if shift is None else off.mul_(slope))

    def row_sums(self, g: Tensor, by_off: Tensor, shift, rstd: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return two stacked pairs: the sums of grad * weight and of that times the normalized value, for each row, and
        the gradients of bias and weight.
        """
        normalized = (by_off if shift is None else torch.addcmul(by_off, g, shift)) * rstd
        params = torch.stack([g.sum(0), normalized.sum(0)])
        pair = [g, normalized] if w is None else [g * w, normalized.mul_(w)]
        return torch.stack([t.sum(1, keepdim=True) for t in pair]), params

    def channel_sums(self, g: Tensor, by_off: Tensor, shift: Any, rstd: Tensor) -> Tensor:
        """Return the sums of grad, and of grad times the normalized value, of each channel, stacked.

        They are per sample if samples do not share a mean.
        """
        level, slope = self.scheme.sum_inner(g), self.scheme.sum_inner(by_off)
        if shift is not None:
            slope = torch.addcmul(slope, level, shift)
        return torch.stack([level, slope * self.scheme.expand_stat(rstd)])

    def reduce_channel_sums(
        self, sums: Tensor, w: Tensor | None, want_stats: bool, want_params: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the two pairs of `row_sums`, summed over ranks, from those of channels (overwritten)."""
        if self.batch or (self.joint and want_stats and want_params and not kernels.on_device(sums)):
            for group, _, _ in self.grad_sums:
                sums = collectives.all_reduce_(sums, group)
            if self.batch:  # one statistic per channel: its sums are also the parameters' sums
                return sums, sums
            return self.scheme.sum_to_stats(sums if w is None else sums * w), sums
        stats = self.scheme.sum_to_stats(sums if w is None else sums * w)
        return self.all_reduce_sums(stats, sums.sum(1), want_stats, want_params)

    def all_reduce_sums(
        self, stats: Tensor, params: Tensor, want_stats: bool, want_params: bool
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks that share a statistic or a parameter: one message per axis."""
        values = [stats, params]
        for group, of_stats, of_params in self.grad_sums:
            chosen = [i for i, send in enumerate((want_stats and of_stats, want_params and of_params)) if send]
            if len(chosen) == 1:
                values[chosen[0]] = collectives.all_reduce_(values[chosen[0]], group)
            elif chosen:
                values = unpack(collectives.all_reduce_(flatten_tensors(values), group), values)
        return values[0], values[1]

    def all_reduce_packed(self, launches: kernels.NormKernels, sums: Tensor, want_stats: bool, want_params: bool):
        """Apply `all_reduce_sums` to the buffer of `grad_sums`; return sums of statistics, of bias and of weight."""
        stats, channels = 2 * launches.stats, launches.rows.channels
        if self.batch or (want_stats and want_params and self.alike):
            for group, _, _ in self.grad_sums:
                sums = collectives.all_reduce_(sums, group)
            skipped = 0 if self.batch else stats
            return sums, *sums.split_with_sizes((skipped, channels, channels))[1:]
        of_stats, params = self.all_reduce_sums(sums[:stats], sums[stats:], want_stats, want_params)
        return of_stats, *params.split_with_sizes((channels, channels))

    # ------------------------------------------------------------------ composed of autograd collectives

    def statistics(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the global mean and 1 / std, and `v` minus that mean: two small messages per axis."""
        scheme, over = self.scheme, self.stat_groups

        def average(value: Tensor) -> Tensor:
            sums = scheme.sum_to_stats(scheme.sum_inner(value).unsqueeze(0))[0]
            return autograd_collectives.reduce(sums.double() / scheme.total, over)

        mean = v.new_zeros(())
        if self.centered:
            mean = average(v)
            (shared,) = autograd_collectives.replicate_in([mean], over)
            v = v - scheme.expand_stat(shared).to(v.dtype)
        return mean, (average(v.square()) + self.eps).rsqrt(), v

    def composite(self, input: Tensor, weight: Tensor | None) -> Tensor:
        """Return the result without the bias, differentiable to any order."""
        _, rstd, v = self.statistics(self.view(input))
        (rstd,) = autograd_collectives.replicate_in([rstd], self.stat_groups)
        out = v * self.scheme.expand_stat(rstd).to(v.dtype)
        if weight is not None:
            (weight,) = autograd_collectives.replicate_in([weight], self.param_groups)
            out = out * self.scheme.expand_param(weight, v.dtype)
        return out.reshape(input.shape).to(self.result)

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
            g = self.view(grad)
            sums = g if self.rows else self.scheme.sum_inner(g)
            sums = sums if self.batch else sums.sum(0)
            shape, dtype = ctx.bias
            grad_bias = autograd_collectives.reduce(sums, self.param_groups).view(shape).to(dtype)
        return grads[0], grads[1], grad_bias


def shaped(value: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return `value` in this shape and dtype; each call of torch is skipped where it would change nothing."""
    value = value if value.shape == shape else value.reshape(shape)
    return value if value.dtype is dtype else value.to(dtype)


class _ShardedNormFunction(Collective):
    """Forward: normalize with merged statistics. Adjoint: `ShardedNorm.backward`."""

    @staticmethod
    def forward(ctx, norm_and_stats, input, weight, bias):
        ctx.norm, stats = norm_and_stats
        ctx.set_materialize_grads(False)
        if autocast_on():
            with autocast_disabled(input):
                out, mean, variance = ctx.norm.forward(ctx, input, weight, bias)
        else:
            out, mean, variance = ctx.norm.forward(ctx, input, weight, bias)
        if not stats:
            return detach_view(out)
        if ctx.kernels is not None:
            mean = mean[: variance.numel()]
        ctx.mark_non_differentiable(mean, variance)
        return detach_view(out), mean, variance

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:
            return None, None, None, None
        backward = ctx.norm.double_backward if torch.is_grad_enabled() else ctx.norm.backward
        if not autocast_on():
            return None, *backward(ctx, grad)
        with autocast_disabled(grad):
            return None, *backward(ctx, grad)
