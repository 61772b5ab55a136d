"""A sharded norm of blocks so small that the number of calls matters and not their work.

The block is normalized in fp64, in which first and second moments need no center. Backward reads the normalized block.
The messages are those of `ShardedNorm`, number by number: the blocks of other ranks may be larger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import runtime
from .stat_groups import SMALL

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
        self._moment_dims = [d + 1 for d in scheme.moment_dims]  # of two stacked views
        self._sum_dims = [d + 1 for d in scheme.sum_dims]
        # As tensors: a number as an operand takes torch twice as long.
        self._eps, self._share, self._grad_share = (
            torch.tensor(value, dtype=torch.float64, device="cpu")
            for value in (norm.eps, 1 / scheme.total, -1 / scheme.total)
        )

    def forward(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        """Return the result, and mean and variance in fp64."""
        norm, scheme = self.norm, self.scheme
        wide = scheme.view(input).double()
        moments = scheme.merge(_sum(torch.stack([wide, wide * wide]), self._moment_dims)).mul_(self._share)
        mean, second = norm.sum_over_ranks(moments).unbind()
        variance = torch.addcmul(second, mean, mean, value=-1).clamp_min_(0)
        rstd = (variance + self._eps).rsqrt_().float()
        normalized = wide.sub_(scheme.expand_stat(mean)).float().mul_(scheme.expand_stat(rstd))
        ctx.save_for_backward(input, weight, normalized, rstd)
        w, b = scheme.expand_param(weight, torch.float32), scheme.expand_param(bias, torch.float32)
        if w is None:
            return normalized.clone() if b is None else normalized + b, mean, variance
        return normalized * w if b is None else torch.addcmul(b, normalized, w), mean, variance

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        norm, scheme = self.norm, self.scheme
        input, weight, normalized, rstd = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        g = scheme.view(grad if grad.dtype is torch.float32 else grad.float())
        sums = _sum(torch.stack([g, g * normalized]), self._sum_dims)
        w = scheme.expand_param(weight, torch.float32)
        stats, params = norm.reduce_channel_sums(sums, w, want_input, want_weight or want_bias)
        grad_input = None
        if want_input:
            spread = scheme.expand_stat
            scale = spread(rstd) if w is None else spread(rstd) * w
            # (g * w - level / n - normalized * slope / n) * rstd; the sums of a batch norm are without the weight
            level, slope = (stats * (scale if norm.batch else rstd)).mul_(self._grad_share).unbind()
            grad_input = torch.addcmul(spread(level), normalized, spread(slope)).addcmul_(g, scale)
        return norm.finish_grads(ctx, input, weight, grad_input, params.reshape(2, -1).unbind())


def _sum(stacked: Tensor, dims: list[int]) -> Tensor:
    return stacked.sum(dims, True) if dims else stacked  # torch sums over all dims for none
