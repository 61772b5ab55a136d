"""Indexing beyond the case tables: messages, views, writes into plain tensors, second derivatives."""

from __future__ import annotations

import math
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardingError, ShardTensor, runtime, strict
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import T, draw_layout, local_shard, no_gathers, world_mesh


def field(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


def make_sharded(full_value: torch.Tensor, mesh, *placements, lengths=None) -> ShardTensor:
    """Shard a global tensor over the ranks."""
    layout = Layout.of(world_mesh(mesh), placements, full_value.shape, lengths)
    return ShardTensor(local_shard(full_value, layout), layout)


class Sent:
    """Count the messages and bytes that this rank sends inside the block."""

    def __enter__(self):
        self.messages = self.nbytes = 0

        def meter(kind, messages, nbytes):
            self.messages += messages
            self.nbytes += nbytes

        runtime.active.meter = meter
        return self

    def __exit__(self, *error):
        runtime.active.meter = None


# ---------------------------------------------------------------------- views


def writes_through_views():
    x = make_sharded(field(5, 6), (3,), Shard(1), lengths={1: [4, 0, 2]})
    y = x[:, 1:4]
    y.mul_(2)
    z = x[::2, ::3]
    z += 100
    wanted = field(5, 6)
    wanted[:, 1:4] *= 2
    wanted[::2, ::3] += 100
    assert torch.equal(x.full_tensor(), wanted)
    x.mul_(0)
    assert not y.full_tensor().any()  # and a write to the view changes the tensor
    row = x[1:2]
    row[:, 5] = 7.0  # a view of a view; one rank owns the element
    assert x.full_tensor()[1, 5] == 7 and x.full_tensor().sum() == 7


def test_writes_through_views():
    run_on_ranks(writes_through_views, 3)


def rows_are_views():
    x = make_sharded(field(5, 6), (2,), Shard(0))
    row = x[1]
    with strict(), Sent() as sent:
        row.mul_(10)
        x[2] += 1
        x[4][2:] = 3.0
    assert sent.messages == 0
    wanted = field(5, 6)
    wanted[1] *= 10
    wanted[2] += 1
    wanted[4, 2:] = 3
    assert torch.equal(x.full_tensor(), wanted)
    x.mul_(2)
    assert torch.equal(row.full_tensor(), 2 * wanted[1])
    with pytest.raises(ShardingError, match="would be lost"):
        x[1, 2].mul_(2)  # a single element has no dim to shard onto its owner
    x[1, 2] = 5.0
    assert x[1, 2].item() == 5


def test_rows_of_a_sharded_dim_are_views():
    run_on_ranks(rows_are_views, 2)


# ---------------------------------------------------------------------- messages


def sends_little():
    full = torch.randn(4000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = make_sharded(full, (4,), Shard(0))
    row = full[0].nbytes
    plain = torch.tensor([5, 1700, 3999, -1])
    index = make_sharded(torch.arange(0, 4000, 100), (4,), Shard(0))  # ten entries per rank
    with strict(), Sent() as sent:
        rows = x[plain]
        assert sent.messages == 0
        assert torch.equal(rows.full_tensor(), full[plain])
        assert sent.nbytes <= 2 * len(plain) * row
    with strict(), Sent() as sent:
        rows = x[index]
        assert isinstance(rows.placements[0], Shard)
        assert sent.nbytes <= 10 * (row + 8) + 200  # a row and an index per entry, and counts
    assert torch.equal(rows.full_tensor(), full[::100])
    with strict(), Sent() as sent:
        chosen = x[x > 2]
        assert sent.nbytes <= 100  # counts
    assert torch.equal(chosen.full_tensor(), full[full > 2])
    across = make_sharded(full.T.contiguous(), (4,), Shard(1))
    with strict(), Sent() as sent:
        chosen = across[across > 2]
        assert sent.nbytes <= int((full > 2).sum()) * 16 + 400  # selected elements with their positions, and counts
    assert torch.equal(chosen.full_tensor(), full.T[full.T > 2])
    with strict(), Sent() as sent:
        across[:, ::7][across[:, ::7] > 2] = 0.0
        across[:, 5:2000] = 1.0
        across[3] = torch.zeros(4000, dtype=torch.float64)
        assert sent.messages == 0
    # A sum of sharded rows into a small grid: the rows carry no origin, so that it becomes Partial.
    with strict(), Sent() as sent:
        grid = torch.zeros(50, 8, dtype=torch.float64).index_add(
            0, make_sharded(torch.arange(4000) % 50, (4,), Shard(0)), x
        )
        assert sent.nbytes <= 100
    torch.testing.assert_close(grid.full_tensor(), full.view(80, 50, 8).sum(0))


def test_messages_follow_the_entries():
    run_on_ranks(sends_little, 4)


# ---------------------------------------------------------------------- writes into plain tensors


def plain_becomes_sharded():
    """Write sharded modes into plain zeros, as a spectral layer does."""
    modes = make_sharded(field(2, 3, 8, 5), (2,), Shard(2), lengths={2: [3, 5]})
    modes.requires_grad_()
    out = torch.zeros(2, 3, 20, 9, dtype=torch.float64)
    name = out
    with strict(), Sent() as sent:
        out[:, :, 6:14, :5] = modes * 2
    assert (sent.messages, sent.nbytes) == (1, 24)  # ranks agree that none of them holds an alias of the zeros
    assert name is out and isinstance(out, ShardTensor) and out._layout.shard_sizes(2) == (9, 11)
    wanted = torch.zeros(2, 3, 20, 9, dtype=torch.float64)
    wanted[:, :, 6:14, :5] = field(2, 3, 8, 5) * 2
    assert torch.equal(out.full_tensor(), wanted)
    (out * out).sum().backward()
    assert torch.equal(modes.grad.full_tensor(), field(2, 3, 8, 5) * 8)
    zeros = torch.zeros(2, 3, 20, 9, dtype=torch.float64)
    memory = zeros.data_ptr()
    zeros[:, :, 6:14, :5] = modes.detach().redistribute(placements=[Replicate()]) * 2
    assert torch.equal(zeros.full_tensor(), wanted) and zeros._local_tensor.data_ptr() == memory  # not copied


def test_plain_tensor_becomes_sharded():
    run_on_ranks(plain_becomes_sharded, 2)


def plain_stays(kind):
    """Check that other references to the memory of the plain tensor see the write."""
    value = make_sharded(field(3, 4), (2,), Shard(0)).requires_grad_()
    plain = torch.zeros(5, 4, dtype=torch.float64)
    held = {
        "view": lambda: plain[1:3],
        "detached": lambda: plain.detach(),
        "array": lambda: plain.numpy(),
        "view itself": lambda: None,
    }[kind]()
    if kind == "view itself":
        base = plain
        plain = base[0:5]
        held = base
    before = plain
    with warnings.catch_warnings():  # the written value is gathered, with one warning
        warnings.simplefilter("ignore")
        plain[1:4] = value
    assert plain is before and type(plain) is torch.Tensor
    wanted = torch.zeros(5, 4, dtype=torch.float64)
    wanted[1:4] = field(3, 4)
    assert torch.equal(plain, wanted)
    seen = torch.as_tensor(held)
    assert torch.equal(seen.detach(), wanted[1:3] if kind == "view" else wanted)
    (plain * plain).sum().backward()
    assert torch.equal(value.grad.full_tensor(), 2 * field(3, 4))


@pytest.mark.parametrize("kind", ["view", "detached", "array", "view itself"])
def test_aliased_plain_tensor_stays_plain(kind):
    run_on_ranks(plain_stays, 2, kind)


def plain_saved():
    """Check that a write to a plain tensor saved by autograd raises torch's error in backward."""
    with warnings.catch_warnings():
        _plain_saved()


def _plain_saved():
    value = make_sharded(field(3), (2,), Shard(0))
    plain = torch.ones(3, dtype=torch.float64)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    out = (weight * plain).sum()
    warnings.simplefilter("ignore")  # the written value is gathered, with one warning
    plain[:] = value
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    assert torch.equal(plain, field(3))
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf[:] = value
    with torch.no_grad():
        leaf[:] = value
    assert type(leaf) is torch.Tensor and torch.equal(leaf.detach(), field(3))


def test_plain_tensor_saved_by_autograd():
    run_on_ranks(plain_saved, 2)


def graph_goes_on():
    """Check that a plain tensor keeps its autograd graph."""
    weight = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    value = make_sharded(field(2, 4), (2,), Shard(1)).requires_grad_()
    made = weight * 3
    made[1:3] = value
    (made * made).sum().backward()
    wanted = torch.full((5, 4), 18.0, dtype=torch.float64)
    wanted[1:3] = 0
    assert torch.equal(weight.grad, wanted)
    assert torch.equal(value.grad.full_tensor(), 2 * field(2, 4))


def test_plain_tensor_keeps_its_graph():
    run_on_ranks(graph_goes_on, 2)


# ---------------------------------------------------------------------- second derivatives

SECOND = [
    (lambda x: x[1:, ::2], (T(5, 6),)),
    (lambda x: x[2], (T(5, 6),)),
    (lambda x: x[torch.tensor([0, 3, 3])], (T(5, 6),)),
    (lambda x: x.gather(0, torch.tensor([[4, 1, 0, 2, 2, 3]])), (T(5, 6),)),
    (lambda x, v: torch.scatter_add(x, 0, torch.tensor([[4, 1, 0, 2, 2, 3]]), v), (T(5, 6), T(1, 6))),
    (lambda x, v: torch.index_add(x, 0, torch.tensor([1, 1, 4]), v), (T(5, 6), T(3, 6))),
    (lambda x: x[torch.arange(30).view(5, 6) % 3 == 1], (T(5, 6),)),
    (lambda x: x.diagonal(), (T(5, 6),)),
    (lambda x: x.unfold(0, 3, 1), (T(7, 2),)),
]


def second_order(fn, inputs, generator):
    out = fn(*inputs)
    seed = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    first = torch.autograd.grad(torch.sin(out), inputs, seed, create_graph=True)
    loss = sum((g * g * torch.randn(g.shape, dtype=g.dtype, generator=generator)).sum() for g in first)
    return [*first, *torch.autograd.grad(loss, inputs)]


def compare_second(mesh_shape, row, draws):
    fn, tensors = SECOND[row]
    mesh = world_mesh(mesh_shape)
    values = [t.make(torch.Generator().manual_seed(i)) for i, t in enumerate(tensors)]
    wanted = second_order(fn, [v.clone().requires_grad_() for v in values], torch.Generator().manual_seed(7))
    for number in range(draws):
        rng = random.Random(f"{row} {number}")
        layouts = [draw_layout(mesh, t, rng, try_partial=True) for t in tensors]
        given = [ShardTensor(local_shard(v, x).requires_grad_(), x) for v, x in zip(values, layouts, strict=True)]
        with no_gathers():
            found = second_order(fn, given, torch.Generator().manual_seed(7))
        for got, ref in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                got.full_tensor(), ref, rtol=1e-9, atol=1e-9, msg=lambda m, x=layouts: f"{x} {m}"
            )


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("row", range(len(SECOND)))
def test_second_derivatives(row, mesh):
    run_on_ranks(compare_second, math.prod(mesh), mesh, row, 6)


# ---------------------------------------------------------------------- an embedding table sharded by rows


def vocabulary():
    """Train a model with a sharded embedding table: lookups are Partial, of the size of the result."""
    table = torch.nn.Embedding(11, 4, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(field(11, 4))
    weight = make_sharded(field(11, 4), (3,), Shard(0)).requires_grad_()
    tokens = torch.tensor([[0, 10, 3], [3, 7, 7]])
    with strict():
        out = F.embedding(tokens, weight)
    assert out.placements[0].is_partial()
    assert torch.equal(out.full_tensor(), table(tokens))
    (out * out).sum().backward()
    (table(tokens) ** 2).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), table.weight.grad)
    mixed = make_sharded(tokens, (3,), Replicate())
    assert torch.equal(F.embedding(mixed, weight).full_tensor(), table(tokens))


def test_sharded_embedding_table():
    run_on_ranks(vocabulary, 3)
