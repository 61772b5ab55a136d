"""Calls that DTensor or PhysicsNeMo get wrong, refuse, or hang in, on the layouts where they do: equal to one device.

The case tables draw layouts; a row here has the layout of the fault. Faults that are no call of an op have their tests
elsewhere: `item()` of a pending sum in tests/tensor, uneven collectives, `DistributedIRFFT2` and `mesh(name)` in
tests/distributed, dropout masks in tests/ops/elementwise/test_random.py, statistics at mean 1000 in
tests/ops/normalization, complex parameters beside real ones under FSDP in tests/train/test_parallelize.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardfield import ShardTensor, scatter_tensor
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


@dataclass(frozen=True)
class On:
    """A tensor of `shape`, with these placements, and shard sizes by mesh axis."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] = (Replicate(),)
    sizes: dict[int, list[int]] | None = None


def on(*shape: int, dim: int | None = None, sizes: list[int] | None = None) -> On:
    """Return a tensor sharded along `dim` over the only mesh axis; without `dim`, Replicate."""
    return On(shape, (Replicate() if dim is None else Shard(dim),), None if sizes is None else {0: sizes})


def rows(*sizes: int) -> On:
    return on(sum(sizes), 6, dim=0, sizes=list(sizes))


def over_both(*shape: int, dims: tuple[int, int]) -> On:
    return On(shape, tuple(map(Shard, dims)))


def sequence(*sizes: int, heads: int = 4) -> On:
    return on(1, heads, sum(sizes), 8, dim=2, sizes=list(sizes))


FIELD = on(1, 2, 10, 6, dim=2, sizes=[5, 5])
KERNEL = on(3, 2, 3, 3)
UNEVEN = [on(2, 2, 7, 6, dim=2, sizes=[6, 1]), on(2, 2, 7, 6, dim=3, sizes=[1, 5])]

Row = tuple[Callable, list[On]]
FAULTS: dict[str, Row] = {
    "conv2d of stride 2 on 5 + 5 rows": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [FIELD, KERNEL]),
    "conv2d of a sharded field": (lambda x, w: F.conv2d(x, w, padding=1), [FIELD, KERNEL]),
    "1x1 conv2d with padding": (lambda x, w: F.conv2d(x, w, padding=1), [FIELD, on(3, 2, 1, 1)]),
    "unbatched conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [on(2, 10, 6, dim=1), KERNEL]),
    "conv2d with a bias of a pending sum": (F.conv2d, [On((1, 2, 5, 6), (Partial(),)), KERNEL, on(3)]),
    "linear with a bias of a pending sum": (F.linear, [On((5, 6), (Partial(),)), on(4, 6), on(4)]),
    "conv_transpose2d with output_padding": (
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, output_padding=1),
        [FIELD, on(2, 3, 3, 3)],
    ),
    "max_pool2d with padding": (lambda x: F.max_pool2d(x, 3, 2, 1), [FIELD]),
    "max_pool2d with dilation": (lambda x: F.max_pool2d(x, 3, 1, 1, 2), [FIELD]),
    "avg_pool2d with padding": (lambda x: F.avg_pool2d(x, 3, 2, 1), [FIELD]),
    "interpolate with align_corners": (
        lambda x: F.interpolate(x, size=(15, 7), mode="bilinear", align_corners=True),
        [FIELD],
    ),
    "interpolate, area": (lambda x: F.interpolate(x, size=(7, 4), mode="area"), [FIELD]),
    "interpolate, nearest by a fraction": (lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest"), [FIELD]),
    "view (2, N, C) -> (2 N, C)": (lambda x: x.view(-1, 3), [on(2, 5, 3, dim=1)]),
    "flatten (B, C, H, W) -> (B, C, H W)": (lambda x: x.flatten(2), [on(2, 3, 5, 4, dim=2)]),
    "view (2, N, C) -> (2 N, C), 2 x 2": (lambda x: x.view(-1, 3), [over_both(2, 5, 3, dims=(0, 1))]),
    "flatten (B, C, H, W) -> (B, C, H W), 2 x 2": (lambda x: x.flatten(2), [over_both(2, 3, 5, 4, dims=(2, 3))]),
    "sum(keepdim=True)": (lambda x: x.sum(0, keepdim=True), [rows(4, 1)]),
    "mean(keepdim=True)": (lambda x: x.mean((0, 1), keepdim=True), [rows(4, 1)]),
    "mean with an empty shard": (lambda x: x.mean(), [rows(0, 5)]),
    "mse_loss": (F.mse_loss, [rows(4, 1), rows(4, 1)]),
    "smooth_l1_loss": (F.smooth_l1_loss, [rows(4, 1), rows(4, 1)]),
    "huber_loss": (F.huber_loss, [rows(4, 1), rows(4, 1)]),
    "group_norm of sharded samples": (lambda x, w, b: F.group_norm(x, 2, w, b), [on(3, 4, 5, dim=0), on(4), on(4)]),
    "operands of one shape and other shards": (lambda a, b: a * b + b, [rows(3, 1), rows(1, 3)]),
    **{
        f"{name} of uneven shards": (call, [rows(4, 1)])
        for name, call in {
            "var": lambda x: x.var(0),
            "softmax": lambda x: x.softmax(0),
            "sort": lambda x: x.sort(0).values,
            "cumsum": lambda x: x.cumsum(0),
            "fft": lambda x: torch.fft.fft(x, dim=0),
            "cat": lambda x: torch.cat([x, x[1:]]),
            "slice": lambda x: x[1:4:2],
        }.items()
    },
    "five rows over four ranks": (lambda x: x.sin() @ x.mT, [on(5, 6, dim=0)]),
    "backward of a call that gathers": (lambda x: torch.linalg.pinv(x) @ x, [rows(4, 3)]),
    "activation checkpointing": (
        lambda x, w: checkpoint(lambda x, w: F.conv2d(x, w, padding=1).softmax(2), x, w, use_reentrant=False),
        [UNEVEN[0], KERNEL],
    ),
    "activation checkpointing, reentrant": (
        lambda x, w: checkpoint(lambda x, w: F.conv2d(x, w, padding=1).softmax(2), x, w, use_reentrant=True),
        [UNEVEN[1], KERNEL],
    ),
    "ring attention of uneven shards": (F.scaled_dot_product_attention, [sequence(6, 1)] * 3),
    "causal ring attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [sequence(6, 1)] * 3,
    ),
    "ring attention of grouped queries": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [sequence(3, 4), sequence(5, 2, heads=2), sequence(5, 2, heads=2)],
    ),
}


def place(full: torch.Tensor, spec: On) -> ShardTensor:
    """Return `full` in the layout of a row."""
    axes = len(spec.placements)
    mesh = world_mesh((2, 2) if axes == 2 else (torch.distributed.get_world_size(),))
    if isinstance(spec.placements[0], Partial):
        parts = full * (0.75 if torch.distributed.get_rank() == 0 else 0.25 / (mesh.size() - 1))
        return ShardTensor.from_local(parts, mesh, spec.placements).requires_grad_()
    x = scatter_tensor(full, 0, mesh, spec.placements)
    return (x if spec.sizes is None else x.redistribute(sharding_shapes=spec.sizes)).detach().requires_grad_()


def run(names: list[str]) -> dict[str, str]:
    """Return what is wrong, by row."""
    wrong = {}
    for name in names:
        call, specs = FAULTS[name]
        torch.manual_seed(0)
        fulls = [torch.randn(spec.shape, dtype=torch.float64) for spec in specs]
        plain = [full.clone().requires_grad_() for full in fulls]
        sharded = [place(full, spec) for full, spec in zip(fulls, specs, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the call that gathers
            expected, found = call(*plain), call(*sharded)
        seed = torch.randn_like(expected)
        expected.backward(seed)
        found.backward(scatter_tensor(seed, 0, found.device_mesh, [Replicate()] * found.device_mesh.ndim))
        try:
            torch.testing.assert_close(found.full_tensor(), expected.detach(), rtol=1e-10, atol=1e-12)
            for a, b in zip(sharded, plain, strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-10, atol=1e-12)
        except AssertionError as error:  # on all ranks: the compared tensors are global
            wrong[name] = str(error)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_others_get_wrong_equals_one_device(ranks):
    names = [name for name in FAULTS if ("2 x 2" in name or "four" in name) == (ranks == 4)]
    assert run_on_ranks(run, ranks, names, timeout=300) == [{}] * ranks
