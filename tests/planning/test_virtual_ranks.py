"""`plan --virtual`: the memory that a step needs on virtual ranks, against what it takes with a budget of nothing."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from shardfield.cli import main
from shardfield.planning.cost import DEVICES
from shardfield.planning.simulate import Subject
from shardfield.planning.unet import UNet, UNetConfig, unet_outline
from shardfield.planning.virtual_ranks import count_virtual, smallest_that_fits
from shardfield.virtual import virtualize

CONFIG = UNetConfig(batch_size=1, resolution=64, channels=1, width=8, levels=2)
SUBJECT = Subject("unet", lambda: unet_outline(CONFIG), 1)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_memory_is_that_of_a_step_with_a_budget_of_nothing(ranks):
    x = torch.ones(1, 1, 64, 64)
    with virtualize(
        lambda model, x, y: F.mse_loss(model(x), y), UNet(1, 8, 2), ranks, dim=2, memory="auto", budget=0
    ) as step:
        step.world.pager.minimum = 1
        step(x, x)
        step.world.pager.peak = 0
        step(x, x)
        measured = step.world.pager.peak
    planned = count_virtual(SUBJECT, ranks, DEVICES["h200"], 1e9).operator
    assert measured == pytest.approx(planned, rel=0.05)


def test_smallest_that_fits(capsys):
    needs = {n: count_virtual(SUBJECT, n, DEVICES["h200"], 1e9).memory for n in (2, 3, 4)}
    options = smallest_that_fits(SUBJECT, DEVICES["h200"], needs[3] / 0.9)
    assert next(o.ranks for o in options if o.fits) == 3 and needs[2] > needs[3] > needs[4]
    sizes = ["--batch-size", "1", "--resolution", "64", "--channels", "1", "--width", "8", "--levels", "2"]
    words = ["plan", "unet", "--virtual", "auto", "--memory", f"{needs[3] / 0.9 + 1:.0f}B", *sizes]
    assert main(words) == 0 and "at least: 3" in capsys.readouterr().out
    assert main(["plan", "unet", "--virtual", "2,3", "--memory", "1kB", "--json", *sizes]) == 1
    found = json.loads(capsys.readouterr().out)["options"]
    assert [o["ranks"] for o in found] == [2, 3] and not any(o["fits"] for o in found)
