"""torch_cluster's knn and radius: edges from queries to points."""

import torch

from shardfield import runtime
from shardfield.ops.indexing.cluster_search import edges
from tests.harness import T, case, raises

SOME, FEW = {"layouts": 8}, {"layouts": 4}

# Operators with the names, arguments and results of torch_cluster's, which has no wheel here.
LIBRARY = torch.library.Library("shardfield_tests", "FRAGMENT")
POINTS = "Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y"


def nearest(x, y, ptr_x, ptr_y, k, cosine, num_workers):
    if k < 1:
        raise RuntimeError("k must be positive")
    point = torch.cdist(y, x).argsort(dim=1, stable=True)[:, :k]
    query = torch.arange(len(y))[:, None].expand_as(point)
    return torch.stack([query.flatten(), point.flatten()])


def within(x, y, ptr_x, ptr_y, r, max_num_neighbors, num_workers):
    near = torch.cdist(y, x) <= r
    return (near & (near.cumsum(1) <= max_num_neighbors)).nonzero().t().contiguous()


LIBRARY.define(f"knn({POINTS}, int k, bool cosine, int num_workers) -> Tensor")
LIBRARY.define(f"radius({POINTS}, float r, int max_num_neighbors, int num_workers) -> Tensor")
for name, function in {"knn": nearest, "radius": within}.items():
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    runtime.active.registry.register_named(f"shardfield_tests.{name}.default", edges)


def knn(x, y, k, ptr=None):
    return torch.ops.shardfield_tests.knn(x, y, ptr, ptr, k, False, 1)


def radius(x, y, r, most=32, ptr=None):
    return torch.ops.shardfield_tests.radius(x, y, ptr, ptr, r, most, 1)


def graph(x, k):
    """Sum the features of the nearest points, as a layer of a graph network does."""
    query, point = knn(x.detach(), x.detach(), k)
    return torch.zeros_like(x).index_add(0, query, x[point])


CASES = [
    case(knn, T(9, 3), T(7, 3), 2, options=SOME),
    case(knn, T(3, 2), T(5, 2), 4, options=FEW),  # fewer points than neighbors
    case(knn, T(4, 2), T(0, 2), 2, options=FEW),
    case(radius, T(9, 2), T(7, 2), 1.0, options=SOME),
    case(radius, T(9, 2), T(7, 2), 2.0, 3, options=FEW),
    case(radius, T(9, 2), T(7, 2), 0.0, options=FEW),  # no edges
    case(graph, T(9, 3), 3, options=SOME),
    # batches of point clouds have no rule
    case(
        knn,
        T(9, 3),
        T(7, 3),
        2,
        T(2, fill=lambda shape, generator: torch.tensor([0, 7])),
        options=FEW | {"may_gather": True},
    ),
    case(knn, T(9, 3), T(7, 3), 0, options=FEW | raises(RuntimeError, "k must be positive")),
]
