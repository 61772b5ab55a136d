"""Layer norm, RMS norm, group norm and local response norm.

If all elements that share a mean are on one rank, torch's kernel runs there. Else the ranks merge their statistics
(`sharded_norm`). Parameters are sharded as the input dims they scale, and their gradients are summed over the ranks
that use them. Errors of torch are raised while planning, on all ranks, from the global shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...comm import autograd_collectives
from ...comm.route import RowRequest, fetch_route
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import starts
from ...redistribute import unmerge_dims
from .._common.probe import probe, stand_in
from ..reduction.common import reduced_layout, sharding_axes
from ..shape.flip_roll import shard_by_one_axis
from .affine_params import AffineParams, empty_result, norm_plan, on_kernel, probe_results
from .sharded_norm import ShardedNorm
from .stat_groups import GroupStats, RowStats, group_stats

# ---------------------------------------------------------------------- over the last dims


@rule(F.layer_norm, merged=True)
def layer_norm(input: Operand, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True, *, fn):
    """Run torch's kernel along unsharded dims. Along sharded dims, exchange one small message per axis each way."""
    return _plan_layer_norm(input, normalized_shape, weight, bias, eps, F.layer_norm)


@rule(torch.native_layer_norm, merged=True)
def native_layer_norm(input: Operand, normalized_shape, weight, bias, eps, *, fn):
    """Plan `layer_norm` with mean and 1 / std as further results, which have no gradient."""
    return _plan_layer_norm(input, normalized_shape, weight, bias, eps, torch.native_layer_norm)


def _plan_layer_norm(input: Operand, normalized_shape, weight, bias, eps: float, fn) -> Plan:
    number = len(normalized_shape)
    # dtypes first: the meta kernel that checks shapes raises another error for a dtype without a kernel
    dtypes = [t.dtype for t in probe_results(fn, input, [1] * number, weight, bias, eps)]
    shapes = [p.shape for p in (weight, bias) if p is not None] + [input.shape[max(input.ndim - number, 0) :]]
    if not number or any(tuple(shape) != tuple(normalized_shape) for shape in shapes):
        probe(fn, input, normalized_shape, weight, bias, eps, meta=True)  # raises torch's error; slow
    layout = input.layout
    dims = range(layout.ndim - number, layout.ndim)
    statistics = reduced_layout(layout, dims, True, None)
    out = [layout, statistics, statistics] if len(dtypes) > 1 else layout
    affine = AffineParams(layout, layout.dims[dims.start :], weight, bias)
    if not sharding_axes(layout, dims) or not input.numel():
        shape = tuple(layout.local_shape[dims.start :])

        def on_one_rank(input, weight, bias):
            return fn(input, shape, weight, bias, eps)

        operands = {n: affine.layout for n, p in (("weight", weight), ("bias", bias)) if p is not None}
        return Plan(local=on_one_rank, layout=out, operands=operands)
    shared = ShardedNorm(RowStats(layout, number), eps, dtypes[0], affine.layout)

    def on_shards(input, weight, bias):
        if len(dtypes) == 1:
            return shared(input, *affine.redistribute(weight, bias))
        value, mean, variance = shared.with_stats(input, *affine.redistribute(weight, bias))
        pair = zip((mean, (variance + eps).rsqrt()), dtypes[1:], strict=True)
        return value, *(s.reshape(statistics.local_shape).to(dtype) for s, dtype in pair)

    return norm_plan(on_shards, input, layout, out)


@rule(F.rms_norm, merged=True)
def rms_norm(input: Operand, normalized_shape, weight=None, eps=None, *, fn):
    """Plan `layer_norm` without a mean: ranks all-reduce the sums of squares."""
    number = len(normalized_shape)
    probe(F.rms_norm, input, normalized_shape, weight, eps, meta=True)
    result = probe_results(F.rms_norm, input, [1] * number, weight, eps)[0].dtype
    layout = input.layout
    dims = range(layout.ndim - number, layout.ndim)
    affine = AffineParams(layout, layout.dims[dims.start :], weight, None)
    if not sharding_axes(layout, dims) or not input.numel():

        def on_one_rank(input, weight):
            return F.rms_norm(input, input.shape[-number:], affine.replicate_in(weight, None)[0], eps)

        return norm_plan(on_one_rank, input, layout, layout)
    if input.dtype.is_complex:  # torch uses the mean of x * x there, not of |x| ** 2
        return None
    tiny = torch.finfo(torch.float64 if input.dtype is torch.float64 else torch.float32).eps
    shared = ShardedNorm(
        RowStats(layout, number),
        tiny if eps is None else eps,
        result,
        affine.layout,
        centered=False,
    )
    return norm_plan(lambda input, weight: shared(input, *affine.redistribute(weight, None)), input, layout, layout)


# ---------------------------------------------------------------------- over groups of channels


@rule(F.group_norm, merged=True)
def group_norm(input: Operand, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True, *, fn):
    """Run torch's kernel if every group is on one rank; else merge statistics, also of groups split between ranks."""
    probe(fn, input, num_groups, weight, bias, eps, meta=True)
    result = probe_results(torch.group_norm, input, 1, weight, bias, eps)[0].dtype
    return _plan_group_norm(input, weight, bias, num_groups, eps, [result])


@rule(torch.native_group_norm, merged=True)
def native_group_norm(input: Operand, weight, bias, N, C, HxW, group, eps, *, fn):
    """Plan `group_norm` with mean and 1 / std as further results."""
    probe(fn, input, weight, bias, N, C, HxW, group, eps, meta=True)
    dtypes = [t.dtype for t in probe_results(fn, input, weight, bias, 1, 1, 1, 1, eps)]
    return _plan_group_norm(input, weight, bias, group, eps, dtypes)


def _plan_group_norm(input: Operand, weight, bias, number: int, eps: float, dtypes: list[torch.dtype]) -> Plan | None:
    layout = unmerge_dims(input.layout, [1])
    affine = AffineParams(layout, [layout.dims[1]], weight, bias)
    if not input.numel():
        if len(dtypes) > 1:
            return None

        def empty(input, weight, bias):
            return empty_result(input, affine.replicate_in(weight, bias), dtypes[0])

        return norm_plan(empty, input, layout, layout)
    scheme = group_stats(layout, number)
    statistics = scheme.statistics()
    out: Any = [layout, statistics, statistics] if len(dtypes) > 1 else layout
    if isinstance(scheme, GroupStats) and not scheme.axes and len(dtypes) == 1:
        run = on_kernel(layout, lambda x, *params: torch.group_norm(x, scheme.local_groups, *params, eps), dtypes[0])

        def on_one_rank(input, weight, bias):
            weight, bias = affine.replicate_in(weight, bias)
            if weight is None and bias is not None:  # torch's kernel has no gradient for a bias alone
                weight = torch.ones_like(bias)
            return run(input, weight, bias)

        return norm_plan(on_one_rank, input, layout, out)
    shared = ShardedNorm(scheme, eps, dtypes[0], affine.layout)

    def on_shards(input, weight, bias):
        value = shared(input, *affine.redistribute(weight, bias))
        if len(dtypes) == 1:
            return value
        pair = zip(shared.statistics(shared.view(input))[:2], dtypes[1:], strict=True)  # differentiable, as in torch
        return value, *(s.reshape(statistics.local_shape).to(dtype) for s, dtype in pair)

    return norm_plan(on_shards, input, layout, out)


# ---------------------------------------------------------------------- over neighboring channels, and of weights


@rule(F.local_response_norm, merged=True)
def local_response_norm(input: Operand, size, alpha=1e-4, beta=0.75, k=1.0, *, fn):
    """Exchange halos of neighboring channels."""
    probe(fn, input, size, alpha, beta, k, meta=True)
    dtype = probe(fn, stand_in(input, [1] * input.ndim), size, alpha, beta, k).dtype  # raises if a kernel is missing
    layout = shard_by_one_axis(input.layout, [1])
    if not layout.is_sharded(1):

        def on_one_rank(input):
            return fn(input, size, alpha, beta, k) if input.numel() else input.to(dtype, copy=True)

        return Plan(local=on_one_rank, operands={"input": layout}, layout=layout)
    (factor,) = layout.dims[1]
    (axis,) = layout.nontrivial_axes(factor.axes)
    before, after = size // 2, (size - 1) // 2
    # Beyond the ends of the dim torch pads with zeros.
    requests = [
        [RowRequest(s - before, before + n + after)] if n else []
        for s, n in zip(starts(factor.shard_sizes), factor.shard_sizes, strict=True)
    ]
    route = fetch_route(
        1,
        factor.shard_sizes,
        layout.coords[axis],
        requests,
        [n + before + after if n else 0 for n in factor.shard_sizes],
    )
    group = layout.mesh.get_group(axis)
    here = layout.local_shape[1]

    def local(input):
        block = autograd_collectives.exchange(input, route, group)
        out = fn(block, size, alpha, beta, k) if block.numel() else block.to(dtype, copy=True)
        return out.narrow(1, before if here else 0, here)

    return Plan(local=local, operands={"input": layout}, layout=layout)


@composed("_weight_norm")
def weight_norm(v, g, dim=0):
    """Return `v` scaled to the norm `g` along `dim`."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


@composed("norm_except_dim")
def norm_except_dim(v, pow=2, dim=0):
    """Return the norm over all dims except `dim` (-1: over all dims)."""
    if dim == -1:
        return torch.linalg.vector_norm(v, pow)
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    return torch.linalg.vector_norm(v, pow, others, True) if others else v.abs()
