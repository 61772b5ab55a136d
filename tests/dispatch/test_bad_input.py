"""Bad input raises the same clear error on every rank, and no rank is left in a collective."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardingError, ShardTensor, lockstep, scatter_tensor
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, world_mesh

HUGE = 2**63 - 1
ROWS = Shard(0)


def field(mesh: tuple[int, ...] = (2,), placements=(ROWS,), sizes=(4, 2)) -> ShardTensor:
    full_value = torch.arange(18.0, dtype=torch.float64).view(6, 3)
    layout = Layout.of(world_mesh(mesh), placements, full_value.shape, {0: sizes} if sizes else None)
    return ShardTensor(local_shard(full_value, layout), layout)


def results(call: Callable, kind: type[Exception] = ShardingError) -> str:
    """Return the text of the error that a call raises, and check that collectives still work afterwards."""
    with pytest.raises(kind) as error:
        call()
    assert torch.equal(field().full_tensor(), torch.arange(18.0, dtype=torch.float64).view(6, 3))
    return str(error.value)


# ---------------------------------------------------------------------- layouts

LAYOUTS: dict[str, tuple[Callable, str]] = {
    "a missing dim": (lambda: field().redistribute(placements=[Shard(2)]), "does not have"),
    "a missing dim, counted back": (lambda: field().redistribute(placements=[Shard(-3)]), "does not have"),
    "local tensors without the sharded dim": (
        lambda: ShardTensor.from_local(torch.zeros(2, 3), world_mesh((2,)), [Shard(2)]),
        "do not have",
    ),
    "a missing dim to scatter": (
        lambda: scatter_tensor(torch.zeros(4), 0, world_mesh((2,)), [Shard(1)]),
        "does not have",
    ),
    "too many placements": (lambda: field().redistribute(placements=[Shard(0), Shard(1)]), "2 placements"),
    "lengths that sum to less": (lambda: field().redistribute(sharding_shapes={0: [3, 2]}), "do not sum"),
    "lengths that sum to more": (lambda: field().redistribute(sharding_shapes={0: [HUGE, HUGE]}), "do not sum"),
    "a negative length": (lambda: field().redistribute(sharding_shapes={0: [7, -1]}), "do not sum"),
    "lengths for three ranks": (lambda: field().redistribute(sharding_shapes={0: [2, 2, 2]}), "for 2 ranks"),
    "shards that sum to another shape": (
        lambda: ShardTensor.from_local(
            torch.zeros(3, 3), world_mesh((2,)), [Shard(0)], {0: [(3, 3), (3, 3)]}, global_shape=(7, 3)
        ),
        "7",
    ),
    "stated shard sizes that are not held": (
        lambda: ShardTensor.from_local(torch.zeros(3, 3), world_mesh((2,)), [Shard(0)], {0: [(2, 3), (2, 3)]}),
        "holds",
    ),
    "another mesh": (lambda: field().redistribute(world_mesh((2, 1)), [Replicate(), Replicate()]), "another mesh"),
}


def bad_layout(name: str) -> str:
    return results(LAYOUTS[name][0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    first, second = run_on_ranks(bad_layout, 2, name, timeout=30)
    assert first == second
    assert LAYOUTS[name][1] in first


# ---------------------------------------------------------------------- meshes

MEETINGS: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "add in place": lambda a, b: a.add_(b),
    "matmul": lambda a, b: a @ b.t(),
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "index": lambda a, b: a[b[:, 0].long() % 6],
    "loss": F.mse_loss,
    "gather": lambda a, b: torch.linalg.lstsq(a, b),
    "copy": lambda a, b: a.copy_(b),
}


def meeting(name: str) -> str:
    a, b = field((4,), sizes=(2, 1, 0, 3)), field((2, 2), (Shard(0), Replicate()))
    with pytest.raises(ShardingError) as error:
        MEETINGS[name](a, b)
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("name", MEETINGS)
def test_meshes(name):
    errors = run_on_ranks(meeting, 4, name, timeout=30)
    assert len(set(errors)) == 1
    assert "different meshes" in errors[0]


# ---------------------------------------------------------------------- ranges

RANGES: dict[str, Callable] = {
    "row": lambda x: x[HUGE],
    "row beyond 64 bits": lambda x: x[2**70],
    "step": lambda x: x[:: 2**70],
    "narrow": lambda x: x.narrow(0, 1, HUGE),
    "roll": lambda x: x.roll(2**70, 0),
    "repeat": lambda x: x.repeat(2**40, 2**40),
    "expand": lambda x: x.unsqueeze(0).expand(HUGE, 6, 3),
    "pad": lambda x: F.pad(x, (0, 0, 0, 2**62)),
    "pad past 64 bits": lambda x: F.pad(x, (0, HUGE)),
    "view": lambda x: x.view(2**32, 2**32),
    "split": lambda x: x.split([HUGE, 7 - HUGE]),
    "index": lambda x: x[torch.tensor([HUGE])],
    "index before the first": lambda x: x[torch.tensor([-HUGE - 1])],
    "take": lambda x: x.take(torch.tensor([HUGE])),
    "gather": lambda x: x.gather(0, torch.full((1, 3), HUGE)),
    "scatter": lambda x: x.scatter(0, torch.full((1, 3), HUGE), 1.0),
    "one_hot": lambda x: F.one_hot(x.long() + HUGE - 30),
    "topk": lambda x: x.topk(HUGE, 0),
    "bincount": lambda x: x.long().flatten().bincount(minlength=2**62),
    "repeat_interleave": lambda x: x.repeat_interleave(HUGE, 0),
    "vander": lambda x: torch.vander(x[:, 0], 2**62),
    "diag_embed": lambda x: x.diag_embed(HUGE),
    "new_zeros": lambda x: x.new_zeros(2**40, 2**40),
}
FINE: dict[str, Callable] = {
    "slice": lambda x: x[-(2**70) : 2**70],
    "slice from beyond": lambda x: x[2**70 :],
    "step": lambda x: x[:: 2**40],
    "roll": lambda x: x.roll(HUGE, 0),
    "unfold": lambda x: x.unfold(0, 2, HUGE),
    "split": lambda x: x.split(HUGE)[0],
    "diff": lambda x: x.diff(HUGE, 0),
    "tril": lambda x: x.tril(HUGE),
    "tril of nothing": lambda x: x.tril(-HUGE),
    "triu": lambda x: x.triu(-HUGE),
    "diagonal": lambda x: x.diagonal(HUGE),
    "diagonal below": lambda x: x.diagonal(-HUGE),
    "sum that wraps": lambda x: (x.long() * 0 + HUGE).sum(0),
    "cumsum that wraps": lambda x: x.to(torch.int8).add(100).cumsum(0, dtype=torch.int8),
}


def bad_range(name: str, sizes: tuple[int, int]) -> None:
    results(lambda: RANGES[name](field(sizes=sizes)), Exception)


@pytest.mark.parametrize("sizes", [(4, 2), (6, 0)], ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_ranges(name, sizes):
    run_on_ranks(bad_range, 2, name, sizes, timeout=30)


def fine_range(name: str, sizes: tuple[int, int]) -> bool:
    x = field(sizes=sizes)
    return torch.equal(FINE[name](x).full_tensor(), FINE[name](x.full_tensor()))


@pytest.mark.parametrize("sizes", [(4, 2), (6, 0)], ids=str)
@pytest.mark.parametrize("name", FINE)
def test_ranges_beyond_the_end_are_clamped(name, sizes):
    assert all(run_on_ranks(fine_range, 2, name, sizes, timeout=30))


# ---------------------------------------------------------------------- ranks that call different ops

APART: dict[str, Callable] = {
    "dim": lambda x, rank: x.softmax(rank),
    "function": lambda x, rank: x.cumsum(0) if rank else x.sort(0),
    "layout": lambda x, rank: (x if rank else x[:5]).softmax(0),
    "a keyword": lambda x, rank: torch.sum(x, dim=0, keepdim=bool(rank)),
    "a plain tensor": lambda x, rank: x * torch.ones(3, dtype=torch.float32 if rank else torch.float64),
    "a call more": lambda x, rank: ((x if rank else x.exp()) + 1).relu(),
    "redistribute": lambda x, rank: x.redistribute(placements=[Shard(rank), *x.placements[1:]]),
    "redistribute or not": lambda x, rank: (
        x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if rank else x.sin()
    ),
    "shard sizes": lambda x, rank: x.redistribute(placements=x.placements, sharding_shapes=["balanced", "chunk"][rank]),
    "full_tensor": lambda x, rank: x.full_tensor() if rank else x.cumsum(0),
    "tolist": lambda x, rank: x.tolist() if rank else x.cumsum(0),
}


def apart(name: str, mesh: tuple[int, ...]) -> str:
    x, rank = field(mesh, [Shard(0)] + [Replicate()] * (len(mesh) - 1), None), int(dist.get_rank() == 1)
    y = x + 1
    with lockstep():
        assert torch.equal((y * 2).softmax(0).full_tensor(), ((x + 1) * 2).softmax(0).full_tensor())
        assert y.redistribute(placements=[Shard(1), *y.placements[1:]]).placements[0] == Shard(1)
        loss = y.mean()
        if dist.get_rank() == 0:
            assert loss.item() > 0  # sends nothing, so it is no call of all ranks
        with pytest.raises(ShardingError) as error:
            APART[name](x, rank)
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", APART)
def test_ranks_that_differ_are_reported(name, mesh):
    errors = run_on_ranks(apart, torch.Size(mesh).numel(), name, mesh, timeout=30)
    assert len(set(errors)) == 1
    assert "do not make the same call" in errors[0]
    assert all(f"at {where}" in errors[0] for where in ([(0,), (1,)] if len(mesh) == 1 else [(0, 0), (0, 1), (1, 1)]))


# ---------------------------------------------------------------------- not supported on shards


def sparse_gradients() -> str:
    table = torch.zeros(5, 3, requires_grad=True)
    return results(lambda: F.embedding(field().long() % 5, table, sparse=True))


def test_sparse_gradients():
    first, second = run_on_ranks(sparse_gradients, 2, timeout=30)
    assert first == second
    assert "sparse=False" in first


# ---------------------------------------------------------------------- 0-d tensors

NO_DIMS: dict[str, Callable] = {
    "matmul": lambda x: torch.matmul(x, torch.tensor(2.0)),
    "mm": lambda x: torch.mm(x, torch.tensor(2)),
    "linear": lambda x: F.linear(x, torch.tensor(2.0)),
    "conv1d": lambda x: F.conv1d(x, torch.tensor(2.0)),
    "gather": lambda x: x.gather(0, torch.tensor(2)),
    "scatter": lambda x: x.scatter(0, torch.tensor(2), torch.tensor(1.0)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, torch.tensor(2.0)),
    "layer_norm": lambda x: F.layer_norm(x, (3,), torch.tensor(2.0)),
    "addmm": lambda x: torch.addmm(x, x, torch.tensor(2.0)),
    "reshape": lambda x: x.reshape(torch.tensor(5), -1),
    "sum": lambda x: x.sum(torch.tensor(7)),
    "roll": lambda x: x.roll(torch.tensor(1.5), 0),
}


def no_dims(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError, TypeError)) as wanted:
        NO_DIMS[name](torch.ones(6, 3, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results(lambda: NO_DIMS[name](field()), type(wanted.value))


@pytest.mark.parametrize("name", NO_DIMS)
def test_0d_tensors_where_torch_rejects_them(name):
    """A 0-d tensor is read as a number where torch wants one; elsewhere torch's error is raised."""
    run_on_ranks(no_dims, 2, name)
