"""Result layouts depend on the operands alone: the same call gives the same layout whatever calls came before it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardingError, ShardTensor
from shardfield.dim_sharding import MAX_ORIGINS, DimSharding, Origin, canonicalize, regroup
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, to_full_tensor, world_mesh

ROWS, WIDTH, ENTRIES = 11, 3, 10
SHARD_SIZES = {"first": (8, 3), "second": (4, 7)}  # two tensors of one length, sharded differently


def sharded(value: torch.Tensor, sizes: tuple[int, ...], dim: int = 0) -> ShardTensor:
    layout = Layout.of(world_mesh((2,)), [Shard(dim)], value.shape, {dim: sizes})
    return ShardTensor(local_shard(value, layout), layout)


def written_rows(name: str, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one of two tensors, written into zeros of its length; and the same on one device."""
    full = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    at = torch.arange(ENTRIES) * 7 % ROWS
    features = torch.ones(ENTRIES, WIDTH)
    found = []
    for rows, index, edges in (
        (sharded(full, SHARD_SIZES[name]), sharded(at, (6, 4)), sharded(features, (6, 4))),
        (full, at, features),
    ):
        messages = torch.relu(rows[index] @ torch.eye(WIDTH))
        wide = index.view(-1, 1).expand(-1, WIDTH)
        calls: dict[str, Callable] = {
            "index_add_": lambda m=messages, i=index: torch.zeros(ROWS, WIDTH).index_add_(0, i, m),
            "index_add": lambda m=messages, i=index: torch.index_add(torch.zeros(ROWS, WIDTH), 0, i, m),
            "new_zeros": lambda m=messages, w=wide: m.new_zeros(ROWS, WIDTH).scatter_add_(0, w, m),
            "scatter_reduce": lambda m=messages, w=wide: torch.zeros(ROWS, WIDTH).scatter_reduce(0, w, m, "amax"),
            "index_put": lambda m=messages, i=index: torch.zeros(ROWS, WIDTH).index_put((i,), m, accumulate=True),
            # nothing says where these rows came from: their place follows from the bytes sent
            "no origin": lambda e=edges, i=index: torch.zeros(ROWS, WIDTH).index_add_(0, i, e),
        }
        found.append(calls[how]())
    return found[0], found[1]


def inverted(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Some modes of one of two fields written into zeros, and the field of them; and the same on one device."""
    full = torch.randn(2, ROWS, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for field in (sharded(full, SHARD_SIZES[name], dim=1), full):
        spectrum = torch.fft.rfft2(field)
        out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
        out[..., :2, :3] = 2 * spectrum[..., :2, :3]
        found.append(torch.fft.irfft2(out, s=(ROWS, 16)))
    return found[0], found[1]


HOW = ("index_add_", "index_add", "new_zeros", "scatter_reduce", "index_put", "no origin")
CALLS: dict[str, Callable] = {
    f"{how} of {name}": lambda name=name, how=how: written_rows(name, how) for how in HOW for name in SHARD_SIZES
} | {f"modes of {name}": lambda name=name: inverted(name) for name in SHARD_SIZES}


def layouts_in_any_order() -> list[str]:
    """Return, on each rank, calls whose layout or value depends on the calls before them."""
    wrong = []
    first = {name: call()[0]._layout for name, call in CALLS.items()}
    for before, name in itertools.product(CALLS, CALLS):
        CALLS[before]()
        got, wanted = CALLS[name]()
        if got._layout is not first[name]:
            wrong.append(f"{name} after {before}: {got._layout}, alone {first[name]}")
        if not torch.allclose(to_full_tensor(got), wanted):
            wrong.append(f"{name} after {before}: wrong values")
    for name, layout in first.items():
        dim = 1 if name.startswith("modes") else 0
        sizes = SHARD_SIZES[name.split(" of ")[1]]
        if "no origin" not in name and layout.shard_sizes(dim) != sizes:
            wrong.append(f"{name}: {layout}, its rows came from shards of {sizes}")
    return wrong


def test_the_same_call_gives_the_same_layout_whatever_came_before():
    assert run_on_ranks(layouts_in_any_order, 2, timeout=120) == [[], []]


def ambiguous() -> list[str]:
    """Check that rows from two dims of one length with different shardings give no hint."""
    full = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    index = sharded(torch.arange(ENTRIES), (6, 4))
    one, other = (sharded(full, sizes)[index] for sizes in SHARD_SIZES.values())
    target = torch.zeros(ROWS, WIDTH).index_add_(0, index, one + other)
    assert len((one + other)._layout.origins(0)) == 2 and not target._layout.shard_axes
    torch.testing.assert_close(to_full_tensor(target)[:ENTRIES], 2 * full[:ENTRIES])
    return []


def test_two_origins_of_one_size_give_no_hint():
    assert run_on_ranks(ambiguous, 2, timeout=60) == [[], []]


def test_origins_are_carried_by_the_layout():
    nodes, other = Origin("rows", 9, (0,), (4, 5)), Origin("rows", 9, (0,), (5, 4))
    entries = DimSharding(6, (0,), (2, 4)).with_origins([nodes])
    assert entries == DimSharding(6, (0,), (2, 4)) and entries.with_origins().origins == ()
    # a dim of size 1 selects nothing; of two factors with different origins, neither holds for all entries
    assert canonicalize([entries, DimSharding(1)])[0].origins == (nodes,)
    assert canonicalize([entries, DimSharding(2)])[0].origins == ()
    assert canonicalize([entries, DimSharding(2).with_origins([nodes, other])])[0].origins == (nodes,)
    assert [d[0].origins for d in regroup([entries], [3, 2]) or ()] == [(nodes,)] * 2
    many = [Origin("rows", n, (), ()) for n in range(9)]
    assert DimSharding(6).with_origins(reversed(many)).origins == tuple(many[:MAX_ORIGINS])


def test_layouts_that_differ_in_origins_place_data_equally():
    assert run_on_ranks(bare, 2, timeout=60) == [[], []]


def bare() -> list[str]:
    """Check that a layout and the same with an origin are two objects and redistribute without a message."""
    x = sharded(torch.randn(ROWS, WIDTH), SHARD_SIZES["first"])
    plain = x._layout
    hinted = plain.with_dim(0, plain.dims[0][0].with_origins([Origin("rows", 99, (0,), (50, 49))]))
    assert hinted is not plain and hinted.dims == plain.dims and hinted.bare is plain
    assert x._redistribute_to(hinted)._local_tensor is x._local_tensor
    assert ShardTensor(x._local_tensor, hinted)._spec == x._spec
    y = ShardTensor(x._local_tensor, hinted)
    assert (x + y)._layout is hinted and (x + 1)._layout is plain and (y @ torch.eye(WIDTH))._layout is hinted
    assert y.redistribute(placements=[Replicate()])._layout.is_replicated
    return []


# ---------------------------------------------------------------------- one rank holds a reference that others do not


def hold(tensor: torch.Tensor, seconds: float) -> None:
    """Keep an alias of a tensor for a while, as a backend's thread does that has sent it."""
    alias = tensor.detach()
    threading.Thread(target=lambda: (time.sleep(seconds), alias.shape), daemon=True).start()


def written_while_one_rank_is_slow(checks: str) -> list[str]:
    """On a rank: writes into a tensor of which the last rank alone holds an alias, for longer than ranks wait."""
    os.environ["SHARDFIELD_CHECK_SIZES"] = checks
    full = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    at = torch.arange(ENTRIES) * 7 % ROWS
    slow = dist.get_rank() == dist.get_world_size() - 1
    wrong = []
    for seconds in (0.0, 0.005, 0.2):
        for name, zeros in {
            "setitem": lambda: torch.zeros(ROWS, WIDTH),
            "index_add_": lambda: torch.zeros(ROWS, WIDTH),
            "index_add_ into a ShardTensor": lambda: (
                sharded(full, (8, 3)).new_zeros(ROWS, WIDTH + 1)[:, :WIDTH].clone()
            ),
        }.items():
            rows, index = sharded(full, SHARD_SIZES["first"]), sharded(at, (6, 4))
            x = zeros()
            if slow and seconds:
                hold(getattr(x, "_local_tensor", x), seconds)
            if name == "setitem":
                x[:, 1:] = rows[:, 1:]
                wanted = torch.zeros(ROWS, WIDTH)
                wanted[:, 1:] = full[:, 1:]
            else:
                x.index_add_(0, index, rows[index])
                wanted = torch.zeros(ROWS, WIDTH).index_add_(0, at, full[at])
            kinds = [None] * dist.get_world_size()
            dist.all_gather_object(kinds, (type(x).__name__, str(getattr(x, "_layout", ""))))
            if len(set(kinds)) > 1 or not torch.allclose(to_full_tensor(x), wanted):
                wrong.append(f"{name}, held {seconds} s: {kinds}")
    return wrong


@pytest.mark.parametrize("checks", ["1", "0"])
def test_ranks_agree_on_a_write_when_one_of_them_is_slow(checks):
    """The last rank alone holds an alias: all gather or none, also with SHARDFIELD_CHECK_SIZES=0."""
    assert run_on_ranks(written_while_one_rank_is_slow, 2, checks, timeout=60) == [[], []]


def stale_on_one_rank() -> list[str]:
    """On a rank: the last rank alone keeps a view of a block whose spectrum is written; then all keep one."""
    found = []
    full = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for keep in ([dist.get_world_size() - 1], range(dist.get_world_size())):
        spectrum = torch.fft.rfft2(sharded(full, (5, 3), dim=1))
        block = spectrum[:, :2, :2]
        view = block[:, :1] if dist.get_rank() in keep else None
        spectrum.abs()
        spectrum.mul_(2)
        torch.testing.assert_close(to_full_tensor(block), 2 * torch.fft.rfft2(full)[:, :2, :2])
        if len(keep) == dist.get_world_size():
            with pytest.raises(ShardingError, match="whose spectrum was written since"):
                view.abs()
        found.append(type(view).__name__)
    return found


def test_a_view_that_one_rank_keeps_raises_on_no_rank():
    assert run_on_ranks(stale_on_one_rank, 2, timeout=60) == [["NoneType", "ShardTensor"], ["ShardTensor"] * 2]
