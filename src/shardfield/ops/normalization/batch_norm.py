"""Batch norm and instance norm, with statistics of the batch or running statistics.

Running statistics are updated in place with the values that one device would write. They may be replicated, as in
modules, or sharded; Partial buffers are refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat.autocast import stack
from ...comm import collectives
from ...dispatch.empty_shards import connected
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import handler, rule
from ...errors import ShardingError
from ...layout import Layout
from ...redistribute import redistribute, without_partial
from .._common.probe import probe
from ..reduction.common import sharding_axes
from .affine_params import (
    AffineParams,
    empty_result,
    fix_grad_format,
    kernel_params,
    norm_plan,
    on_kernel,
    probe_results,
)  # fmt: skip
from .sharded_norm import ShardedNorm, shaped
from .stat_groups import BatchStats, InstanceStats


class RunningStats:
    """The running mean and variance of the channels that this rank computes."""

    def __init__(self, channels: Layout, mean: Operand | None, variance: Operand | None):
        self.channels = channels
        self.sources = [b.layout for b in (mean, variance) if b is not None]
        for layout in self.sources:
            if layout.partial:
                raise ShardingError(
                    f"running statistics that are {layout} cannot be written: make them Replicate or Shard"
                )
        self.in_place = all(s is channels for s in self.sources)

    def redistribute(self, *buffers: Tensor | None) -> list[Tensor | None]:
        """Return this rank's channels: the buffers themselves, or copies for `store` to write back."""
        if self.in_place:
            return list(buffers)
        with torch.no_grad():
            return [
                redistribute(b, s, self.channels).clone()
                for b, s in zip(buffers, self.sources, strict=True)
                if b is not None
            ]

    def store(self, buffers: list[Tensor | None], mine: list[Tensor | None]) -> None:
        """Write the updated channels of all ranks to the buffers: one message per axis that shards channels."""
        if not self.in_place:
            with torch.no_grad():
                self._store(buffers, stack([m for m in mine if m is not None]))

    def _store(self, buffers: list[Tensor | None], both: Tensor) -> None:
        for i, (buffer, source) in enumerate(zip(buffers, self.sources, strict=True)):
            if i == 0 or source is not self.sources[0]:
                moved = redistribute(both, self.channels.insert(0, 2), source.insert(0, 2))
            if buffer is not None:
                buffer.copy_(moved[i])


def update_running_stats(buffers: list[Tensor | None], values: list[Tensor], momentum: float) -> None:
    """Update running statistics with those of a batch, which have no gradient."""
    for buffer, value in zip(buffers, values, strict=True):
        if buffer is not None:
            buffer.lerp_(shaped(value, buffer.shape, buffer.dtype), momentum)


# ---------------------------------------------------------------------- batch_norm


@rule(F.batch_norm, partial=True, merged=True, exact=True)
def batch_norm(input: Operand, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1,
               eps=1e-5, *, fn):  # fmt: skip
    """Exchange one small message per axis each way in training; that of backward includes the parameter gradients."""
    probe(fn, input, running_mean, running_var, weight, bias, training, momentum, eps, meta=True)
    return _plan_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


@rule(torch.batch_norm, partial=True, merged=True, exact=True)
def torch_batch_norm(input: Operand, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled, *,
                     fn):  # fmt: skip
    """Plan `batch_norm` with torch.batch_norm's order of arguments."""
    probe(fn, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled, meta=True)
    return _plan_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


@rule(torch.native_batch_norm, partial=True, merged=True)
def native_batch_norm(input: Operand, weight, bias, running_mean, running_var, training, momentum, eps, *, fn):
    """Plan `batch_norm` with mean and 1 / std as further results, which torch leaves empty in evaluation."""
    probe(fn, input, weight, bias, running_mean, running_var, training, momentum, eps, meta=True)
    return _plan_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, fn)


def _plan_batch_norm(
    input: Operand, weight, bias, running_mean, running_var, training, momentum, eps, fn=torch.batch_norm
):
    native = fn is not torch.batch_norm

    def call(input, weight, bias, *buffers):
        weight, bias = kernel_params(weight, bias)
        out = fn(
            input, weight, bias, *buffers, training, momentum, eps, *(() if native else (torch.backends.cudnn.enabled,))
        )
        fix_grad_format(out[0] if native else out, input)
        return out

    if input.ndim < 2:  # torch accepts an empty vector
        return None
    probed = probe_results(call, input, weight, bias, running_mean, running_var)
    result, layout = probed[0].dtype, without_partial(input.layout)
    affine = AffineParams(layout, [layout.dims[1]], weight, bias)
    channels = affine.layout
    if native:
        kept = channels if probed[1].numel() else Layout.replicate(layout.mesh, (0,))
        out: Any = [layout, kept, kept]
    else:
        out = layout
    if not training:

        def run_kernel(input, weight, bias, running_mean, running_var):
            if not input.numel():
                value = empty_result(input, [weight, bias], result)
                if not native:
                    return value
                # On a device torch returns the statistics it used, on the CPU empty tensors.
                used = (running_mean, (running_var + eps).rsqrt()) if kept.numel else probed[1:]
                return value, *(s.detach().to(t.dtype, copy=True) for s, t in zip(used, probed[1:], strict=True))
            return call(input, weight, bias, running_mean, running_var)

        on_data = connected(run_kernel, [layout])

        def evaluate(input, weight, bias, running_mean, running_var):
            return on_data(input, *affine.replicate_in(weight, bias), running_mean, running_var)

        return norm_plan(evaluate, input, layout, out, running_mean=channels, running_var=channels)
    running = RunningStats(channels, running_mean, running_var)
    scheme = BatchStats(layout)
    if not scheme.axes or not input.numel():

        def on_channels(input, weight, bias, *buffers):
            if input.shape[1]:
                return call(input, weight, bias, *buffers)
            value = empty_result(input, [weight, bias], result)
            return (value, *(t.new_empty(0) for t in probed[1:])) if native else value

        run = connected(on_channels, [layout])

        def on_one_rank(input, weight, bias, running_mean, running_var):
            weight, bias = affine.replicate_in(weight, bias)
            mine = running.redistribute(running_mean, running_var)
            value = run(input, weight, bias, *mine)
            running.store([running_mean, running_var], mine)
            return value

        return norm_plan(on_one_rank, input, layout, out)
    shared = ShardedNorm(scheme, eps, result, channels)
    unbiased = scheme.total / max(scheme.total - 1, 1)

    tracked = running_mean is not None or running_var is not None

    def on_shards(input, weight, bias, running_mean, running_var):
        if not native and not tracked:
            return shared(input, *affine.redistribute(weight, bias))
        value, mean, variance = shared.with_stats(input, *affine.redistribute(weight, bias))
        mine = running.redistribute(running_mean, running_var)
        update_running_stats(mine, [mean, variance * unbiased], momentum)
        running.store([running_mean, running_var], mine)
        if not native:
            return value
        return value, *(
            s.reshape(-1).to(t.dtype) for s, t in zip((mean, (variance + eps).rsqrt()), probed[1:], strict=True)
        )

    return norm_plan(on_shards, input, layout, out)


# ---------------------------------------------------------------------- instance_norm


@rule(F.instance_norm, partial=True, merged=True, exact=True)
def instance_norm(input: Operand, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True,
                  momentum=0.1, eps=1e-5, *, fn):  # fmt: skip
    """Exchange one small message per axis that shards spatial dims; average running statistics over all samples."""
    probe(fn, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, meta=True)
    return _plan_instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


@rule(torch.instance_norm, partial=True, merged=True, exact=True)
def torch_instance_norm(input: Operand, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
                        cudnn_enabled, *, fn):  # fmt: skip
    """Plan `instance_norm` with torch.instance_norm's order of arguments."""
    probe(fn, input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled, meta=True)
    return _plan_instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


def _plan_instance_norm(
    input: Operand, weight, bias, running_mean, running_var, use_input_stats, momentum, eps
) -> Plan | None:
    if not use_input_stats:  # with running statistics it is batch norm
        return _plan_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)

    def call(input, weight, bias, *buffers):
        # torch reshapes the input to one sample, which fixes its memory format
        input = input.contiguous()
        weight, bias = kernel_params(weight, bias)
        out = torch.instance_norm(input, weight, bias, *buffers, True, momentum, eps, torch.backends.cudnn.enabled)
        return fix_grad_format(out, input)

    result = probe_results(call, input, weight, bias, running_mean, running_var)[0].dtype
    if not input.numel():
        return None
    layout = without_partial(input.layout)
    affine = AffineParams(layout, [layout.dims[1]], weight, bias)
    scheme = InstanceStats(layout)
    tracked = running_mean is not None or running_var is not None
    if not scheme.axes and not tracked:
        run = on_kernel(layout, lambda input, *params: call(input, *params, None, None), result)

        def on_one_rank(input, weight, bias):
            weight, bias = affine.replicate_in(weight, bias)
            return run(input, weight, bias)

        return norm_plan(on_one_rank, input, layout, layout)
    running = RunningStats(affine.layout, running_mean, running_var)
    shared = ShardedNorm(scheme, eps, result, affine.layout)
    unbiased = scheme.total / max(scheme.total - 1, 1)
    samples, over = layout.shape[0], process_groups(layout, sharding_axes(layout, [0]))

    def on_shards(input, weight, bias, running_mean, running_var):
        value, mean, variance = shared.with_stats(input, *affine.redistribute(weight, bias))
        if tracked:
            both = stack([mean, variance * unbiased]).sum(1) / samples
            for group in over:
                both = collectives.all_reduce(both, group)
            mine = running.redistribute(running_mean, running_var)
            update_running_stats(mine, list(both), momentum)
            running.store([running_mean, running_var], mine)
        return value

    return norm_plan(on_shards, input, layout, layout)


# ---------------------------------------------------------------------- SyncBatchNorm


@handler("batch_norm_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt",
         "batch_norm_backward_reduce", "batch_norm_backward_elemt")  # fmt: skip
def refuse_sync_batch_norm(func, types, args, kwargs):
    """Refuse the steps of nn.SyncBatchNorm, which would count every shard as a full batch."""
    raise ShardingError(
        f"{func.__name__}: nn.SyncBatchNorm works on local tensors. nn.BatchNorm of a ShardTensor computes its "
        "statistics over all ranks of the mesh: use nn.BatchNorm, without convert_sync_batchnorm"
    )
