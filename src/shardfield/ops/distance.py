"""Distances between points: a product in all but name, so the same planner says where the points go."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm import moves
from ..comm.wire import wider
from ..dispatch import composed, rule
from ..plan import Operand, Plan, groups
from .across import after_reduction, cutting, extreme_of, probe, reduced_dims, root, settled
from .align import align
from .contract import contract
from .product import batch, checked, term

MODES = {
    None: "use_mm_for_euclid_dist_if_necessary",
    1: "use_mm_for_euclid_dist",
    2: "donot_use_mm_for_euclid_dist",
}


@rule("cdist", merged=True)
def cdist(x1: Operand, x2: Operand, p=2.0, compute_mode=MODES[None]):
    """One set of points stays in pieces and the other, the smaller one, is whole; cut features give sums of powers."""
    compute_mode = MODES.get(compute_mode, compute_mode)
    checked(torch.cdist, x1, x2, p=p, compute_mode=compute_mode)
    if compute_mode == MODES[None]:  # torch asks for the number of points, which is not that of a piece
        compute_mode = MODES[1] if max(x1.shape[-2], x2.shape[-2]) > 25 else MODES[2]
    left, right = batch(x1.ndim - 2), batch(x2.ndim - 2)
    terms = [term(x1, (*left, "p", "m")), term(x2, (*right, "r", "m"))]
    out = (*max(left, right, key=len), "p", "r")
    # below 1 the power of a zero difference has no gradient, and torch's own distance has
    work = contract(terms, out, linear=False, stay=False, whole=() if p >= 1 or p == 0 else ("m",))
    over = groups(work.result, work.result.partial_axes)

    def local(x1: Tensor, x2: Tensor) -> Tensor:
        near = torch.cdist(x1, x2, p=p, compute_mode=compute_mode)
        return _summed(near, p, over) if over else near

    targets = dict(zip(("x1", "x2"), work.targets, strict=True))
    return Plan(local=local, operands=targets, layout=work.result.with_partial(()))


def _summed(distance: Tensor, p: float, over: tuple[ProcessGroup, ...]) -> Tensor:
    """The p-norm distance from those of parts of the features, one part on each rank."""
    if p == math.inf:
        # torch gives the whole gradient to each of the features that are farthest apart, and shares nothing
        farthest = extreme_of(distance, over, "max")
        return settled(torch.where(distance == farthest, distance, 0), farthest, over)
    if p in (0, 1):
        return moves.reduce(distance, over)
    total = moves.reduce(distance**p, over)
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
    over = groups(how.result, cutting(how.result, dims))

    def local(x1, x2):
        if not over:
            return fn(x1, x2, dim, eps)
        pair = torch.broadcast_tensors(x1.to(result), x2.to(result))
        sizes = torch.stack([x.square().sum(dims, keepdim=True, dtype=wider(result)) for x in pair])
        sizes = moves.enter([root(moves.reduce(sizes, over))], over)[0].to(result)
        # torch's gradient goes through a norm below eps as if it were not held at eps
        sizes = sizes + (sizes.clamp_min(eps) - sizes).detach()
        return (pair[0] / sizes[0] * (pair[1] / sizes[1])).sum(dims)

    moved = {"x1": how.targets[0], "x2": how.targets[1]}
    return Plan(local=local, operands=moved, layout=after_reduction(how.result, dims, False))
