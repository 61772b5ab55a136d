"""torch_cluster's `knn` and `radius`, operators in compiled code that list edges from queries to points.

Which of equally distant points, and of more than fit, are listed depends on the order of all points, so that a rank
receives the points of all ranks and searches for the queries that it owns. Edges are listed query by query: the result
is sharded along its edges, and only counts are communicated. The rules are found by the operators' names, so that
torch_cluster need not be installed. Batches of point clouds gather. `shardfield.knn` and `radius_search` keep points
sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...dispatch.arguments import as_operand, mesh_of
from ...dispatch.fallback import gather_fallback
from ...layout import DimSharding, Layout, starts
from ...redistribute import redistribute
from ...tensor import wrap
from .owners import gather_counts
from .point_search import sharded_queries


def edges(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `knn(x, y, ptr_x, ptr_y, ...)` or `radius(x, y, ptr_x, ptr_y, ...)`: edges (query, point) of shape (2, n)."""
    x, y, *batches = args[:4]
    if kwargs or batches != [None, None] or not _searchable(x, y):
        return gather_fallback(func, types, args, kwargs)
    mesh = mesh_of(args, kwargs)
    (points, of_points), (queries, of_queries) = as_operand(x, mesh), as_operand(y, mesh)
    target = sharded_queries(of_points, of_queries)
    points = redistribute(points.detach(), of_points, of_points.unshard([0, 1])).contiguous()
    queries = redistribute(queries.detach(), of_queries, target).contiguous()
    # The operator sees a query on every rank, so that all ranks raise its errors or none.
    found = func(points, queries if len(queries) else points[:1], None, None, *args[4:])
    if not isinstance(found, Tensor):  # a release that also returns distances
        return gather_fallback(func, types, args, kwargs)
    axes = target.axes_of(0)
    first = starts(target.shard_sizes(0))[target.index(axes)] if axes else 0
    index = torch.stack([found[0] + first, found[1]]) if len(queries) else found[:, :0]
    counts = gather_counts(index.shape[1], target, axes, index.device)
    sharding = DimSharding(sum(counts), axes, counts if axes else ())
    return wrap(index, Layout.make(mesh, [(DimSharding(2),), (sharding,)]))


def _searchable(x: Any, y: Any) -> bool:
    """Return whether two tensors are points and queries of one kind; otherwise torch_cluster's own error is raised."""
    tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    return tensors and x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1] and x.dtype == y.dtype and len(x) > 0


for _name in ("knn", "radius"):
    runtime.active.registry.register_named(f"torch_cluster.{_name}.default", edges)
