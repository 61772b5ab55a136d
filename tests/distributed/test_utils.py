"""The documented collectives: values, gradients, and arguments that differ between ranks."""

import contextlib
import copy
import io
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardfield import runtime
from shardfield.distributed import DistributedManager, mappings, utils
from shardfield.distributed.autograd import all_gather_v, gather_v, indexed_all_to_all_v, scatter_v
from shardfield.errors import ShardingError, WorldError
from shardfield.layout import starts
from shardfield.testing import run_on_ranks
from tests.rank_checks import assert_gradients, assert_second_order

SIZES = {1: [5], 2: [1, 4], 3: [2, 0, 3], 4: [0, 4, 0, 1]}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool, torch.int16]


@contextlib.contextmanager
def groups(**sizes):
    """Provide the manager with groups of these names and sizes."""
    DistributedManager.initialize()
    for name, size in sizes.items():
        DistributedManager.create_process_subgroup(name, size)
    yield DistributedManager()
    DistributedManager.cleanup()


def field(dtype, dim=0, size=5):
    """Return the same tensor on all ranks."""
    shape = [3, 2]
    shape.insert(dim, size)
    values = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(1))
    if dtype.is_complex:
        values = values + 1j * values.flip(dim)
    return (values > 0) if dtype is torch.bool else values.to(dtype)


def shard(x, dim, sizes):
    rank = dist.get_rank()
    return x.narrow(dim, starts(sizes)[rank], sizes[rank])


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_of_any_size_dim_and_dtype(world):
    run_on_ranks(shards, world)


def shards():
    rank, world = dist.get_rank(), dist.get_world_size()
    root = world - 1
    for dim, dtypes in ((0, DTYPES), (1, [torch.float32]), (2, [torch.bool]), (-1, [torch.complex64])):
        for dtype in dtypes:
            for sizes in (SIZES[world], [2] * world):
                x = field(dtype, dim % 3, sum(sizes))
                mine = shard(x, dim, sizes)
                for given in (sizes, None, [local_shape(x, dim, n) for n in sizes]):
                    assert torch.equal(utils.all_gather_v_wrapper(mine, given, dim), x)
                    gathered = utils.gather_v_wrapper(mine, given, dim, root)
                    assert torch.equal(gathered, x if rank == root else torch.zeros_like(x))
                    assert gathered.dtype == dtype
                dummy = x if rank == root else torch.empty_like(x.narrow(dim, 0, 0))
                assert torch.equal(utils.scatter_v_wrapper(dummy, sizes, dim, root), mine)
                even = utils.compute_split_shapes(sum(sizes), world)
                assert torch.equal(utils.scatter_v_wrapper(dummy, None, dim, root), shard(x, dim, even))
                if dtype is not torch.bool:
                    total = utils.all_gather_v_bwd_wrapper(x * (rank + 1), sizes, dim)
                    assert torch.equal(total, mine * sum(range(1, world + 1)))


def local_shape(x, dim, length):
    shape = list(x.shape)
    shape[dim] = length
    return torch.Size(shape)


def routing(world):
    """Return the rows that each rank sends to each: repeated ones, none, and all."""
    chosen = [[[(s + r + i) % n for i in range((s + 2 * r) % 4)] if n else [] for r in range(world)] for s, n in rows()]
    return chosen, [[len(c) for c in row] for row in chosen]


def rows():
    return enumerate([n + 1 if s == 0 else n for s, n in enumerate(SIZES[dist.get_world_size()])])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_indexed_all_to_all(world):
    run_on_ranks(indexed, world)


def indexed():
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen, sizes = routing(world)
    lengths = [n for _, n in rows()]
    indices = [torch.tensor(c, dtype=torch.int64) for c in chosen[rank]]
    for dim, dtypes in ((0, DTYPES), (1, [torch.int64]), (-1, [torch.complex64])):
        for dtype in dtypes:
            x = field(dtype, dim % 3, sum(lengths))
            mine = shard(x, dim, lengths)
            got = utils.indexed_all_to_all_v_wrapper(mine, indices, sizes, dim)
            begin = starts(lengths)
            wanted = [begin[s] + i for s in range(world) for i in chosen[s][rank]]
            expected = x.index_select(dim, torch.tensor(wanted, dtype=torch.int64))
            assert torch.equal(got, expected)
            if dtype is torch.int64:
                back = utils.indexed_all_to_all_v_wrapper_bwd(got.double(), indices, sizes, lengths[rank], dim=dim)
                sent = torch.cat(indices)
                counts = torch.bincount(sent, minlength=lengths[rank])
                shape = [-1 if d == dim % 3 else 1 for d in range(3)]
                assert torch.equal(back, mine * counts.reshape(shape).double())


def test_transpose():
    run_on_ranks(transpose, 3)


def transpose():
    rank, sizes = dist.get_rank(), [1, 0, 3]
    for dtype in (torch.float32, torch.complex64, torch.bool):
        x = field(dtype, 2, 4)  # 3, 2, 4
        mine = shard(x, 2, sizes)
        expected = shard(x, 0, utils.compute_split_shapes(3, 3))
        got, request = utils.distributed_transpose(mine, 0, 2)
        assert request is None and torch.equal(torch.cat(got, 2), expected)
        got, request = utils.distributed_transpose(mine, -3, -1, async_op=True)
        request.wait()
        assert torch.equal(torch.cat(got, 2), expected)
        got, _ = utils.distributed_transpose(mine, 1, 2)  # two rows over three ranks: one shard is empty
        assert torch.equal(torch.cat(got, 2), shard(x, 1, [0, 0, 2]))
    if rank == 0:
        got[0].zero_()
        assert mine.any()
    with pytest.raises(ValueError, match="dims 2 and 2"):
        utils.distributed_transpose(mine, 2, 2)


def test_single_process_needs_no_group():
    assert not dist.is_initialized()
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    for same in (all_gather_v(x, [3]), gather_v(x, [3]), scatter_v(x, None)):
        assert torch.equal(same, x)
    moved = indexed_all_to_all_v(x, [torch.tensor([2, 0, 2])], [[3]])
    moved.sum().backward()
    assert torch.equal(x.grad[:, 0], torch.tensor([1.0, 0.0, 2.0]))
    assert utils.distributed_transpose(x, 0, 1)[1] is None
    with pytest.raises(ShardingError, match="all_gather_v: its tensor has 3 along dim 0, sizes says 2"):
        all_gather_v(x, [2])
    with pytest.raises(ShardingError, match="no dim 2"):
        all_gather_v(x, [3], dim=2)


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_of_shards(world):
    run_on_ranks(gradients_of_shards, world)


def gradients_of_shards():
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes, root = SIZES[world], world - 1
    for dim, dtype in ((0, torch.float64), (1, torch.complex128)):
        gradients_along(dim, dtype, sizes, root)
    mine = shard(torch.randn(sum(sizes), dtype=torch.float64), 0, sizes)
    assert_second_order(lambda x: all_gather_v(x, sizes) * (rank + 1), mine)
    assert_second_order(lambda x: gather_v(x, sizes, dst=root) * (rank + 1), mine)
    assert_second_order(lambda x: scatter_v(x, None, src=root).sin(), mine)


def gradients_along(dim, dtype, sizes, root):
    rank = dist.get_rank()
    full_value = torch.randn([sum(sizes) if d == dim else 2 for d in range(2)], dtype=dtype)
    mine = shard(full_value, dim, sizes)
    # A factor that differs between ranks, so that a gradient from the wrong rank is found.
    assert_gradients(lambda x: all_gather_v(x, sizes, dim) * (rank + 1), mine)
    assert_gradients(lambda x: gather_v(x, sizes, dim, root) * (rank + 1), mine)
    source = full_value if rank == root else full_value.narrow(dim, 0, 1)
    assert_gradients(lambda x: scatter_v(x, sizes, dim, root) * (rank + 1), source)
    chosen, table = routing(len(sizes))
    indices = [torch.tensor(c, dtype=torch.int64) for c in chosen[rank]]
    x = torch.randn([dict(rows())[rank] if d == dim else 2 for d in range(2)], dtype=dtype)
    assert_gradients(lambda x: indexed_all_to_all_v(x, indices, table, dim=dim) * (rank + 1), x)


def test_only_one_rank_requires_grad():
    """The others join the collectives of backward nevertheless."""
    run_on_ranks(one_wants, 3)


def one_wants():
    rank = dist.get_rank()
    calls = {
        "all_gather_v": (lambda x: all_gather_v(x, [2, 2, 2]), [3.0, 3.0, 3.0]),
        "gather_v": (lambda x: gather_v(x, [2, 2, 2], dst=1), [1.0, 1.0, 1.0]),
        "scatter_v": (lambda x: scatter_v(x, [1, 0, 1], src=2), [0.0, 0.0, 1.0]),
    }
    for wanting in range(3):
        for name, (call, gradient) in calls.items():
            x = torch.ones(2, requires_grad=rank == wanting)
            call(x).sum().backward()
            got = x.grad.tolist() if rank == wanting else x.grad
            assert got == ([gradient[rank]] * 2 if rank == wanting else None), name
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ShardingError, match=r"gradients are off at positions \[1\]"):
        with torch.set_grad_enabled(rank != 1):
            all_gather_v(x, [2, 2, 2])


def test_half_precision_gradients_are_summed_in_fp32():
    run_on_ranks(half_gradients, 4)


def half_gradients():
    rank = dist.get_rank()
    for dtype, small in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        exact = torch.tensor(1 + 3 * small).to(dtype)
        weight = 1.0 if rank == 0 else small
        x = torch.ones(1, dtype=dtype, requires_grad=True)
        for use_fp32 in (True, False):
            (grad,) = torch.autograd.grad(all_gather_v(x, [1] * 4, use_fp32=use_fp32).sum() * weight, x)
            assert grad == (exact if use_fp32 else 1)  # one by one, the small terms are rounded away
        # Each rank sends its one slice to all, so four gradients come back to it.
        everyone = [torch.zeros(1, dtype=torch.int64)] * 4
        got = indexed_all_to_all_v(x, everyone, [[1] * 4] * 4)
        assert torch.autograd.grad(got, x, torch.full_like(got, weight))[0] == exact


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mappings(world):
    run_on_ranks(check_mappings, world)


def check_mappings():
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[world]
    with groups(parallel=world):
        for dtype in (torch.float64, torch.complex128):
            x = torch.randn(5, 1 if dtype.is_complex else 2, dtype=dtype)
            even = utils.compute_split_shapes(5, world)
            assert torch.equal(mappings.copy_to_parallel_region(x, "parallel"), x)
            assert torch.allclose(mappings.reduce_from_parallel_region(x, "parallel"), world * x)
            assert torch.equal(mappings.scatter_to_parallel_region(x, -2, "parallel"), shard(x, 0, even))
            gathered = mappings.gather_from_parallel_region(shard(x, 0, sizes), 0, sizes, "parallel")
            assert torch.equal(gathered, x)
            assert_gradients(
                lambda x: mappings.copy_to_parallel_region(x, "parallel") * (rank + 1), x, replicated_input=True
            )
            assert_gradients(
                lambda x: mappings.reduce_from_parallel_region(x * (rank + 1), "parallel"), x, replicated_output=True
            )
            assert_gradients(lambda x: mappings.scatter_to_parallel_region(x, 0, "parallel"), x, replicated_input=True)
            assert_gradients(
                lambda x: mappings.gather_from_parallel_region(x, 0, sizes, "parallel"),
                shard(x, 0, sizes),
                replicated_output=True,
            )
        part = mappings.scatter_to_parallel_region(torch.ones(5, requires_grad=True) * 2, 0, "parallel")
        torch.relu_(part)  # a copy, so that layers may write into it
        with pytest.raises(WorldError, match="nowhere"):
            mappings.copy_to_parallel_region(x, "nowhere")
        with pytest.raises(ValueError, match="no dim 2"):
            mappings.scatter_to_parallel_region(x, 2, "parallel")
        if world > 1:
            with pytest.raises(ShardingError, match="do not agree on sizes"):
                mappings.gather_from_parallel_region(x, 0, [5] * world if rank else [4] * world, "parallel")


# ---------------------------------------------------------------------- arguments that differ between ranks


def test_different_arguments_raise_on_all_ranks():
    messages = run_on_ranks(disagreements, 3)
    assert messages[0] == messages[1] == messages[2]
    sizes = messages[0]["sizes"]
    assert "all_gather_v: the ranks do not agree on sizes" in sizes
    assert "rank 1: sizes [2, 3, 2]" in sizes and "rank 2: sizes [2, 2, 2]" in sizes
    assert "rank 1" in messages[0]["length"] and "its tensor has 4 along dim 0, sizes says 2" in messages[0]["length"]
    assert "2 sizes for 3 ranks" in messages[0]["count"]
    assert "do not agree on dim" in messages[0]["dim"] and "rank 2: sizes [2, 2, 2], dim 1" in messages[0]["dim"]
    assert "has no dim 5" in messages[0]["no dim"]
    assert "do not agree on dtype" in messages[0]["dtype"] and "torch.float64" in messages[0]["dtype"]
    assert "do not agree on other dims" in messages[0]["other dims"]
    assert "do not agree on dst" in messages[0]["dst"]
    assert "none at position 3" in messages[0]["no dst"]
    assert "its tensor has 2 along dim 0, sizes add up to 6" in messages[0]["source"]
    assert "different calls: all_gather_v, gather_v" in messages[0]["calls"]
    assert "negative" in messages[0]["negative"] and "is not a list of lengths" in messages[0]["no list"]
    assert "is not 3 x 3 for 3 ranks" in messages[0]["table"]
    assert "sizes says [1, 1, 1]" in messages[0]["indices"]
    assert "go from 0 to 7, of 2 slices" in messages[0]["outside"]
    assert "torch.float32, not integers" in messages[0]["float indices"]
    assert "says that it received 3" in messages[0]["backward"]


def disagreements():
    rank = dist.get_rank()
    odd = rank == 1
    x = torch.zeros(2, 2)
    one = [torch.zeros(1, dtype=torch.int64)] * 3
    table = [[1] * 3] * 3
    calls = {
        "sizes": lambda: all_gather_v(x, [2, 3, 2] if odd else [2, 2, 2]),
        "length": lambda: all_gather_v(torch.zeros(4, 2) if odd else x, [2, 2, 2]),
        "count": lambda: all_gather_v(x, [2, 2] if odd else [2, 2, 2]),
        "dim": lambda: all_gather_v(x, [2, 2, 2], dim=1 if rank == 2 else 0),
        "no dim": lambda: all_gather_v(x, [2, 2, 2], dim=5 if odd else 0),
        "dtype": lambda: all_gather_v(x.double() if odd else x, [2, 2, 2]),
        "other dims": lambda: all_gather_v(torch.zeros(2, 3) if odd else x, None),
        "dst": lambda: gather_v(x, [2, 2, 2], dst=rank),
        "no dst": lambda: gather_v(x, [2, 2, 2], dst=3),
        "source": lambda: scatter_v(x, [2, 2, 2]),
        "calls": lambda: gather_v(x, [2, 2, 2]) if odd else all_gather_v(x, [2, 2, 2]),
        "negative": lambda: all_gather_v(x, [2, 2, -2]),
        "no list": lambda: all_gather_v(x, ["a", 2, 2] if odd else [2, 2, 2]),
        "table": lambda: indexed_all_to_all_v(x, one, table[: 2 if odd else 3]),
        "indices": lambda: indexed_all_to_all_v(x, [one[0].repeat(2)] * 3 if odd else one, table),
        "outside": lambda: indexed_all_to_all_v(x, [torch.tensor([7])] * 3 if odd else one, table),
        "float indices": lambda: indexed_all_to_all_v(x, [torch.zeros(1)] * 3 if odd else one, table),
        "backward": lambda: utils.indexed_all_to_all_v_wrapper_bwd(x if odd else torch.zeros(3, 2), one, table, 2),
    }
    messages = {}
    for name, call in calls.items():
        begin = time.monotonic()
        with pytest.raises(ShardingError) as raised:
            call()
        assert time.monotonic() - begin < 10
        messages[name] = str(raised.value).replace("go from 7 to 7", "go from 0 to 7")
    all_gather_v(x, [2, 2, 2])  # collectives still work
    return messages


def test_argument_check_costs_one_message_and_can_be_disabled():
    assert run_on_ranks(count_messages, 2) == [[("all_gather", 296), ("all_gather", 16)]] * 2
    assert run_on_ranks(count_messages, 2, env={"SHARDFIELD_CHECK_SIZES": "0"}) == [[("all_gather", 16)]] * 2


def count_messages():
    sent = []
    runtime.active.meter = lambda kind, messages, nbytes: sent.append((kind, nbytes))
    all_gather_v(torch.zeros(4), [4, 4])
    runtime.active.meter = None
    return sent


def test_ranks_outside_the_group_raise():
    run_on_ranks(outside_the_group, 2)


def outside_the_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        assert all_gather_v(torch.ones(2), [2], group=group).shape == (2,)
        dist.destroy_process_group(group)
    else:
        with pytest.raises(ValueError, match="rank 1 is not in the process group"):
            all_gather_v(torch.ones(2), [2], group=group)


# ---------------------------------------------------------------------- helpers without communication


def test_split_shapes():
    for size in range(12):
        for parts in range(1, 6):
            lengths = utils.compute_split_shapes(size, parts)
            assert len(lengths) == parts and sum(lengths) == size and min(lengths) >= 0
            assert min(lengths) > 0 or size < parts
    assert utils.compute_split_shapes(10, 4) == [3, 3, 3, 1] and utils.compute_split_shapes(9, 4) == [2, 2, 2, 3]
    with pytest.raises(ValueError, match="cannot split"):
        utils.compute_split_shapes(3, 0)
    assert [t.shape for t in utils.split_tensor_along_dim(torch.zeros(2, 5), -1, 3)] == [(2, 2), (2, 2), (2, 1)]
    with pytest.raises(ValueError, match="no dim 2"):
        utils.split_tensor_along_dim(torch.zeros(2, 5), 2, 2)


def test_pad_and_truncate():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for dim in (0, 1, 2, -1):
        size = x.shape[dim]
        padded = utils.pad_helper(x, dim, size + 2)
        assert torch.equal(padded.narrow(dim, 0, size), x) and not padded.narrow(dim, size, 2).any()
        assert torch.equal(utils.truncate_helper(padded, dim, size), x)
    for size in (6, 7):
        full = torch.fft.fft(torch.randn(2, size, 3), dim=1)
        half = utils.truncate_helper(full, 1, size // 2 + 1)
        torch.testing.assert_close(utils.pad_helper(half, 1, size, mode="conj"), full)
    for bad in (
        lambda: utils.pad_helper(x, 1, -1),
        lambda: utils.pad_helper(x, 1, 9, "conj"),
        lambda: utils.pad_helper(x, 1, 9, "mirror"),
        lambda: utils.truncate_helper(x, 1, -1),
    ):
        with pytest.raises(ValueError, match="_helper"):
            bad()
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert utils.get_memory_format(image) is torch.channels_last
    assert utils.truncate_helper(image, 2, 2).is_contiguous(memory_format=torch.channels_last)
    assert utils.get_memory_format(x) is torch.contiguous_format


# ---------------------------------------------------------------------- losses and fused sums


def test_reduce_loss():
    assert run_on_ranks(losses, 3) == [
        [None, None, None],
        [None, None, 4.5],
        [1.0, 3.0, None],
    ]


def losses():
    with groups():
        rank = dist.get_rank()
        with pytest.raises(ValueError, match="no rank 3"):
            utils.reduce_loss(1.0, 3)
        return [
            utils.reduce_loss(float(rank), dst_rank=2),
            utils.reduce_loss(torch.tensor(float(rank)), 2, mean=False),
            utils.reduce_loss(rank + 0.5, 1, mean=False),
        ]


def test_fused_all_reduce():
    run_on_ranks(fused, 3)
    alone = {"b": torch.ones(2, dtype=torch.int64), "a": [torch.tensor(1)]}
    got = utils.fused_all_reduce(alone)
    assert list(got) == ["b", "a"] and got["a"][0] is not alone["a"][0] and torch.equal(got["b"], alone["b"])
    result, work = utils.fused_all_reduce(torch.ones(2), async_op=True)
    assert work.wait() and torch.equal(result, torch.ones(2))
    assert utils.fused_all_reduce([]) == []


def fused():
    rank = dist.get_rank()
    keys = ["loss", "count", "deep"]
    values = {
        "loss": torch.tensor(float(rank), requires_grad=True),
        "count": torch.full((2, 2), 2.0, dtype=torch.float64),
        "deep": {"half": torch.full((3,), 0.5 + rank, dtype=torch.bfloat16), "empty": torch.zeros(0)},
    }
    mine = {k: values[k] for k in (keys if rank else keys[::-1])}  # in another order on rank 0
    sent = []
    runtime.active.meter = lambda kind, messages, nbytes: sent.append((kind, messages))
    got = utils.fused_all_reduce(mine)
    runtime.active.meter = None
    assert sent == [("all_reduce", 1)]
    assert list(got) == list(mine) and float(got["loss"]) == 3.0 and not got["loss"].requires_grad
    assert got["count"].dtype == torch.float64 and got["count"].tolist() == [[6.0] * 2] * 2
    assert got["deep"]["half"].dtype == torch.bfloat16 and got["deep"]["half"].tolist() == [4.5] * 3
    counts = utils.fused_all_reduce([torch.tensor(2**60 + rank), torch.tensor([rank], dtype=torch.int32)])
    assert int(counts[0]) == 3 * 2**60 + 3 and counts[1].tolist() == [3]
    mean = utils.fused_all_reduce((torch.tensor(float(rank)),), op=dist.ReduceOp.AVG)
    assert isinstance(mean, list) and float(mean[0]) == 1.0
    assert float(utils.fused_all_reduce(torch.tensor(float(rank)), op=dist.ReduceOp.MAX)) == 2.0
    mixed = {"n": torch.tensor(3), "x": torch.tensor(0.5)}
    with pytest.raises(ValueError, match=r"integers \(torch.int64\) together with torch.float32"):
        utils.fused_all_reduce(mixed)
    wide = utils.fused_all_reduce(mixed, buffer_dtype=torch.float64, device="cpu")
    assert wide["n"].dtype == torch.int64 and int(wide["n"]) == 9 and float(wide["x"]) == 1.5
    result, work = utils.fused_all_reduce([torch.tensor(float(rank))], async_op=True)
    assert float(result[0]) == rank
    assert work.wait() and work.wait() and float(result[0]) == 3.0
    with pytest.raises(TypeError, match="float is not a tensor"):
        utils.fused_all_reduce([1.0])
    with pytest.raises(ValueError, match="op"):
        utils.fused_all_reduce(torch.ones(1), op=dist.ReduceOp.BXOR)


# ---------------------------------------------------------------------- shared modules


def test_marked_modules_sum_their_gradients():
    run_on_ranks(marked, 2)


def marked():
    rank = dist.get_rank()
    with groups(pair=2):
        for fp32 in (True, False):
            for dtype in (torch.float32, torch.bfloat16, torch.complex64):
                model = nn.Linear(2, 1, bias=False, dtype=dtype)
                x = torch.full((1, 2), rank + 1.0, dtype=dtype)
                assert utils.mark_module_as_shared(model, "pair", use_fp32_reduction=fp32) is model
                for passes in (1, 2):  # earlier passes are not summed again
                    (model(x).real if dtype.is_complex else model(x)).sum().backward()
                    assert model.weight.grad.tolist() == [[3.0 * passes] * 2]
                with pytest.raises(RuntimeError, match="weight is marked as shared over 'pair' already"):
                    utils.mark_module_as_shared(model, "pair")
                assert utils.unmark_module_as_shared(model) is model
                model.weight.grad = None
                (model(x).real if dtype.is_complex else model(x)).sum().backward()
                assert model.weight.grad.tolist() == [[rank + 1.0] * 2]
                with pytest.raises(RuntimeError, match="weight is not marked"):
                    utils.unmark_module_as_shared(model)
        nest = nn.Sequential(nn.Linear(1, 1))
        nest.register_parameter("scale", nn.Parameter(torch.ones(1)))
        utils.mark_module_as_shared(nest, None, recurse=False)
        (nest(torch.ones(1, 1)) * nest.scale * (rank + 1)).sum().backward()
        alone = float(nest[0](torch.ones(1, 1)))
        assert float(nest.scale.grad) == pytest.approx(3 * alone) and float(nest[0].bias.grad) == rank + 1
        utils.unmark_module_as_shared(nest, recurse=False)
        frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
        utils.mark_module_as_shared(frozen, "pair")
        assert not frozen.weight.requires_grad
        frozen.requires_grad_(True)
        (frozen(torch.ones(1, 1)) * (rank + 1)).sum().backward()
        assert float(frozen.weight.grad) == 3.0
        assert torch.equal(copy.deepcopy(frozen).weight, frozen.weight)
        torch.save(frozen.state_dict(), io.BytesIO())


def test_marks_compose_with_ddp_and_each_other():
    run_on_ranks(marked_twice, 4)


def marked_twice():
    """Check gradients summed over mesh rows and averaged by DDP over columns, then summed over both."""
    rank = dist.get_rank()
    with groups(row=2) as manager:
        manager.create_orthogonal_process_group("column", "row")
        for view in (False, True):
            model = nn.Linear(2, 2)
            utils.mark_module_as_shared(model, "row")
            ddp = DistributedDataParallel(model, process_group=manager.group("column"), gradient_as_bucket_view=view)
            (ddp(torch.ones(1, 2)) * (rank + 1)).sum().backward()
            assert model.bias.grad.tolist() == [((1 + 2) + (3 + 4)) / 2] * 2
            del (
                ddp
            )  # before its group: where DDP's reducer is the last to hold a group, torch may deadlock in freeing it
        model = nn.Linear(2, 2)
        utils.mark_module_as_shared(model, "row")
        utils.mark_module_as_shared(model, "column")
        (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        assert model.bias.grad.tolist() == [10.0] * 2
        utils.unmark_module_as_shared(model)
        model.zero_grad()
        (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        assert model.bias.grad.tolist() == [rank + 1.0] * 2
