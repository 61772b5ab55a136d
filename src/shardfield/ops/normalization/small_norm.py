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
from ...native import leaf
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
        # Of each channel; statistics of other schemes broadcast as they are.
        self.group_of = scheme.group_of if isinstance(scheme, SplitGroupStats) else None
        self._moment_dims = tuple([d + 1 for d in scheme.moment_dims])  # of two stacked views
        self._sum_dims = tuple([d + 1 for d in scheme.sum_dims])
        # As tensors of the dtype of the other operand: a number, or another dtype, takes torch twice as long.
        self._eps, self._share = (
            torch.tensor(value, dtype=torch.float64, device="cpu") for value in (norm.eps, 1 / scheme.total)
        )
        self._grad_share = torch.tensor(-1 / scheme.total, dtype=torch.float32, device="cpu")

    def forward(self, ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None):
        """Return the result, and mean and variance in fp64."""
        wide, moments = norm_moments(input, self.scheme.shape, self._moment_dims, self._share)
        if self.group_of is not None:
            moments = self.scheme.merge(moments)
        for group in self.norm.stat_groups:
            moments = collectives.all_reduce_(moments, group)
        out, mean, variance, *saved = normalize(
            wide, moments, self._eps, weight, bias, self.scheme.param_shape, self.group_of, input.shape
        )
        ctx.save_for_backward(input, weight, *saved)
        return out, mean, variance

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        norm = self.norm
        input, weight, normalized, rstd, w = ctx.saved_tensors
        _, want_input, want_weight, want_bias = ctx.needs_input_grad
        g, sums = norm_grad_sums(grad, normalized, self.scheme.shape, self._sum_dims)
        stats, params = norm.reduce_channel_sums(sums, w, want_input, want_weight or want_bias)
        grad_input, *params = norm_grads(
            g, normalized, stats if want_input else None, params, rstd, w, self._grad_share, norm.batch, self.group_of,
            input.shape,
        )  # fmt: skip
        return norm.finish_grads(ctx, input, weight, grad_input, params)


# ---------------------------------------------------------------------- between the messages


@leaf
def norm_moments(input: Tensor, shape: tuple, dims: tuple, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the view of a block in fp64, and this rank's share of its first and second moments."""
    wide = shaped(input, shape).double()
    moments = torch.stack([wide, wide * wide])
    if dims:  # torch sums over all dims for none
        moments = moments.sum(dims, True)
    return wide, moments.mul_(share)


@leaf
def normalize(
    wide: Tensor, moments: Tensor, eps: Tensor, weight: Any, bias: Any, shape: tuple, group_of: Any, full: Any
) -> tuple[Tensor | None, ...]:
    """Return the result, mean and variance, and what backward needs: the normalized block, 1 / std and the weight."""
    mean, second = moments.unbind()
    variance = torch.addcmul(second, mean, mean, value=-1).clamp_min_(0)
    rstd = (variance + eps).rsqrt_().float()
    if group_of is None:
        normalized = (wide - mean).float().mul_(rstd)
    else:
        normalized = (wide - spread(mean, group_of)).float().mul_(spread(rstd, group_of))
    w = None if weight is None else as_float(weight.reshape(shape))
    b = None if bias is None else as_float(bias.reshape(shape))
    if w is None:
        out = normalized.clone() if b is None else normalized + b
    else:
        out = normalized * w if b is None else torch.addcmul(b, normalized, w)
    return shaped(out, full), mean, variance, normalized, rstd, w


@leaf
def norm_grad_sums(grad: Tensor, normalized: Tensor, shape: tuple, dims: tuple) -> tuple[Tensor, Tensor]:
    """Return the view of a gradient, and its sums and those of it times the normalized value, stacked."""
    g = shaped(as_float(grad), shape)
    sums = torch.stack([g, g * normalized])
    return g, sums.sum(dims, True) if dims else sums


@leaf
def norm_grads(
    g: Tensor,
    normalized: Tensor,
    stats: Tensor | None,
    params: Tensor,
    rstd: Tensor,
    w: Tensor | None,
    share: Tensor,
    batch: bool,
    group_of: Tensor | None,
    full: tuple,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of input, bias and weight; that of the input only for given sums of statistics.

    It is (g * w - level / n - normalized * slope / n) * rstd; the sums of a batch norm are without the weight.
    """
    of_bias, of_weight = params.reshape(2, -1).unbind()
    if stats is None:
        return None, of_bias, of_weight
    scale = spread(rstd, group_of)
    scale = scale if w is None else scale * w
    level, slope = (stats * (scale if batch else rstd)).mul_(share).unbind()
    grad_input = torch.addcmul(spread(level, group_of), normalized, spread(slope, group_of)).addcmul_(g, scale)
    return shaped(grad_input, full), of_bias, of_weight


def shaped(value: Tensor, shape: tuple) -> Tensor:
    return value if value.shape == shape else value.reshape(shape)  # a call of torch less


def as_float(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float32 else value.float()


def spread(statistic: Tensor, group_of: Tensor | None) -> Tensor:
    """Expand a statistic to broadcast against the view."""
    return statistic if group_of is None else statistic.index_select(1, group_of)
