"""Autograd collectives: values in every dtype, adjoints, derivatives of any order, messages and bytes."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial

from shardfield import ShardTensor, runtime
from shardfield.comm import autograd_collectives, collectives
from shardfield.comm.route import RowRequest, fetch_route, reshard_route, swap_route
from shardfield.layout import Layout, starts
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh
from tests.rank_checks import assert_second_order, inner_product, random_like

LENGTHS = {1: (5,), 2: (1, 4), 3: (2, 0, 3), 4: (0, 4, 0, 1)}
EQUAL = {1: (5,), 2: (3, 3), 3: (2, 2, 2), 4: (1, 1, 1, 1)}


@contextlib.contextmanager
def metered():
    """Collect what this rank sends: a list of (kind, messages, bytes)."""
    sent = []
    runtime.active.meter = lambda *what: sent.append(what)
    try:
        yield sent
    finally:
        runtime.active.meter = None


def everything(shape, dtype, seed=0):
    """Return the same tensor on every rank; its elements are small integers, exact in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), torch.randint(-8, 8, shape, generator=generator).double()).to(dtype)
    return (values > 0) if dtype is torch.bool else values.to(dtype)


def part(tensor, dim, lengths, coord=None):
    coord = dist.get_rank() if coord is None else coord
    return tensor.narrow(dim, starts(lengths)[coord], lengths[coord])


# ---------------------------------------------------------------------- routes used below


def halo(dim, lengths, width):
    """Return the route of a halo of `width` cells on each side; cells beyond the domain keep the fill value."""
    size = sum(lengths)
    requests, sizes = [], []
    for start, length in zip(starts(lengths), lengths, strict=True):
        first, last = max(0, start - width), min(size, start + length + width)
        requests.append([RowRequest(first, last - first, target=first - (start - width))])
        sizes.append(length + 2 * width)
    return fetch_route(dim, lengths, dist.get_rank(), requests, sizes)


def reverse(dim, lengths):
    """Return the route that reverses a dim and keeps its shard sizes."""
    size = sum(lengths)
    requests = [[RowRequest(size - b - n, n, flip=True)] for b, n in zip(starts(lengths), lengths, strict=True)]
    return fetch_route(dim, lengths, dist.get_rank(), requests, lengths)


def roll(dim, lengths, shift):
    """Return the route of a roll: two runs per rank, one of which wraps around."""
    size = sum(lengths)
    requests = []
    for begin, length in zip(starts(lengths), lengths, strict=True):
        runs, done = [], 0
        while done < length:
            source = (begin + done - shift) % size
            n = min(length - done, size - source)
            runs.append(RowRequest(source, n, target=done))
            done += n
        requests.append(runs)
    return fetch_route(dim, lengths, dist.get_rank(), requests, lengths)


# ---------------------------------------------------------------------- one row per collective


# name -> (kind before, kind after, the collective on a local tensor, what this rank should hold of the global value).
# Kinds: shard; replicate; partial (partial sums, one gradient for all); entered (one value, a gradient per rank).
def table(dim, lengths):
    world, group = dist.get_world_size(), dist.group.WORLD
    other = 1 - dim
    new = LENGTHS[world][::-1] if world > 1 else (5,)
    size = sum(lengths)

    def rolled(x):
        return part(x.roll(2, dim), dim, lengths)

    def padded(x):
        pad = [0, 0, 0, 0]
        pad[2 * other : 2 * other + 2] = 2, 2
        begin = starts(lengths)[dist.get_rank()]
        return torch.nn.functional.pad(x, pad).narrow(dim, begin, lengths[dist.get_rank()] + 4)

    even = size // max(1, world - 1)
    shard_sizes = (size,) if world == 1 else (0, *[even] * (world - 2), size - (world - 2) * even)
    return {
        "enter": ("replicate", "entered", lambda x: autograd_collectives.replicate_in([x], (group,))[0], lambda x: x),
        "reduce": ("partial", "replicate", lambda x: autograd_collectives.reduce(x, (group,)), lambda x: x),
        "to_partial": ("replicate", "partial", lambda x: autograd_collectives.to_partial(x, (group,)), lambda x: x),
        "leave": ("entered", "replicate", lambda x: autograd_collectives.replicate_out(x, (group,)), lambda x: x),
        "gather": ("shard", "replicate", lambda x: autograd_collectives.gather(x, dim, lengths, group), lambda x: x),
        "split": (
            "replicate",
            "shard",
            lambda x: autograd_collectives.split(x, dim, lengths, group),
            lambda x: part(x, dim, lengths),
        ),
        "reduce_scatter": (
            "partial",
            "shard",
            lambda x: autograd_collectives.reduce_scatter(x, dim, lengths, group),
            lambda x: part(x, dim, lengths),
        ),
        "gather_enter": (
            "shard",
            "entered",
            lambda x: autograd_collectives.gather_replicate_in(x, dim, lengths, group),
            lambda x: x,
        ),
        "halo": ("shard", "shard", lambda x: autograd_collectives.exchange(x, halo(dim, lengths, 2), group), padded),
        "reverse": (
            "shard",
            "shard",
            lambda x: autograd_collectives.exchange(x, reverse(dim, lengths), group),
            lambda x: part(x.flip(dim), dim, lengths),
        ),
        "roll": ("shard", "shard", lambda x: autograd_collectives.exchange(x, roll(dim, lengths, 2), group), rolled),
        "reshard": (
            "shard",
            "shard",
            lambda x: autograd_collectives.exchange(
                x, reshard_route(dim, lengths, shard_sizes, dist.get_rank()), group
            ),
            lambda x: part(x, dim, shard_sizes),
        ),
        "swap": (
            "shard",
            "shard",
            lambda x: autograd_collectives.exchange(x, swap_route(dim, lengths, other, new, dist.get_rank()), group),
            lambda x: part(x, other, new),
        ),
    }


MOVES = "enter reduce to_partial leave gather split reduce_scatter gather_enter halo reverse roll reshard swap".split()


def held(kind, x, dim, lengths):
    """Return what this rank holds of a global value of a kind."""
    if kind == "shard":
        return part(x, dim, lengths).clone()
    if kind == "partial":  # partial sums that are exact in every dtype: one rank has the value plus 1, the next -1
        rank, world = dist.get_rank(), dist.get_world_size()
        if x.dtype is torch.bool:
            return x if rank == world - 1 else torch.zeros_like(x)
        ones = torch.ones_like(x)
        return x if world == 1 else x + ones if rank == 0 else -ones if rank == 1 else torch.zeros_like(x)
    return x.clone()


def cotangent(kind, like, seed):
    """Return a random cotangent for a kind: the same on all ranks or one per rank."""
    return random_like(like, seed, same_on_all_ranks=kind in ("replicate", "partial"))


def shape_for(dim, lengths):
    return (sum(lengths), 5) if dim == 0 else (5, sum(lengths))


def check_values(name, dim, lengths, dtypes):
    for dtype in dtypes:
        x = everything(shape_for(dim, lengths), dtype)
        before, after, move, expected = table(dim, lengths)[name]
        y = move(held(before, x, dim, lengths))
        assert y.dtype == dtype
        if after == "partial":
            y = collectives.all_reduce(y, dist.group.WORLD)
        assert torch.equal(y, expected(x)), (name, dtype, y, expected(x))
        if dtype.is_complex:  # the conjugate is a lazy flag in torch, which a buffer would drop
            y = move(held(before, x, dim, lengths).conj())
            if after == "partial":
                y = collectives.all_reduce(y, dist.group.WORLD)
            assert torch.equal(y, expected(x).conj()), (name, dtype)


def check_adjoint(name, dim, lengths, dtype):
    before, after, move, _ = table(dim, lengths)[name]
    x = everything(shape_for(dim, lengths), dtype, seed=1)
    x = (held(before, x, dim, lengths) + 0).requires_grad_()
    y = move(x)
    bar = cotangent(after, y, 5).requires_grad_()
    (back,) = torch.autograd.grad(y, x, bar, create_graph=True)
    left = inner_product(y, bar, replicated=after == "replicate")
    right = inner_product(x, back, replicated=before == "replicate")
    assert abs(left - right) <= 1e-12 * max(1, abs(left)), (name, left, right)
    if before in ("replicate", "partial"):
        first = collectives.broadcast(back.detach(), 0, dist.group.WORLD)
        assert torch.allclose(first, back, rtol=1e-14, atol=1e-14), f"{name}: ranks differ in the full gradient"
    one = torch.ones((), dtype=dtype).expand_as(y)  # the gradient of a sum repeats one element
    of_sum, dense = (torch.autograd.grad(move(x), x, bar)[0] for bar in (one, one.clone()))
    assert torch.equal(of_sum, dense) and (one == 1).all(), f"{name}: a gradient that repeats its elements"
    # The adjoint is linear too, and its adjoint is the collective.
    z = everything(shape_for(dim, lengths), dtype, seed=2)
    z = held(before, z, dim, lengths)
    (again,) = torch.autograd.grad(back, bar, z)
    assert torch.allclose(again, move(z), rtol=1e-14, atol=1e-14), f"{name}: the second adjoint differs"


ALL_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values(world):
    run_on_ranks(values_of_all, world)


def values_of_all():
    world = dist.get_world_size()
    for lengths in (LENGTHS[world], EQUAL[world]):
        for dim in (0, 1):
            for name in MOVES:
                check_values(name, dim, lengths, [t for t in ALL_DTYPES if t is not torch.uint8])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_adjoints(world):
    run_on_ranks(adjoints_of_all, world)


def adjoints_of_all():
    world = dist.get_world_size()
    for lengths in (LENGTHS[world], EQUAL[world]):
        for dim in (0, 1):
            for name in MOVES:
                for dtype in (torch.float64, torch.complex128):
                    check_adjoint(name, dim, lengths, dtype)


def test_table_has_every_collective():
    assert run_on_ranks(names_in_table, 1) == [sorted(MOVES)]


def names_in_table():
    return sorted(table(0, (5,)))


def test_second_derivatives():
    """Through nonlinear functions and all kinds of value."""
    run_on_ranks(second_derivatives, 3)


def second_derivatives():
    group, lengths = dist.group.WORLD, (1, 0, 2)
    coord = dist.get_rank()
    x = torch.arange(2.0 * lengths[coord], dtype=torch.float64).reshape(2, -1) / 3 + coord

    def round_trip(x):
        full_value = autograd_collectives.gather(x, 1, lengths, group)  # replicate
        full_value = autograd_collectives.reduce(autograd_collectives.to_partial(full_value.sin(), (group,)), (group,))
        entered = autograd_collectives.replicate_in([full_value], (group,))[0]
        partial = entered * (coord + 1)  # a different factor on each rank
        return autograd_collectives.reduce_scatter(partial, 1, lengths, group)

    assert_second_order(round_trip, x)
    assert_second_order(lambda x: autograd_collectives.exchange(x, halo(1, lengths, 1), group, fill=2.0).sin(), x)
    assert_second_order(lambda x: autograd_collectives.gather_replicate_in(x, 1, lengths, group) * (coord + 1), x)


# ---------------------------------------------------------------------- sums, extremes, unusual shapes


def test_half_precision_is_summed_in_fp32():
    run_on_ranks(half_sums, 4)


def half_sums():
    group, rank = dist.group.WORLD, dist.get_rank()
    for dtype, small in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        # 1 + three times half of the last bit: each addition in half precision rounds back to 1, the sum does not.
        mine = torch.full((4,), 1.0 if rank == 0 else small, dtype=dtype)
        exact = torch.tensor(1 + 3 * small).to(dtype)
        assert exact != 1
        for got in (
            collectives.all_reduce(mine, group),
            autograd_collectives.reduce(mine, (group,)),
            autograd_collectives.reduce_scatter(mine.repeat(4), 0, (4,) * 4, group),
            collectives.all_reduce(mine * 2, group, "avg") * 2,
        ):
            assert got.dtype == dtype and bool((got == exact).all()), (dtype, got)
        # The adjoint of a halo exchange sums the gradients of the neighbors.
        x = torch.zeros(1, dtype=dtype, requires_grad=True)
        y = autograd_collectives.exchange(x, halo(0, (1,) * 4, 3), group)
        weight = torch.full_like(y, 1.0 if rank == 0 else small)
        (back,) = torch.autograd.grad(y, x, weight)
        assert float(back) == float(exact), (dtype, back)


def test_reductions():
    run_on_ranks(reductions, 3)


def reductions():
    group, rank = dist.group.WORLD, dist.get_rank()
    for dtype in ALL_DTYPES:
        shards = [everything((3, 2), dtype, seed) for seed in range(3)]
        stack = torch.stack(shards)
        for op, expected in {
            "sum": stack.sum(0).to(dtype),
            "prod": stack.prod(0).to(dtype),
            "product": stack.prod(0).to(dtype),
            "max": None if dtype.is_complex else stack.amax(0),
            "min": None if dtype.is_complex else stack.amin(0),
            "avg": stack.mean(0) if dtype.is_complex or dtype.is_floating_point else None,
        }.items():
            if expected is not None:
                got = collectives.all_reduce(shards[rank].t(), group, op).t()
                assert torch.equal(got, expected) or (op == "avg" and torch.allclose(got, expected)), (dtype, op)
    for op in ("max", "min"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            nan, inf = float("nan"), float("inf")
            values = [[nan, 1.0, 2.0, -0.5], [2.0, nan, inf, -3.0], [1.0, 0.0, nan, -inf]]
            got = collectives.all_reduce(torch.tensor(values[rank], dtype=dtype), group, op)
            expected = getattr(torch.tensor(values, dtype=dtype), f"a{op}")(0)
            torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)
    for bad, dtype in (("mean", torch.float32), ("avg", torch.int64), ("max", torch.complex64)):
        with pytest.raises(ValueError, match="all_reduce"):
            collectives.all_reduce(torch.ones(2, dtype=dtype), group, bad)
    x = torch.tensor([1.0, 5.0 if rank else 2.0], requires_grad=True)
    y = autograd_collectives.reduce_with(x, "max", (group,))
    y.backward(torch.tensor([3.0, 4.0]))
    assert torch.equal(x.grad, torch.tensor([1.0, 2.0 if rank else 0.0]))


def test_equal_maxima_share_the_gradient():
    run_on_ranks(equal_parts, 4)


def equal_parts():
    """Check Partial(max) over two axes: three of four are equal and each gets a third, as from amax of all four."""
    mesh, rank = world_mesh((2, 2)), dist.get_rank()
    for op, sign in (("max", 1), ("min", -1)):
        part = torch.tensor([sign * (1.0 if rank else 0.0), 2.0], requires_grad=True)
        x = ShardTensor(part, Layout.of(mesh, [Partial(op), Partial(op)], (2,)))
        y = (x * 1.0) * torch.tensor([3.0, 4.0])
        assert torch.equal(y.full_tensor(), torch.tensor([sign * 3.0, 8.0]))
        y.backward(torch.ones(2))
        assert torch.equal(part.grad, torch.tensor([1.0 if rank else 0.0, 1.0])), part.grad


def test_unusual_shapes():
    run_on_ranks(odd_shapes, 3)


def odd_shapes():
    """Check scalars, non-contiguous and expanded tensors, more than two dims, and that inputs do not change."""
    group, rank = dist.group.WORLD, dist.get_rank()
    scalar = torch.tensor(float(rank))
    assert float(collectives.all_reduce(scalar, group)) == 3.0 and float(scalar) == rank
    assert [float(t) for t in collectives.all_gather(scalar, [()] * 3, group)] == [0.0, 1.0, 2.0]
    assert float(collectives.broadcast(scalar, 2, group)) == 2.0 and float(scalar) == rank
    wide = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)
    assert torch.equal(collectives.broadcast(wide, 1, group), wide)
    assert torch.equal(collectives.all_reduce(wide, group), 3 * wide)
    assert torch.equal(collectives.all_reduce(torch.ones(1).expand(4), group), torch.full((4,), 3.0))
    single = torch.arange(6).to(torch.complex64).reshape(2, 3)[rank % 2 :: 2, 1]  # one element, of stride 6
    assert [t.tolist() for t in collectives.all_gather(single, [(1,)] * 3, group)] == [[1], [4], [1]]
    lazy = torch.tensor([1 + 2j]).conj().imag  # contiguous, and its sign is a flag, not in memory
    assert lazy.is_neg() and lazy.is_contiguous()
    assert [t.tolist() for t in collectives.all_gather(lazy, [(1,)] * 3, group)] == [[-2.0]] * 3
    assert collectives.exchange([lazy] * 3, [(1,)] * 3, group)[rank - 1].tolist() == [-2.0]
    full_value = autograd_collectives.gather(part(wide, 1, (0, 1, 2)), 1, (0, 1, 2), group)
    assert torch.equal(full_value, wide)
    swapped = autograd_collectives.exchange(
        part(wide, 0, (3, 0, 1)), swap_route(0, (3, 0, 1), 2, (1, 1, 0), rank), group
    )
    assert torch.equal(swapped, part(wide, 2, (1, 1, 0)))
    # Gradients of replicated operands of several dtypes take one message each.
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    c, fixed = torch.ones(2, 2, requires_grad=True), torch.ones(1)
    with metered() as sent:
        ea, eb, ec, ef = autograd_collectives.replicate_in([a, b, c, fixed], (group,))
        assert ef is fixed and not sent
        (ea.sum() + eb.sum() + ec.sum()).backward()
    assert [s[0] for s in sent] == ["all_reduce"] * 2
    assert all(bool((t.grad == 3).all()) for t in (a, b, c))


def test_messages_and_bytes():
    run_on_ranks(messages_and_bytes, 3)


def messages_and_bytes():
    group, rank = dist.group.WORLD, dist.get_rank()
    lengths = (4, 0, 2)
    mine = torch.zeros(lengths[rank], 8)  # 32 bytes a row
    with metered() as sent:
        autograd_collectives.gather(mine, 0, lengths, group)
        # Uneven: this rank's rows go to both others; an empty shard sends no message.
        assert sent == [("exchange", 2 if lengths[rank] else 0, 2 * 32 * lengths[rank])]
    with metered() as sent:
        autograd_collectives.gather(torch.zeros(2, 8), 0, (2, 2, 2), group)
        assert sent == [("all_gather", 1, 2 * 64)]
    with metered() as sent:
        collectives.all_reduce(torch.zeros(3, 8), group)
        assert sent == [("all_reduce", 1, 2 * 2 * 96 // 3)]
    with metered() as sent:
        autograd_collectives.reduce_scatter(torch.zeros(6, 8), 0, lengths, group)
        to_others = sum(n for c, n in enumerate(lengths) if c != rank)
        assert sent == [("exchange", sum(bool(n) for c, n in enumerate(lengths) if c != rank), 32 * to_others)]
    with metered() as sent:
        autograd_collectives.exchange(mine, halo(0, lengths, 1), group)
        # The rank in the middle has an empty shard and requests a row from each side.
        assert sent == [("exchange", 2 if rank != 1 else 0, 32 * (2 if rank != 1 else 0))]
    with metered() as sent:
        autograd_collectives.split(torch.zeros(6, 8), 0, lengths, group)
        collectives.all_reduce(torch.zeros(0, 8), group)
        assert not sent


def test_pending_messages_overlap_and_are_waited_for_once():
    run_on_ranks(pending, 2)


def pending():
    group, rank = dist.group.WORLD, dist.get_rank()
    first = collectives.start_all_reduce(torch.ones(3, dtype=torch.bfloat16), group)
    second = collectives.start_exchange([torch.full((2,), rank)] * 2, [(2,)] * 2, group)
    assert second.wait()[1 - rank].tolist() == [1 - rank] * 2
    assert first.wait().tolist() == [2.0] * 3 and first.wait() is first.wait()
    assert collectives.gather_ints([rank, 2**40], group, torch.device("cpu")) == [[0, 2**40], [1, 2**40]]


def test_groups_within_the_world():
    run_on_ranks(groups_within, 4)


def groups_within():
    """Check that coords are positions in the group, not ranks."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = halves[rank % 2]
    x = torch.full((rank // 2 + 1,), float(rank))
    full_value = autograd_collectives.gather(x, 0, (1, 2), group)
    assert full_value.tolist() == [rank % 2, rank % 2 + 2, rank % 2 + 2]
    assert collectives.broadcast(torch.tensor(rank), 1, group) == rank % 2 + 2
    both = autograd_collectives.reduce(torch.ones(1), (group, dist.group.WORLD))
    assert float(both) == 8.0
    for half in halves:
        if dist.get_rank(half) >= 0:
            dist.destroy_process_group(half)
