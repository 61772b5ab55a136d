"""(x - mean) / std where what shares a mean lies on several ranks: one small message an axis forward, one backward.

Forward, each rank takes the mean of what it has and the sum of squared deviations from it; these are merged (Welford,
Chan), which keeps its digits where the mean is large. Backward sends two sums for each statistic, and the gradients
of the parameters go with them. What is saved is the input and the statistics. When the gradient is to be
differentiated again, it is taken through the same function written with moves.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Collective, detach_view
from ...dispatch.plan import process_groups
from ...layout import Layout
from ...triton_kernels.merge import merge_moments
from .._common.autocast import HALF_DTYPES
from .stat_groups import BatchStats, RowStats, StatGrouping


class ShardedNorm:
    """One normalisation, planned: call it with the local input, weight and bias (or None).

    It gives the local result and, where there is a mean to take (`centered`), the mean and the variance of all ranks
    in the shape of the scheme's statistics; without one, zeros and the mean square. Those two have no gradient.
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
        cut = set(layout.nontrivial_axes(layout.shard_axes))
        self.stat_axes = set(scheme.axes)
        self.param_axes = cut - set(param_layout.shard_axes)
        self.axes = sorted(self.stat_axes | self.param_axes)
        self.stat_groups = process_groups(layout, sorted(self.stat_axes))
        self.param_groups = process_groups(layout, sorted(self.param_axes))
        self.group = layout.mesh.get_group

    def __call__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return _ShardedNormFunction.apply(self, input, weight, bias)

    def view(self, tensor: Tensor) -> Tensor:
        """Through the scheme, in the dtype that is computed in."""
        return self.scheme.view(tensor.float() if tensor.dtype in HALF_DTYPES else tensor)

    # ------------------------------------------------------------------ forward

    def moments(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and squared deviations of what this rank has, a point near the mean, and what `v` is from there.

        The mean in fp64, as that point and what was lost in rounding to it: of deviations from a mean of 1000 that is
        rounded to fp32, four digits are left.
        """
        scheme = self.scheme
        near = (scheme.stat_sums(v) / self.count_or_one).to(v.dtype)
        off = v - scheme.expand_stat(near)
        rest, squares = (t.double() for t in scheme.moments(off))
        deviations = (squares - rest.square() / self.count_or_one).clamp_min(0)
        return near + rest / self.count_or_one, deviations, near, off

    def merge_ranks(self, mean: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and squared deviations over all ranks: one message an axis."""
        for group, weights in self.merge_steps:
            mean, deviations = merge_moments(
                collectives.all_gather_even(torch.stack([mean, deviations]), group), weights
            )
        return mean, deviations

    def forward(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        scheme, v = self.scheme, self.view(input)
        off: Tensor | None
        if self.centered:
            mean, deviations, near, off = self.moments(v)
            mean, deviations = self.merge_ranks(mean, deviations)
            shift = (mean - near).to(v.dtype)  # from this rank's point to the mean: small, so nothing is lost
        else:
            near = shift = None
            off, deviations = None, scheme.stat_sums(v.square()).double()
            for group, _ in self.merge_steps:
                deviations = collectives.all_reduce(deviations, group)
            mean = torch.zeros_like(deviations)
        variance = deviations / scheme.total
        rstd = (variance + self.eps).rsqrt().to(v.dtype)
        ctx.save_for_backward(input, weight, near, shift, rstd)
        ctx.bias = None if bias is None else bias.detach()  # for its shape and dtype: its values may change
        out = self.apply_affine(v if off is None else off, shift, rstd, weight, bias, off)
        return out.view(input.shape).to(self.result), mean, variance

    def apply_affine(self, off: Tensor, shift, rstd, weight, bias, into: Tensor | None) -> Tensor:
        """(off - shift) * rstd * weight + bias, into the memory of `off` where that is ours."""
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
        input, weight, near, shift, rstd = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        scheme, v = self.scheme, self.view(input)
        g = self.view(grad.to(v.dtype))
        off = v if near is None else v - scheme.expand_stat(near)
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
            if near is None:
                grad_input = torch.mul(off, slope, out=into)
            else:
                level = first * rstd / -scheme.total - slope * shift
                grad_input = torch.addcmul(scheme.expand_stat(level), off, scheme.expand_stat(slope), out=into)
            grad_input = grad_input.addcmul_(weighted, by).view(input.shape).to(input.dtype)
        given = (weight, ctx.bias)
        wanted = (want_weight, want_bias)
        pairs = [t.view(p.shape).to(p.dtype) if want else None for t, p, want in zip(grads, given, wanted, strict=True)]
        return grad_input, *pairs

    def row_sums(self, g: Tensor, weighted: Tensor, off: Tensor, shift, rstd, w: Tensor | None) -> list[Tensor]:
        """Along rows: the sums of grad * weight and of that times what is normalised. Across: the parameters' own."""
        scheme = self.scheme
        shift = torch.zeros_like(rstd) if shift is None else shift
        level, slope = scheme.grad_sums(weighted, off, shift, rstd)
        if w is None or not g.numel():
            return [level, slope, g.new_zeros(g.shape[1]), g.sum(0)]
        given = (g, off, scheme.shape[1:], shift, rstd, w, w, [False, True, True])
        return [level, slope, *torch.ops.aten.native_layer_norm_backward(*given)[1:]]

    def channel_sums(self, g: Tensor, off: Tensor, shift, rstd, w: Tensor | None) -> list[Tensor]:
        """The same from sums for each channel, of each sample where samples do not share a mean."""
        scheme = self.scheme
        level, slope = scheme.grad_sums(g, off, scheme.expand_stat(shift), scheme.expand_stat(rstd))
        if self.batch:  # one statistic for each channel: its sums are the parameters' sums
            return [level, slope]
        pair = [level, slope] if w is None else [level * w, slope * w]
        return [*map(scheme.sum_to_stats, pair), scheme.param_sums(slope), scheme.param_sums(level)]

    def all_reduce_sums(self, values: list[Tensor], w: Tensor | None, *wanted: bool) -> list[Tensor]:
        """The sums over all ranks that need them: one message an axis."""
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

    # ------------------------------------------------------------------ the same, written with moves

    def statistics(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean and 1 / std of all ranks, and what `v` is from that mean: two small messages an axis."""
        scheme, over = self.scheme, self.stat_groups
        mean = v.new_zeros(())
        if self.centered:
            near = (scheme.stat_sums(v.detach()) / self.count_or_one).to(
                v.dtype
            )  # any point gives the same derivatives
            v = v - scheme.expand_stat(near)
            mean = (
                autograd_collectives.reduce(near.double() * self.count + scheme.stat_sums(v).double(), over)
                / scheme.total
            )
            shift = autograd_collectives.replicate_in([mean], over)[0] - near
            v = v - scheme.expand_stat(shift.to(v.dtype))
        variance = autograd_collectives.reduce(scheme.stat_sums(v.square()), over) / scheme.total
        return mean, (variance + self.eps).rsqrt(), v

    def composite(self, input: Tensor, weight: Tensor | None) -> Tensor:
        """The result less the bias, for derivatives of any order."""
        _, rstd, v = self.statistics(self.view(input))
        (rstd,) = autograd_collectives.replicate_in([rstd], self.stat_groups)
        out = v * self.scheme.expand_stat(rstd)
        if weight is not None:
            out = out * self.scheme.expand_param(autograd_collectives.replicate_in([weight], self.param_groups)[0]).to(
                v.dtype
            )
        return out.view(input.shape).to(self.result)

    def double_backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """`backward` as a function that has derivatives itself."""
        input, weight = ctx.saved_tensors[:2]
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        # seen apart from their own past: a weight may be a function of the input
        input, weight = (None if t is None else t.view_as(t) for t in (input, weight))
        asked = [t for t, want in ((input, want_input), (weight, want_weight)) if want]
        out = self.composite(input, weight) if asked else None
        found = iter(torch.autograd.grad(out, asked, grad, create_graph=True) if asked else ())
        grads = [next(found) if want else None for want in (want_input, want_weight)]
        grad_bias = None
        if want_bias:
            sums = (
                self.view(grad).sum(0)
                if isinstance(self.scheme, RowStats)
                else self.scheme.param_sums(self.scheme.sum_inner(self.view(grad)))
            )
            grad_bias = autograd_collectives.reduce(sums, self.param_groups).view(ctx.bias.shape).to(ctx.bias.dtype)
        return grads[0], grads[1], grad_bias


def autocast_disabled(tensor: Tensor) -> Any:
    """Autocast off: the dtypes are chosen already, and a sum taken as a product must not become one of halves."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _ShardedNormFunction(Collective):
    """Forward: the merged statistics' standardised value. Adjoint: written by hand; see `ShardedNorm`."""

    @staticmethod
    def forward(ctx, how, input, weight, bias):
        ctx.how = how
        ctx.set_materialize_grads(False)
        with autocast_disabled(input):
            out, mean, variance = how.forward(ctx, input, weight, bias)
        ctx.mark_non_differentiable(mean, variance)
        return detach_view(out), mean, variance

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:
            return None, None, None, None
        with autocast_disabled(grad):
            return None, *(ctx.how.double_backward if torch.is_grad_enabled() else ctx.how.backward)(ctx, grad)
