"""Every model with every policy of memory: the bits of "keep", and the values of plain torch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

from shardfield.virtual import virtualize
from tests.ops.spectral.test_neuralop import in_double
from tests.virtual.test_world import CASES

POLICIES = {
    "keep": {"memory": "keep"},
    "auto": {"memory": "auto", "budget": 5_000},
    "offload": {"memory": "offload"},
    "recompute": {"memory": "recompute"},
    "recompute and move": {"memory": "recompute", "budget": 5_000},
}
ALL = ("unet", "norms", "dropout")  # the others with every second policy: they take long


def loss_of(model, x):
    return model(x).square().mean()


def step_of(policy, model, x, dim):
    """Return the loss, the gradients and the buffers of a step on 3 virtual ranks; of plain torch without a policy."""
    buffers = [b.clone() for b in model.buffers()]
    model.zero_grad()
    torch.manual_seed(5)
    if policy is None:
        value = loss_of(model, x)
        value.backward()
    else:
        with virtualize(loss_of, model, 3, dim=dim, **policy) as step:
            if step.world.pager is not None:
                step.world.pager.minimum = 512
            value = step(x)
            assert step.world.pager is None or step.world.pager.moved_in > 0
    found = [value.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return found


@pytest.mark.parametrize("case", CASES)
def test_same_bits_and_the_values_of_plain_torch(case):
    factory, shape, dim = CASES[case]
    double = case != "sfno"  # torch-harmonics computes in single precision
    torch.manual_seed(0)
    with in_double() if case == "tfno" else nullcontext():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of third-party packages
            model = factory()
        model = model.double() if double and case != "tfno" else model
        x = torch.randn(shape, dtype=torch.float64 if double else torch.float32)
        names = list(POLICIES) if case in ALL else list(POLICIES)[::2]
        found = {name: step_of(POLICIES[name], model, x, dim) for name in names}
        plain = step_of(None, model, x, dim)
    for name, tensors in found.items():
        for ours, kept in zip(tensors, found["keep"], strict=True):
            assert torch.equal(ours, kept), f"{name}: {(ours - kept).abs().max()} from keep"
    if case == "dropout":  # one device draws other numbers
        return
    largest = max(float(t.abs().max()) for t in plain[1:])
    for ours, expected in zip(found["keep"], plain, strict=True):
        scale = max(float(expected.abs().max()), largest)  # a bias before a norm has a gradient of 0 but for rounding
        assert (ours - expected).abs().max() <= (1e-12 if double else 2e-6) * scale
