"""Distances: cdist, pdist, pairwise_distance, cosine_similarity.

`cdist` has the dims of a matrix product, so that the planner of contractions chooses its layouts. If the feature dim is
sharded, ranks compute partial distances, which an all_reduce combines.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm import autograd_collectives
from ...comm.collectives import accumulate_dtype
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout
from .._common.broadcast import align
from .._common.probe import probe
from ..reduction.common import all_reduce_minmax, known_sum, reduced_dims, reduced_layout, safe_sqrt, sharding_axes
from .contraction_strategy import plan_contraction
from .matmul import batch_labels, make_term

MODES = {
    None: "use_mm_for_euclid_dist_if_necessary",
    1: "use_mm_for_euclid_dist",
    2: "donot_use_mm_for_euclid_dist",
}


@rule("cdist", merged=True)
def cdist(x1: Operand, x2: Operand, p=2.0, compute_mode=MODES[None]):
    """Replicate the smaller set of points and keep the larger sharded; sharded features are combined by all_reduce."""
    compute_mode = MODES.get(compute_mode, compute_mode)
    if compute_mode == MODES[None] and min(x1.ndim, x2.ndim) > 1:
        # torch decides by the number of points, which must be the global one
        compute_mode = MODES[1] if max(x1.shape[-2], x2.shape[-2]) > 25 else MODES[2]
    dtype = probe(torch.cdist, x1, x2, p=p, compute_mode=compute_mode).dtype
    left, right = batch_labels(x1.ndim - 2), batch_labels(x2.ndim - 2)
    terms = [make_term(x1, (*left, "p", "m")), make_term(x2, (*right, "r", "m"))]
    out = (*max(left, right, key=len), "p", "r")
    # for p < 1, the power of a zero difference has no gradient, but torch's distance has one
    plan = plan_contraction(terms, out, linear=False, prefer_local=False, unsharded=() if p >= 1 or p == 0 else ("m",))
    groups = process_groups(plan.result, plan.result.partial_axes)

    def local(x1: Tensor, x2: Tensor) -> Tensor:
        if not (x1.shape[-2] and x2.shape[-2]):  # torch's kernel for no points has no second derivative
            return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(-1).to(dtype)  # autocast gives cdist alone fp32
        distance = torch.cdist(x1, x2, p=p, compute_mode=compute_mode)
        return _combine_distances(distance, p, groups) if groups else distance

    targets = dict(zip(("x1", "x2"), plan.targets, strict=True))
    return Plan(local=local, operands=targets, layout=plan.result.with_partial(()))


@rule("pdist")
def pdist(input: Operand, p=2.0, *, fn):
    """Gather the points; each rank computes the pairs of some consecutive points, about equally many pairs."""
    probe(fn, input, p)
    layout, points = input.layout, input.shape[0]
    total = pairs_before(points, points)
    axes = layout.nontrivial_axes(layout.shard_axes)
    operands = {"input": Layout.replicate(layout.mesh, input.shape)}
    if not axes or not total:  # without pairs, torch supports other dtypes than cdist
        return Plan(local=lambda input: fn(input, p), operands=operands, layout=Layout.replicate(layout.mesh, (total,)))
    ranks = math.prod(layout.mesh.size(axis) for axis in axes)
    first = [bisect_left(range(points), i * total / ranks, key=lambda n: pairs_before(n, points)) for i in range(ranks)]
    first.append(points)
    sizes = tuple(pairs_before(b, points) - pairs_before(a, points) for a, b in pairwise(first))
    coord = layout.index(axes)
    start, stop = first[coord], first[coord + 1]

    def local(input: Tensor) -> Tensor:
        # Row r, column c is the pair (start + r, start + 1 + c), a pair of the result if r <= c.
        distance = torch.cdist(input[start:stop], input[start + 1 :], p=p, compute_mode=MODES[2])
        return distance[tuple(torch.triu_indices(*distance.shape, device=distance.device))]

    return Plan(local=local, operands=operands, layout=Layout.make(layout.mesh, [[DimSharding(total, axes, sizes)]]))


def pairs_before(point: int, points: int) -> int:
    """Return the number of pairs (i, j), i < j < points, with i < point."""
    return point * (2 * points - point - 1) // 2


def _combine_distances(distance: Tensor, p: float, groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Combine the p-norm distances of each rank's shard of the features."""
    if p == math.inf:
        # torch gives the full gradient to each of the features with the maximal difference
        farthest = all_reduce_minmax(distance, groups, "max")
        return known_sum(torch.where(distance == farthest, distance, 0), farthest, groups)
    if p in (0, 1):
        return autograd_collectives.reduce(distance, groups)
    total = autograd_collectives.reduce(distance**p, groups)
    # a distance of zero has gradient zero in torch, but the gradient of the root is infinite
    nonzero = total > 0
    return torch.where(nonzero, torch.where(nonzero, total, 1) ** (1 / p), 0)


@composed(F.pairwise_distance)
def pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    """Return the norm of the difference over the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@rule("cosine_similarity")
def cosine_similarity(x1: Operand, x2: Operand, dim=1, eps=1e-8, *, fn):
    """Multiply the normalized inputs and sum. One all_reduce sums both squared norms."""
    dtype = probe(fn, x1, x2, dim, eps).dtype
    alignment = align((x1.layout, x2.layout))
    dims = reduced_dims(alignment.result.ndim, dim)
    groups = process_groups(alignment.result, sharding_axes(alignment.result, dims))

    def local(x1, x2):
        if not groups:
            return fn(x1, x2, dim, eps)
        pair = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))
        norms = torch.stack([x.square().sum(dims, keepdim=True, dtype=accumulate_dtype(dtype)) for x in pair])
        norms = safe_sqrt(autograd_collectives.reduce(norms, groups))
        norms = autograd_collectives.replicate_in([norms], groups)[0].to(dtype)
        # torch's gradient ignores the clamp of a norm below eps
        norms = norms + (norms.clamp_min(eps) - norms).detach()
        return (pair[0] / norms[0] * (pair[1] / norms[1])).sum(dims)

    operands = {"x1": alignment.targets[0], "x2": alignment.targets[1]}
    return Plan(local=local, operands=operands, layout=reduced_layout(alignment.result, dims, False))
