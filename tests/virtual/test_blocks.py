"""Blocks of many kinds that are recomputed: loss, gradients and buffers of plain torch, or a refusal."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from shardfield.errors import ShardfieldError
from shardfield.virtual import virtualize

DOUBLE = torch.float64


def conv(inner=1, out=4):
    return nn.Conv2d(inner, out, 3, padding=1)


class Calls(nn.Module):
    """A module whose forward is a function of it and its arguments, with children of the given names."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def block(function, inner=1, out=4, **others):
    return Calls(function, conv=conv(inner, out), **others)


def twice():
    shared = nn.Sequential(conv(1, 1), nn.Tanh())
    return Calls(lambda m, x: m.same(m.one(m.one(x))), one=shared, same=shared, some=nn.ModuleList([shared]))


def several_results():
    def inner(m, x, y, *, scale):
        h = m.conv(x)
        return {"a": h.sin(), "b": (h * y, [h.cos() * scale])}

    def outer(m, x):
        out = m.inner(x, x.exp(), scale=3.0)
        m.unused(x)
        return out["a"] + out["b"][0] * out["b"][1][0]

    return Calls(outer, inner=block(inner), unused=nn.Sequential(conv(), nn.GELU()))


def lists():
    def push(m, x, skips):
        skips.append(x)
        return m.conv(x).sin()

    def pull(m, x, skips):
        return (m.conv(x) * skips.pop()).sin()

    def outer(m, x):
        skips = []
        return m.pull(m.push(x, skips), skips)

    return Calls(outer, push=block(push, 1, 1), pull=block(pull, 1, 1))


def in_place():
    def inner(m, x):
        h = F.relu_(m.conv(x))
        h = m.more(h) + 1
        h += x
        return h.sigmoid_()

    return nn.Sequential(block(inner, more=conv(4)), conv(4))


def buffers():
    def ema(m, x):  # replaces its buffer, and counts in an attribute
        h = m.norm(m.norm(m.conv(x)).sin())
        m.count += 1
        m.ema = 0.9 * m.ema + 0.1 * h.detach().abs().mean()
        return (h / m.ema * m.count).sin()

    inner = block(ema, norm=nn.BatchNorm2d(4, momentum=None))
    inner.register_buffer("ema", torch.ones((), dtype=DOUBLE))
    inner.count = 1.0
    return nn.Sequential(inner, conv(4))


def generators():
    def inner(m, x):
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(1, dtype=DOUBLE))
        return (m.conv(x) * drawn).sin()

    return nn.Sequential(block(inner), conv(4))


def checkpoints():
    def inner(m, x, reentrant):
        return m.conv(checkpoint(m.some, x, use_reentrant=reentrant).sin()).sin()

    def some():
        return nn.Sequential(conv(1, 1), nn.GroupNorm(1, 1), nn.SiLU())

    def outer(m, x):
        return m.two(m.one(m.first(x), False), True)

    return Calls(outer, first=conv(1, 1), one=block(inner, 1, 1, some=some()), two=block(inner, 1, 1, some=some()))


def frozen():
    model = nn.Sequential(nn.Sequential(conv(), nn.GELU()), nn.Sequential(conv(4), nn.GroupNorm(2, 4)), conv(4))
    model[0].requires_grad_(False)
    model[1][1].requires_grad_(False)
    return model


def without_gradients():
    def inner(m, x):
        with torch.no_grad():
            gate = m.other(x).sin()
        return m.conv(x) * gate

    def outer(m, x):
        with torch.no_grad():
            x = m.norm(x)
        return m.inner(x)

    return Calls(outer, norm=nn.Sequential(conv(1, 1), nn.BatchNorm2d(1)), inner=block(inner, other=conv()))


def spectral_norms():
    inner = nn.Sequential(nn.utils.parametrizations.spectral_norm(conv(1, 1)), nn.GELU())
    return Calls(lambda m, x: m.one(m.two(m.one(x).sin())), one=nn.utils.spectral_norm(conv(1, 1)), two=inner)


def norm_of_means():
    """The means are the same on all ranks: torch's batch_norm writes the buffers, and leaves their versions."""

    def inner(m, x):
        return m.norm(m.conv(x).mean((2, 3))).sin()

    return nn.Sequential(block(inner, norm=nn.BatchNorm1d(4)), nn.Linear(4, 3))


def weight_norms():
    inner = nn.Sequential(nn.utils.weight_norm(conv(1, 1), dim=1), nn.GELU())
    return Calls(lambda m, x: m.one(m.two(m.one(x).sin())), one=nn.utils.weight_norm(conv(1, 1)), two=inner)


def auxiliary_loss():
    def inner(m, x):
        h = m.conv(x)
        m.extra = h.square().mean()
        return h.sin()

    return nn.Sequential(block(inner), conv(4))


def attention():
    def attend(m, x):
        q, k, v = m.linear(x).split(4, -1)
        return F.scaled_dot_product_attention(q, k, v)

    return nn.Sequential(Calls(attend, linear=nn.Linear(6, 12)), conv(1, 1))


def mean_square(model, x):
    return model(x).square().mean()


def with_extra(model, x):
    return mean_square(model, x) + 0.3 * model[0].extra


def in_math(model, x):
    with sdpa_kernel(SDPBackend.MATH):
        return mean_square(model, x)


def backward_inside(model, x):
    value = mean_square(model, x)
    if value.requires_grad:
        (value * 2).backward(retain_graph=True)
    return value


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def product(m, x):
    return Product.apply(m.conv(x), x.sin())


def own_function():
    return nn.Sequential(block(product, 1, 1), nn.Tanh())


def of_slope(model, x):
    if not torch.is_grad_enabled():
        return mean_square(model, x)
    (slope,) = torch.autograd.grad(model(x * 2).sum(), x, create_graph=True)
    return slope.square().mean()


CASES = {
    **dict.fromkeys([twice, several_results, lists, in_place, buffers], mean_square),
    **dict.fromkeys([checkpoints, frozen, without_gradients, norm_of_means, spectral_norms, weight_norms], mean_square),
    auxiliary_loss: with_extra,
    attention: in_math,
    generators: backward_inside,
    own_function: of_slope,
}


def steps(model, step, x):
    """Accumulate the gradients of two steps, with an evaluation between."""
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(3)
    losses = [step(x)]
    with torch.no_grad():
        losses.append(step(x))
    losses.append(step(x))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [torch.as_tensor(loss).detach() for loss in losses], grads, list(model.buffers())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.nn.utils.spectral_norm and weight_norm
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of checkpoint, in the evaluation
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_as_plain_torch(make):
    loss = CASES[make]
    torch.manual_seed(0)
    x = torch.randn(2, 1, 11, 6, dtype=DOUBLE, requires_grad=loss is of_slope)
    model, plain = make().double(), make().double()
    plain.load_state_dict(model.state_dict())

    def plain_step(x):
        value = loss(plain, x)
        if value.requires_grad:
            value.backward()
        return value

    with virtualize(loss, model, 3, dim=2, memory="recompute", budget=4000) as step:
        step.world.pager.minimum = 256
        found = steps(model, step, x)
        assert step.world.pager.moved_in > 0
    torch.testing.assert_close(found, steps(plain, plain_step, x), rtol=1e-11, atol=1e-12)


def overwrites(m, x):
    h = m.conv(x)
    return h.sin() + h.add_(1.0).cos()


def fails(m, x):
    raise KeyError("inside")


def writes_a_parameter(model, x):
    value = mean_square(model, x)
    with torch.no_grad():
        model[0].conv.weight.mul_(2.0)
    return value


def penalized(model, x):
    (grad,) = torch.autograd.grad(mean_square(model, x), model[0].conv.weight, create_graph=True)
    return grad.square().sum()


@pytest.mark.parametrize(
    ("function", "loss", "error", "text"),
    [
        (overwrites, mean_square, ShardfieldError, "a Calls of the model writes a tensor in place that its backward"),
        (lambda m, x: m.conv(x).sin(), writes_a_parameter, ShardfieldError, "a parameter of a Calls .* was written"),
        (product, penalized, ShardfieldError, "autograd.grad with respect to a parameter of the model"),
        (fails, mean_square, KeyError, "inside"),
    ],
    ids=["overwrites", "writes_a_parameter", "penalized", "fails"],
)
def test_refused(function, loss, error, text):
    x = torch.randn(2, 1, 11, 6, dtype=DOUBLE, requires_grad=True)
    model = nn.Sequential(block(function, 1, 1)).double()
    with virtualize(loss, model, 3, dim=2, memory="recompute") as step:
        with pytest.raises(error, match=text):
            step(x)
        model[0].function = product  # the world goes on
        step.loss = mean_square
        step(x)
