"""torch_cluster's `knn`, `radius` and `fps`, operators in compiled code: edges from queries to points, and samples.

Which of equally distant points, and of more than fit, are listed depends on the order of all points, so that a rank
receives the points of all ranks and searches for the queries that it owns. Edges are listed query by query: the result
is sharded along its edges, and only counts are communicated. A sample of `fps` is the point farthest from all samples
before it, so that every rank finds all of them and keeps its chunk.

`ptr` has the first row of each cloud of a batch. The rules are found by the operators' names, so that torch_cluster
need not be installed. `shardfield.knn` and `radius_search` keep points sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...comm.collectives import broadcast_over
from ...dispatch.arguments import as_operand, mesh_of
from ...dispatch.fallback import gather_fallback
from ...layout import DimSharding, Layout, nested_chunk, starts
from ...redistribute import redistribute
from ...tensor import wrap
from .owners import gather_counts
from .point_search import sharded_queries


def edges(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `knn(x, y, ptr_x, ptr_y, ...)` or `radius(x, y, ptr_x, ptr_y, ...)`: edges (query, point) of shape (2, n)."""
    x, y, *batches = args[:4]
    if kwargs or len({isinstance(ptr, Tensor) for ptr in batches}) > 1 or not _searchable(x, y):
        return gather_fallback(func, types, args, kwargs)
    mesh = mesh_of(args, kwargs)
    (_, of_points), (queries, of_queries) = as_operand(x, mesh), as_operand(y, mesh)
    target = sharded_queries(of_points, of_queries)
    points = _replicated(x, mesh)
    queries = redistribute(queries.detach(), of_queries, target).contiguous()
    axes = target.axes_of(0)
    first = starts(target.shard_sizes(0))[target.index(axes)] if axes else 0
    # The operator sees a query on every rank, so that all ranks raise its errors or none.
    searched = queries if len(queries) else points[:1]
    ptr_x, ptr_y = (ptr if ptr is None else _replicated(ptr, mesh) for ptr in batches)
    if ptr_y is not None:  # the clouds of the queries that this rank owns; the last one has those that are left
        ptr_y = torch.cat([(ptr_y[:-1] - first).clamp(0, len(searched)), ptr_y.new_full((1,), len(searched))])
    found = func(points, searched, ptr_x, ptr_y, *args[4:])
    if not isinstance(found, Tensor):  # a release that also returns distances
        return gather_fallback(func, types, args, kwargs)
    index = torch.stack([found[0] + first, found[1]]) if len(queries) else found[:, :0]
    counts = gather_counts(index.shape[1], target, axes, index.device)
    sharding = DimSharding(sum(counts), axes, counts if axes else ())
    return wrap(index, Layout.make(mesh, [(DimSharding(2),), (sharding,)]))


def samples(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `fps(points, ptr, ratio, random_start)`: the rows of the farthest points, sharded over the points' axes."""
    if kwargs or len(args) != 4 or not all(isinstance(t, Tensor) for t in args[:3]) or not args[0].ndim:
        return gather_fallback(func, types, args, kwargs)
    mesh = mesh_of(args, kwargs)
    axes = as_operand(args[0], mesh)[1].shard_axes
    found = func(*(_replicated(t, mesh) for t in args[:3]), args[3])
    if args[3]:  # the first samples are random, and ranks may draw different ones
        found = broadcast_over(found, mesh, 0)
    replicated = Layout.replicate(mesh, found.shape)
    sizes = nested_chunk(len(found), [mesh.size(a) for a in axes])
    sharded = Layout.make(mesh, [(DimSharding(len(found), axes, sizes),)]) if axes else replicated
    return wrap(redistribute(found, replicated, sharded), sharded)


def _replicated(tensor: Tensor, mesh: Any) -> Tensor:
    local, layout = as_operand(tensor, mesh)
    return redistribute(local.detach(), layout, Layout.replicate(mesh, layout.shape)).contiguous()


def _searchable(x: Any, y: Any) -> bool:
    """Return whether two tensors are points and queries of one kind; otherwise torch_cluster's own error is raised."""
    tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    return tensors and x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1] and x.dtype == y.dtype and len(x) > 0


for _name in ("knn", "radius"):
    runtime.active.registry.register_named(f"torch_cluster.{_name}.default", edges)
runtime.active.registry.register_named("torch_cluster.fps.default", samples)
