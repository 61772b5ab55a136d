"""Sharded convolution as one convolution of the block joined with its halo.

The fewest kernels: one packs the rows for all neighbors, one joins the received rows with the block, one convolves.
Backward: torch computes all gradients of the convolution in one call, and one autograd node sends the rows of the halo
in the gradient of the joined block to their owners and sums the gradients of weight and bias over the ranks. Of a large
block the gradient of the joined block comes first, and those of weight and bias are computed while its rows are in
flight. `conv_local.py` instead convolves the block while the halo is in flight, which takes many more kernels.
`prefers_joining` estimates which of the two is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import runtime
from ...comm import adjoints, autograd_collectives, collectives, grad_deferral, route_messages
from ...comm.autograd_collectives import Groups
from .conv_local import ConvArgs
from .padded_block import ExchangedDim, LocalDim


class Speeds(NamedTuple):
    """Rough speeds of a kind of device, in seconds and bytes per second: only their ratios matter."""

    launch: float  # host time of one small kernel
    memory: float
    latency: float  # of one message between neighbors
    link: float
    separate: float  # host time of a separate call for the gradients of the parameters


SPEEDS = {"cpu": Speeds(20e-6, 8e9, 60e-6, 2e9, 20e-6)}
DEVICE_SPEEDS = Speeds(15e-6, 4e12, 20e-6, 25e9, 150e-6)
OVERLAP_BYTES = 1 << 20  # size of a block from which the gradients of the parameters take as long as a message
EXTRA_KERNELS = 40  # of overlapping, compared with joining, per dim: two sides, forward and backward (an estimate)


def prefers_joining(device: str, block_bytes: int, halo_bytes: int, dims: int) -> bool:
    """Return whether joining the block with its halo takes less time than overlapping the exchange.

    Joining copies the block in forward, and waits for messages in forward and backward. All ranks pass equal arguments:
    the sizes of the largest block and halo.

    >>> prefers_joining("cuda", 64 << 20, 256 << 10, 1), prefers_joining("cuda", 1 << 30, 1 << 20, 1)
    (True, False)
    """
    speeds = SPEEDS.get(device, DEVICE_SPEEDS)
    joining = 2 * dims * (speeds.latency + halo_bytes / speeds.link) + 2 * block_bytes / speeds.memory
    return joining < dims * EXTRA_KERNELS * speeds.launch


def prefers_overlap(device: str, block_bytes: int, halo_bytes: int) -> bool:
    """Return whether the gradients of the parameters take a call of their own, while those of the halo are in flight.

    All ranks pass equal arguments: the sizes of the largest block and halo.

    >>> prefers_overlap("cuda", 64 << 20, 2 << 20), prefers_overlap("cuda", 1 << 30, 4 << 20)
    (False, True)
    """
    speeds = SPEEDS.get(device, DEVICE_SPEEDS)
    return block_bytes >= OVERLAP_BYTES and speeds.latency + halo_bytes / speeds.link > speeds.separate


class PaddedConv:
    """Convolution of one rank on its block joined with the halo; `steps` join it, dim by dim.

    The gradients of weight and bias are summed over `grad_groups`. `out`: the spatial shape of the rank's outputs,
    which may be empty. `padding`: of the local call, 0 along sharded dims, whose joined block contains the padding.
    `at_once`: torch's own node of the convolution computes all gradients in one call; equal on all ranks, and False if
    one of them has no outputs. Otherwise backward computes the gradients of the parameters by a call of its own, while
    those of the halo are in flight.
    """

    def __init__(
        self,
        call: ConvArgs,
        steps: Sequence[ExchangedDim | LocalDim],
        padding: Sequence[int],
        out: Sequence[int],
        grad_groups: Groups,
        at_once: bool,
    ):
        self.at_once = at_once
        self.steps, self.out, self.grad_groups = list(steps), tuple(out), grad_groups
        self.call, self.padding = call, tuple(padding)
        self.is_empty = 0 in self.out

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the rank's outputs."""
        rt, groups = runtime.active, self.grad_groups
        if rt.deferring_groups:
            params, groups = grad_deferral.defer_sums([weight] if bias is None else [weight, bias], groups)
            weight, bias = params if bias is not None else (params[0], None)
        # A compiled program may compute the gradients of the parameters later, while other messages are in flight.
        if not self.at_once or rt.tracer is not None:
            return _PaddedConvFunction.apply(self, groups, block, weight, bias)[0]
        sums_weight = bool(groups) and weight.requires_grad
        sums_bias = bool(groups) and bias is not None and bias.requires_grad
        if sums_weight and sums_bias:
            joined, weight, bias = _JoinFunction.apply(self, groups, block, weight, bias)
        elif sums_weight:
            joined, weight = _JoinFunction.apply(self, groups, block, weight)
        elif sums_bias:
            joined, bias = _JoinFunction.apply(self, groups, block, bias)
        else:
            (joined,) = _JoinFunction.apply(self, groups, block)
        return self.run(joined, weight, bias)

    def join(self, block: Tensor) -> Tensor:
        """Return the block joined with its halo, without autograd."""
        for step in self.steps:
            if isinstance(step, ExchangedDim):
                block = route_messages.exchange_no_grad(block, step.route, step.group)
            else:
                block = step.apply(block, 0)
        return block

    def start_adjoint(self, grad: Tensor) -> collectives.Pending[Tensor]:
        """Start sending the rows of the halo to their owners, without autograd; the gradient may be overwritten."""
        pending: collectives.Pending[Tensor] | None = None
        for step in reversed(self.steps):
            grad = grad if pending is None else pending.wait()
            if isinstance(step, ExchangedDim):
                pending = route_messages.start_route(grad, step.route.transposed, step.group, owned=True)
            else:
                grad, pending = step.apply_adjoint(grad), None
        return collectives.Pending((), (), None, grad) if pending is None else pending

    def run(self, joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_empty:
            return joined.new_empty(joined.shape[0], weight.shape[0], *self.out)
        return self.call.run(joined, weight, bias, self.padding)

    def grads(self, grad: Tensor, joined: Tensor, weight: Tensor, needs_grad: list[bool]) -> Sequence[Any]:
        """Return the gradients of joined block, weight and bias; None where `needs_grad` is False."""
        if self.is_empty:
            shapes = (joined, weight, weight.new_empty(weight.shape[0]))
            zeros = [torch.zeros_like(t) if needed else None for t, needed in zip(shapes, needs_grad, strict=True)]
            if not torch.is_grad_enabled():
                return zeros
            # Attached to the graph, so that this rank takes part in the collectives of a second backward.
            none = (
                grad.sum()
                + joined.new_zeros(joined.shape).mul(joined).sum()
                + weight.new_zeros(weight.shape).mul(weight).sum()
            )
            return [None if z is None else z + none for z in zeros]
        return self.call.grads(grad, joined, weight, [weight.shape[0]], self.padding, needs_grad)


class _JoinFunction(adjoints.Collective):
    """The block joined with its halo, and parameters that enter work that differs from rank to rank.

    Adjoint: the gradients of the halo rows are sent to their owners and added there, and the gradients of the
    parameters are summed over the groups.
    """

    @staticmethod
    def forward(ctx, conv, groups, block, *params):
        ctx.conv, ctx.groups = conv, groups
        joined = conv.join(block)
        if not ctx.needs_input_grad[2]:
            ctx.mark_non_differentiable(joined)
        return joined, *params

    @staticmethod
    def backward(ctx, grad, *grads):
        conv, groups = ctx.conv, ctx.groups
        need_block = ctx.needs_input_grad[2]
        if torch.is_grad_enabled():
            for step in reversed(conv.steps) if need_block else ():
                grad = step.apply_adjoint(grad)
            sums = autograd_collectives.reduce_all(grads, groups) if grads else ()
            return None, None, grad if need_block else None, *sums
        pending = conv.start_adjoint(grad) if need_block else None
        sums = autograd_collectives.sum_owned(grads, groups) if grads else ()
        return None, None, None if pending is None else pending.wait(), *sums


class _PaddedConvFunction(adjoints.Collective):
    """One autograd node for a convolution with its halo exchange.

    The joined block is a second result, so that derivatives of any order reach the block through it, and the block
    itself is not kept. Adjoint: the gradients of the halo rows are sent to their owners and added there.
    """

    @staticmethod
    def forward(ctx, conv, groups, block, weight, bias):
        joined = conv.join(block)
        ctx.conv, ctx.groups = conv, groups
        ctx.save_for_backward(joined, weight)
        ctx.set_materialize_grads(False)
        return conv.run(joined, weight, bias), joined

    @staticmethod
    def backward(ctx, grad, joined_grad):
        conv, groups = ctx.conv, ctx.groups
        joined, weight = ctx.saved_tensors
        need_block, need_weight, need_bias = ctx.needs_input_grad[2:]
        differentiable = torch.is_grad_enabled()
        if differentiable:  # each rank's share of a second derivative of the weight is summed, as its gradient is
            (weight,) = autograd_collectives.replicate_in([weight], groups)
        pending = block_grad = weight_grad = bias_grad = None
        params: list[Tensor] = []
        if need_block:
            block_grad = joined_grad
            if grad is not None:
                of_conv = conv.grads(grad, joined, weight, [True, False, False])[0]
                block_grad = of_conv if joined_grad is None else of_conv + joined_grad
            if differentiable:
                for step in reversed(conv.steps):
                    block_grad = step.apply_adjoint(block_grad)
            else:
                pending = conv.start_adjoint(block_grad if grad is not None else block_grad.clone())
        if grad is not None and (need_weight or need_bias):
            (_, *params) = conv.grads(grad, joined, weight, [False, need_weight, need_bias])
            params = [g for g, needed in zip(params, (need_weight, need_bias), strict=True) if needed]
            if differentiable:
                params = autograd_collectives.reduce_all(params, groups)
            else:
                params = autograd_collectives.sum_owned(params, groups)
            summed = iter(params)
            weight_grad, bias_grad = next(summed) if need_weight else None, next(summed) if need_bias else None
        return None, None, block_grad if pending is None else pending.wait(), weight_grad, bias_grad
