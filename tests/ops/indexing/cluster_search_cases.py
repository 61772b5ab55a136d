"""torch_cluster's knn and radius, edges from queries to points, and fps, points that are far from each other."""

from itertools import pairwise

import torch

from shardfield import runtime
from shardfield.ops.indexing.cluster_search import edges, samples
from tests.harness import T, case, raises

SOME, FEW = {"layouts": 8}, {"layouts": 4}

# Operators with the names, arguments and results of torch_cluster's, which has no wheel here.
LIBRARY = torch.library.Library("shardfield_tests", "FRAGMENT")
POINTS = "Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y"


def by_cloud(search):
    """Search for the queries of each cloud of a batch among its points: rows from `ptr[i]` to `ptr[i + 1]`."""

    def run(x, y, ptr_x, ptr_y, *rest):
        if ptr_x is None:
            return search(x, y, *rest)
        found = []
        for (a, b), (c, d) in zip(pairwise(ptr_x.tolist()), pairwise(ptr_y.tolist()), strict=True):
            found.append(search(x[a:b], y[c:d], *rest) + torch.tensor([[c], [a]]))
        return torch.cat(found, 1)

    return run


@by_cloud
def nearest(x, y, k, cosine, num_workers):
    if k < 1:
        raise RuntimeError("k must be positive")
    point = torch.cdist(y, x).argsort(dim=1, stable=True)[:, :k]
    query = torch.arange(len(y))[:, None].expand_as(point)
    return torch.stack([query.flatten(), point.flatten()])


@by_cloud
def within(x, y, r, max_num_neighbors, num_workers):
    near = torch.cdist(y, x) <= r
    return (near & (near.cumsum(1) <= max_num_neighbors)).nonzero().t().contiguous()


def farthest(src, ptr, ratio, random_start):
    """Begin each cloud with its first row; the next sample is the first of those farthest from all before it."""
    found = []
    for begin, end in pairwise(ptr.tolist()):
        points, count = src[begin:end], int((ratio * (end - begin)).ceil())
        at = int(torch.randint(end - begin, ())) if random_start else 0
        distance = points.new_full((end - begin,), torch.inf)
        for _ in range(count):
            found.append(begin + at)
            distance = torch.minimum(distance, (points - points[at]).square().sum(1))
            at = int(distance.argmax())
    return torch.tensor(found, dtype=torch.int64)


LIBRARY.define(f"knn({POINTS}, int k, bool cosine, int num_workers) -> Tensor")
LIBRARY.define(f"radius({POINTS}, float r, int max_num_neighbors, int num_workers) -> Tensor")
for name, function in {"knn": nearest, "radius": within}.items():
    LIBRARY.impl(name, function, "CPU")  # like torch_cluster: no kernel for tensors without data
    runtime.active.registry.register_named(f"shardfield_tests.{name}.default", edges)


LIBRARY.define("fps(Tensor src, Tensor ptr, Tensor ratio, bool random_start) -> Tensor")
LIBRARY.impl("fps", farthest, "CPU")
runtime.active.registry.register_named("shardfield_tests.fps.default", samples)


def knn(x, y, k, ptr_x=None, ptr_y=None):
    return torch.ops.shardfield_tests.knn(x, y, ptr_x, ptr_y, k, False, 1)


def radius(x, y, r, ptr_x=None, ptr_y=None, most=32):
    return torch.ops.shardfield_tests.radius(x, y, ptr_x, ptr_y, r, most, 1)


def fps(x, ratio, batch=None, random_start=False):
    """Sample as torch_cluster's function of this name does, before it calls the operator."""
    if batch is None:
        ptr = torch.tensor([0, len(x)])
    else:
        counts = x.new_zeros(2, dtype=torch.int64).scatter_add_(0, batch, torch.ones_like(batch))
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    ratio = torch.tensor(ratio, dtype=x.dtype)
    return torch.ops.shardfield_tests.fps(x, ptr, ratio, random_start)


def coarse(x, ratio):
    """Pool the features of the points nearest to each sample, as PointNet++ does."""
    chosen = x[fps(x.detach(), ratio)]
    query, point = knn(x.detach(), chosen.detach(), 3)
    return chosen + torch.zeros_like(chosen).index_reduce(0, query, x[point], "amax", include_self=False)


def ptr(*rows):
    return T(len(rows), fill=lambda shape, generator: torch.tensor(rows))


def graph(x, k):
    """Sum the features of the nearest points, as a layer of a graph network does."""
    query, point = knn(x.detach(), x.detach(), k)
    return torch.zeros_like(x).index_add(0, query, x[point])


CASES = [
    case(knn, T(9, 3), T(7, 3), 2, options=SOME),
    case(knn, T(3, 2), T(5, 2), 4, options=FEW),  # fewer points than neighbors
    case(knn, T(4, 2), T(0, 2), 2, options=FEW),
    case(radius, T(9, 2), T(7, 2), 1.0, options=SOME),
    case(radius, T(9, 2), T(7, 2), 2.0, None, None, 3, options=FEW),
    case(radius, T(9, 2), T(7, 2), 0.0, options=FEW),  # no edges
    case(graph, T(9, 3), 3, options=SOME),
    case(knn, T(9, 3), T(7, 3), 2, ptr(0, 4, 9), ptr(0, 5, 7), options=SOME | {"name": "knn of a batch"}),
    case(radius, T(9, 2), T(7, 2), 2.0, ptr(0, 0, 6, 9), ptr(0, 3, 5, 7), options=SOME | {"name": "radius of a batch"}),
    case(knn, T(9, 3), T(7, 3), 0, options=FEW | raises(RuntimeError, "k must be positive")),
    case(fps, T(9, 3), 0.5, options=SOME),
    case(fps, T(5, 2), 1.0, options=FEW),
    case(
        fps,
        T(6, 2, fill=lambda shape, generator: torch.ones(shape)),
        0.7,
        options=FEW | {"name": "fps of equal points"},
    ),
    case(
        fps,
        T(9, 3),
        0.4,
        T(9, fill=lambda *_: torch.tensor([0] * 5 + [1] * 4)),
        options=SOME | {"name": "fps of a batch"},
    ),
    case(coarse, T(11, 3), 0.4, options=SOME),
]
