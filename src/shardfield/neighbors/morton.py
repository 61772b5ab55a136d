"""Sort points along a Morton curve, so that contiguous shards are spatially compact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import collectives, consensus
from ..errors import ShardingError
from ..layout import DimSharding, Layout
from ..ops._common.blockwise import nested_balanced
from ..redistribute import redistribute
from ..tensor import ShardTensor, wrap

MORTON_BITS = 62  # bits of a code over all features; the sign bit of an int64 stays 0


def partition_points(points: Tensor, mesh: DeviceMesh | None = None) -> tuple[Tensor, Tensor]:
    """Sort `points` (n, features) by Morton code, ties by index; return (order, points[order]).

    If `points` is a ShardTensor, the results are sharded over the mesh axes that shard the points, or over all axes if
    none does. Shard sizes differ by at most one point, and each shard is a compact region, so that neighbors are mostly
    on the same rank. `order` has the same sharding: `features[order]` moves other data of the points to the same ranks.
    A plain tensor must be equal on all ranks; with `mesh`, each rank takes its shard, after the ranks have compared the
    number of points and a checksum.

    >>> order, sorted_points = partition_points(torch.tensor([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [8.0, 9.0]]))
    >>> order.tolist()
    [0, 2, 3, 1]
    """
    if not isinstance(points, Tensor) or points.ndim != 2 or not points.is_floating_point() or not points.shape[1]:
        raise ValueError("partition_points: points must be a floating point tensor (number, features)")
    if isinstance(points, ShardTensor):
        return _partition_sharded(points, mesh)
    if mesh is None:
        order = morton_codes(points.detach(), *_global_bounds(points.detach(), ())).argsort(stable=True)
        return order, points[order]
    order = _agreed_codes(points.detach(), mesh).argsort(stable=True)
    replicated = Layout.replicate(mesh, order.shape)
    sharded = _evenly_sharded(replicated, range(mesh.ndim))
    local_order = wrap(redistribute(order, replicated, sharded), sharded)
    return local_order, wrap(points, Layout.replicate(mesh, points.shape))[local_order]


def _agreed_codes(points: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the codes of points that all ranks have; raise on all ranks if they differ or one is not finite.

    The checksum has a weight for each place: the same points in another order differ, as does another scale.
    """
    codes, problem = points.new_zeros(0, dtype=torch.int64), None
    try:
        codes = morton_codes(points, *_global_bounds(points, ()))
    except ValueError as error:
        problem = str(error).partition(": ")[2]
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[points.dtype.itemsize]
    bits = (points + 0.0).contiguous().view(ints).flatten().long()  # adding zero: -0.0 equals 0.0
    places = torch.arange(bits.numel(), device=bits.device) * 0x5851F42D4C957F2D + 1  # modulo 2**64
    claim = {"points": tuple(points.shape), "dtype": points.dtype, "checksum": int((bits * places).sum())}
    consensus.check_arguments("partition_points", mesh, claim, problem=problem)
    return codes


def _partition_sharded(points: ShardTensor, mesh: DeviceMesh | None) -> tuple[Any, Any]:
    if mesh is not None and mesh != points.device_mesh:
        raise ShardingError("partition_points: points are on another mesh than `mesh`; leave `mesh` out")
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
    """Return the lowest and highest coordinates of all ranks' points; raise on all ranks if any is not finite."""
    bounds = points.new_full((2, points.shape[1]), torch.inf)
    if len(points):
        bounds = torch.stack([points.amin(0), -points.amax(0)])
    for group in groups:
        bounds = collectives.all_reduce(bounds, group, "min")
    low, high = bounds[0].double(), -bounds[1].double()
    if bool((high - low).isnan().any() | (high - low == torch.inf).any()):
        raise ValueError("partition_points: coordinates must be finite")
    return low, high


def morton_codes(points: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return Morton codes: the interleaved bits of all coordinates, quantized between `low` and `high`."""
    features = points.shape[1]
    bits = max(1, min(MORTON_BITS // features, 31))
    # One step for all features: cells are cubes, and an elongated cloud is split across its long side.
    step = (high - low).amax().clamp_min(torch.finfo(torch.float64).tiny) / ((1 << bits) - 1)
    cells = ((points.double() - low) / step).to(torch.int64).clamp(0, (1 << bits) - 1)
    code = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for bit in range(bits - 1, -1, -1):
        for d in range(min(features, MORTON_BITS)):
            code = (code << 1) | ((cells[:, d] >> bit) & 1)
    return code
