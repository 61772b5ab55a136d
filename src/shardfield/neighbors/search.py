"""`knn` and `radius_search`: where the operands must lie, what comes back, and how gradients flow.

The search itself has no gradient. Where one is wanted, the coordinates of the neighbours that were found are taken
from the points by index, as any index takes rows: only those rows travel, and their gradients travel back.
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
    """Calls on ShardTensors go through dispatch as torch's own do: reports list them, users may register their own."""

    @wraps(body)
    def call(points: Tensor, queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((points, queries)):
            return handle_torch_function(call, (points, queries), points, queries, *args, **kwargs)
        return body(points, queries, *args, **kwargs)

    register(call, lambda func, types, args, kwargs: body(*args, **kwargs))
    return call  # type: ignore[return-value]


@_dispatched
def knn(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` nearest of `points` (n, features) to each of `queries` (m, features), nearest first.

    Returns (indices, distances), both (m, k): indices into the whole of `points`, and Euclidean distances, through
    which gradients flow to both operands (that of a distance of zero is zero). Exact: of points that are equally
    far, the one with the lower index comes first. Either operand may be a ShardTensor, cut in any way; the results are
    then cut as the queries are, and only blocks of points that can hold a neighbour take part in messages.

    >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [0.0, -1.0]])
    >>> indices, distances = knn(points, points[:1], 3)
    >>> indices.tolist(), distances.tolist()
    ([[0, 2, 3]], [[0.0, 1.0, 1.0]])
    """
    job = _NeighborSearch("knn", points, queries)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"knn: k is {k!r}; it must be an integer")
    if not 1 <= k <= job.n:
        raise ValueError(f"knn: k = {k} neighbours of {job.n} points; k must be from 1 to {job.n}")
    squares, index = job.nearest(k, None)
    return job.results(squares, index)[:2]


@_dispatched
def radius_search(
    points: Tensor, queries: Tensor, radius: float, max_neighbors: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The points within `radius` of each query (m, features), nearest first: at most `max_neighbors` of them.

    Returns (indices, distances, counts). Row i of `indices` and `distances` (m, width) begins with the `counts[i]`
    neighbours of query i, and is filled up with -1 and inf. The width is `max_neighbors`; without it, all neighbours
    are found and the width is that of the fullest row. A point at a distance of exactly `radius` counts. Everything
    else is as with `knn`.

    >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [0.0, -1.0]])
    >>> indices, distances, counts = radius_search(points, points[:2], 1.0)
    >>> indices.tolist(), counts.tolist()
    ([[0, 2, 3], [1, -1, -1]], [3, 1])
    """
    job = _NeighborSearch("radius_search", points, queries)
    radius = float(radius)
    if not radius >= 0:
        raise ValueError(f"radius_search: radius is {radius}; it must be 0 or more")
    if max_neighbors is not None and max_neighbors < 1:
        raise ValueError(f"radius_search: max_neighbors is {max_neighbors}; it must be 1 or more, or None for all")
    reach = torch.tensor(min(radius, torch.finfo(job.compute_dtype).max), dtype=job.compute_dtype, device=job.device)
    wanted = job.max_count(reach) if max_neighbors is None else max_neighbors
    squares, index = job.nearest(min(wanted, job.n), reach)
    squares = squares.masked_fill(squares.sqrt() > reach, torch.inf)
    if max_neighbors is None:  # a tree counts generously
        width = job.global_max(squares.isfinite().sum(1))
        squares, index = squares[:, :width], index[:, :width]
    elif max_neighbors > job.n:
        more = (len(squares), max_neighbors - job.n)
        squares = torch.cat([squares, squares.new_full(more, torch.inf)], 1)
        index = torch.cat([index, index.new_full(more, NO_NEIGHBOR)], 1)
    return job.results(squares, index)


class _NeighborSearch:
    """Two operands, checked: what this rank holds of them, and how results are put together again."""

    def __init__(self, name: str, points: Tensor, queries: Tensor):
        for what, x in (("points", points), ("queries", queries)):
            if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
                held = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: {what} is {held}; it must be (number, features) of floating point")
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
        """Bring both into rows; queries that ranks with different points hold alike are shared out among them."""
        mesh = mesh_of((self.points, self.queries), None) or self._dtensor_mesh()
        self.points, self.queries = (
            wrap(*_unshard_features(*as_operand(x, mesh))) for x in (self.points, self.queries)
        )
        points, queries = self.points._layout, self.queries._layout
        self.query_layout = self.search_layout = queries
        extra = [a for a in points.nontrivial_axes(points.axes_of(0)) if a not in queries.axes_of(0)]
        if extra:
            sizes = [mesh.size(a) for a in extra]
            cut = tuple(n for piece in queries.shard_sizes(0) for n in nested_balanced(piece, sizes))
            self.search_layout = queries.with_dim(0, DimSharding(len(self.queries), (*queries.axes_of(0), *extra), cut))
        blocks = Blocks.along(points, 0)
        asking = redistribute(self.queries._local_tensor.detach(), queries, self.search_layout)
        here = self.points._local_tensor.detach()
        self._check(here, asking, [*self.search_layout.shard_axes, *points.shard_axes])
        self.cloud, self.local_queries = (
            DistributedPoints(here.to(self.compute_dtype), blocks),
            asking.to(self.compute_dtype),
        )

    def _dtensor_mesh(self) -> Any:
        """The mesh of DTensors, where there is no ShardTensor."""
        return next(x.device_mesh for x in (self.points, self.queries) if isinstance(x, DTensor))

    def _check(self, points: Tensor, queries: Tensor, axes: Any) -> None:
        """Coordinates that have no distance are refused, on all ranks if one has any."""
        most = max_coordinate(self.compute_dtype, self.features)
        wrong = torch.zeros((), dtype=torch.bool, device=queries.device)
        for x in (points, queries):
            if x.numel():
                wrong |= ~(x.abs().amax() <= most)
        if axes:
            mesh = self.search_layout.mesh
            for axis in self.search_layout.nontrivial_axes(sorted(set(axes))):
                wrong = collectives.all_reduce(wrong, mesh.get_group(axis))
        if bool(wrong):
            raise ValueError(
                f"{self.name}: coordinates must be finite, and not beyond {most:.3g} in {self.compute_dtype}"
            )

    def nearest(self, k: int, reach: Tensor | None) -> tuple[Tensor, Tensor]:
        """(squared distances, indices) of this rank's share of the queries."""
        if not k:  # nobody has a neighbour, on no rank
            return self.local_queries.new_empty(len(self.local_queries), 0), self.local_queries.new_empty(
                len(self.local_queries), 0
            ).long()
        return self.cloud.nearest(self.local_queries, k, reach)

    def max_count(self, reach: Tensor) -> int:
        """At least as many as any query has points within `reach`."""
        return self.global_max(self.cloud.count(self.local_queries, reach))

    def global_max(self, counts: Tensor) -> int:
        """The highest count of all ranks' queries."""
        found = counts.amax() if len(counts) else counts.new_zeros(())
        if self.sharded:
            for axis in self.search_layout.nontrivial_axes(self.search_layout.shard_axes):
                found = collectives.all_reduce(found, self.search_layout.mesh.get_group(axis), "max")
        return int(found)

    def results(self, squares: Tensor, index: Tensor) -> tuple[Any, Any, Any]:
        """(indices, distances, counts) as the caller gets them."""
        there = squares.isfinite()
        index = torch.where(there, index, -1)
        parts: list[Any] = [index, squares.sqrt(), there.sum(1)]
        if self.sharded:
            parts = [self._to_query_layout(x) for x in parts]
        index, distance, counts = parts
        needed = self.n and torch.is_grad_enabled() and (self.points.requires_grad or self.queries.requires_grad)
        return index, (self._with_gradient(index, distance) if needed else distance).to(self.dtype), counts

    def _to_query_layout(self, part: Tensor) -> Tensor:
        """A result of this rank's share of the queries, laid out as the queries were given."""
        layouts = []
        for layout in (self.search_layout, self.query_layout):
            kept = layout.drop_dims([1])
            layouts.append(kept if part.ndim == 1 else kept.insert(1, part.shape[1]))
        return wrap(redistribute(part, *layouts), layouts[1])

    def _with_gradient(self, index: Any, distance: Any) -> Any:
        """The same distances with a gradient: they are computed again from the rows that were found."""
        near = self.points[index.clamp_min(0)].to(self.compute_dtype)
        total = (self.queries.to(self.compute_dtype).unsqueeze(1) - near).square().sum(-1)
        apart = (total > 0) & (index >= 0)
        again = torch.where(apart, torch.where(apart, total, 1.0).sqrt(), 0.0)
        # To the last bit the value that the search has found, which another order of adding may not give.
        return again + (distance - again.detach())


def _unshard_features(local: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """The features of a point are brought together: where they are cut, that cut moves to the points."""
    if not layout.is_sharded(1):
        return local, layout
    goal = move_shard_off(layout, 1, allow_empty=True) or layout.unshard([1])
    return redistribute(local, layout, goal), goal
