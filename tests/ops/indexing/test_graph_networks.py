"""Graph networks on unevenly sharded nodes and edges equal one device and send only rows of remote nodes."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor, explain, partition_points
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, no_gathers, to_full_tensor, world_mesh

NODES, EDGES, WIDTH = 11, 40, 3


def mlp(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 8), nn.SiLU(), nn.Linear(8, outputs), nn.LayerNorm(outputs)]
    return nn.Sequential(*layers)


class MeshGraphNet(nn.Module):
    """One processor block: edges are updated from their nodes, nodes from the sum of their edges, with residuals."""

    def __init__(self):
        super().__init__()
        self.edge, self.node = mlp(3 * WIDTH, WIDTH), mlp(2 * WIDTH, WIDTH)

    def forward(self, nodes, edge_index, edges):
        source, target = edge_index
        edges = edges + self.edge(torch.cat([nodes[source], nodes[target], edges], -1))
        summed = torch.zeros(nodes.shape, dtype=nodes.dtype).index_add_(0, target, edges)
        return nodes + self.node(torch.cat([nodes, summed], -1)), edges


class Gathered(nn.Module):
    """The same aggregation by elementwise indexing: gather, scatter_reduce of any kind, take_along_dim."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes, edge_index, edges):
        source, target = (row.view(-1, 1).expand(-1, WIDTH) for row in edge_index)
        message = torch.relu(self.mix(torch.gather(nodes, 0, source))) * edges
        found = [torch.zeros_like(nodes).scatter_reduce(0, target, message, how) for how in ("mean", "amax", "amin")]
        found.append(nodes.new_ones(nodes.shape).scatter_add(0, target, torch.take_along_dim(nodes, source[:, :1], 0)))
        found.append(nodes.index_reduce(0, edge_index[1], message, "amax"))
        return torch.cat(found, 1)


@functools.cache
def pyg() -> Any:
    """Import torch_geometric, which imports deprecated parts of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_geometric.nn
    return torch_geometric.nn


class Two(nn.Module):
    """Two layers with an activation in between that makes ties."""

    def __init__(self, name: str, edge: int = 0, **how):
        super().__init__()
        layer = getattr(pyg(), name)
        self.first, self.second = layer(WIDTH, 4, **how), layer(4 * how.get("heads", 1), 2, **how)
        self.edge = edge

    def forward(self, nodes, edge_index, edges):
        more = {1: (edges[:, 0].exp(),), 3: (edges,)}.get(self.edge, ())
        return self.second(torch.relu(self.first(nodes, edge_index, *more)), edge_index, *more)


MODELS = {
    "MeshGraphNet": MeshGraphNet,
    "elements": Gathered,
    "GCNConv": lambda: Two("GCNConv"),
    "GCNConv, weighted": lambda: Two("GCNConv", edge=1),
    "SAGEConv mean": lambda: Two("SAGEConv"),
    "SAGEConv max": lambda: Two("SAGEConv", aggr="max"),
    "GATConv": lambda: Two("GATConv", heads=2),
    "GATConv, edge features": lambda: Two("GATConv", edge=3, edge_dim=WIDTH),
}
SHARDINGS = {2: ((8, 3), (13, 27)), 3: ((6, 0, 5), (20, 3, 17)), 4: ((6, 1, 0, 4), (20, 0, 3, 17))}


def layouts(mesh) -> list[tuple[Layout, Layout | None]]:
    """Return layouts of nodes, and of edges (None: plain on every rank)."""

    def of(placements, size, lengths):
        return Layout.of(mesh, placements, size, {0: lengths})

    if mesh.ndim == 1:
        nodes, edges = SHARDINGS[mesh.size()]
        node_layout = of([Shard(0)], (NODES,), nodes)
        return [(node_layout, of([Shard(0)], (EDGES,), edges)), (node_layout, None)]
    nodes, edges = SHARDINGS[2]
    one, other = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    nested = of([Shard(0), Shard(0)], (NODES,), SHARDINGS[4][0])
    return [
        (of(one, (NODES,), nodes), of(one, (EDGES,), edges)),
        (of(one, (NODES,), nodes), of(other, (EDGES,), edges)),
        (nested, of([Shard(0), Shard(0)], (EDGES,), SHARDINGS[4][1])),
        (nested, None),
    ]


def placed(value: torch.Tensor, along: Layout | None, dim: int) -> torch.Tensor:
    """Shard a tensor along `dim` like a 1-d layout."""
    if along is None:
        return value.clone()
    layout = Layout.replicate(along.mesh, value.shape).with_dim(dim, *along.dims[0])
    return ShardTensor(local_shard(value, layout), layout)


def results(model: nn.Module, nodes, edge_index, edges) -> tuple[list[torch.Tensor], Any]:
    """Return outputs, the gradients of nodes, edge features and parameters, and the layout of the first output."""
    model.zero_grad()
    supplied = [nodes.requires_grad_(), edges.requires_grad_()]
    out = model(nodes, edge_index, edges)
    out = out if isinstance(out, tuple) else (out,)
    weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape) for o in out]
    sum((o * w).sum() for o, w in zip(out, weights, strict=True)).backward()
    grads = [t.grad for t in (*supplied, *model.parameters()) if t.grad is not None]
    return [to_full_tensor(t).detach().clone() for t in (*out, *grads)], getattr(out[0], "_layout", None)


def graph() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    nodes, edges = (torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for n in (NODES, EDGES))
    return [nodes, torch.randint(NODES, (2, EDGES), generator=generator), edges]


@functools.cache
def part_of_four(mesh_shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh among four ranks, which have torch_geometric imported: two pairs, three ranks, or all."""
    if mesh_shape == (2,):
        return world_mesh((2, 2))["w"]
    return DeviceMesh("cpu", torch.arange(3)) if mesh_shape == (3,) else world_mesh(mesh_shape)


def compare(mesh_shape: tuple[int, ...]) -> list[str]:
    """Return, on each rank, what differs from one device."""
    wrong: list[str] = []
    mesh = part_of_four(mesh_shape)
    if mesh.get_coordinate() is None:
        return wrong
    nodes, edge_index, edges = graph()
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().double()
        wanted, _ = results(model, nodes.clone(), edge_index, edges.clone())
        for along, edge_layout in layouts(mesh):
            supplied = [placed(nodes, along, 0), placed(edge_index, edge_layout, 1), placed(edges, edge_layout, 0)]
            with no_gathers():
                found, where = results(model, *supplied)
            if len(found) != len(wanted):
                wrong.append(f"{name} with {along}, {edge_layout}: {len(found)} values, should be {len(wanted)}")
            for i, (a, b) in enumerate(zip(found, wanted, strict=False)):
                if not torch.allclose(a, b, rtol=1e-10, atol=1e-10):
                    wrong.append(f"{name} with {along}, {edge_layout}: value {i} is off by {(a - b).abs().max()}")
            adds_axes = edge_layout is not None and set(edge_layout.shard_axes) - set(along.shard_axes)
            if where.dims[0] != along.dims[0] and not adds_axes:
                wrong.append(f"{name} with {along}, {edge_layout}: nodes are now {where}")
    return wrong


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_models(mesh):
    for wrong in run_on_ranks(compare, 4, mesh, timeout=120):
        assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------- messages

CACHED, NEW = "rule: rows by cached lists", "rule: rows by new lists"
ROW = WIDTH * 8
CONSENSUS = 5  # bytes of a consensus of three ranks on four flags


def sent(call, *values) -> tuple[str, int, int]:
    """Return the explained strategy of an index call, and the bytes this rank sent, forward and backward."""
    with explain() as report:
        local = call(*values)._local_tensor
        torch.autograd.backward(local, torch.ones_like(local))
    (row,) = [r for r in report.rows if "rows" in r.ending]
    return row.ending, row.bytes, row.back_bytes


def halo() -> None:
    """Check that each remote row is sent once, and that cached exchange lists send no index."""
    mesh, me = world_mesh((3,)), torch.distributed.get_rank()
    nodes, edge_index, edges = graph()
    along, edge_layout = layouts(mesh)[0]
    index, messages = placed(edge_index, edge_layout, 1), placed(edges, edge_layout, 0)
    named = [[set(shard[end].tolist()) for shard in edge_index.split(SHARDINGS[3][1], 1)] for end in (0, 1)]
    owned = [set(range(*along.span(0, (r,)))) for r in range(3)]
    for end in (0, 1):
        halo_of(index[end], named[end], owned, me, placed(nodes, along, 0), messages)


def halo_of(index, named, owned, me, nodes, messages) -> None:
    """Check one end of the edges: `named` and `owned` are each rank's nodes."""
    others = [r for r in range(3) if r != me]
    requested = sum(len(named[me] & owned[r]) for r in others)
    supplied = sum(len(named[r] & owned[me]) for r in others)
    lists = 2 * 3 * 8 + requested * 8  # three counts to two ranks, and the requested indices
    wide = index.view(-1, 1).expand(-1, WIDTH)
    ways = [
        lambda x: x.index_select(0, index),
        lambda x: x.index_select(0, index),
        lambda x: x[index],
        lambda x: torch.gather(x, 0, wide),
        lambda x: x.unsqueeze(0).index_select(1, index),
    ]
    results = [sent(way, nodes.detach().requires_grad_()) for way in ways]
    cached = (CACHED, supplied * ROW + CONSENSUS, requested * ROW)
    assert results == [(NEW, supplied * ROW + CONSENSUS + lists, requested * ROW), *[cached] * 4]
    # sums go back, into nodes or into zeros that are sharded like the nodes of the messages
    messages = (messages + 0 * nodes[index]).detach()
    ways = [
        lambda m: nodes.index_add(0, index, m),
        lambda m: torch.zeros(NODES, WIDTH, dtype=m.dtype).index_add_(0, index, m),
        lambda m: m.new_zeros(NODES, WIDTH).scatter_add_(0, wide, m),
        lambda m: m.new_zeros(NODES, WIDTH).scatter_reduce_(0, wide, m, "amax", include_self=False),
    ]
    results = [sent(way, messages.detach().requires_grad_()) for way in ways]
    # for a plain tensor the ranks need a consensus on whether it is aliased
    wanted = [(CACHED, requested * ROW + CONSENSUS + plain, supplied * ROW) for plain in (0, 1, 0)]
    assert results[:3] == wanted, (results, wanted)
    assert results[3][:2] == (CACHED, requested * ROW + CONSENSUS)


def test_remote_rows_are_sent_once():
    run_on_ranks(halo, 3, timeout=60)


def stale() -> None:
    """Check that a write to the index on any rank invalidates the cached exchange lists."""
    mesh = world_mesh((3,))
    nodes, edge_index, _ = graph()
    along, edge_layout = layouts(mesh)[0]
    x = placed(nodes, along, 0)
    index = placed(edge_index, edge_layout, 1)

    def same():
        taken = x[index[0]]
        assert torch.equal(to_full_tensor(taken), nodes[to_full_tensor(index)[0]])

    same()
    index[0] = (index[0] + 1) % NODES  # through the ShardTensor, on all ranks
    same()
    index.to_local().fill_(2)  # through the local tensor, on all ranks
    same()
    if torch.distributed.get_rank() == 0:  # on one rank alone
        index.to_local()[:, :1] = 7
    same()
    assert sent(lambda x: x.index_select(0, index[0]), x.detach().requires_grad_())[0] == CACHED
    os.environ["SHARDFIELD_CHECK_SIZES"] = "0"
    try:  # cached lists are used without a consensus, only rows are sent
        ending, forward, backward = sent(lambda x: x.index_select(0, index[0]), x.detach().requires_grad_())
        assert ending == CACHED and forward % ROW == backward % ROW == 0
    finally:
        del os.environ["SHARDFIELD_CHECK_SIZES"]
    index[0] = 5
    with torch.inference_mode():
        same()  # builds lists that a training step can use
    assert sent(lambda x: x.index_select(0, index[0]), x.detach().requires_grad_())[0] == CACHED
    with torch.inference_mode():  # tensors have no version counter here
        index = placed(edge_index, edge_layout, 1)
        same()
        index.to_local().fill_(3)
        same()
    with pytest.raises(IndexError):  # an error on one rank is raised on all
        bad = edge_index.clone()
        bad[0, 0] = NODES
        x[placed(bad, edge_layout, 1)[0]]


def test_exchange_lists_are_not_stale():
    run_on_ranks(stale, 3, timeout=60)


def alike() -> None:
    """Check indices of which a rank has equal views: their lists are not mixed up when they are used in turn."""
    mesh = world_mesh((3,))
    nodes = graph()[0]
    along = Layout.of(mesh, [Shard(0)], nodes.shape, {0: (1, 1, NODES - 2)})
    x = placed(nodes, along, 0)
    # A replicated index is sharded evenly where it meets nodes, and as its messages where it meets these: rank 2 has no
    # entry in both cases.
    entries = torch.tensor([NODES - 1, 3, 0, NODES - 2])
    index = ShardTensor(entries, Layout.replicate(mesh, entries.shape))
    messages = placed(nodes[:4] + 1.0, Layout.of(mesh, [Shard(0)], (4, WIDTH), {0: (4, 0, 0)}), 0)
    for _ in range(2):
        torch.testing.assert_close(to_full_tensor(x[index]), nodes[entries])
        added = x.index_add(0, index, messages)
        torch.testing.assert_close(to_full_tensor(added), nodes.index_add(0, entries, nodes[:4] + 1.0))
    # Both ends of the edges: the empty local tensor of rank 2 has strides of zero, as one of numpy has.
    both = torch.tensor([[NODES - 1, 3, 0, 1], [NODES - 2, NODES - 2, NODES - 1, 5]])
    local = both.split((3, 1, 0), 1)[torch.distributed.get_rank()]
    local = local.clone() if local.numel() else torch.zeros(0, dtype=torch.int64).as_strided((2, 0), (0, 0))
    edges = ShardTensor.from_local(local, mesh, [Shard(1)], "infer")
    for _ in range(2):
        for end in (0, 1):
            torch.testing.assert_close(to_full_tensor(x[edges[end]]), nodes[both[end]])


def test_indices_that_look_alike_on_a_rank():
    run_on_ranks(alike, 3, timeout=60)


def compact() -> None:
    """Check that points in the order of `partition_points` have few remote neighbors."""
    mesh, side = world_mesh((3,)), 24
    at = torch.stack(torch.meshgrid(*[torch.arange(float(side))] * 2, indexing="ij"), -1).view(-1, 2)
    shuffled = at[torch.randperm(len(at), generator=torch.Generator().manual_seed(0))]
    order, points = partition_points(shuffled, mesh)
    everyone = to_full_tensor(points)
    near = (torch.cdist(everyone, everyone) < 1.1).nonzero().T  # each cell and its neighbors, in the new order
    count = torch.bincount(near[0], minlength=len(at))
    sizes = [int(c.sum()) for c in count.split(list(points._layout.shard_sizes(0)))]
    edges = Layout.of(mesh, [Shard(0)], (near.shape[1],), {0: sizes})
    index = placed(near, edges, 1)
    rows = placed(everyone.double(), points._layout.drop_dims([1]), 0)
    rows[index[1]]
    with explain() as report:
        out = rows[index[1]]
    # boundary rows only, not the two thirds that are remote
    assert 0 < report.bytes < 5 * side * 2 * 8 and torch.equal(to_full_tensor(out), everyone.double()[near[1]])


def test_compact_shards_have_few_remote_rows():
    run_on_ranks(compact, 3, timeout=60)


def small_or_large() -> None:
    """Check that sums into few rows are Partial, sums into many are sharded, and explain() reports it."""
    mesh = world_mesh((3,))
    for count, width, ending in ((7, 2, "rule: partial sums of the target"), (7, 20_000, NEW)):
        edge_layout = Layout.of(mesh, [Shard(0)], (12,), {0: (5, 0, 7)})
        src, index = torch.randn(12, width), torch.arange(12) % count
        with explain() as report:
            out = torch.zeros(count, width).index_add_(0, placed(index, edge_layout, 0), placed(src, edge_layout, 0))
        (row,) = [r for r in report.rows if r.op == "index_add_"]
        assert row.ending == ending
        torch.testing.assert_close(to_full_tensor(out), torch.zeros(count, width).index_add_(0, index, src))


def test_sums_into_few_rows_are_partial():
    run_on_ranks(small_or_large, 3, timeout=60)


def written_again() -> None:
    """Check that an in-place write is seen through every alias, once, twice, and after a read."""
    mesh = world_mesh((3,))
    nodes, edge_index, edges = graph()
    along, edge_layout = layouts(mesh)[0]
    index, messages = placed(edge_index[0], edge_layout, 0), placed(edges, edge_layout, 0)
    x = placed(nodes, along, 0)
    wanted = torch.zeros(NODES, WIDTH, dtype=nodes.dtype).index_add_(0, edge_index[0], edges)
    for known in (False, True):
        if known:
            messages = messages + 0 * x[index]
        for make in (lambda: torch.zeros(NODES, WIDTH, dtype=nodes.dtype), lambda: x.new_zeros(NODES, WIDTH)):
            total = make()
            for times in (1, 2, 3):
                assert total.index_add_(0, index, messages) is total
                torch.testing.assert_close(to_full_tensor(total.sum(0)), times * wanted.sum(0))
                torch.testing.assert_close(to_full_tensor(total), times * wanted)
            total = make()
            seen = [total[:4], total.view(-1), total.detach()]
            total.index_add_(0, index, messages)
            for view, part in zip(seen, (wanted[:4], wanted.view(-1), wanted), strict=True):
                torch.testing.assert_close(to_full_tensor(view), part)
        local = torch.zeros(NODES, WIDTH, dtype=nodes.dtype)
        ShardTensor(local, Layout.replicate(mesh, local.shape)).index_add_(0, index, messages)
        torch.testing.assert_close(local, wanted)


def test_written_in_place():
    run_on_ranks(written_again, 3, timeout=60)
