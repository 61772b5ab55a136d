"""Segments of a model that are recomputed in backward from the messages of their forward."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfield.errors import ShardfieldError
from shardfield.virtual import segment, virtualize
from tests.harness.run import check_case
from tests.harness.virtual import VirtualRanks
from tests.ops import case_tables

SAMPLE = 1 if "SHARDFIELD_LAYOUTS" in os.environ else 6  # `make sweep` runs all rows
MESHES = [(2,), (2, 2), (3,)]
REFUSALS = ("computes gradients in its forward", "was written after the call")
# Rows that fail on virtual ranks without a segment too: one changes a module of all ranks, one counts references.
NOT_ON_VIRTUAL_RANKS = ("row by row", "filled 2x8x8 0,(slice(0, 2, None), slice(0, 2, None)),(slice(1, 3, None)")


def as_segment(call):
    block = nn.Module()
    block.forward = call
    return segment.recomputed(block)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns once per process: on one of its virtual ranks
def test_rows_of_the_case_tables():
    """Each row has its gradients when its call is recomputed, though plans and lists are cached by then."""
    rows = [(n, row) for name in case_tables.TABLES for n, row in enumerate(case_tables.table(name))]
    rows = [r for r in rows if r[1].runs and r[1].grad and not any(part in r[1].name for part in NOT_ON_VIRTUAL_RANKS)]
    failures, refused = [], 0
    with VirtualRanks() as ranks:
        for number, row in rows[::SAMPLE]:
            mesh = MESHES[number % len(MESHES)]
            found = ranks.check(math.prod(mesh), check_case, row, mesh, 0, as_segment, [number % 2])
            refused += bool(found) and any(text in found[0] for text in REFUSALS)
            failures += [] if found and any(text in found[0] for text in REFUSALS) else found
    assert not failures, "\n".join(failures[:12]) + f"\n({len(failures)} failures)"
    assert refused < 0.05 * len(rows[::SAMPLE])


def grads(model, loss, x, memory, ranks=3):
    torch.manual_seed(3)
    model.zero_grad()
    with virtualize(loss, model, ranks, dim=2, memory=memory) as step:
        value = step(x)
    return [value, *(p.grad.clone() for p in model.parameters())]


class Calls(nn.Module):
    """A block that counts its calls."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.count = nn.Sequential(*layers), [0]

    def forward(self, x):
        self.count[0] += 1
        return self.layers(x)


def conv(inner=1, out=4):
    return nn.Conv2d(inner, out, 3, padding=1)


def mean_square(model, x):
    return model(x).square().mean()


def test_a_block_is_recomputed_once_and_sends_nothing():
    block = Calls(conv(), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.3), nn.Softmax(2))
    model, x = nn.Sequential(block, conv(4)).double(), torch.randn(2, 1, 11, 6, dtype=torch.float64)
    counts = []
    with virtualize(mean_square, model, 3, dim=2, memory="recompute") as step:
        for _ in range(2):
            torch.manual_seed(3)
            model.zero_grad()
            step(x)
            counts.append([r.model[0].count[0] for r in step._replicas.values()])
        found = [p.grad.clone() for p in model.parameters()]
    assert counts == [[2] * 3, [4] * 3]
    torch.testing.assert_close(found, grads(model, mean_square, x, "keep")[1:], rtol=1e-11, atol=1e-13)


def test_what_a_waiting_rank_has_recomputed_is_dropped(monkeypatch):
    """It is computed again where too little memory is left, and moved out where a block sends many messages."""
    model, x = nn.Sequential(conv(), Calls(*norms(), *norms()), conv(4)).double(), torch.randn(2, 1, 33, 8).double()
    expected, moved = grads(model, mean_square, x, "keep"), []
    for most in (segment.MOST_MESSAGES, 0):
        monkeypatch.setattr(segment, "MOST_MESSAGES", most)
        with virtualize(mean_square, model, 3, dim=2, memory="recompute", budget=80_000) as step:
            step.world.pager.minimum = 512
            model.zero_grad()
            found = [step(x), *(p.grad.clone() for p in model.parameters())]
            counts = [replica.model[1].count[0] for replica in step._replicas.values()]
            moved.append(step.world.pager.moved_out)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        assert (step.world.pager.dropped > 0 and max(counts) > 2) if most else counts == [2] * 3
    assert moved[0] < 0.9 * moved[1]


def norms():
    return conv(4), nn.GroupNorm(2, 4), nn.SiLU()


def test_layers_that_write_their_argument():
    """A layer that is in place is not recomputed alone, and a block that writes its argument is refused."""
    x = torch.randn(2, 1, 11, 6, dtype=torch.float64)
    model = nn.Sequential(conv(), nn.SiLU(inplace=True), conv(4), nn.Dropout(0.5, inplace=True), conv(4)).double()
    found, expected = (grads(model, mean_square, x, memory) for memory in ("recompute", "keep"))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)

    class Writes(nn.Module):
        def forward(self, x):
            return F.silu(x, inplace=True) * 2

    model = nn.Sequential(conv(), Writes(), conv(4)).double()
    with pytest.raises(ShardfieldError, match="an argument of a Writes of the model was written after the call"):
        grads(model, mean_square, x, "recompute")


def test_gradients_inside_a_block_are_refused_and_of_its_result_are_not():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv()

        def forward(self, x):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.conv(x).sin().sum(), x, create_graph=True)
            return slope

    x = torch.randn(2, 1, 11, 6, dtype=torch.float64)
    with pytest.raises(ShardfieldError, match="a Slope of the model computes gradients in its forward"):
        grads(nn.Sequential(Slope()).double(), mean_square, x, "recompute")

    def of_slope(model, x):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    model = nn.Sequential(Calls(conv(), nn.Tanh(), conv(4)), nn.Tanh()).double()
    found, expected = (grads(model, of_slope, x.requires_grad_(), memory) for memory in ("recompute", "keep"))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_autocast_is_that_of_the_forward():
    class Full(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Calls(conv(4, 4), nn.GELU(), conv(4, 4))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.block(x.float())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.full = conv(), Full()
            self.children_of_full = nn.ModuleList([self.full.block])  # a block of its own

        def forward(self, x):
            return self.full(self.first(x))

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 1, 11, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (grads(model, mean_square, x, memory) for memory in ("recompute", "keep"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_block_whose_messages_change_is_refused():
    class Alternates(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.calls = conv(), []

        def forward(self, x):
            self.calls.append(1)
            return self.conv(x).sin() if len(self.calls) == 1 else x.softmax(2).sin() * self.conv.weight.sum()

    x = torch.randn(2, 1, 11, 6, dtype=torch.float64)
    with pytest.raises(ShardfieldError, match="recomputing a segment .* makes the call"):
        grads(nn.Sequential(Alternates()).double(), mean_square, x, "recompute")
