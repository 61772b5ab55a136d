"""`plan --virtual`: the memory that a step needs on virtual ranks, against what it takes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from shardfield.bench.models import token_mixer, transolver
from shardfield.cli import main
from shardfield.planning.cost import DEVICES
from shardfield.planning.simulate import Subject
from shardfield.planning.unet import UNet, UNetConfig, unet_outline
from shardfield.planning.virtual_ranks import count_virtual
from shardfield.train.task import TaskSpec
from shardfield.virtual import virtualize

CONFIG = UNetConfig(batch_size=1, resolution=64, channels=1, width=8, levels=2)
SUBJECT = Subject("unet", lambda: unet_outline(CONFIG), 1)


class Case(NamedTuple):
    """A model on a field of this shape (without the batch), sharded along its first dim but `skipped` ones."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    skipped: int = 0

    @property
    def subject(self) -> Subject:
        def outline() -> TaskSpec:
            return TaskSpec(self.build(), {"x": self.shape}, lambda out, batch: out.square().mean())

        return Subject("case", outline, 1, dims=(self.skipped,))


CASES = {
    "unet": Case(lambda: UNet(1, 8, 2), (1, 64, 64), 1),
    "ring attention": Case(lambda: token_mixer(32, 2), (256, 32)),
    "transolver": Case(lambda: transolver(16, 2), (512, 16)),
}
POLICIES = {
    "operator": {"memory": "auto", "budget": 0},
    "everything": {"memory": "auto", "budget": 1 << 40},
    "recomputed": {"memory": "recompute", "budget": 1 << 40},
}


def peak_of(case, ranks, memory, budget):
    """Return the bytes of pages in the second step, without those of parameters."""
    x, model = torch.ones(1, *case.shape), case.build()
    loss, dim = lambda model, x: model(x).square().mean(), 1 + case.skipped
    with virtualize(loss, model, ranks, dim=dim, memory=memory, budget=budget) as step:
        step.world.pager.minimum = 64
        for parameter in model.parameters():
            step.world.pager.expose(parameter)
        step(x)
        step._fitting.clear()  # or else the pager would not see a step that moves nothing
        step.world.pager.peak = 0
        model.zero_grad()
        step(x)
        return step.world.pager.peak


@pytest.mark.parametrize("name, ranks", [("unet", 2), ("unet", 5), ("ring attention", 3), ("transolver", 3)])
def test_memory_is_that_of_a_step(name, ranks):
    case = CASES[name]
    option = count_virtual(case.subject, ranks, DEVICES["h200"], 1e9)
    parameters = sum(p.numel() * p.element_size() for p in case.build().parameters())
    others = option.stays - math.prod(case.shape) * 4 - parameters  # not pages: parameters, optimizer state
    for policy, options in POLICIES.items():
        planned = getattr(option, policy) - (0 if policy == "operator" else others)
        assert peak_of(case, ranks, **options) == pytest.approx(planned, rel=0.05), policy


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
