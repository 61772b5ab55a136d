"""Resampling: weights against torch's kernels for many sizes, and the bytes of sharded fields."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, runtime, strict
from shardfield.layout import Layout
from shardfield.ops.stencil.resample_weights import ANTIALIASED_TAPS, TAPS, Taps, nearest
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, to_full_tensor, world_mesh
from tests.harness.virtual import VirtualRanks

SIZES = [1, 2, 3, 5, 8, 9, 12, 30]
RESULTS = [{"size": n} for n in (1, 2, 3, 5, 8, 13, 24, 45, 100)] + [
    {"scale_factor": f} for f in (0.1, 0.5, 1 / 3, 0.7, 1.0, 1.1, 1.5, 2.0, 2.3, 3.0)
]
KINDS = [(mode, False, corners) for mode in TAPS for corners in (False, True) if mode != "area" or not corners]
KINDS += [
    (mode, True, corners) for mode in ANTIALIASED_TAPS for corners in (False, True) if mode != "lanczos" or not corners
]
DIMS = {"linear": 1, "trilinear": 3}
EXACT = {torch.float64: 1e-12, torch.float32: 5e-6}


def matrix(taps: Taps) -> torch.Tensor:
    """Return the matrix that maps inputs to outputs."""
    weights = taps.weights.nan_to_num(0)
    return weights.new_zeros(taps.out, taps.size).scatter_add(1, taps.cells, weights)


def result_of(size: int, how: dict) -> tuple[int, float | None]:
    factor = how.get("scale_factor")
    return (how["size"], None) if factor is None else (int(size * factor), factor)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize(("mode", "antialias", "corners"), KINDS)
def test_weights_equal_torch(mode, antialias, corners, dtype):
    if mode == "lanczos" and not torch_has_lanczos():
        return
    nd = DIMS.get(mode, 2)
    table = (ANTIALIASED_TAPS if antialias else TAPS)[mode]
    tried = 0
    for size in SIZES:
        each = torch.eye(size, dtype=dtype).view(1, size, size, *[1] * (nd - 1)).expand(1, size, size, *[2] * (nd - 1))
        for how in RESULTS:
            out, factor = result_of(size, how)
            if not out:
                continue
            sizes = (
                {"size": [out, *[2] * (nd - 1)]} if factor is None else {"scale_factor": [factor, *[1.0] * (nd - 1)]}
            )
            found = F.interpolate(
                each, **sizes, mode=mode, align_corners=None if mode == "area" else corners, antialias=antialias
            )
            # area uses the resulting size; other modes ignore the factor on the CPU where the size is unchanged
            forgotten = mode == "area" or (size == out and ("linear" in mode or antialias))
            made = matrix(table(size, out, None if forgotten else factor, corners, dtype))
            torch.testing.assert_close(
                made.T, found[0].reshape(size, out, -1)[..., 0], rtol=0, atol=EXACT[dtype], msg=f"{size} {how}"
            )
            tried += 1
    assert tried > 100


def torch_has_lanczos() -> bool:
    try:
        F.interpolate(torch.ones(1, 1, 2, 2), size=(3, 3), mode="lanczos", antialias=True)
    except (NotImplementedError, ValueError):  # before 2.13
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_equals_torch(mode, dtype):
    """In a field of several rows and columns of any dtype: cells of 200 rows are identified by their digits."""
    for size, out, columns in [(2, 82, 4), (2, 82, 90), (3, 123, 7), (200, 160, 9), (97, 200, 3), (16, 37, 100)]:
        rows = torch.arange(size)
        field = torch.stack([rows % 16, rows // 16]).to(dtype).view(1, 2, size, 1).expand(1, 2, size, 5).contiguous()
        found = F.interpolate(field, size=(out, columns), mode=mode)[0, :, :, 0].long()
        taps = nearest(size, out, None, mode, (1, 2, out, columns), dtype, torch.device("cpu"))
        assert taps.cells[:, 0].tolist() == (found[0] + 16 * found[1]).tolist()


# ---------------------------------------------------------------------- messages

WIDTH = 6
BYTES = 8 * WIDTH  # of a row
TABLE = {
    # name -> (call, rows of each rank, (messages, rows sent) of each rank forward)
    "nearest x2": (lambda x: F.interpolate(x, scale_factor=2), (4, 1, 3), [(0, 0)] * 3),
    "nearest to 5": (lambda x: F.interpolate(x, size=(5, 4)), (4, 1, 3), [(0, 0)] * 3),
    "bilinear x2": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (3, 2, 3),
        [(1, 1), (2, 2), (1, 1)],
    ),
    "bicubic x2": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (3, 2, 3), [(1, 2), (2, 4), (1, 2)]),
    "bilinear / 2": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), (4, 2, 2), [(0, 0)] * 3),
    "area / 2": (lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), (4, 2, 2), [(0, 0)] * 3),
    "area / 2, elsewhere": (
        lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
        (3, 3, 2),
        [(1, 1), (0, 0), (0, 0)],
    ),
    "bilinear along the other dim": (
        lambda x: F.interpolate(x, size=(8, 11), mode="bilinear"),
        (4, 1, 3),
        [(0, 0)] * 3,
    ),
}


def count(name: str) -> tuple[int, int, int, int]:
    """Return, on each rank, its messages and bytes forward and backward."""
    call, lengths, _ = TABLE[name]
    x = torch.randn(1, 1, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = Layout.of(world_mesh((3,)), [Shard(2)], x.shape, {2: lengths})
    held = ShardTensor(local_shard(x, layout).requires_grad_(), layout)
    sent = [0, 0]

    def meter(kind, messages, nbytes):
        sent[0], sent[1] = sent[0] + messages, sent[1] + nbytes

    runtime.active.meter = meter
    try:
        with strict():
            out = call(held)._local_tensor
        forward, sent[:] = tuple(sent), (0, 0)
        torch.autograd.backward(out, torch.ones_like(out))
        return *forward, *sent
    finally:
        runtime.active.meter = None


@pytest.mark.parametrize("name", TABLE)
def test_messages(name):
    results = run_on_ranks(count, 3, name, timeout=60)
    planned = TABLE[name][2]
    assert [t[:2] for t in results] == [(messages, rows * BYTES) for messages, rows in planned]
    # backward sends what the forward received
    assert sum(t[2] for t in results) == sum(messages for messages, _ in planned)
    assert sum(t[3] for t in results) == sum(t[1] for t in results)


def reach(shift: float) -> int:
    """Return, on each rank, the bytes of the field sent for points that are `shift` rows away."""
    rows, columns = 12, WIDTH
    x = torch.randn(1, 1, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta = torch.tensor([[[1, 0, 0], [0, 1, 2 * shift / rows]]], dtype=torch.float64)
    layout = Layout.of(world_mesh((3,)), [Shard(2)], x.shape)
    sent = [0]

    def meter(kind, messages, nbytes):
        sent[0] += nbytes if kind == "exchange" else 0

    grid = F.affine_grid(theta, [1, 1, rows, columns], align_corners=False)
    runtime.active.meter = meter
    try:
        with strict():
            out = F.grid_sample(ShardTensor(local_shard(x, layout), layout), grid, align_corners=False)
    finally:
        runtime.active.meter = None
    assert out._layout.shard_sizes(2) == (4, 4, 4)
    torch.testing.assert_close(out.full_tensor(), F.grid_sample(x, grid, align_corners=False))
    return sent[0]


@pytest.mark.parametrize(
    ("shift", "rows"), [(0.5, [0, 1, 1]), (1.5, [0, 2, 2]), (-2.5, [3, 3, 0]), (5.25, [0, 3, 5]), (20.0, [0, 0, 0])]
)
def test_nearby_points_fetch_few_rows(shift, rows):
    assert run_on_ranks(reach, 3, shift, timeout=60) == [n * BYTES for n in rows]


def down_and_up(mesh, sizes) -> list[str]:
    """Shard a dim over two axes: at half the size one rank has all cells, at the end two have."""
    full = torch.arange(float(sum(sizes)), dtype=torch.float64).reshape(1, 1, -1)
    layout = Layout.of(world_mesh(mesh), [Shard(2)] * len(mesh), full.shape, {2: sizes})
    grads = []
    for x in (ShardTensor(local_shard(full, layout), layout), full.clone()):
        x.requires_grad_()
        out = F.interpolate(F.interpolate(x, scale_factor=0.5), scale_factor=4.0)
        (out * out).sum().backward()
        grads += [to_full_tensor(out.detach()), to_full_tensor(x.grad)]
    return [] if torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3]) else [str(grads)]


@pytest.mark.parametrize("sizes", [[1, 1, 0, 0], [2, 0, 1, 1], [0, 3, 0, 1]])
def test_a_dim_sharded_over_two_axes_that_needs_a_halo(sizes):
    """Outputs have the proportions of the original resolution, so that ranks read cells of others."""
    with VirtualRanks() as ranks:
        assert ranks.check(4, down_and_up, (2, 2), sizes) == []
