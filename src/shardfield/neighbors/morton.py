"""An order of points along a space-filling curve: cut anywhere, its pieces are compact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import collectives
from ..errors import ShardingError
from ..layout import DimSharding, Layout
from ..ops._common.blockwise import nested_balanced
from ..redistribute import redistribute
from ..tensor import ShardTensor, wrap

MORTON_BITS = 62  # of a code, all features together; the sign bit of an int64 stays clear


def partition_points(points: Tensor, mesh: DeviceMesh | None = None) -> tuple[Tensor, Tensor]:
    """An order of `points` (n, features) in which near ones stand together, and the points in it.

    Returns (order, points[order]). The order is that of Morton codes, equal ones by index. Points that are a
    ShardTensor come back cut over the axes that cut them (over all axes if none does) into pieces that differ by one
    point at most, each a compact region: neighbours are then mostly on the same rank. `order` is cut alike, so that
    `features[order]` brings anything else that belongs to the points to them. Plain points that every rank has are cut
    over `mesh` if one is given; nothing is sent.

    >>> order, sorted_points = partition_points(torch.tensor([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [8.0, 9.0]]))
    >>> order.tolist()
    [0, 2, 3, 1]
    """
    if not isinstance(points, Tensor) or points.ndim != 2 or not points.is_floating_point() or not points.shape[1]:
        raise ValueError("partition_points: points must be a floating point tensor (number, features)")
    if isinstance(points, ShardTensor):
        return _partition_sharded(points, mesh)
    order = morton_codes(points.detach(), *_global_bounds(points.detach(), ())).argsort(stable=True)
    if mesh is None:
        return order, points[order]
    whole = Layout.replicate(mesh, order.shape)
    cut = _evenly_sharded(whole, range(mesh.ndim))
    held = wrap(redistribute(order, whole, cut), cut)
    return held, wrap(points, Layout.replicate(mesh, points.shape))[held]


def _partition_sharded(points: ShardTensor, mesh: DeviceMesh | None) -> tuple[Any, Any]:
    if mesh is not None and mesh != points.device_mesh:
        raise ShardingError("partition_points: the points lie on another mesh; leave `mesh` out")
    points = points._unmerged_value()
    if points._layout.is_sharded(1):
        points = points._redistribute_to(points._layout.unshard([1]))
    layout = points._layout
    local = points._local_tensor.detach()
    axes = layout.nontrivial_axes(layout.axes_of(0))
    groups = [layout.mesh.get_group(a) for a in axes]
    flat = layout.drop_dims([1])
    order: Any = torch.argsort(wrap(morton_codes(local, *_global_bounds(local, groups)), flat), stable=True)
    order = order._redistribute_to(_evenly_sharded(flat, layout.axes_of(0) or range(layout.mesh.ndim)))
    return order, points[order]


def _evenly_sharded(flat: Layout, axes: Any) -> Layout:
    axes = tuple(axes)
    return flat.with_dim(
        0, DimSharding(flat.shape[0], axes, tuple(nested_balanced(flat.shape[0], [flat.mesh.size(a) for a in axes])))
    )


def _global_bounds(points: Tensor, groups: Any) -> tuple[Tensor, Tensor]:
    """The lowest and highest coordinates of all ranks' points; all raise if they are not finite."""
    ends = points.new_full((2, points.shape[1]), torch.inf)
    if len(points):
        ends = torch.stack([points.amin(0), -points.amax(0)])
    for group in groups:
        ends = collectives.all_reduce(ends, group, "min")
    low, high = ends[0].double(), -ends[1].double()
    if bool((high - low).isnan().any() | (high - low == torch.inf).any()):
        raise ValueError("partition_points: coordinates must be finite")
    return low, high


def morton_codes(points: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Morton codes: the bits of all coordinates, counted in steps from `low` to `high`, by turns."""
    features = points.shape[1]
    bits = max(1, min(MORTON_BITS // features, 31))
    # One step for all features: cells are cubes, and a thin cloud is cut across its length.
    step = (high - low).amax().clamp_min(torch.finfo(torch.float64).tiny) / ((1 << bits) - 1)
    cells = ((points.double() - low) / step).to(torch.int64).clamp(0, (1 << bits) - 1)
    code = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for bit in range(bits - 1, -1, -1):
        for d in range(min(features, MORTON_BITS)):
            code = (code << 1) | ((cells[:, d] >> bit) & 1)
    return code
