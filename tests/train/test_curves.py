"""A sample of `make curves`: a few steps on several meshes have the losses of plain torch in one process."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from shardfield.testing import run_on_ranks

from .curves import DOCS, LIMITS, MESHES, MODELS, STEPS, STRATEGIES, gap, train_on_ranks, train_plain


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_of_one_process(model):
    expected = train_plain(model, "fp64", 8)
    assert expected[-1] < 0.99 * expected[0] or expected[-1] > 1.01 * expected[0]  # it trains
    for mesh, strategy in (("2", "ddp"), ("2x2", "fsdp")):
        shape = MESHES[mesh]
        found = run_on_ranks(train_on_ranks, math.prod(shape), model, "fp64", shape, strategy, 8, timeout=90)
        for losses in found:
            assert gap(losses, expected) <= LIMITS["fp64"], f"{model} on {mesh} under {strategy}"


def test_recorded_curves():
    """The curves of the front page: all 72 runs of `make curves` have 300 steps and end within the limits."""
    curves = json.loads((DOCS / "curves.json").read_text())
    runs = list(itertools.product(MODELS, LIMITS, MESHES, STRATEGIES))
    assert len(runs) == 72 and len(curves) == 72 + len(MODELS) * len(LIMITS)
    for model, precision, mesh, strategy in runs:
        run, plain = curves[f"{model} {precision} {mesh} {strategy}"], curves[f"{model} {precision} plain"]
        assert len(run) == len(plain) == STEPS
        assert gap(run, plain) <= LIMITS[precision], f"{model} {precision} on {mesh} under {strategy}"
