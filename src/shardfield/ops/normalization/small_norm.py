"""A sharded norm of blocks so small that the number of calls matters and not their work.

The block is normalized in fp64, in which first and second moments need no center. Backward reads the normalized block.
The messages are those of `ShardedNorm`, number by number: the blocks of other ranks may be larger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import runtime
from ...comm import collectives
from .stat_groups import SMALL, SplitGroupStats

if TYPE_CHECKING:
    from .sharded_norm import ShardedNorm


def is_small(values: Tensor) -> bool:
    """Return whether a block is small. Moments of fp64 values would need more digits; a traced program fuses calls."""
    if values.device.type != "cpu" or values.numel() > SMALL or values.dtype is torch.float64:
        return False
    return runtime.active.tracer is None


class SmallNorm:
    """The forward and backward of a `ShardedNorm` with a mean, for small blocks."""

    def __init__(self, norm: ShardedNorm):
        scheme = norm.scheme
        self.norm, self.scheme = norm, scheme
        self.is_split = isinstance(scheme, SplitGroupStats)  # statistics of other schemes broadcast as they are
        self._moment_dims = [d + 1 for d in scheme.moment_dims]  # of two stacked views
        self._sum_dims = [d + 1 for d in scheme.sum_dims]
        # As tensors of the dtype of the other operand: a number, or another dtype, takes torch twice as long.
        self._eps, self._share = (
            torch.tensor(value, dtype=torch.float64, device="cpu") for value in (norm.eps, 1 / scheme.total)
        )
        self._grad_share = torch.tensor(-1 / scheme.total, dtype=torch.float32, device="cpu")

    def forward(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        """Return the result, and mean and variance in fp64."""
        scheme = self.scheme
        wide = scheme.view(input).double()
        moments = torch.stack([wide, wide * wide])
        if self._moment_dims:  # torch sums over all dims for none
            moments = moments.sum(self._moment_dims, True)
        if self.is_split:
            moments = scheme.merge(moments)
        moments.mul_(self._share)
        for group in self.norm.stat_groups:
            moments = collectives.all_reduce_(moments, group)
        mean, second = moments.unbind()
        variance = torch.addcmul(second, mean, mean, value=-1).clamp_min_(0)
        rstd = (variance + self._eps).rsqrt_().float()
        if self.is_split:
            normalized = wide.sub_(scheme.expand_stat(mean)).float().mul_(scheme.expand_stat(rstd))
        else:
            normalized = wide.sub_(mean).float().mul_(rstd)
        w = None if weight is None else scheme.expand_param(weight, torch.float32)
        ctx.save_for_backward(input, weight, normalized, rstd, w)
        if w is None:
            out = normalized.clone() if bias is None else normalized + scheme.expand_param(bias, torch.float32)
        elif bias is None:
            out = normalized * w
        else:
            out = torch.addcmul(scheme.expand_param(bias, torch.float32), normalized, w)
        return out, mean, variance

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        norm, scheme = self.norm, self.scheme
        input, weight, normalized, rstd, w = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        g = scheme.view(grad if grad.dtype is torch.float32 else grad.float())
        sums = torch.stack([g, g * normalized])
        if self._sum_dims:
            sums = sums.sum(self._sum_dims, True)
        stats, params = norm.reduce_channel_sums(sums, w, want_input, want_weight or want_bias)
        grad_input = None
        if want_input:
            scale = scheme.expand_stat(rstd) if self.is_split else rstd
            scale = scale if w is None else scale * w
            # (g * w - level / n - normalized * slope / n) * rstd; the sums of a batch norm are without the weight
            level, slope = (stats * (scale if norm.batch else rstd)).mul_(self._grad_share).unbind()
            if self.is_split:
                level, slope = scheme.expand_stat(level), scheme.expand_stat(slope)
            grad_input = torch.addcmul(level, normalized, slope).addcmul_(g, scale)
        return norm.finish_grads(ctx, input, weight, grad_input, params.reshape(2, -1).unbind())
