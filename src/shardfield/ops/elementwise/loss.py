"""Elementwise losses: values per element (or per sample) from torch's function, then a sum or a global mean.

The losses of torch.nn.functional are Python functions. The dispatcher runs their bodies, which call the C functions
listed here. The mean divides by the global count, so that values and gradients equal those on one device for every
sharding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._compat import NAMESPACES, caller_argument, without_override_check
from ...dispatch.plan import process_groups
from ...dispatch.registry import as_operand, composed, handler, mesh_of
from .._common.autocast import autocast_to_fp32
from .._common.probe import probe
from .._common.value_checks import raise_if_any_rank
from .pointwise import pointwise

NN = NAMESPACES[1]

# C function of an elementwise loss -> position of its `reduction` argument
ELEMENTWISE = {
    NN.mse_loss: 2,
    NN.l1_loss: 2,
    NN.smooth_l1_loss: 2,
    NN.huber_loss: 2,
    NN.soft_margin_loss: 2,
    NN.binary_cross_entropy: 3,
    torch.binary_cross_entropy_with_logits: 4,
    torch.kl_div: 2,
    torch.poisson_nll_loss: 5,
    torch.hinge_embedding_loss: 3,
    torch.margin_ranking_loss: 4,
}
NONE, MEAN, SUM = 0, 1, 2  # torch's reduction codes; its C functions default to NONE


def apply_reduction(losses: Tensor, reduction: int) -> Tensor:
    """Return the values of a loss, or their mean or sum."""
    return losses.mean() if reduction == MEAN else losses.sum() if reduction == SUM else losses


def elementwise_loss(func, types, args, kwargs):
    position = ELEMENTWISE[func]
    if func == NN.binary_cross_entropy:
        check_probabilities(*args[:2], mesh=mesh_of(args, kwargs))
    if len(args) > position:
        reduction, args = args[position], (*args[:position], NONE, *args[position + 1 :])
    else:
        reduction, kwargs = kwargs.get("reduction", NONE), kwargs | {"reduction": NONE}
    return apply_reduction(pointwise(func, types, args, kwargs), reduction)


for _function in ELEMENTWISE:
    handler(_function, exact=True)(elementwise_loss)


def check_probabilities(*tensors: Any, mesh: DeviceMesh) -> None:
    """Raise on all ranks if an element on any rank is outside [0, 1]; torch's kernel would raise on that rank alone."""
    operands = [as_operand(t, mesh) for t in tensors]
    axes = sorted({a for _, layout in operands for a in layout.shard_axes})
    bad = torch.stack([~((local >= 0) & (local <= 1)).all() for local, _ in operands])
    groups = process_groups(operands[0][1], axes)
    raise_if_any_rank(bad, groups, RuntimeError, "all elements of input and target should be between 0 and 1")


@handler(F.l1_loss, exact=True)
def l1_loss(func, types, args, kwargs):
    """Run torch's body with `weight`, which the body does not pass on to `__torch_function__`."""
    weight = caller_argument(F.l1_loss, "weight")
    if weight is not None:
        kwargs = kwargs | {"weight": weight}
    return without_override_check(F.l1_loss)(*args, **kwargs)


@handler(*filter(None, [getattr(F, "linear_cross_entropy", None)]), exact=True)  # new in torch 2.13
def linear_cross_entropy(func, types, args, kwargs):
    """Run torch's body without `options`, which split the batch to save memory: the batch is sharded already."""
    out = without_override_check(func)(*args, **kwargs | {"options": None})
    in_chunks = kwargs.get("options") is not None  # torch's own Function, which autocast does not run in fp32
    return out.to(args[0].dtype) if in_chunks else out


# ---------------------------------------------------------------------- composed of distances


@composed(torch.triplet_margin_loss, exact=True)
def triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False, reduction=NONE):
    anchor, positive, negative = autocast_to_fp32(anchor, positive, negative)
    near, far = torch.pairwise_distance(anchor, positive, p, eps), torch.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, torch.pairwise_distance(positive, negative, p, eps))
    return apply_reduction((margin + near - far).clamp_min(0), reduction)


@composed(torch.cosine_embedding_loss, exact=True)
def cosine_embedding_loss(input1, input2, target, margin=0.0, reduction=NONE):
    """Return 1 - cos if the target is 1, and max(0, cos - margin) if the target is -1."""
    probe(torch.cosine_embedding_loss, input1, input2, target, margin, reduction, meta=True)
    input1, input2 = autocast_to_fp32(input1, input2)
    dim, tiny = target.ndim, 1e-12
    products = (input1 * input2).sum(dim)
    squared_norms = ((input1 * input1).sum(dim) + tiny) * ((input2 * input2).sum(dim) + tiny)
    cos = products / squared_norms.sqrt()
    losses = torch.where(target == 1, 1 - cos, 0) + torch.where(target == -1, (cos - margin).clamp_min(0), 0)
    return apply_reduction(losses, reduction)
