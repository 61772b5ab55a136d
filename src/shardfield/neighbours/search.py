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

from ..comm import wire
from ..dispatch import register
from ..layout import Factor, Layout
from ..operands import admit, mesh_of
from ..ops.blocks import Blocks, freed, spread
from ..redistribute import redistribute
from ..tensor import ShardTensor, wrap
from .across import Cloud
from .local import Held
from .metric import NOBODY, limit, working

F = TypeVar("F", bound=Callable)


def _called(body: F) -> F:
    """Calls on ShardTensors go through dispatch as torch's own do: reports list them, users may register their own."""

    @wraps(body)
    def call(points: Tensor, queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((points, queries)):
            return handle_torch_function(call, (points, queries), points, queries, *args, **kwargs)
        return body(points, queries, *args, **kwargs)

    register(call, lambda func, types, args, kwargs: body(*args, **kwargs))
    return call  # type: ignore[return-value]


@_called
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
    job = _Job("knn", points, queries)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"knn: k is {k!r}; it must be an integer")
    if not 1 <= k <= job.n:
        raise ValueError(f"knn: k = {k} neighbours of {job.n} points; k must be from 1 to {job.n}")
    squares, index = job.nearest(k, None)
    return job.results(squares, index)[:2]


@_called
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
    job = _Job("radius_search", points, queries)
    radius = float(radius)
    if not radius >= 0:
        raise ValueError(f"radius_search: radius is {radius}; it must be 0 or more")
    if max_neighbors is not None and max_neighbors < 1:
        raise ValueError(f"radius_search: max_neighbors is {max_neighbors}; it must be 1 or more, or None for all")
    reach = torch.tensor(min(radius, torch.finfo(job.work).max), dtype=job.work, device=job.device)
    wanted = job.most(reach) if max_neighbors is None else max_neighbors
    squares, index = job.nearest(min(wanted, job.n), reach)
    squares = squares.masked_fill(squares.sqrt() > reach, torch.inf)
    if max_neighbors is None:  # a tree counts generously
        width = job.highest(squares.isfinite().sum(1))
        squares, index = squares[:, :width], index[:, :width]
    elif max_neighbors > job.n:
        more = (len(squares), max_neighbors - job.n)
        squares = torch.cat([squares, squares.new_full(more, torch.inf)], 1)
        index = torch.cat([index, index.new_full(more, NOBODY)], 1)
    return job.results(squares, index)


class _Job:
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
        self.work, self.device = working(self.dtype), queries.device
        self.sharded = any(isinstance(x, (ShardTensor, DTensor)) for x in (points, queries))
        self.points: Any = points
        self.queries: Any = queries
        self.cloud: Cloud | Held
        if self.sharded:
            self._lay_out()
        else:
            self._check(points.detach(), queries.detach(), ())
            self.cloud, self.asking = Held(points.detach().to(self.work)), queries.detach().to(self.work)

    def _lay_out(self) -> None:
        """Bring both into rows; queries that ranks with different points hold alike are shared out among them."""
        mesh = mesh_of((self.points, self.queries), None) or self._adopted()
        self.points, self.queries = (wrap(*_in_rows(*admit(x, mesh))) for x in (self.points, self.queries))
        points, queries = self.points._layout, self.queries._layout
        self.given = self.shared = queries
        extra = [a for a in points.wide(points.axes_of(0)) if a not in queries.axes_of(0)]
        if extra:
            sizes = [mesh.size(a) for a in extra]
            cut = tuple(n for piece in queries.lengths(0) for n in spread(piece, sizes))
            self.shared = queries.with_dim(0, Factor(len(self.queries), (*queries.axes_of(0), *extra), cut))
        blocks = Blocks.along(points, 0)
        asking = redistribute(self.queries._local_tensor.detach(), queries, self.shared)
        here = self.points._local_tensor.detach()
        self._check(here, asking, [*self.shared.shard_axes, *points.shard_axes])
        self.cloud, self.asking = Cloud(here.to(self.work), blocks), asking.to(self.work)

    def _adopted(self) -> Any:
        """The mesh of DTensors, where there is no ShardTensor."""
        return next(x.device_mesh for x in (self.points, self.queries) if isinstance(x, DTensor))

    def _check(self, points: Tensor, queries: Tensor, axes: Any) -> None:
        """Coordinates that have no distance are refused, on all ranks if one has any."""
        most = limit(self.work, self.features)
        wrong = torch.zeros((), dtype=torch.bool, device=queries.device)
        for x in (points, queries):
            if x.numel():
                wrong |= ~(x.abs().amax() <= most)
        if axes:
            mesh = self.shared.mesh
            for axis in self.shared.wide(sorted(set(axes))):
                wrong = wire.all_reduce(wrong, mesh.get_group(axis))
        if bool(wrong):
            raise ValueError(f"{self.name}: coordinates must be finite, and not beyond {most:.3g} in {self.work}")

    def nearest(self, k: int, reach: Tensor | None) -> tuple[Tensor, Tensor]:
        """(squared distances, indices) of this rank's share of the queries."""
        if not k:  # nobody has a neighbour, on no rank
            return self.asking.new_empty(len(self.asking), 0), self.asking.new_empty(len(self.asking), 0).long()
        return self.cloud.nearest(self.asking, k, reach)

    def most(self, reach: Tensor) -> int:
        """At least as many as any query has points within `reach`."""
        return self.highest(self.cloud.count(self.asking, reach))

    def highest(self, counts: Tensor) -> int:
        """The highest count of all ranks' queries."""
        found = counts.amax() if len(counts) else counts.new_zeros(())
        if self.sharded:
            for axis in self.shared.wide(self.shared.shard_axes):
                found = wire.all_reduce(found, self.shared.mesh.get_group(axis), "max")
        return int(found)

    def results(self, squares: Tensor, index: Tensor) -> tuple[Any, Any, Any]:
        """(indices, distances, counts) as the caller gets them."""
        there = squares.isfinite()
        index = torch.where(there, index, -1)
        parts: list[Any] = [index, squares.sqrt(), there.sum(1)]
        if self.sharded:
            parts = [self._returned(x) for x in parts]
        index, distance, counts = parts
        needed = self.n and torch.is_grad_enabled() and (self.points.requires_grad or self.queries.requires_grad)
        return index, (self._attached(index, distance) if needed else distance).to(self.dtype), counts

    def _returned(self, part: Tensor) -> Tensor:
        """A result of this rank's share of the queries, laid out as the queries were given."""
        layouts = []
        for layout in (self.shared, self.given):
            kept = layout.without([1])
            layouts.append(kept if part.ndim == 1 else kept.insert(1, part.shape[1]))
        return wrap(redistribute(part, *layouts), layouts[1])

    def _attached(self, index: Any, distance: Any) -> Any:
        """The same distances with a gradient: they are computed again from the rows that were found."""
        near = self.points[index.clamp_min(0)].to(self.work)
        total = (self.queries.to(self.work).unsqueeze(1) - near).square().sum(-1)
        apart = (total > 0) & (index >= 0)
        again = torch.where(apart, torch.where(apart, total, 1.0).sqrt(), 0.0)
        # To the last bit the value that the search has found, which another order of adding may not give.
        return again + (distance - again.detach())


def _in_rows(local: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """The features of a point are brought together: where they are cut, that cut moves to the points."""
    if not layout.is_cut(1):
        return local, layout
    goal = freed(layout, 1, crowded=True) or layout.uncut([1])
    return redistribute(local, layout, goal), goal
