"""Distances between points: a product in all but name, so the same planner says where the points go."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm import autograd_collectives
from ...comm.collectives import accumulate_dtype
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, rule
from .._common.broadcast import align
from .._common.probe import all_reduce_minmax, known_sum, probe, reduced_dims, reduced_layout, safe_sqrt, sharding_axes
from .contraction_strategy import plan_contraction
from .matmul import batch_labels, make_term, validate_args

MODES = {
    None: "use_mm_for_euclid_dist_if_necessary",
    1: "use_mm_for_euclid_dist",
    2: "donot_use_mm_for_euclid_dist",
}


@rule("cdist", merged=True)
def cdist(x1: Operand, x2: Operand, p=2.0, compute_mode=MODES[None]):
    """One set of points stays in pieces and the other, the smaller one, is whole; cut features give sums of powers."""
    compute_mode = MODES.get(compute_mode, compute_mode)
    validate_args(torch.cdist, x1, x2, p=p, compute_mode=compute_mode)
    if compute_mode == MODES[None]:  # torch asks for the number of points, which is not that of a piece
        compute_mode = MODES[1] if max(x1.shape[-2], x2.shape[-2]) > 25 else MODES[2]
    left, right = batch_labels(x1.ndim - 2), batch_labels(x2.ndim - 2)
    terms = [make_term(x1, (*left, "p", "m")), make_term(x2, (*right, "r", "m"))]
    out = (*max(left, right, key=len), "p", "r")
    # below 1 the power of a zero difference has no gradient, and torch's own distance has
    work = plan_contraction(terms, out, linear=False, prefer_local=False, unsharded=() if p >= 1 or p == 0 else ("m",))
    over = process_groups(work.result, work.result.partial_axes)

    def local(x1: Tensor, x2: Tensor) -> Tensor:
        near = torch.cdist(x1, x2, p=p, compute_mode=compute_mode)
        return _combine_distances(near, p, over) if over else near

    targets = dict(zip(("x1", "x2"), work.targets, strict=True))
    return Plan(local=local, operands=targets, layout=work.result.with_partial(()))


def _combine_distances(distance: Tensor, p: float, over: tuple[ProcessGroup, ...]) -> Tensor:
    """The p-norm distance from those of parts of the features, one part on each rank."""
    if p == math.inf:
        # torch gives the whole gradient to each of the features that are farthest apart, and shares nothing
        farthest = all_reduce_minmax(distance, over, "max")
        return known_sum(torch.where(distance == farthest, distance, 0), farthest, over)
    if p in (0, 1):
        return autograd_collectives.reduce(distance, over)
    total = autograd_collectives.reduce(distance**p, over)
    # a distance of zero has gradient zero, as torch has it, where that of the root is infinite
    apart = total > 0
    return torch.where(apart, torch.where(apart, total, 1) ** (1 / p), 0)


@composed(F.pairwise_distance)
def pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    """The norm of a difference over the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@rule("cosine_similarity")
def cosine_similarity(x1: Operand, x2: Operand, dim=1, eps=1e-8, *, fn):
    """The product of the two directions. Both norms travel in one message."""
    result = probe(fn, x1, x2, dim, eps).dtype
    how = align((x1.layout, x2.layout))
    dims = reduced_dims(how.result.ndim, dim)
    over = process_groups(how.result, sharding_axes(how.result, dims))

    def local(x1, x2):
        if not over:
            return fn(x1, x2, dim, eps)
        pair = torch.broadcast_tensors(x1.to(result), x2.to(result))
        sizes = torch.stack([x.square().sum(dims, keepdim=True, dtype=accumulate_dtype(result)) for x in pair])
        sizes = autograd_collectives.replicate_in([safe_sqrt(autograd_collectives.reduce(sizes, over))], over)[0].to(
            result
        )
        # torch's gradient goes through a norm below eps as if it were not held at eps
        sizes = sizes + (sizes.clamp_min(eps) - sizes).detach()
        return (pair[0] / sizes[0] * (pair[1] / sizes[1])).sum(dims)

    moved = {"x1": how.targets[0], "x2": how.targets[1]}
    return Plan(local=local, operands=moved, layout=reduced_layout(how.result, dims, False))
