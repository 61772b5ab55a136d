"""Scores: their definitions on one device, and equal values and gradients for every sharding."""

from __future__ import annotations

import math

import pytest
import torch

from shardfield import ShardingError, metrics
from shardfield.testing import run_on_ranks
from tests.harness import check_case
from tests.metrics.scores_cases import CASES, WEIGHTS

MESHES = [(2,), (3,), (2, 2)]


def run_rows(mesh) -> list[str]:
    return [failure for row in CASES for failure in check_case(row, mesh)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equal_for_every_sharding(mesh):
    found = run_on_ranks(run_rows, math.prod(mesh), mesh, timeout=90)
    failures = [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"


def test_definitions():
    """The scores as sums over points and pairs of members, in numpy's words."""
    g = torch.Generator().manual_seed(0)
    x, y, climate = (torch.randn(2, 6, 8, dtype=torch.float64, generator=g) for _ in range(3))
    w = WEIGHTS.expand(6, 8)
    assert w.mean().item() == pytest.approx(1)
    torch.testing.assert_close(metrics.mse(x, y, WEIGHTS), ((x - y) ** 2 * w).sum((1, 2)) / w.sum())
    torch.testing.assert_close(metrics.bias(x, y, WEIGHTS), ((x - y) * w).sum((1, 2)) / w.sum())
    a, b = x - climate, y - climate
    expected = (a * b * w).sum((1, 2)) / ((a**2 * w).sum((1, 2)) * (b**2 * w).sum((1, 2))).sqrt()
    torch.testing.assert_close(metrics.acc(x, y, climate, WEIGHTS), expected)
    known = y.clone()
    known[:, :2] = torch.nan
    torch.testing.assert_close(
        metrics.mse(x, known, WEIGHTS, skipna=True), ((x - y) ** 2 * w)[:, 2:].sum((1, 2)) / w[2:].sum()
    )
    assert metrics.mse(x, known).isnan().all()
    waves = torch.fft.rfft(x - y, norm="forward").abs().square().mean((1, 2))
    torch.testing.assert_close(metrics.spectral_mse(x, y), waves)


def test_ensemble_definitions():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 6, 8, dtype=torch.float64, generator=g), torch.randn(6, 8, dtype=torch.float64, generator=g)
    pairs = (x[:, None] - x[None]).abs().sum((0, 1))
    error = (x - y).abs().mean(0)
    torch.testing.assert_close(metrics.crps(x, y), (error - pairs / (2 * 25)).mean())
    torch.testing.assert_close(metrics.crps(x, y, fair=True), (error - pairs / (2 * 20)).mean())
    torch.testing.assert_close(metrics.crps(x[:1], y), (x[0] - y).abs().mean())
    # members and truth of one distribution: a reliable ensemble
    x, y = torch.randn(10, 200, 200, generator=g), torch.randn(200, 200, generator=g)
    assert metrics.spread_skill_ratio(x, y).item() == pytest.approx(1, abs=0.02)
    assert metrics.crps(x, y, fair=True).item() == pytest.approx(1 / math.sqrt(math.pi), abs=0.01)


def test_refused():
    x = torch.zeros(2, 3, 6, 8)
    for said, call in {
        "cannot be compared with a truth of (2, 3, 6, 4)": lambda: metrics.mse(x, x[..., ::2]),
        "weights of shape (5, 1) do not broadcast": lambda: metrics.mse(x, x, torch.ones(5, 1)),
        "members along dim 0 cannot be compared": lambda: metrics.crps(x, x),
        "needs 2 or more members": lambda: metrics.crps(x[:1], x[0], fair=True),
    }.items():
        with pytest.raises(ShardingError) as caught:
            call()
        assert said in str(caught.value)
    with pytest.raises(ValueError, match="in degrees"):
        metrics.latitude_weights(torch.tensor([100.0, 0.0]))
