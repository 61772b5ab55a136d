"""Attention beyond the case table: messages, load balance, choice of strategy, dropout, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

from shardfield import ShardingError, ShardTensor, explain, runtime, strict
from shardfield.layout import Layout
from shardfield.ops.attention import attention_strategy, strategy
from shardfield.ops.attention import ring as ring_attention
from shardfield.ops.attention import sdpa as sdpa_rule
from shardfield.ops.attention.block_kernels import FlashCpu
from shardfield.planning.fake_world import simulated
from shardfield.testing import run_on_ranks
from tests.harness import T, check_case, draw_layout, local_shard, to_full_tensor, world_mesh
from tests.harness import case as row

attend = F.scaled_dot_product_attention


def held(value: torch.Tensor, mesh, placements, lengths=None, grad: bool = True) -> ShardTensor:
    layout = Layout.of(mesh, placements, value.shape, lengths)
    return ShardTensor(local_shard(value, layout).requires_grad_(grad), layout)


def drawn(*shapes: Sequence[int], dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


class Metered:
    """Count the messages and bytes that this rank sends inside the block."""

    def __enter__(self):
        self.messages = self.bytes = 0
        runtime.active.meter = self.add
        return self

    def add(self, kind, messages, nbytes):
        self.messages += messages
        self.bytes += nbytes

    def __exit__(self, *_):
        runtime.active.meter = None


# ---------------------------------------------------------------------- messages


@contextmanager
def preferring(way, visit_bytes=strategy.VISIT_BYTES):
    """Choose the strategy with `way` in its summary, where there is one, inside the context.

    A ring visits at most `visit_bytes` of keys and values together: 0 is one block.
    """
    price, limit, strategy.VISIT_BYTES = strategy.estimate_cost, strategy.VISIT_BYTES, visit_bytes

    def cost(found, *args):
        return price(found, *args) - (1e15 if way in found.summary else 0)

    strategy.estimate_cost = cost
    try:
        with runtime.fresh():  # plans of other calls follow the true costs
            yield
    finally:
        strategy.estimate_cost, strategy.VISIT_BYTES = price, limit


LENGTHS = (5, 9, 0, 10)


@preferring("ring")
def ring_traffic():
    mesh = world_mesh((4,))
    q, k, v = (held(x, mesh, [Shard(2)], {2: LENGTHS}) for x in drawn(*[(2, 3, 24, 8)] * 3))
    with Metered() as forward:
        out = attend(q, k, v)
    with Metered() as backward:
        out._local_tensor.sum().backward()
    return (forward.messages, forward.bytes), (backward.messages, backward.bytes)


def test_ring_sends_keys_and_values_to_every_rank_once():
    results = run_on_ranks(ring_traffic, 4)
    per_row = 2 * 2 * 3 * 8 * 8  # keys and values, batch, heads, features, bytes
    total = sum(LENGTHS)
    for rank, (forward, backward) in enumerate(results):
        # A rank sends its own block directly to the three others.
        own = LENGTHS[rank]
        assert forward == (3 * (own > 0), 3 * own * per_row)
        # Backward does so again, and sends each other rank the gradient of its block.
        others = [n for i, n in enumerate(LENGTHS) if i != rank]
        assert backward == (3 * (own > 0) + sum(n > 0 for n in others), (3 * own + sum(others)) * per_row)
    assert sum(f[1] for f, _ in results) == 3 * total * per_row  # (P - 1) / P of keys and values per rank


def sent_before_work(visit_bytes):
    """Return, on each rank, the number of messages sent before each visit was computed, forward and backward."""
    with preferring("ring", visit_bytes):
        return count_sent_before_work()


def count_sent_before_work():
    mesh = world_mesh((4,))
    q, k, v = (held(x, mesh, [Shard(2)]) for x in drawn(*[(2, 3, 24, 8)] * 3))
    found: list[list[int]] = []
    for name in ("forward", "backward"):
        with Metered() as sent, pytest.MonkeyPatch.context() as patch:
            before, counts = getattr(FlashCpu, name), []

            def spy(*args, before=before, sent=sent, counts=counts):
                counts.append(sent.messages)
                return before(*args)

            patch.setattr(FlashCpu, name, spy)
            if name == "forward":
                out = attend(q, k, v)
            else:
                out._local_tensor.sum().backward()
        found.append(counts)
    return found


def test_messages_overlap_computation():
    # Two visits are prefetched; in backward also the gradients of earlier blocks are in flight. Blocks that are small
    # enough for one visit come by one all_gather, and one kernel computes the result.
    block = 2 * 2 * 3 * 6 * 8 * 8  # bytes of keys and values of a rank
    assert run_on_ranks(sent_before_work, 4, 0) == [[[2, 3, 3, 3], [2, 3, 4, 5]]] * 4
    assert run_on_ranks(sent_before_work, 4, 2 * block) == [[[3, 3, 3], [3, 3, 5]]] * 4
    assert run_on_ranks(sent_before_work, 4, 3 * block) == [[[1], [1]]] * 4


def local_traffic(placements, mesh_shape):
    mesh = world_mesh(mesh_shape)
    q, k, v = (held(x, mesh, placements) for x in drawn(*[(4, 4, 10, 8)] * 3))
    with Metered() as both, strict():
        attend(q, k, v)._local_tensor.sum().backward()
        attend(q, k, v, is_causal=True)._local_tensor.sum().backward()
    return both.messages


@pytest.mark.parametrize(
    ("placements", "mesh"), [([Shard(0)], (4,)), ([Shard(1)], (4,)), ([Shard(0), Shard(1)], (2, 2))], ids=str
)
def test_batch_and_heads_send_nothing(placements, mesh):
    assert run_on_ranks(local_traffic, 4, placements, mesh) == [0] * 4


def few_key_heads(ranks):
    mesh = world_mesh((ranks,))
    tensors = drawn((2, 6, 12, 4), *[(2, 1, 12, 4)] * 2)
    q, k, v = held(tensors[0], mesh, [Shard(1)]), *tensors[1:]
    out = attend(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out.full_tensor(), attend(*tensors, enable_gqa=True))
    return out.placements, out.to_local().numel() * ranks / out.numel()


@pytest.mark.parametrize("ranks", [2, 3])
def test_heads_of_fewer_key_heads_than_ranks_are_no_unit(ranks):
    """All query heads of one key head were on one rank: the rows are sharded instead."""
    for (placement,), balance in run_on_ranks(few_key_heads, ranks, ranks):
        assert placement == Shard(2) and balance == 1.0


def replicated_keys():
    mesh = world_mesh((3,))
    q, k, v = drawn((2, 2, 9, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    with Metered() as forward:
        out = attend(held(q, mesh, [Shard(2)]), k, v)
    return forward.messages, tuple(out.placements)


def test_replicated_keys_send_nothing():
    assert run_on_ranks(replicated_keys, 3) == [(0, (Shard(2),))] * 3


# ---------------------------------------------------------------------- load balance


def shares(mesh_shape, placements, rows, columns, replicated_keys, lengths):
    """Return, on each rank, the number of scores that it computes, in total and per ring step."""
    mesh = world_mesh(mesh_shape)
    works = []
    before = ring_attention.attend
    from shardfield.ops.attention import sdpa

    def spy(work, *args):
        works.append(work)
        return before(work, *args)

    sdpa.attend = spy
    try:
        q, k, v = drawn(*[(1, 1, n, 2) for n in (rows, columns, columns)])
        q = held(q, mesh, placements, lengths)
        k, v = (x if replicated_keys else held(x, mesh, placements) for x in (k, v))
        out = attend(q, k, v, is_causal=True)
        assert out._layout is q._layout
    finally:
        sdpa.attend = before
    (work,) = works
    return work.scores, [sum(t.area for t in tiles) for tiles in work.tiles]


CAUSAL = {
    "even": ((4,), [Shard(2)], 1024, 1024, False, None),
    "uneven": ((4,), [Shard(2)], 1024, 1024, False, {2: (10, 900, 0, 114)}),
    "three ranks": ((3,), [Shard(2)], 1000, 1000, False, None),
    "replicated keys": ((4,), [Shard(2)], 1024, 1024, True, None),
    "more queries": ((4,), [Shard(2)], 1500, 1024, False, None),
    "more keys": ((4,), [Shard(2)], 1024, 1500, False, None),
    "two axes": ((2, 2), [Shard(2), Shard(2)], 1024, 1024, False, None),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_work_is_equal(name):
    mesh, placements, rows, columns, *_ = CAUSAL[name]
    ranks = math.prod(mesh)
    results = run_on_ranks(shares, ranks, *CAUSAL[name])
    everything = sum(min(r + 1, columns) for r in range(rows))
    mean = everything / ranks
    assert sum(total for total, _ in results) == everything  # every score is computed once
    assert all(abs(total - mean) <= 0.05 * mean for total, _ in results)
    if len(mesh) == 1:  # each ring step is the same work for all ranks
        for stop in zip(*(stops for _, stops in results), strict=True):
            assert max(stop) - min(stop) <= 0.06 * mean


class Kernels(TorchDispatchMode):
    """Count the calls of attention kernels."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += "flash_attention" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_causal_ring_calls_few_kernels(rank, monkeypatch):
    """On a rank of 8 that visits pairs of blocks, the others' blocks are read by 4 or 5 kernels, its own by 2."""
    monkeypatch.setattr(sdpa_rule, "blocks_together", lambda *_: 2)
    with simulated(8, rank), attention_strategy("ring"):
        layout = Layout.of(init_device_mesh("cpu", (8,), mesh_dim_names=("domain",)), [Shard(2)], (1, 2, 256, 4))
        q, k, v = (ShardTensor(torch.ones(1, 2, 32, 4, requires_grad=True), layout) for _ in range(3))
        attend(q, k, v, is_causal=True)  # plans, with kernels on stand-ins
        with Kernels() as forward:
            out = attend(q, k, v, is_causal=True)
        with Kernels() as backward:
            out._local_tensor.sum().backward()
    assert forward.calls == backward.calls == {0: 6, 3: 7, 7: 5}[rank]


@pytest.mark.parametrize(("rows", "kernels"), [(16, 1), (2048, 2)])
def test_two_ranks_compute_with_their_own_keys_unless_the_work_is_short(rows, kernels):
    """The own block hides the message of the other one; small blocks are received first, and are one kernel."""
    with simulated(2), attention_strategy("ring"):
        layout = Layout.of(init_device_mesh("cpu", (2,), mesh_dim_names=("domain",)), [Shard(2)], (1, 1, 2 * rows, 8))
        x = ShardTensor(torch.ones(1, 1, rows, 8), layout)
        attend(x, x, x)
        with Kernels() as forward:
            attend(x, x, x)
    assert forward.calls == kernels


# ---------------------------------------------------------------------- choice of strategy


def way_of(shapes, placements, mesh_shape, kwargs):
    mesh = world_mesh(mesh_shape)
    q, k, v = (x if p is None else held(x, mesh, p) for x, p in zip(drawn(*shapes), placements, strict=True))
    with explain() as report:
        attend(q, k, v, **kwargs)
    (line,) = report.rows
    way = line.ending.removeprefix("rule: ")
    assert min(line.costs, key=line.costs.__getitem__) == way and ("cost in kB" in str(report)) == (len(line.costs) > 1)
    assert "e+" not in line.outcome, "costs are plain numbers"
    return line.ending


S = [Shard(2)]
WAYS = [
    # name, shapes of q, k, v, placements
    ("keys gathered", [(1, 3, 64, 8)] * 3, [S, S, S]),  # small: one message
    ("ring", [(1, 4, 4096, 8)] * 3, [S, S, S]),  # long: keys are sent while blocks are computed
    ("heads", [(3, 64, 256, 64)] * 3, [S, S, S]),  # short, many heads: fewer bytes
    ("keys gathered", [(1, 2, 4096, 8), (1, 2, 16, 8), (1, 2, 16, 8)], [S, S, S]),
    ("merge", [(1, 2, 4, 8), (1, 2, 4096, 8), (1, 2, 4096, 8)], [None, S, S]),
    ("merge", [(1, 2, 4, 8), (1, 2, 4096, 8), (1, 2, 4096, 8)], [S, S, S]),
    ("local", [(1, 4, 64, 8)] * 3, [[Shard(1)]] * 3),
    ("local", [(1, 4, 64, 8)] * 3, [S, None, None]),
]


@pytest.mark.parametrize(("way", "shapes", "placements"), WAYS)
def test_cheapest_strategy_is_chosen_and_explained(way, shapes, placements):
    assert run_on_ranks(way_of, 4, shapes, placements, (4,), {}) == [f"rule: {way}"] * 4


def forced(way, mesh_shape, tensors, kwargs, layouts, visit_bytes=strategy.VISIT_BYTES):
    """Return, on each rank, failures of a row whose calls are forced to one strategy, and how many used it."""
    taken = [0]

    def call(*args, **given):
        with explain() as report:
            out = attend(*args, **given)
        taken[0] += any(way in r.ending for r in report.rows)
        return out

    with preferring(way, visit_bytes):
        case_row = row(call, *tensors, options={"layouts": layouts, "name": f"attention by {way}"}, **kwargs)
        return check_case(case_row, mesh_shape), taken[0]


FORCED = {
    "self": ([T(2, 4, 7, 4, shard_dims=(1, 2)) for _ in range(3)], {}),
    "causal": ([T(2, 4, 7, 4, shard_dims=(2,)) for _ in range(3)], {"is_causal": True}),
    "bias": ([T(2, 2, 6, 4, shard_dims=(2,)), *(T(2, 2, 5, 4, shard_dims=(2,)) for _ in range(2)), T(2, 6, 5)], {}),
    "groups": (
        [T(2, 8, 6, 4, shard_dims=(2,)), *(T(2, 4, 5, 4, shard_dims=(2,)) for _ in range(2))],
        {"enable_gqa": True},
    ),
}


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("what", FORCED)
@pytest.mark.parametrize("way", ["ring", "heads", "keys gathered", "merge"])
def test_every_strategy(way, what, mesh):
    results = run_on_ranks(forced, math.prod(mesh), way, mesh, *FORCED[what], 6, timeout=60)
    assert not [c for complaints, _ in results for c in complaints]
    assert way == "heads" or all(taken for _, taken in results)


@pytest.mark.parametrize(("what", "ranks", "visit_bytes"), [*((name, 3, 0) for name in FORCED), ("self", 4, 2000)])
def test_ring_of_several_visits(what, ranks, visit_bytes):
    """Blocks one by one, and two at a time: small blocks, as in the other tests, are one visit."""
    results = run_on_ranks(forced, ranks, "ring", (ranks,), *FORCED[what], 6, visit_bytes, timeout=60)
    assert not [c for complaints, _ in results for c in complaints]
    assert all(taken for _, taken in results)


# ---------------------------------------------------------------------- memory


@preferring("ring")
def kept_for_backward():
    mesh = world_mesh((4,))
    q, k, v = (held(x, mesh, [Shard(2)]) for x in drawn(*[(1, 3, 64, 8)] * 3))
    seen: dict[int, int] = {}

    def note(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        attend(q, k, v)
    return sum(seen.values()), q._local_tensor.nbytes


def test_blocks_of_other_ranks_are_not_saved():
    for kept, shard in run_on_ranks(kept_for_backward, 4):
        assert kept <= 4.5 * shard  # q, k, v, out and the log-sum-exp


# ---------------------------------------------------------------------- dropout


def dropped(mesh_shape, placements, key_placements, seed):
    mesh = world_mesh(mesh_shape)
    q, k, v = drawn((2, 2, 12, 4), (2, 2, 9, 4), (2, 2, 9, 4))
    q = held(q, mesh, placements)
    k, v = (held(x, mesh, key_placements) for x in (k, v))
    torch.manual_seed(seed)
    out = attend(q, k, v, dropout_p=0.4)
    out.backward(torch.ones(out.shape, dtype=out.dtype))
    grads = [to_full_tensor(x.grad) for x in (q, k, v)]
    torch.manual_seed(seed)
    x, y, z = (held(to_full_tensor(t.detach()), mesh, [Replicate()] * mesh.ndim) for t in (q, k, v))
    composed = F.dropout((x @ y.mT / 2).softmax(-1), 0.4) @ z
    composed.backward(torch.ones(out.shape, dtype=out.dtype))
    return [to_full_tensor(out.detach()), *grads], [
        to_full_tensor(composed.detach()),
        *(to_full_tensor(t.grad) for t in (x, y, z)),
    ]


SHARDINGS = [
    ((1,), [Shard(2)], [Shard(2)]),
    ((3,), [Shard(2)], [Shard(2)]),
    ((2,), [Shard(1)], [Shard(1)]),
    ((3,), [Replicate()], [Shard(2)]),
    ((2, 2), [Shard(2), Shard(0)], [Shard(2), Shard(0)]),
]


def test_dropout_is_independent_of_the_sharding():
    ((_, expected),) = run_on_ranks(dropped, 1, *SHARDINGS[0], 3)
    for sharding in SHARDINGS:
        for got, composed in run_on_ranks(dropped, math.prod(sharding[0]), *sharding, 3):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(composed, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- dtypes


def half_error(dtype):
    mesh = world_mesh((4,))
    exact = drawn(*[(1, 3, 96, 16)] * 3)
    given = [x.to(dtype) for x in exact]
    reference = attend(*[x.double() for x in given])
    one = (attend(*given).double() - reference).abs().max()
    out = attend(*[held(x, mesh, [Shard(2)]) for x in given])
    assert out.dtype is dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attend(*[held(x.float(), mesh, [Shard(2)]) for x in exact])
    assert cast.dtype is torch.bfloat16
    torch.testing.assert_close(to_full_tensor(cast).double(), attend(*exact), rtol=0.05, atol=0.05)
    return one.item(), (to_full_tensor(out).double() - reference).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_accumulates_in_fp32(dtype):
    for one, ring in run_on_ranks(half_error, 4, dtype):
        assert ring <= 2 * one


# ---------------------------------------------------------------------- second derivatives


def second(fn, inputs):
    out = fn(*inputs)
    generator = torch.Generator().manual_seed(1)
    seed = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    first = torch.autograd.grad(torch.sin(out), inputs, seed, create_graph=True)
    loss = sum((g * g * torch.randn(g.shape, dtype=g.dtype, generator=generator)).sum() for g in first)
    return [*first, *torch.autograd.grad(loss, inputs)]


SECOND = {
    "plain": ([(2, 3, 5, 4)] + [(2, 3, 4, 4)] * 2, lambda q, k, v: attend(q, k, v)),
    "causal": ([(2, 2, 6, 4)] * 3, lambda q, k, v: attend(q, k, v, is_causal=True)),
    "bias": ([(2, 3, 5, 4)] + [(2, 3, 4, 4)] * 2 + [(3, 5, 4)], lambda q, k, v, m: attend(q, k, v, m)),
    "itself": ([(2, 3, 6, 4)], lambda x: attend(x, x, x)),
}


def compare_second(name, mesh_shape, draws):
    import random

    mesh = world_mesh(mesh_shape)
    shapes, fn = SECOND[name]
    values = drawn(*shapes)
    with sdpa_kernel(SDPBackend.MATH):  # torch's kernels have no second derivative
        wanted = second(fn, [x.clone().requires_grad_() for x in values])
        for number in range(draws):
            rng = random.Random(f"{name} {number}")
            layouts = [draw_layout(mesh, T(*s, shard_dims=(len(s) - 2,)), rng, try_partial=False) for s in shapes]
            given = [ShardTensor(local_shard(x, y).requires_grad_(), y) for x, y in zip(values, layouts, strict=True)]
            for got, ref in zip(second(fn, given), wanted, strict=True):
                torch.testing.assert_close(to_full_tensor(got), ref, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name, mesh):
    run_on_ranks(compare_second, math.prod(mesh), name, mesh, 5, timeout=60)


# ---------------------------------------------------------------------- other forms of the call


def biases():
    mesh = world_mesh((3,))
    q, k, v = drawn((2, 2, 5, 4), (2, 2, 8, 4), (2, 2, 8, 4))
    shards = [held(x, mesh, [Shard(2)]) for x in (q, k, v)]
    for make in (causal_upper_left, causal_lower_right):
        bias = make(5, 8)
        torch.testing.assert_close(to_full_tensor(attend(*shards, bias)), attend(q, k, v, bias), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError):
        attend(*shards, causal_upper_left(5, 8), is_causal=True)
    total = shards[0]._layout.with_dims(Layout.replicate(mesh, q.shape).dims)
    assert attend(held(q, mesh, [Partial()]), k, v)._layout is total  # reduced, then local
    return dist.get_rank()


def test_causal_biases():
    assert run_on_ranks(biases, 3) == [0, 1, 2]


# ---------------------------------------------------------------------- a forced strategy


def forced_strategies():
    """Return what `explain` shows for each forced strategy, with equal results and gradients, and the refusals."""
    mesh = world_mesh((2,))
    full = drawn((1, 2, 10, 4), (1, 2, 10, 4), (1, 2, 10, 4))
    q, k, v = (held(t, mesh, [Shard(2)]) for t in full)
    expected = attend(*full)
    shown = {}
    for name in (None, "ring", "heads", "gather", "merge", None, "ring"):
        with attention_strategy(name) if name else nullcontext(), explain() as report:
            out = attend(q, k, v)
        out.sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected)
        shown.setdefault(name, []).append(report.rows[0].ending)
    grads = [torch.autograd.grad(attend(*(t.requires_grad_() for t in full)).sum(), full)]
    for t, expected_grad in zip((q, k, v), grads[0], strict=True):
        torch.testing.assert_close(t.grad.full_tensor() / 7, expected_grad)
    three = [held(t, mesh, [Shard(2)]) for t in drawn((1, 3, 10, 4), (1, 3, 10, 4), (1, 3, 10, 4))]
    with pytest.raises(ShardingError, match="'heads' does not apply to mesh axis"), attention_strategy("heads"):
        attend(*three)
    attend(*three)
    with pytest.raises(ValueError, match="'rings' is not one of 'ring', 'heads', 'gather', 'merge'"):
        with attention_strategy("rings"):
            pass
    assert runtime.active.attention_strategy is None
    return shown


def test_the_strategy_can_be_forced():
    for shown in run_on_ranks(forced_strategies, 2):
        assert shown["ring"] == ["rule: ring"] * 2 and shown["heads"] == ["rule: heads"]
        assert shown["gather"] == ["rule: keys gathered"] and shown["merge"] == ["rule: merge"]
        assert len(set(shown[None])) == 1, "a forced strategy leaves no trace"
