"""Normalization modules over several steps: values, accuracy, messages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.modules._functions import SyncBatchNorm

from shardfield import ShardTensor, runtime, strict
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, world_mesh

# name -> (module, shape of its input, shard sizes of two dims, including those it normalizes over)
MODULES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (5, 4), {0: (4, 1), 1: (3, 1)}),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 4), {0: (1, 3), 2: (5, 0)}),
    "BatchNorm2d, cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (2, 3, 5, 4), {2: (2, 3), 3: (4, 0)}),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 3, 4), {1: (1, 2), 3: (2, 1)}),
    "BatchNorm2d, untracked": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        (2, 3, 5, 4),
        {0: (1, 1), 2: (2, 3)},
    ),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (2, 6, 5, 3), {1: (4, 2), 2: (1, 4)}),
    "LayerNorm": (lambda: nn.LayerNorm((5, 4)), (3, 5, 4), {1: (3, 2), 2: (0, 4)}),
    "LayerNorm over the last": (lambda: nn.LayerNorm(4), (3, 5, 4), {0: (3, 0), 1: (2, 3)}),
    "RMSNorm": (lambda: nn.RMSNorm((5, 4)), (3, 5, 4), {1: (3, 2), 2: (1, 3)}),
    "InstanceNorm2d": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (3, 3, 4, 5),
        {0: (1, 2), 2: (3, 1)},
    ),
    "InstanceNorm1d of one sample": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 7), {0: (1, 2), 1: (6, 1)}),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3, alpha=0.5), (2, 5, 3, 4), {1: (1, 4), 3: (2, 2)}),
}


def full(value):
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def same(got, ref, tolerance=1e-10) -> bool:
    return torch.allclose(full(got), ref, rtol=tolerance, atol=tolerance)


def train(name: str) -> tuple[list[str], list[torch.Tensor]]:
    """Return, on each of 2 x 2 ranks, differences from one device in three training steps and eval; the buffers."""
    make, shape, sizes = MODULES[name]
    torch.manual_seed(0)
    ours = make().double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs = copy.deepcopy(ours)
    layout = Layout.of(world_mesh((2, 2)), [Shard(d) for d in sizes], shape, sizes)
    wrong = []
    for step in range(4):
        x, seed = torch.randn(shape).double() * 2 + 3, torch.randn(shape).double()
        if step == 3:
            ours.eval(), theirs.eval()
        xs = [ShardTensor(local_shard(x, layout).requires_grad_(), layout), x.clone().requires_grad_()]
        with strict():
            outs = [ours(xs[0]), theirs(xs[1])]
        if outs[0].placements != layout.placements:
            wrong.append(f"step {step}: placed {outs[0].placements}")
        outs[0].backward(seed)
        outs[1].backward(seed)
        found = {"result": outs, "gradient": [x.grad for x in xs]}
        names = [n for n, _ in theirs.named_parameters()]
        found |= {n: [m.get_parameter(n).grad for m in (ours, theirs)] for n in names}
        found |= {n: [m.get_buffer(n) for m in (ours, theirs)] for n, _ in theirs.named_buffers()}
        wrong += [f"step {step}: {n}" for n, (a, b) in found.items() if not same(a, b)]
        with torch.no_grad():
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                mine -= 0.1 * mine.grad
                other -= 0.1 * other.grad
        ours.zero_grad(), theirs.zero_grad()
    return wrong, list(ours.buffers())


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    results = run_on_ranks(train, 4, name, timeout=60)
    assert [wrong for wrong, _ in results] == [[]] * 4
    for _, buffers in results:  # bitwise equal on every rank
        assert all(torch.equal(a, b) for a, b in zip(buffers, results[0][1], strict=True))


# ---------------------------------------------------------------------- accuracy

# name -> (call, shape): fields of mean 1000 and standard deviation 1 in fp32
FAR = {
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 6, 40, 30)),
    "group_norm": (lambda x: F.group_norm(x, 2), (4, 6, 40, 30)),
    "group_norm with groups split between ranks": (lambda x: F.group_norm(x.transpose(1, 2), 2), (4, 20, 6, 30)),
    "instance_norm": (lambda x: F.instance_norm(x), (4, 6, 40, 30)),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[1:]), (40, 6, 40, 10)),
    # blocks of at most `SMALL` elements, on one rank and on both, take other calls and send the same messages
    "batch_norm, a small block": (
        lambda x: F.batch_norm(x, None, None, scales(x), scales(x), training=True),
        (2, 6, 8, 64),
    ),
    "group_norm, a small block": (lambda x: F.group_norm(x, 2, scales(x), scales(x)), (1, 6, 16, 64)),
    "batch_norm, small blocks": (lambda x: F.batch_norm(x, None, None, training=True), (2, 6, 8, 20)),
    "group_norm, small blocks": (lambda x: F.group_norm(x, 2), (2, 6, 8, 20)),
    "instance_norm, small blocks": (lambda x: F.instance_norm(x), (2, 6, 8, 20)),
}


def scales(x):
    return torch.arange(1, 7, dtype=x.dtype)


def errors(name: str, dtype: torch.dtype) -> list[float]:
    """Return, on each rank, the largest error of the value and the gradient here, and on one device."""
    call, shape = FAR[name]
    torch.manual_seed(0)
    exact = (torch.randn(shape) + 1000).to(dtype).double().requires_grad_()
    seed = torch.randn(call(exact).shape).to(dtype).double()
    call(exact).backward(seed)
    layout = Layout.of(world_mesh((2,)), [Shard(2)], shape, {2: (shape[2] // 4, shape[2] - shape[2] // 4)})
    one = exact.detach().to(dtype).requires_grad_()
    many = ShardTensor(local_shard(exact.detach().to(dtype), layout).requires_grad_(), layout)
    found = []
    for x in (many, one):
        out = call(x)
        out.backward(seed.to(dtype))
        ref = call(exact)
        found += [(full(a).double() - b).abs().max().item() for a, b in ((out, ref), (x.grad, exact.grad))]
    return found


@pytest.mark.parametrize("name", FAR)
def test_accuracy_with_a_large_mean(name):
    """As accurate as one device where the mean is a thousand times the deviation."""
    for value, gradient, one_value, one_gradient in run_on_ranks(errors, 2, name, torch.float32, timeout=60):
        assert value <= 2 * one_value < 1e-3
        assert gradient <= 2 * one_gradient < 1e-2


@pytest.mark.parametrize("name", FAR)
def test_half_precision(name):
    """Statistics of half precision are computed in fp32."""
    for value, gradient, one_value, one_gradient in run_on_ranks(errors, 2, name, torch.bfloat16, timeout=60):
        assert value <= 2 * one_value and gradient <= 2 * one_gradient


def in_memory() -> tuple[bool, float]:
    """Return, on each rank, whether channels_last is kept, and the effect of autocast on an fp32 layer_norm."""
    mesh = world_mesh((2,))
    layout = Layout.of(mesh, [Shard(2)], (2, 4, 6, 5))
    local = torch.randn(layout.local_shape).to(memory_format=torch.channels_last).requires_grad_()
    out = F.batch_norm(ShardTensor(local, layout), None, None, training=True)
    out.backward(ShardTensor(torch.randn_like(local), layout))
    last = [t.is_contiguous(memory_format=torch.channels_last) for t in (out._local_tensor, local.grad)]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    layout = Layout.of(mesh, [Shard(1)], x.shape)
    found = []
    for enabled in (True, False):
        held = ShardTensor(local_shard(x, layout).requires_grad_(), layout)
        weight = torch.linspace(1, 2, 16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            (F.layer_norm(held, (16,), weight) ** 3).sum().backward()
        found.append(torch.cat([held.grad.full_tensor().flatten(), weight.grad]))
    return all(last), (found[0] - found[1]).abs().max().item()


def test_memory_format_and_autocast():
    assert run_on_ranks(in_memory, 2, timeout=60) == [(True, 0.0)] * 2


# ---------------------------------------------------------------------- messages

# name -> (call with weight and bias of 6, messages forward and backward for x (4, 6, 8, 6) sharded along dims 2, 1, 0)
SENT = {
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(1, 1), (0, 1), (1, 1)]),
    "batch_norm in eval": (
        lambda x, w, b: F.batch_norm(x, w.detach(), w.detach().abs(), w, b),
        [(0, 1), (0, 1), (0, 1)],
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(1, 1), (0, 1), (0, 1)]),
    "group_norm with groups split between ranks": (lambda x, w, b: F.group_norm(x, 3, w, b), [(1, 1), (1, 2), (0, 1)]),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [(1, 1), (0, 1), (0, 1)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(0, 1), (0, 1), (0, 1)]),
    "layer_norm of planes": (
        lambda x, w, b: F.layer_norm(x, (8, 6), None, (w + b).expand(8, 6)),
        [(1, 2), (0, 1), (0, 1)],
    ),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (8, 6)), [(1, 1), (0, 0), (0, 0)]),
}


def count(name: str, dim: int) -> tuple[int, int]:
    """Return, on each rank, the messages that it sends forward and backward."""
    shape = (4, 6, 8, 6)
    lengths = (shape[dim] // 2 - 1 + shape[dim] % 2, shape[dim] // 2 + 1) if dim != 1 else (3, 3)
    layout = Layout.of(world_mesh((2,)), [Shard(dim)], shape, {dim: lengths})
    x = ShardTensor(
        local_shard(torch.randn(shape, generator=torch.Generator().manual_seed(0)), layout).requires_grad_(), layout
    )
    w, b = (torch.arange(1.0, 7.0).requires_grad_() for _ in range(2))
    sent: list[int] = []
    runtime.active.meter = lambda kind, messages, nbytes: sent.append(messages)
    try:
        out = SENT[name][0](x, w, b)
        forward = sum(sent)
        torch.autograd.backward(out._local_tensor, torch.ones_like(out._local_tensor))
        return forward, sum(sent) - forward
    finally:
        runtime.active.meter = None


@pytest.mark.parametrize("at", range(3), ids=["place", "channel", "sample"])
@pytest.mark.parametrize("name", SENT)
def test_messages(name, at):
    assert run_on_ranks(count, 2, name, (2, 1, 0)[at], timeout=60) == [SENT[name][1][at]] * 2


# ---------------------------------------------------------------------- refusals


def refusals() -> list[str]:
    mesh = world_mesh((2,))
    layout = Layout.of(mesh, [Shard(2)], (1, 3, 2))
    x = ShardTensor(torch.ones(layout.local_shape), layout)
    partial = ShardTensor(torch.ones(3), Layout.of(mesh, [Replicate()], (3,)).with_partial([0]))
    one = ShardTensor(torch.ones(1, 3, 1) if mesh.get_local_rank() else torch.ones(1, 3, 0),
                      Layout.of(mesh, [Shard(2)], (1, 3, 1), {2: (0, 1)}))  # fmt: skip
    results = []
    for call in (
        lambda: F.batch_norm(one, None, None, training=True),
        lambda: F.batch_norm(x, partial, partial, training=True),
        lambda: F.layer_norm(x, (3,)),
        lambda: nn.SyncBatchNorm(3)(x),
        lambda: SyncBatchNorm.apply(x, None, None, None, None, 0.1, 0.1, mesh.get_group(0), 2),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def test_refusals():
    first, second = run_on_ranks(refusals, 2, timeout=60)
    assert first == second
    assert "Expected more than 1 value per channel" in first[0]
    assert first[1].startswith("ShardingError") and "make them Replicate or Shard" in first[1]
    assert "normalized_shape" in first[2]
    assert "expected input tensor to be on GPU" in first[3]  # torch's own error on the CPU
    assert "without convert_sync_batchnorm" in first[4]
