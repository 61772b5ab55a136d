"""`knn` and `radius_search`: layouts of operands and results, and gradients.

The search itself is not differentiable. If a gradient is needed, the neighbors' coordinates are gathered from the
points by index, and their distances are computed again. Only these rows are sent; backward sends their gradients back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from ..comm import collectives
from ..dispatch.arguments import as_operand, mesh_of
from ..dispatch.registry import register
from ..layout import DimSharding, Layout
from ..ops._common.blockwise import Blocks, move_shard_off, nested_balanced
from ..redistribute import redistribute
from ..tensor import ShardTensor, wrap
from .distributed_search import DistributedPoints
from .local import LocalPoints
from .metric import NO_NEIGHBOR, compute_dtype, max_coordinate

F = TypeVar("F", bound=Callable)


def _dispatched(body: F) -> F:
    """Dispatch calls on ShardTensors like torch functions, so that `explain` lists them and users can override them."""

    @wraps(body)
    def call(points: Tensor, queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((points, queries)):
            return handle_torch_function(call, (points, queries), points, queries, *args, **kwargs)
        return body(points, queries, *args, **kwargs)

    register(call, lambda func, types, args, kwargs: body(*args, **kwargs))
    return call  # type: ignore[return-value]


@_dispatched
def knn(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` nearest of `points` (n, features) to each of `queries` (m, features), nearest first.

    Returns (indices, distances), both (m, k): global indices into `points`, and Euclidean distances. The distances are
    differentiable with respect to both operands; the gradient of a zero distance is zero. The search is exact: of
    equally distant points the one with the lower index comes first. Either operand may be a ShardTensor of any layout.
    The results are then sharded like the queries, and only shards that may contain a neighbor take part in messages.

    >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [0.0, -1.0]])
    >>> indices, distances = knn(points, points[:1], 3)
    >>> indices.tolist(), distances.tolist()
    ([[0, 2, 3]], [[0.0, 1.0, 1.0]])
    """
    search = _NeighborSearch("knn", points, queries)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"knn: k is {k!r}; it must be an integer")
    if not 1 <= k <= search.n:
        allowed = f"k must be from 1 to {search.n}" if search.n else "there are no points"
        raise ValueError(f"knn: k = {k} neighbors of {search.n} points; {allowed}")
    squares, index = search.nearest(k, None)
    return search.results(squares, index, counted=False)[:2]


@_dispatched
def radius_search(
    points: Tensor, queries: Tensor, radius: float, max_neighbors: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the points within `radius` of each query (m, features), nearest first, at most `max_neighbors` of them.

    Returns (indices, distances, counts). Row i of `indices` and `distances` (m, width) starts with the `counts[i]`
    neighbors of query i and is padded with -1 and inf. The width is `max_neighbors`; without it all neighbors are
    returned, and the width is the largest count. A point at a distance of exactly `radius` is included. Everything else
    is as in `knn`.

    >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [0.0, -1.0]])
    >>> indices, distances, counts = radius_search(points, points[:2], 1.0)
    >>> indices.tolist(), counts.tolist()
    ([[0, 2, 3], [1, -1, -1]], [3, 1])
    """
    search = _NeighborSearch("radius_search", points, queries)
    radius = float(radius)
    if not radius >= 0:
        raise ValueError(f"radius_search: radius is {radius}; it must be 0 or more")
    if max_neighbors is not None and max_neighbors < 1:
        raise ValueError(f"radius_search: max_neighbors is {max_neighbors}; it must be 1 or more, or None for all")
    reach = torch.tensor(
        min(radius, torch.finfo(search.compute_dtype).max), dtype=search.compute_dtype, device=search.device
    )
    max_count = search.max_count(reach) if max_neighbors is None else max_neighbors
    squares, index = search.nearest(min(max_count, search.n), reach)
    squares = squares.masked_fill(squares.sqrt() > reach, torch.inf)
    if max_neighbors is None:  # the count is an upper bound
        width = search.global_max(squares.isfinite().sum(1))
        squares, index = squares[:, :width], index[:, :width]
    elif max_neighbors > search.n:
        padding = (len(squares), max_neighbors - search.n)
        squares = torch.cat([squares, squares.new_full(padding, torch.inf)], 1)
        index = torch.cat([index, index.new_full(padding, NO_NEIGHBOR)], 1)
    return search.results(squares, index)


class _NeighborSearch:
    """The validated operands of one call, their local tensors, and the layout of its results."""

    def __init__(self, name: str, points: Tensor, queries: Tensor):
        for argument, x in (("points", points), ("queries", queries)):
            if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
                actual = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: {argument} is {actual}; it must be (number, features) of floating point")
        if points.shape[1] != queries.shape[1] or not points.shape[1]:
            raise ValueError(f"{name}: points have {points.shape[1]} features and queries {queries.shape[1]}")
        self.name, self.n, self.features = name, len(points), points.shape[1]
        self.dtype = torch.promote_types(points.dtype, queries.dtype)
        self.compute_dtype, self.device = compute_dtype(self.dtype), queries.device
        self.sharded = any(isinstance(x, (ShardTensor, DTensor)) for x in (points, queries))
        self.points: Any = points
        self.queries: Any = queries
        self.cloud: DistributedPoints | LocalPoints
        if self.sharded:
            self._shard_operands()
        else:
            self._check(points.detach(), queries.detach(), ())
            self.cloud, self.local_queries = (
                LocalPoints(points.detach().to(self.compute_dtype)),
                queries.detach().to(self.compute_dtype),
            )

    def _shard_operands(self) -> None:
        """Unshard the features of both operands; shard queries over axes that shard the points but not the queries.

        The ranks of such an axis have different points and equal queries: sharding avoids searching twice.
        """
        mesh = mesh_of((self.points, self.queries), None) or self._dtensor_mesh()
        self.points, self.queries = (
            wrap(*_unshard_features(*as_operand(x, mesh))) for x in (self.points, self.queries)
        )
        points, queries = self.points._layout, self.queries._layout
        self.query_layout = self.search_layout = queries
        extra = [a for a in points.nontrivial_axes(points.axes_of(0)) if a not in queries.axes_of(0)]
        if extra:
            sizes = [mesh.size(a) for a in extra]
            shard_sizes = tuple(n for shard in queries.shard_sizes(0) for n in nested_balanced(shard, sizes))
            self.search_layout = queries.with_dim(
                0, DimSharding(len(self.queries), (*queries.axes_of(0), *extra), shard_sizes)
            )
        blocks = Blocks.along(points, 0)
        local_queries = redistribute(self.queries._local_tensor.detach(), queries, self.search_layout)
        local_points = self.points._local_tensor.detach()
        self._check(local_points, local_queries, [*self.search_layout.shard_axes, *points.shard_axes])
        self.cloud, self.local_queries = (
            DistributedPoints(local_points.to(self.compute_dtype), blocks),
            local_queries.to(self.compute_dtype),
        )

    def _dtensor_mesh(self) -> Any:
        """Return the mesh of the DTensor operands, if no operand is a ShardTensor."""
        return next(x.device_mesh for x in (self.points, self.queries) if isinstance(x, DTensor))

    def _check(self, points: Tensor, queries: Tensor, axes: Any) -> None:
        """Raise on all ranks if any rank has a coordinate that is not finite or whose distances overflow."""
        limit = max_coordinate(self.compute_dtype, self.features)
        invalid = torch.zeros((), dtype=torch.bool, device=queries.device)
        for x in (points, queries):
            if x.numel():
                invalid |= ~(x.abs().amax() <= limit)
        if axes:
            mesh = self.search_layout.mesh
            for axis in self.search_layout.nontrivial_axes(sorted(set(axes))):
                invalid = collectives.all_reduce(invalid, mesh.get_group(axis))
        if bool(invalid):
            raise ValueError(
                f"{self.name}: coordinates must be finite, and not beyond {limit:.3g} in {self.compute_dtype}"
            )

    def nearest(self, k: int, reach: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (squared distances, indices) of this rank's queries."""
        if not k:  # no query on any rank has a neighbor
            return self.local_queries.new_empty(len(self.local_queries), 0), self.local_queries.new_empty(
                len(self.local_queries), 0
            ).long()
        return self.cloud.nearest(self.local_queries, k, reach)

    def max_count(self, reach: Tensor) -> int:
        """Return an upper bound of the largest number of points within the radius `reach` of any query."""
        return self.global_max(self.cloud.count(self.local_queries, reach))

    def global_max(self, counts: Tensor) -> int:
        """Return the largest count over all ranks."""
        largest = counts.amax() if len(counts) else counts.new_zeros(())
        if self.sharded:
            for axis in self.search_layout.nontrivial_axes(self.search_layout.shard_axes):
                largest = collectives.all_reduce(largest, self.search_layout.mesh.get_group(axis), "max")
        return int(largest)

    def results(self, squares: Tensor, index: Tensor, counted: bool = True) -> tuple[Any, Any, Any]:
        """Return (indices, distances, counts or None) in the layout of the queries, with gradients if needed."""
        exists = squares.isfinite()
        index = torch.where(exists, index, -1)
        parts: list[Any] = [index, squares.sqrt(), *([exists.sum(1)] if counted else [])]
        if self.sharded:
            parts = [self._to_query_layout(x) for x in parts]
        index, distance, counts = parts if counted else (*parts, None)
        needed = self.n and torch.is_grad_enabled() and (self.points.requires_grad or self.queries.requires_grad)
        return index, (self._with_gradient(index, distance) if needed else distance).to(self.dtype), counts

    def _to_query_layout(self, result: Tensor) -> Tensor:
        """Redistribute a result from the layout of the search to the layout of the caller's queries."""
        layouts = []
        for layout in (self.search_layout, self.query_layout):
            rows = layout.drop_dims([1])
            layouts.append(rows if result.ndim == 1 else rows.insert(1, result.shape[1]))
        return wrap(redistribute(result, *layouts), layouts[1])

    def _with_gradient(self, index: Any, distance: Any) -> Any:
        """Return the distances with a gradient: compute them again from the neighbors' coordinates."""
        neighbors = self.points[index.clamp_min(0)].to(self.compute_dtype)
        total = (self.queries.to(self.compute_dtype).unsqueeze(1) - neighbors).square().sum(-1)
        nonzero = (total > 0) & (index >= 0)
        recomputed = torch.where(nonzero, torch.where(nonzero, total, 1.0).sqrt(), 0.0)
        # The value stays bitwise that of the search: another order of additions may round differently.
        return recomputed + (distance - recomputed.detach())


def _unshard_features(local: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Unshard the features; their mesh axes then shard the points, if possible."""
    if not layout.is_sharded(1):
        return local, layout
    target = move_shard_off(layout, 1, allow_empty=True) or layout.unshard([1])
    return redistribute(local, layout, target), target
