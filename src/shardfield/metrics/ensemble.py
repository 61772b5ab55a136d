"""Scores of an ensemble: its members are a dim of one tensor, which a mesh axis `ensemble` may shard.

A score needs all members of a point. If ranks share the members, one all-to-all exchanges them for points: afterwards a
rank has all members of its part of the field. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShardingError
from ..layout import DimSharding, balanced, shard_sizes_of
from ..tensor import ShardTensor
from .scores import LAT_LON, rmse, weighted_mean


def crps(
    ensemble: Tensor,
    truth: Tensor,
    weights: Tensor | None = None,
    dims: Sequence[int] = LAT_LON,
    *,
    member_dim: int = 0,
    fair: bool = False,
    skipna: bool = False,
) -> Tensor:
    """Return the continuous ranked probability score of an ensemble, the mean over `dims` of

        mean_i |x_i - y|  -  sum_ij |x_i - x_j| / (2 M^2)        over the M members x of a point with the truth y.

    `fair=True` divides by 2 M (M - 1) instead: the expected score then does not depend on M (Ferro 2014). `ensemble`
    has the dims of `truth` and the members along `member_dim`; `dims` are those of `truth`. Differentiable.
    """
    members = _check(ensemble, truth, member_dim, 2 if fair else 1)
    ensemble = _with_local_members(ensemble, member_dim).movedim(member_dim, 0)
    mask = ~torch.isnan(truth) if skipna else None
    known = truth if mask is None else torch.where(mask, truth, 0.0)
    error = (ensemble - known).abs().mean(0)
    # The sum over all pairs: member k of the sorted ones (from 0) is larger than k others, smaller than the rest.
    rank = 2 * torch.arange(members, dtype=ensemble.dtype, device=ensemble.device) - (members - 1)
    pairs = (torch.sort(ensemble, 0).values * rank.reshape(-1, *[1] * truth.ndim)).sum(0)
    values = error - pairs / (members * (members - 1) if fair else members**2)
    return weighted_mean(values, weights, dims, mask)


def ensemble_mean(ensemble: Tensor, member_dim: int = 0) -> Tensor:
    """Return the mean of the members."""
    return _with_local_members(ensemble, member_dim).mean(member_dim)


def spread(
    ensemble: Tensor, weights: Tensor | None = None, dims: Sequence[int] = LAT_LON, member_dim: int = 0
) -> Tensor:
    """Return the root of the mean variance of the members (with M - 1)."""
    return weighted_mean(_with_local_members(ensemble, member_dim).var(member_dim), weights, dims).sqrt()


def spread_skill_ratio(
    ensemble: Tensor,
    truth: Tensor,
    weights: Tensor | None = None,
    dims: Sequence[int] = LAT_LON,
    member_dim: int = 0,
    skipna: bool = False,
) -> Tensor:
    """Return the spread over the RMSE of the ensemble mean, times sqrt(1 + 1/M): 1 for a reliable ensemble."""
    members = _check(ensemble, truth, member_dim, 2)
    ensemble = _with_local_members(ensemble, member_dim)
    skill = rmse(ensemble.mean(member_dim), truth, weights, dims, skipna)
    mask = ~torch.isnan(truth) if skipna else None
    variance = weighted_mean(ensemble.var(member_dim), weights, dims, mask)
    return (variance * (1 + 1 / members)).sqrt() / skill


def _check(ensemble: Tensor, truth: Tensor, member_dim: int, at_least: int) -> int:
    """Return the number of members."""
    shape = list(ensemble.shape)
    members = shape.pop(member_dim) if -len(shape) <= member_dim < len(shape) else 0
    if tuple(shape) != tuple(truth.shape):
        raise ShardingError(
            f"an ensemble of shape {tuple(ensemble.shape)} with members along dim {member_dim} cannot be compared with "
            f"a truth of {tuple(truth.shape)}"
        )
    if members < at_least:
        raise ShardingError(f"this score needs {at_least} or more members, and the ensemble has {members}")
    return members


def _with_local_members(ensemble: Tensor, member_dim: int) -> Tensor:
    """Move the sharding of the members to another dim: the largest one in terms of points per rank."""
    if not isinstance(ensemble, ShardTensor):
        return ensemble
    ensemble = ensemble._unmerged_value()
    layout = ensemble._layout
    dim = member_dim % layout.ndim
    axes = layout.axes_of(dim)
    if not layout.is_sharded(dim):
        return ensemble
    target = layout.unshard([dim])
    onto = max((d for d in range(layout.ndim) if d != dim), key=lambda d: min(layout.shard_sizes(d)), default=None)
    if onto is None:
        return ensemble._redistribute_to(target)
    for axis in axes:
        (now,) = target.dims[onto]
        sizes = [n for size in shard_sizes_of(now) for n in balanced(size, layout.mesh.size(axis))]
        target = target.with_dim(onto, DimSharding(now.size, (*now.axes, axis), tuple(sizes)))
    return ensemble._redistribute_to(target)
