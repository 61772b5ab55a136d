"""`plan --virtual`: the memory that a step needs on virtual ranks, against what it takes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from shardfield.cli import main
from shardfield.planning.cost import DEVICES
from shardfield.planning.simulate import Subject
from shardfield.planning.unet import UNet, UNetConfig, unet_outline
from shardfield.planning.virtual_ranks import count_virtual
from shardfield.virtual import virtualize

CONFIG = UNetConfig(batch_size=1, resolution=64, channels=1, width=8, levels=2)
SUBJECT = Subject("unet", lambda: unet_outline(CONFIG), 1)


POLICIES = {
    "operator": {"memory": "auto", "budget": 0},
    "everything": {"memory": "auto", "budget": 1 << 40},
    "recomputed": {"memory": "recompute", "budget": 1 << 40},
}


def peak_of(ranks, memory, budget):
    """Return the bytes of pages in the second step."""
    x = torch.ones(1, 1, 64, 64)
    with virtualize(
        lambda model, x, y: F.mse_loss(model(x), y), UNet(1, 8, 2), ranks, dim=2, memory=memory, budget=budget
    ) as step:
        step.world.pager.minimum = 1
        step(x, x)
        step._fitting.clear()  # or else the pager would not see a step that moves nothing
        step.world.pager.peak = 0
        step(x, x)
        return step.world.pager.peak


@pytest.mark.parametrize("ranks", [2, 5])
def test_memory_is_that_of_a_step(ranks):
    option = count_virtual(SUBJECT, ranks, DEVICES["h200"], 1e9)
    parameters = sum(p.numel() * p.element_size() for p in UNet(1, 8, 2).parameters())
    others = option.stays - 2 * 64 * 64 * 4 - parameters  # not pages: parameters, optimizer state
    for name, policy in POLICIES.items():
        planned = getattr(option, name) - (0 if name == "operator" else others)
        assert peak_of(ranks, **policy) == pytest.approx(planned, rel=0.05), name


def test_smallest_that_fits(capsys):
    needs = {n: count_virtual(SUBJECT, n, DEVICES["h200"], 1e9).memory for n in (2, 3)}
    assert needs[2] > needs[3]
    sizes = ["--batch-size", "1", "--resolution", "64", "--channels", "1", "--width", "8", "--levels", "2"]
    words = ["plan", "unet", "--virtual", "auto", "--memory", f"{needs[3] / 0.9 + 1:.0f}B", *sizes]
    assert main(words) == 0 and "at least: 3" in capsys.readouterr().out
    assert main(["plan", "unet", "--virtual", "2,3", "--memory", "1kB", "--json", *sizes]) == 1
    found = json.loads(capsys.readouterr().out)["options"]
    assert main(["plan", "unet", "--virtual", "1", "--memory", "1GB", "--device", "measured", *sizes]) == 0
    assert "this machine with" in capsys.readouterr().out
    assert [o["ranks"] for o in found] == [2, 3] and not any(o["fits"] for o in found)
