"""PhysicsNeMo's radius search, an operator in compiled code: each rank searches for the queries that it owns.

Which neighbors are kept, of more than fit, depends on the order of all points, so that a rank receives the points of
all ranks. Results are sharded like the queries. Replicated queries of sharded points are divided among the ranks. The
rule is found by the operator's name, so that PhysicsNeMo need not be installed. A search without `max_points` has a
result whose size depends on values: it gathers. `shardfield.radius_search` keeps points sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ... import runtime
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...layout import DimSharding, Layout, nested_chunk
from .._common.probe import probe
from .._common.together import empty_result_of

RADIUS_SEARCH = "physicsnemo.radius_search_warp.default"


def radius_search(
    points: Operand,
    queries: Operand,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    *,
    fn: Any,
) -> Plan | None:
    """Search all points for the queries of a rank."""
    if max_points is None or points.ndim != queries.ndim or not 2 <= points.ndim <= 3:
        return None
    made = probe(fn, points, queries, radius, max_points, return_dists, return_points, meta=True)
    target = sharded_queries(points.layout, queries.layout)
    layouts = tuple(_result_layout(target, out.shape) for out in made)

    def local(points, queries):
        if 0 in queries.shape:
            # The operator sees a query on every rank, so that all raise its errors and have results of its dtypes. Its
            # results are used: a compiled program drops a call without a use, and with it the error.
            one = [x.new_zeros([max(n, 1) for n in x.shape]) for x in (points.detach(), queries.detach())]
            found = fn(*one, radius, max_points, return_dists, return_points)
            return tuple(
                out.flatten()[:0].view(layout.local_shape)
                + empty_result_of([points], layout.local_shape, out.dtype, points)
                for layout, out in zip(layouts, found, strict=True)
            )
        # the operator has no gradient of the queries
        return fn(points.contiguous(), queries.detach().contiguous(), radius, max_points, return_dists, return_points)

    samples = points.layout.unshard(range(points.ndim))
    if points.ndim == 3:
        samples = samples.with_dims([target.dims[0], *samples.dims[1:]])
    return Plan(local=local, layout=layouts, operands={"points": samples, "queries": target})


def _result_layout(queries: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout of a result (samples, queries, ...), or of one that was not requested and is empty."""
    outer = queries.shape[:-1]
    known = list(queries.dims[:-1]) if tuple(shape[: len(outer)]) == tuple(outer) else []
    return Layout.make(queries.mesh, [*known, *((DimSharding(n),) for n in shape[len(known) :])])


def sharded_queries(points: Layout, queries: Layout) -> Layout:
    """Return the layout of queries during the search: theirs, and divided over the other mesh axes of the points."""
    queries = queries.unshard([-1])
    dim, mesh = queries.ndim - 2, queries.mesh
    axes = tuple(a for a in points.nontrivial_axes(points.shard_axes) if a not in queries.shard_axes)
    sizes = [mesh.size(a) for a in axes]
    if not axes or queries.axes_of(dim) or queries.shape[dim] < math.prod(sizes):
        return queries
    n = queries.shape[dim]
    return queries.with_dim(dim, DimSharding(n, axes, tuple(nested_chunk(n, sizes))))


runtime.active.registry.register_named(RADIUS_SEARCH, make_handler(radius_search, partial=False, merged=False))
