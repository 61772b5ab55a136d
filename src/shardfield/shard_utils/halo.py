"""Halo exchange for custom ops: extend the local block by rows of its neighbors and by a boundary condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._compat.autocast import concatenate
from ..comm import autograd_collectives, route_messages
from ..comm.consensus import check_arguments
from ..comm.route import Route, RowRequest, fetch_route
from ..errors import ShardingError
from ..layout import starts
from ..ops.shape.flip_roll import periodic_runs
from ..ops.stencil.pad import padding_runs
from ..ops.stencil.window import shard_spans
from ..tensor import ShardTensor
from .halo_op import GroupAxes, traced_padding

Axes: TypeAlias = "DeviceMesh | GroupAxes"
BOUNDARIES = ("zero", "circular", "reflect", "replicate", "pole")


@dataclass(frozen=True)
class HaloConfig:
    """The halo of one tensor dim, which is sharded over one mesh axis.

    Each block gets `halo_size` rows of its neighbors on either side (of several ranks, if shards are thinner). At the
    ends of the field it gets `edge_padding_size` cells by `boundary`: "zero", "circular" (periodic, as along a circle
    of latitude), "reflect" and "replicate" as in F.pad, or "pole": the last rows are mirrored and rotated by half of
    `pole_dim`, the dim of longitudes (which mesh axis `pole_mesh_dim` may shard). A boundary without an
    `edge_padding_size` has the width of the halo. `lengths` are the shard sizes; without them, the ranks exchange their
    sizes. `communication_method` and `async_op` are accepted for compatibility and have no effect.
    """

    mesh_dim: int
    tensor_dim: int
    halo_size: int
    edge_padding_size: int = 0
    async_op: bool = False
    communication_method: str = "a2a"
    boundary: str | None = None
    lengths: tuple[int, ...] | None = None
    pole_dim: int | None = None
    pole_mesh_dim: int | None = None

    def __post_init__(self) -> None:
        if self.halo_size < 0 or self.edge_padding_size < 0:
            raise ShardingError(
                f"a halo of {self.halo_size} and an edge of {self.edge_padding_size}: both must be >= 0"
            )
        if self.boundary is not None and self.boundary not in BOUNDARIES:
            raise ShardingError(f"boundary {self.boundary!r} is not one of {', '.join(BOUNDARIES)}")
        if (self.boundary == "pole") != (self.pole_dim is not None):
            raise ShardingError('boundary "pole" needs pole_dim (the dim of longitudes), and no other boundary has it')
        if self.communication_method not in ("p2p", "a2a"):
            raise ShardingError(f'communication_method must be "p2p" or "a2a", not {self.communication_method!r}')

    @property
    def edge(self) -> int:
        """The number of padding cells beyond each end of the field."""
        return self.edge_padding_size or (self.halo_size if self.boundary else 0)

    def ranges(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the global range of each coord's extended block; that of an empty shard is empty."""
        size, found = sum(lengths), []
        for start, stop in shard_spans(lengths):
            low = -self.edge if start == 0 else max(start - self.halo_size, -self.edge)
            high = size + self.edge if stop == size else min(stop + self.halo_size, size + self.edge)
            found.append((low, high) if start < stop else (start, start))
        return found


def halo_padding(tensor: Tensor, mesh: DeviceMesh, halo_config: HaloConfig | Sequence[HaloConfig]) -> Tensor:
    """Return this rank's block, extended along the dim of each config; later configs include the corners.

    One message per pair of ranks that share rows, along each dim. Adjoint: the gradient's halo rows are sent back and
    added to the rows they were copied from.

        wide = halo_padding(block, mesh, HaloConfig(mesh_dim=0, tensor_dim=2, halo_size=1))
        sphere = halo_padding(block, mesh, [
            HaloConfig(0, 2, 2, boundary="pole", pole_dim=3, pole_mesh_dim=1),
            HaloConfig(1, 3, 2, boundary="circular"),
        ])
    """
    if torch.compiler.is_dynamo_compiling():
        for config in _as_list(halo_config):
            tensor = traced_padding(tensor, mesh, config)
        return tensor
    block, layout_sizes = _local_block(tensor), _layout_shard_sizes(tensor)
    for config in _as_list(halo_config):
        block = pad_dim(block, mesh, config, layout_sizes)
    return block


def unhalo_padding(tensor: Tensor, mesh: DeviceMesh, halo_config: HaloConfig | Sequence[HaloConfig]) -> Tensor:
    """Return an extended block without its halo. Differentiable; no messages.

    Without `lengths`, shards are assumed to be at least as wide as the halo.
    """
    for config in reversed(_as_list(halo_config)):
        dim = config.tensor_dim % tensor.ndim
        coord, size = mesh.get_local_rank(config.mesh_dim), mesh.size(config.mesh_dim)
        if config.lengths is not None:
            (low, _), start = config.ranges(config.lengths)[coord], starts(config.lengths)[coord]
            first, length = start - low, config.lengths[coord]
        else:
            first = config.edge if coord == 0 else config.halo_size
            length = tensor.shape[dim] - first - (config.edge if coord == size - 1 else config.halo_size)
        tensor = tensor.narrow(dim, first, length)
    return tensor


def _as_list(config: HaloConfig | Sequence[HaloConfig]) -> list[HaloConfig]:
    return [config] if isinstance(config, HaloConfig) else list(config)


def _local_block(tensor: Tensor) -> Tensor:
    return tensor._unmerged_value()._local_tensor if isinstance(tensor, ShardTensor) else tensor


def _layout_shard_sizes(tensor: Tensor) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the shard sizes of a ShardTensor by (axis, dim)."""
    if not isinstance(tensor, ShardTensor):
        return {}
    layout = tensor._unmerged_value()._layout
    return {(layout.axes_of(d)[0], d): layout.shard_sizes(d) for d in range(layout.ndim) if len(layout.axes_of(d)) == 1}


def pad_dim(block: Tensor, mesh: Axes, config: HaloConfig, layout_sizes: dict) -> Tensor:
    """Return the block, extended along the dim of one config."""
    dim = config.tensor_dim % block.ndim
    lengths = shard_sizes(block, mesh, config.mesh_dim, dim, config.lengths or layout_sizes.get((config.mesh_dim, dim)))
    coord = mesh.get_local_rank(config.mesh_dim)
    route = _halo_route(dim, config, lengths, coord)
    wide = autograd_collectives.exchange(block, route, mesh.get_group(config.mesh_dim))
    return _turn_poles(wide, mesh, config, lengths, layout_sizes)


def padding_adjoint(grad: Tensor, mesh: Axes, config: HaloConfig, lengths: Sequence[int]) -> Tensor:
    """Return the adjoint of `pad_dim`, without autograd. That of a half turn is the same half turn."""
    dim, coord = config.tensor_dim % grad.ndim, mesh.get_local_rank(config.mesh_dim)
    grad = _turn_poles(grad, mesh, config, lengths, {})
    route = _halo_route(dim, config, lengths, coord)
    return route_messages.exchange_no_grad(grad, route.transposed, mesh.get_group(config.mesh_dim))


def _turn_poles(wide: Tensor, mesh: Axes, config: HaloConfig, lengths: Sequence[int], layout_sizes: dict) -> Tensor:
    """Rotate the rows beyond the poles of an extended block by half of the longitudes."""
    if config.boundary != "pole":
        return wide
    dim, size = config.tensor_dim % wide.ndim, sum(lengths)
    low, high = config.ranges(lengths)[mesh.get_local_rank(config.mesh_dim)]
    front, back = max(-low, 0), max(high - size, 0)
    first, middle, last = wide.split([front, high - low - front - back, back], dim)
    turn = _half_turn(wide, mesh, config, layout_sizes)
    return concatenate([turn(first), middle, turn(last)], dim)


def _halo_route(dim: int, config: HaloConfig, lengths: Sequence[int], coord: int) -> Route:
    size, edge = sum(lengths), config.edge
    most = {"circular": size, "reflect": size - 1, "pole": size}.get(config.boundary or "", edge)
    if size == 0 or edge > most:
        raise ShardingError(
            f"halo_padding: a field of {size} rows cannot have {edge} cells of {config.boundary!r} padding"
        )
    wanted = config.ranges(lengths)
    requests = [_boundary_runs(config.boundary, size, edge, low, high) for low, high in wanted]
    return fetch_route(dim, lengths, coord, requests, [high - low for low, high in wanted])


def shard_sizes(block: Tensor, mesh: Axes, axis: int, dim: int, stated: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shard sizes along a dim: `stated`, or gathered from the ranks."""
    group, coord = mesh.get_group(axis), mesh.get_local_rank(axis)
    if stated is None:
        others = [n for d, n in enumerate(block.shape) if d != dim]
        sizes = check_arguments(
            "halo_padding", group, {"other dims": others, "dim": dim}, extra=[block.shape[dim]], always=True
        )
        assert sizes is not None
        return tuple(n for (n,) in sizes)
    if len(stated) != mesh.size(axis) or stated[coord] != block.shape[dim]:
        raise ShardingError(f"halo_padding: a block of {tuple(block.shape)} is not shard {coord} of {tuple(stated)}")
    return tuple(stated)


def _boundary_runs(boundary: str | None, size: int, edge: int, low: int, high: int) -> list[RowRequest]:
    """Return the source rows of positions `low` to `high` of a field that is extended beyond its ends."""
    if boundary in ("circular", "reflect", "replicate"):
        return padding_runs(boundary, size, edge, edge, low + edge, high + edge)
    first, last = max(low, 0), min(high, size)
    inside = [RowRequest(first, last - first, first - low)] if first < last else []
    if boundary != "pole" or low == high:
        return inside
    front, back = min(high, 0), max(low, size)
    mirrored = [RowRequest(-front, front - low, 0, True)] if low < front else []
    return mirrored + inside + ([RowRequest(2 * size - high, high - back, back - low, True)] if back < high else [])


def _half_turn(block: Tensor, mesh: Axes, config: HaloConfig, layout_sizes: dict):
    """Return a function that rotates rows by half of the longitudes."""
    dim = (config.pole_dim or 0) % block.ndim
    axis = config.pole_mesh_dim
    lengths = (
        (block.shape[dim],) if axis is None else shard_sizes(block, mesh, axis, dim, layout_sizes.get((axis, dim)))
    )
    longitudes = sum(lengths)
    if longitudes % 2:
        raise ShardingError(f'halo_padding: boundary "pole" needs an even number of longitudes, not {longitudes}')
    if axis is None:
        return lambda rows: rows.roll(longitudes // 2, dim)
    requests = [
        periodic_runs(start - longitudes // 2, n, longitudes) for start, n in zip(starts(lengths), lengths, strict=True)
    ]
    route = fetch_route(dim, lengths, mesh.get_local_rank(axis), requests, lengths)
    return lambda rows: autograd_collectives.exchange(rows, route, mesh.get_group(axis))
