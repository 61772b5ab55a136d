"""The FFTs of a sharded field equal those of the global field, forward and backward."""

import pytest
import torch
import torch.distributed as dist

from shardfield import runtime
from shardfield.distributed import DistributedManager, utils
from shardfield.distributed.fft import DistributedIRFFT2, DistributedRFFT2
from shardfield.distributed.utils import compute_split_shapes
from shardfield.errors import ShardingError, WorldError
from shardfield.testing import run_on_ranks
from tests.distributed.test_utils import groups, shard
from tests.rank_checks import assert_gradients, assert_second_order, random_like

# Global field sizes, and s: uneven, padded, cropped, both, fewer rows than ranks, and a single column.
FIELDS = [
    ((6, 8), None),
    ((5, 7), (5, 7)),
    ((4, 6), (7, 9)),
    ((7, 9), (4, 5)),
    ((3, 10), (8, 3)),
    ((1, 5), (2, 6)),
    ((6, 1), (3, 1)),
]
NORMS = ["ortho", "backward", "forward"]


def global_gradient(fn, x, cotangent):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, cotangent)[0]


def shardings(size):
    """Return the package's even shard sizes, and sizes with empty shards."""
    world = dist.get_world_size()
    return [compute_split_shapes(size, world), [0] * (world - 1) + [size], [size] + [0] * (world - 1)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_to_torch(world):
    run_on_ranks(equal_to_torch, world)


def equal_to_torch():
    world = dist.get_world_size()
    with groups(spatial_parallel=world):
        for i, (size, s) in enumerate(FIELDS):
            for dim, norm in zip(((-2, -1), (1, 2), (2, 0)), NORMS[i % 3 :] + NORMS[: i % 3], strict=True):
                shape = [2, 2, 2]
                for d, n in zip(dim, size, strict=True):
                    shape[d] = n
                x = torch.randn(shape, dtype=torch.float64)
                compare(DistributedRFFT2.apply, torch.fft.rfft2, x, s, dim, norm, dim[1], dim[0])
                if s is not None or size[1] > 1:  # a spectrum of one column does not determine the size
                    z = torch.randn(shape, dtype=torch.complex128)
                    compare(DistributedIRFFT2.apply, torch.fft.irfft2, z, s, dim, norm, dim[0], dim[1])


def compare(ours, torchs, x, s, dim, norm, sharded, target):
    def reference(x):
        return torchs(x, s, dim, norm)

    expected = reference(x)
    cotangent = random_like(expected, 5, same_on_all_ranks=True)
    gradient = global_gradient(reference, x, cotangent)
    parts = compute_split_shapes(expected.shape[target], dist.get_world_size())
    for lengths in shardings(x.shape[sharded]):
        mine = shard(x, sharded, lengths).clone().requires_grad_()
        got = ours(mine, (None, None) if s is None else s, dim, norm)
        torch.testing.assert_close(got, shard(expected, target, parts), rtol=1e-12, atol=1e-12)
        got.backward(shard(cotangent, target, parts))
        torch.testing.assert_close(mine.grad, shard(gradient, sharded, lengths), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients(world):
    run_on_ranks(gradients, world)


def gradients():
    world = dist.get_world_size()
    with groups(spatial_parallel=world):
        x = torch.randn(3, compute_split_shapes(4, world)[dist.get_rank()], dtype=torch.float64)
        z = torch.randn_like(x, dtype=torch.complex128)
        assert_gradients(lambda x: DistributedRFFT2.apply(x, (4, 3), (0, 1), "forward"), x)
        assert_gradients(lambda z: DistributedIRFFT2.apply(z, (2, 5), (1, 0)), z)
        assert_second_order(lambda x: DistributedRFFT2.apply(x, None, (0, 1)).abs(), x)


def test_round_trip_in_single_precision():
    run_on_ranks(round_trip, 3)


def round_trip():
    with groups(spatial_parallel=3):
        x = torch.randn(2, 6, 9)
        spectrum = DistributedRFFT2.apply(shard(x, 2, [3, 3, 3]), (6, 9), (1, 2))
        assert spectrum.dtype == torch.complex64
        full = utils.all_gather_v_wrapper(spectrum, [2, 2, 2], dim=1)
        torch.testing.assert_close(full, torch.fft.rfft2(x, norm="ortho"), rtol=1e-5, atol=1e-5)
        back = DistributedIRFFT2.apply(spectrum, (None, 9), (1, 2))  # the spectrum as it is: sharded along dim 1
        assert back.dtype == torch.float32
        torch.testing.assert_close(back, shard(x, 2, [3, 3, 3]), rtol=1e-5, atol=1e-5)


def test_only_needed_columns_are_sent():
    run_on_ranks(bytes_sent, 2)


def bytes_sent():
    sent = []
    with groups(spatial_parallel=2):
        for s in ((4, 8), (4, 4)):
            runtime.active.meter = lambda kind, messages, nbytes: sent.append((kind, nbytes))
            DistributedRFFT2.apply(torch.zeros(4, 4, dtype=torch.float64), s, (0, 1))
            runtime.active.meter = None
    rank = dist.get_rank()
    exchanges = [nbytes for kind, nbytes in sent if kind == "exchange"]
    assert exchanges == [2 * 4 * 16, 2 * 4 * 16 if rank == 0 else 0]


def test_unsupported_arguments_are_refused():
    run_on_ranks(refused, 2)


def refused():
    rank = dist.get_rank()
    x = torch.zeros(4, 4)
    DistributedManager.initialize()
    with pytest.raises(WorldError, match="spatial_parallel"):
        DistributedRFFT2.apply(x, None, (0, 1))
    DistributedManager.cleanup()
    with groups(spatial_parallel=2):
        for bad, match in (
            (lambda: DistributedRFFT2.apply(x, (4, 8 + rank), (0, 1)), r"do not agree on s\n  rank 0: .*s \[4, 8\]"),
            (lambda: DistributedRFFT2.apply(x, None, (0, 1) if rank else (1, 0)), "do not agree on dim"),
            (lambda: DistributedRFFT2.apply(torch.zeros(4 + rank, 4), None, (0, 1)), "do not agree on other dims"),
            (lambda: DistributedRFFT2.apply(x, None, (0, 2)), "no dim 2"),
        ):
            with pytest.raises(ShardingError, match=match):
                bad()
        for bad, match in (
            (lambda: DistributedRFFT2.apply(x, None, (1, 1)), "not two dims"),
            (lambda: DistributedRFFT2.apply(x, (0, 4), (0, 1)), "sizes of at least 1"),
            (lambda: DistributedIRFFT2.apply(x[:, :1], None, (0, 1)), "spectrum of one column"),
            (lambda: DistributedIRFFT2.apply(x[:, :0], None, (0, 1)), "an empty field"),
        ):
            with pytest.raises(ValueError, match=match):
                bad()
