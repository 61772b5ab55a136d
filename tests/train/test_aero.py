"""The recipe of surface pressure: equal losses on any mesh, a picture, and a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardfield import cli
from shardfield.testing import run_on_ranks
from shardfield.train.config import UsageError
from shardfield.train.recipes.aero_transolver import AeroTransolverConfig, aero_transolver, drag, relative_l2
from tests.train.test_loop import run, same

AERO = AeroTransolverConfig(
    points=23, test_points=(31,), n_train=8, n_test=3, batch_size=4, epochs=1, width=8, heads=2, slices=3, layers=1,
    precision="fp64", picture=False,
)  # fmt: skip


def test_equal_losses_on_any_mesh(tmp_path):
    """Bodies whose points the ranks do not divide, and a test set that the data ranks do not divide."""
    (alone,) = run_on_ranks(run, 1, "aero_transolver", replace(AERO, out=tmp_path / "one", picture=True), timeout=90)
    assert set(alone[1]) == {"31 points/l2", "31 points/drag"}
    assert (tmp_path / "one" / "prediction.png").stat().st_size > 10_000
    for domain in [(2,), (4,)]:
        config = replace(AERO, out=tmp_path / f"domain{domain[0]}", domain=domain)
        for found in run_on_ranks(run, 4, "aero_transolver", config, timeout=90):
            same(found, alone)


def test_scores():
    normal = torch.tensor([[[1.0, 0, 0], [-1.0, 0, 0]]])
    area = torch.tensor([[[3.0], [1.0]]])
    batch = {"x": torch.cat([normal, normal], -1), "y": torch.tensor([[[1.0], [2.0]]]), "area": area}
    output = batch["y"] + torch.tensor([[[1.0], [0.0]]])
    assert relative_l2(output, batch).item() == pytest.approx((3 / 7) ** 0.5)  # weighted by area
    assert drag(output, batch).item() == pytest.approx(abs(-2 * 3 + 2 * 1) / 2)


def test_options():
    with pytest.raises(UsageError, match="--heads 5 must divide --width 48"):
        aero_transolver(AeroTransolverConfig(heads=5), None, None)
    with pytest.raises(UsageError, match="a body of 3 points cannot be sharded over 4 ranks"):
        aero_transolver(AeroTransolverConfig(test_points=(3,), domain=(2, 2)), None, None)


def test_plan(capsys):
    """The points are the dim that is sharded, not the features."""
    assert (
        cli.main(["plan", "aero_transolver", "--gpus", "8", "--memory", "80GB", "--batch", "2", "--points", "4000"])
        == 0
    )
    assert "2 x 4" in capsys.readouterr().out
