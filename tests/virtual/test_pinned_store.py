"""Pinned host memory for the pages of a GPU: regions without a GPU, and steps with one."""

from __future__ import annotations

import random
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardfield.virtual import pinned_store, virtualize
from shardfield.virtual.pinned_store import ALIGNMENT, PinnedArena, available_host_memory


def test_regions_are_disjoint_and_used_again(monkeypatch):
    """Random takes and returns: no two regions overlap, and free neighbors join until a chunk is whole again."""
    monkeypatch.setattr(pinned_store, "CHUNK", 1 << 14)
    arena, rng, held = PinnedArena(limit=1 << 16, pin=False), random.Random(0), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            arena.give_back(held.pop(rng.randrange(len(held))))
        else:
            nbytes = rng.randint(1, 5000)
            region = arena.take(nbytes)
            if region is None and arena.grow(nbytes):
                region = arena.take(nbytes)
            if region is not None:
                assert len(arena.bytes_of(region, nbytes)) == nbytes and region.start % ALIGNMENT == 0
                held.append(region)
        taken = sorted(held)
        assert all(a.chunk < b.chunk or a.stop <= b.start for a, b in zip(taken, taken[1:], strict=False))
        assert arena.taken == sum(r.stop - r.start for r in held) <= arena.size <= 1 << 16
    for region in held:
        arena.give_back(region)
    assert arena._free == [[(0, 1 << 14)], [(0, 1 << 14)], [(0, 1 << 15)]]  # chunks grow
    assert arena.take(40_000) is None and not arena.grow(40_000)


def test_host_memory_of_a_container(tmp_path, monkeypatch):
    free = available_host_memory()
    (tmp_path / "memory.max").write_text(str(1 << 20))
    (tmp_path / "memory.current").write_text(str(1 << 19))
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1024\n")
    paths = pinned_store.Path
    monkeypatch.setattr(pinned_store, "Path", lambda p: tmp_path if p == "/sys/fs/cgroup" else paths(p))
    limited = available_host_memory()
    assert 0 < limited < free and limited == int((1 << 19) + 1024 - pinned_store.HOST_RESERVE * (1 << 20))


def mse(model, x, y):
    return F.mse_loss(model(x), y)


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, nn.Conv2d(8, 1, 3, padding=1)).double()


def test_auto_recomputes_before_it_moves(monkeypatch):
    """What "auto" does on a GPU, here on a CPU: the step that exceeds the budget begins again and recomputes."""
    monkeypatch.setattr(sys.modules["shardfield.virtual.virtualize"], "RECOMPUTES_FIRST", frozenset(["cpu"]))
    x = torch.randn(1, 1, 61, 200, dtype=torch.float64)
    plain, model = network(), network()
    calls = []

    def counted(model, x, y):
        calls.append(1)
        return mse(model, x, y)

    loss = mse(plain, x, 2 * x)
    loss.backward()
    with virtualize(counted, model, 3, dim=2, memory="auto", budget=4_000_000) as step:
        for _ in range(2):
            model.zero_grad()
            found = step(x, 2 * x)
            torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)
        assert step.recompute and 6 < len(calls) <= 9  # at most three calls were begun twice
        with torch.no_grad():
            step(x, 2 * x)
    with virtualize(mse, model, 3, dim=2, memory="auto", budget=1 << 30) as step:
        step(x, 2 * x)
        assert not step.recompute and step.world.pager.moved_out == 0


def test_auto_keeps_tensors_until_memory_runs_out(monkeypatch):
    """Without a budget, a step that runs out of memory begins again: it recomputes, and then the pager sees it."""
    monkeypatch.setattr(sys.modules["shardfield.virtual.virtualize"], "RECOMPUTES_FIRST", frozenset(["cpu"]))
    x, model, plain, full = torch.randn(1, 1, 61, 200, dtype=torch.float64), network(), network(), []

    def loss(model, x, y):
        found = mse(model, x, y)
        if dist.get_rank() == 1 and full:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    mse(plain, x, 2 * x).backward()
    with virtualize(loss, model, 3, dim=2) as step:
        step(x, 2 * x)
        assert step.recompute is None and step.world.pager.peak == 0
        full.append(1)
        step(x, 2 * x)
        assert step.recompute and step.world.pager.peak == 0 and not full
        full.append(1)
        model.zero_grad()
        step(x, 2 * x)
        assert step.world.pager.peak > 0 and not full
        step.world.pager.peak = 0
        step(x, x)
        assert step.world.pager.peak == 0  # nothing was moved on a batch of this kind
        full.append(1)
        model.zero_grad()
        step(x, 2 * x)
        assert step.world.pager.peak > 0  # it needed more this time
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{"memory": "offload"}, {"memory": "auto", "budget": 0}, {"memory": "recompute"}])
def test_steps_on_a_gpu_are_those_of_plain_torch(options):
    plain, model = network().cuda(), network().cuda()
    with virtualize(mse, model, 3, dim=2, **options) as step:
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(1, 1, 121, 256, dtype=torch.float64, device="cuda")
            for each in (plain, model):
                each.zero_grad()
            loss = mse(plain, x, 2 * x)
            loss.backward()
            torch.testing.assert_close(step(x, 2 * x), loss.detach(), rtol=1e-11, atol=1e-12)
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        assert step.world.pager is None or step.world.pager.moved_out > 0
