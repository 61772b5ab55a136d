"""Neighbor search against brute force on one device: every sharding, ties, duplicates, gradients, bytes sent."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardfield import ShardTensor, explain, knn, partition_points, radius_search, runtime
from shardfield.dispatch.registry import run_backward
from shardfield.layout import Layout
from shardfield.neighbors import brute, distributed_search, kernel, local, tree
from shardfield.neighbors.metric import squared_distance
from shardfield.testing import run_on_ranks
from tests import triton_interpreter as texts
from tests.harness import MESHES, Case, T, check_case, local_shard, world_mesh

# ---------------------------------------------------------------------- brute-force reference


def distances(points, queries):
    """Return the distances of all pairs; a distance of zero has gradient zero."""
    total = squared_distance(queries[:, None], points)
    return torch.where(total > 0, torch.where(total > 0, total, 1).sqrt(), 0)


def order_of(points, queries):
    return squared_distance(queries.detach()[:, None], points.detach()).sort(dim=1, stable=True)[1]


def all_pairs_knn(points, queries, k):
    index = order_of(points, queries)[:, :k]
    return index, distances(points, queries).gather(1, index)


def all_pairs_radius(points, queries, radius, most=None):
    index, every = order_of(points, queries), distances(points, queries)
    counts = (every <= radius).sum(1)
    width = int(counts.max()) if most is None else most
    counts = counts.clamp_max(width)
    index = torch.nn.functional.pad(index, (0, max(0, width - index.shape[1])), value=-1)[:, :width]
    inside = torch.arange(width) < counts[:, None]
    index = torch.where(inside, index, -1)
    return index, torch.where(inside, every.gather(1, index.clamp_min(0)), torch.inf), counts


def either(ours, reference):
    """Return a function that calls `ours` on ShardTensors and `reference` on plain tensors."""

    def call(points, queries, *args):
        sharded = isinstance(points, ShardTensor) or isinstance(queries, ShardTensor)
        return (ours if sharded else reference)(points, queries, *args)

    return call


def lattice(shape, generator):
    """Draw points with many duplicates and equal distances, exact in float64 and float32."""
    return torch.randint(3, shape, generator=generator).double()


def clusters(shape, generator):
    """Draw three clusters far apart, the rows of each contiguous."""
    centres = torch.tensor([-50.0, 0.0, 80.0], dtype=torch.float64).repeat_interleave(-(-shape[0] // 3))[: shape[0]]
    return centres[:, None] + torch.randn(shape, dtype=torch.float64, generator=generator)


NEAR, WITHIN = either(knn, all_pairs_knn), either(radius_search, all_pairs_radius)
CASES = [
    Case(NEAR, (T(17, 3), T(9, 3), 4), name="knn"),
    Case(NEAR, (T(5, 2), T(6, 2), 5), name="knn of all"),
    Case(NEAR, (T(23, 2, fill=lattice), T(11, 2, fill=lattice), 7), name="knn with ties", try_partial=False),
    Case(NEAR, (T(18, 2, fill=clusters), T(9, 2, fill=clusters), 5), name="knn of clusters", try_partial=False),
    Case(NEAR, (T(7, 1), T(0, 1), 2), name="knn of nobody"),
    Case(WITHIN, (T(17, 2), T(9, 2), 0.8), name="radius"),
    Case(WITHIN, (T(23, 2, fill=lattice), T(11, 2, fill=lattice), 1.0), name="radius with ties", try_partial=False),
    Case(WITHIN, (T(17, 2), T(9, 2), 1.0, 3), name="radius and most"),
    Case(WITHIN, (T(4, 2), T(3, 2), 1.0, 6), name="radius and more"),
    Case(WITHIN, (T(8, 2), T(5, 2), 0.0), name="radius of zero"),
]
LAYOUTS = int(os.environ.get("SHARDFIELD_LAYOUTS", 4))


def run_case(number, mesh_shape):
    """Check a case by all pairs with all visits in flight, then by tree with one visit at a time."""
    case, results = CASES[number], []
    case.layouts = LAYOUTS
    for seed, settings in enumerate([(distributed_search.MAX_INCOMING_BYTES, local.TREE_PAIRS), (0, 0)]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed_search, "MAX_INCOMING_BYTES", settings[0])
            patch.setattr(local, "TREE_PAIRS", settings[1])
            results += check_case(case, mesh_shape, seed)
    return results


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[c.name for c in CASES])
def test_any_sharding(number, mesh):
    results = run_on_ranks(run_case, torch.Size(mesh).numel(), number, mesh, timeout=240)
    assert not [line for lines in results for line in lines]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[c.name for c in CASES])
def test_references_run(number):
    """A case whose reference raises would check nothing."""
    case = CASES[number]
    values = [a.make(torch.Generator().manual_seed(0)) if isinstance(a, T) else a for a in case.args]
    for got, ref in zip((knn if case.fn is NEAR else radius_search)(*values), case.fn(*values), strict=True):
        assert torch.equal(got, ref)


# ---------------------------------------------------------------------- one device


def cloud(kind, n, features, dtype):
    generator = torch.Generator().manual_seed(n + features)
    x = torch.randn(n, features, dtype=torch.float64, generator=generator)
    if kind == "duplicates":
        x = x[torch.randint(max(n // 40, 1), (n,), generator=generator)]
    elif kind == "lattice":
        x = torch.randint(6, (n, features), generator=generator) / 3.0
    elif kind == "clusters":
        x = x * 1e-6 + torch.randint(4, (n, 1), generator=generator) * 1000
    elif kind == "one":
        x = x[:1].expand(n, features).clone()
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "duplicates", "lattice", "clusters", "one"])
@pytest.mark.parametrize("how", ["pairs", "blocks", "tree"])
def test_plain(how, kind, dtype, monkeypatch):
    monkeypatch.setattr(local, "TREE_PAIRS", 0 if how == "tree" else 1 << 62)
    if how == "blocks":
        monkeypatch.setattr(brute, "POINTS_PER_CHUNK", 100)
        monkeypatch.setattr(brute, "PAIRS_PER_CHUNK", 1000)
    for n, m, features, k in ((700, 50, 3, 17), (640, 30, 1, 3), (90, 20, 7, 90)):
        points, queries = cloud(kind, n, features, dtype), cloud(kind, n, features, dtype)[3 : 3 + m] + 0.25
        wide = (
            points.float() if dtype is torch.bfloat16 else points,
            queries.float() if dtype is torch.bfloat16 else queries,
        )
        index, distance = knn(points, queries, k)
        ref_index, ref = all_pairs_knn(*wide, k)
        assert torch.equal(index, ref_index) and torch.equal(distance, ref.to(dtype))
        radius = float(ref[:, min(k, 5) - 1].median())
        for got, want in zip(radius_search(points, queries, radius), all_pairs_radius(*wide, radius), strict=True):
            assert torch.equal(got, want.to(got.dtype))


def test_memory_of_brute_force_is_bounded(monkeypatch):
    """No block of distances exceeds the limit, for any number of points."""
    seen = []
    monkeypatch.setattr(brute, "squared_distance", lambda a, b: seen.append(len(a) * len(b)) or squared_distance(a, b))
    monkeypatch.setattr(local, "TREE_PAIRS", 1 << 62)
    monkeypatch.setattr(brute, "PAIRS_PER_CHUNK", 4096)
    monkeypatch.setattr(brute, "POINTS_PER_CHUNK", 256)
    knn(torch.randn(3000, 3), torch.randn(200, 3), 5)
    assert max(seen) <= 4096 and sum(seen) == 3000 * 200


def test_without_scipy(monkeypatch):
    monkeypatch.setattr(tree, "kdtree_class", lambda: None)
    points, queries = cloud("lattice", 3000, 3, torch.float32), cloud("lattice", 100, 3, torch.float32)
    assert 3000 * 100 > local.TREE_PAIRS
    for got, want in zip(knn(points, queries, 9), all_pairs_knn(points, queries, 9), strict=True):
        assert torch.equal(got, want)


def test_kernel_is_for_cuda():
    x = torch.zeros(4, 3)
    assert not kernel.supports(x, x, 2)


@pytest.fixture
def text(monkeypatch):
    """Provide the kernel interpreted on the CPU, with other tile sizes if set."""

    def of(**sizes):
        for name, size in sizes.items():
            monkeypatch.setattr(kernel, name, size)

    of(jit=texts.jit, tl=None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return of


@pytest.mark.parametrize("kind", ["normal", "lattice", "clusters", "one"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("n", "m", "features", "k"), [(300, 21, 3, 17), (40, 3, 2, 40), (9, 5, 1, 1), (1700, 2, 3, 5)])
def test_interpreted_kernel(n, m, features, k, ordered, kind, text):
    """Check which points the kernel returns, and in which order."""
    text(TILE=16, BOXES=4, CHUNKS=2, QUERIES=4)
    points, queries = cloud(kind, n, features, torch.float32), cloud(kind, m, features, torch.float32)
    squares, index = kernel.PointTiles(points, ordered).nearest(queries, k)
    assert (
        texts.last_launch_options["enable_fp_fusion"] is False
    )  # else distances differ in the last bit from the other algorithms
    want, distance = all_pairs_knn(points, queries, k)
    assert torch.equal(index, want) and torch.equal(squares.sqrt(), distance)


def test_kernel_visits_few_tiles(text):
    """With points in spatial order hardly any tile is visited, whatever the input order."""
    text(TILE=16, BOXES=8, CHUNKS=64, PROGRAMS=1)
    points, queries = cloud("normal", 4000, 3, torch.float32), cloud("normal", 8, 3, torch.float32)
    want, distance = all_pairs_knn(points, queries, 5)
    visited, chunks = {}, {}
    for ordered in (False, True):
        texts.load_counts.clear()
        squares, index = kernel.PointTiles(points, ordered).nearest(queries, 5)
        assert torch.equal(index, want) and torch.equal(squares.sqrt(), distance)
        visited[ordered] = texts.load_counts[16] / 4 / (len(queries) / kernel.QUERIES)  # three coordinates and a number
        chunks[ordered] = texts.load_counts[8] / 6 / (len(queries) / kernel.QUERIES)  # two corners of three coordinates
    assert visited[True] < 40 and visited[False] > 200, visited  # of 250
    assert chunks[True] < 12 and chunks[False] > 30, chunks  # of 32


def test_spatial_order_is_cached(monkeypatch):
    """Few queries do not trigger a sort; later ones use the cached order."""
    monkeypatch.setattr(kernel, "MIN_PAIRS_TO_SORT", 1000)
    held = local.LocalPoints(torch.randn(100, 3))
    few = held._get_tiles(5)
    many = held._get_tiles(20)
    assert not few.ordered and many.ordered and held._get_tiles(1) is many is held._get_tiles(50)


def test_second_derivatives():
    generator = torch.Generator().manual_seed(5)
    points, queries = (torch.randn(n, 2, dtype=torch.float64, generator=generator).requires_grad_() for n in (8, 4))
    assert torch.autograd.gradcheck(lambda p, q: knn(p, q, 3)[1], (points, queries))
    assert torch.autograd.gradgradcheck(lambda p, q: knn(p, q, 3)[1], (points, queries))


def test_zero_distance_has_zero_gradient():
    points = torch.zeros(3, 2, requires_grad=True)
    knn(points, points.detach()[:1], 3)[1].sum().backward()
    assert torch.equal(points.grad, torch.zeros(3, 2))


# ---------------------------------------------------------------------- errors on all ranks


@pytest.mark.parametrize(
    ("points", "queries", "k", "why"),
    [
        (torch.zeros(4, 3), torch.zeros(2, 3), 5, "k = 5 neighbors of 4 points"),
        (torch.zeros(4, 3), torch.zeros(2, 3), 0, "k must be from 1 to 4"),
        (torch.zeros(0, 3), torch.zeros(2, 3), 1, "there are no points"),
        (torch.zeros(4, 3), torch.zeros(2, 2), 1, "3 features and queries 2"),
        (torch.zeros(4), torch.zeros(2, 2), 1, r"points is \(4,\)"),
        (torch.zeros(4, 3), torch.zeros(2, 3, dtype=torch.int64), 1, "floating point"),
        (torch.full((4, 3), torch.nan), torch.zeros(2, 3), 1, "finite"),
        (torch.zeros(4, 3), torch.full((2, 3), 1e30), 1, "not beyond"),
    ],
)
def test_bad_arguments(points, queries, k, why):
    with pytest.raises(ValueError, match=why):
        knn(points, queries, k)


def refusals():
    """Return, on each of four ranks, the errors that only one rank can detect, and one that all do."""
    mesh, results = world_mesh((2, 2)), []
    for bad in ("points", "queries", "k"):
        points, queries = torch.randn(9, 2), torch.randn(7, 2)
        if bad == "points":
            points[0, 0] = torch.inf
        if bad == "queries":
            queries[6, 1] = torch.nan
        layouts = Layout.of(mesh, [Shard(0), Replicate()], (9, 2)), Layout.of(mesh, [Replicate(), Shard(0)], (7, 2))
        p, q = (ShardTensor(local_shard(x, w), w) for x, w in zip((points, queries), layouts, strict=True))
        try:
            knn(p, q, 10 if bad == "k" else 2)
        except ValueError as error:
            results.append(str(error)[:22])
    return results


def test_all_ranks_refuse():
    results = run_on_ranks(refusals, 4, timeout=60)
    assert results == [["knn: coordinates must ", "knn: coordinates must ", "knn: k = 10 neighbors "]] * 4


# ---------------------------------------------------------------------- messages

N, K = 4096, 8


def sent(kind, gradient):
    """Return, on each of four ranks, the bytes of a search, the explained strategy, and whether the result is right."""
    mesh = world_mesh((4,))
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(N, 3, generator=generator)
    queries = torch.rand(256, 3, generator=generator)
    if kind == "clusters":  # a cluster on each rank, with its queries
        points[:, 0] += torch.arange(N) // (N // 4) * 100
        queries[:, 0] += torch.arange(256) // 64 * 100
    elif kind == "sorted":  # adjacent slabs
        points, queries = points[points[:, 0].argsort()], queries[queries[:, 0].argsort()]
    elif kind == "few points":
        points = points[:40]
    layouts = [Layout.of(mesh, [Shard(0)], x.shape) for x in (points, queries)]
    p, q = (
        ShardTensor(local_shard(x, w), w).requires_grad_(gradient)
        for x, w in zip((points, queries), layouts, strict=True)
    )
    with explain() as report:
        index, distance = knn(p, q, K)
    (row,) = report.rows
    if gradient:
        with explain() as back:
            run_backward([distance], [torch.ones(256, K)], None, False, None)
        row.bytes += back.bytes
    ref = all_pairs_knn(points, queries, K)
    right = torch.equal(index.full_tensor(), ref[0]) and torch.equal(distance.full_tensor(), ref[1])
    return row.bytes, row.ending, right


SMALL = 3 * (16 * 7 * 4 + 4 * 8) + 2  # boxes and a row of counts to three ranks, and whether all is finite
QUERY = (3 + 2 * K) * 4  # a query sent, its neighbors returned
ROWS = 64 * K * (8 + 2 * 12) + 3 * 4 * 8 + 2  # an index, a row and its gradient per neighbor


@pytest.mark.parametrize(
    ("kind", "gradient", "ending", "bound"),
    [
        ("clusters", False, "rule: bounding boxes alone", SMALL),
        (
            "clusters",
            True,
            "rule: bounding boxes alone",
            SMALL + 3 * 4 * 8 + 2 + 3,
        ),  # no rows are requested, which takes a consensus
        (
            "sorted",
            False,
            "rule: queries to points",
            SMALL + 48 * QUERY,
        ),  # only queries near a face
        ("sorted", True, "rule: queries to points", SMALL + 48 * QUERY + ROWS / 2 + 3),
        (
            "random",
            False,
            "rule: queries to points",
            SMALL + 3 * 64 * QUERY + 300,
        ),  # queries alone are sent
        (
            "few points",
            False,
            "rule: points to queries",
            SMALL + 3 * 10 * 12 + 3 * 4 * 8,
        ),  # fewer bytes
    ],
)
def test_bytes(kind, gradient, ending, bound):
    results = run_on_ranks(sent, 4, kind, gradient, timeout=60)
    assert [(how, right) for _, how, right in results] == [(ending, True)] * 4
    assert max(nbytes for nbytes, _, _ in results) <= bound


def registered():
    """Check that a user's handler replaces the search."""
    layout = Layout.of(world_mesh((1,)), [Shard(0)], (4, 2))
    x = ShardTensor(torch.zeros(4, 2), layout)
    before = runtime.active.registry.handlers[knn]
    ShardTensor.register_function_handler(knn, lambda func, types, args, kwargs: "mine")
    try:
        return knn(x, x, k=2)
    finally:
        ShardTensor.register_function_handler(knn, before)


def test_user_handler():
    assert run_on_ranks(registered, 1) == ["mine"]


def with_dtensors():
    """Check a search over DTensors."""
    mesh = world_mesh((2,))
    x = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    held = distribute_tensor(x, mesh, [Shard(0)])
    index, distance = knn(held, held, 3)
    want = all_pairs_knn(x, x, 3)
    return torch.equal(index.full_tensor(), want[0]) and torch.equal(distance.full_tensor(), want[1])


def on_a_field():
    """Check a search over the cells of a field sharded along its second dim, as points and as queries."""
    layout = Layout.of(world_mesh((2,)), [Shard(1)], (3, 4, 2), {1: (3, 1)})
    x = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    held = ShardTensor(local_shard(x.detach(), layout).requires_grad_(), layout)
    index, distance = knn(held.reshape(12, 2), held.reshape(12, 2) + 0.1, 3)
    want = all_pairs_knn(x.reshape(12, 2), x.reshape(12, 2) + 0.1, 3)
    (distance**2).sum().backward()
    (want[1] ** 2).sum().backward()
    same = torch.allclose(held.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-10)
    return same and torch.equal(index.full_tensor(), want[0]) and torch.equal(distance.full_tensor(), want[1])


def test_cells_of_a_field():
    assert run_on_ranks(on_a_field, 2, timeout=60) == [True, True]


def test_dtensors():
    assert run_on_ranks(with_dtensors, 2, timeout=60) == [True, True]


# ---------------------------------------------------------------------- spatial order


def spread_of(points, parts):
    """Return the mean volume of the boxes around equal parts."""
    return torch.stack([(p.amax(0) - p.amin(0)).prod() for p in points.tensor_split(parts)]).mean()


def test_partition_of_plain_points():
    points = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
    order, moved = partition_points(points)
    assert torch.equal(order.sort()[0], torch.arange(4000)) and torch.equal(moved, points[order])
    assert spread_of(moved, 8) < 0.3 * spread_of(points, 8)
    same = torch.ones(5, 2)
    assert partition_points(same)[0].tolist() == [0, 1, 2, 3, 4]
    assert partition_points(points[:0])[0].tolist() == []
    with pytest.raises(ValueError, match="finite"):
        partition_points(torch.full((3, 2), torch.nan))


def partitions(mesh_shape):
    """Compare, on each rank, orders of sharded points with that of the global points."""
    mesh, results = world_mesh(mesh_shape), []
    points = torch.randn(23, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want, moved = partition_points(points)
    names = [Shard(0), Shard(1), Replicate()]
    for placed in ([a] + [b] * (mesh.ndim - 1) for a in names for b in names):
        layout = Layout.of(mesh, placed, points.shape)
        held = ShardTensor(local_shard(points, layout).requires_grad_(), layout)
        order, got = partition_points(held)
        even = max(got._layout.shard_sizes(0)) - min(got._layout.shard_sizes(0)) <= 1
        right = torch.equal(order.full_tensor(), want) and torch.equal(got.full_tensor(), moved)
        (got * moved).sum().backward()
        results.append(even and right and torch.equal(held.grad.full_tensor(), points))
    order, got = partition_points(points, mesh)
    return results + [torch.equal(order.full_tensor(), want) and torch.equal(got.full_tensor(), moved)]


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_partition_of_sharded_points(mesh):
    results = run_on_ranks(partitions, torch.Size(mesh).numel(), mesh, timeout=60)
    assert all(all(t) for t in results), results
