"""`virtualize`: a plain model on plain tensors has the loss, gradients and buffers of plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfield.errors import ShardfieldError
from shardfield.planning.unet import UNet
from shardfield.virtual import virtualize


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1)
    ).double()


def mse(model, x, y):
    return F.mse_loss(model(x), y)


def field(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def train(model, step, x, y, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(x, y)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


OPTIONS = [
    {"memory": "keep"},
    {"memory": "auto", "budget": 20_000},
    {"memory": "offload"},
    {"memory": "recompute"},
    {"memory": "recompute", "budget": 10_000},
]


def unet() -> nn.Module:
    return UNet(1, 8, 2).double()


@pytest.mark.parametrize(
    ("make", "options"),
    [*((small, o) for o in OPTIONS), (unet, OPTIONS[0]), (unet, OPTIONS[-1])],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(map(str, value.values())),
)
def test_trains_as_plain_torch(make, options):
    torch.manual_seed(0)
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    x, y = field(2, 1, 22, 6), field(2, 1, 22, 6)
    with virtualize(mse, model, 3, dim=2, **options) as step:
        if step.world.pager is not None:
            step.world.pager.minimum = 512
        losses = train(model, step, x, y)
        if step.world.pager is not None:
            assert step.world.pager.moved_in > 0
    close(losses, train(plain, lambda x, y: mse(plain, x, y), x, y))
    for (name, ours), (_, theirs) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_recomputing_moves_and_keeps_less():
    torch.manual_seed(0)
    x = field(1, 1, 64, 64)
    peaks = []
    for memory in ("auto", "recompute"):
        with virtualize(mse, UNet(1, 8, 2).double(), 2, dim=2, memory=memory, budget=1 << 30) as step:
            step(x, x)
            peaks.append(step.world.pager.peak)
    assert peaks[1] < 0.7 * peaks[0], peaks


def test_gradients_accumulate_reach_the_batch_and_call_hooks():
    model, seen = small(), []
    model[0].weight.register_hook(lambda grad: seen.append("hook"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    source = field(2, 1, 11, 6).requires_grad_()
    y = field(2, 1, 11, 6)
    with virtualize(mse, model, 2, dim=2, memory="keep") as step:
        for _ in range(2):
            step(source * 2, y)
    assert seen == ["hook", "after"] * 2
    grads, of_source = [p.grad.clone() for p in model.parameters()], source.grad.clone()
    model.zero_grad()
    source.grad = None
    for _ in range(2):
        mse(model, source * 2, y).backward()
    close(grads, [p.grad for p in model.parameters()])
    close(of_source, source.grad)


def test_predictions_and_modes():
    model = nn.Sequential(small(), nn.Dropout(0.5)).eval()
    x = field(2, 1, 11, 6)

    def predict(model, x):
        out = model(x)
        return {"field": out, "mean": out.mean(), "whole": torch.ones(2)}

    with virtualize(predict, model, 3, dim=-2, memory="keep") as step, torch.no_grad():
        found = step(x)
        model[0][1].eps = 0.5  # replicas follow the model
        changed = step(x)["field"]
    expected = model(x)
    close(changed, expected)
    model[0][1].eps = 1e-5
    close(found["field"], model(x))
    close(found["mean"], model(x).mean())
    assert type(found["field"]) is torch.Tensor and found["whole"].tolist() == [1, 1]
    assert int(model[0][1].num_batches_tracked) == 0


def test_items_that_are_not_sharded():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x, scale):
            return self.inner(x) * scale.view(-1, 1, 1, 1)

    def loss(model, x, scale, power):
        scale.add_(1)  # of each rank, not of the caller
        return model(x, scale).abs().pow(power).mean()

    model, x, scale = Scaled(), field(2, 1, 11, 6), torch.tensor([1.0, 2.0], dtype=torch.float64)
    with virtualize(loss, model, 3, dim=(2, None, None), memory="keep") as step:
        found = step(x, scale, 3)
    assert scale.tolist() == [1, 2]
    close(found, loss(model, x, scale, 3).detach())


def test_refusals():
    model, x = small(), field(1, 1, 8, 8)
    outside = nn.Parameter(torch.ones(1, dtype=torch.float64))
    cases = [
        (lambda m, x: m(x), {"dim": 2}, "one number is expected"),
        (lambda m, x: 3.0, {"dim": 2}, "returned float"),
        (lambda m, x: (m(x) * outside).mean(), {"dim": 2}, "no parameter of the model"),
        (lambda m, x: m(x).mean(), {"dim": 4}, "no dim 4"),
        (lambda m, x: m(x).mean(), {"dim": (2, 2)}, "2 dims are named, and the batch has 1"),
    ]
    for loss, options, text in cases:
        with virtualize(loss, model, 2, memory="keep", **options) as step, pytest.raises(ShardfieldError, match=text):
            step(x)
    with virtualize(mse, nn.LazyConv2d(1, 3), 2, dim=2) as step, pytest.raises(ShardfieldError, match="lazy modules"):
        step(x, x)
    with pytest.raises(ValueError, match="none of"):
        virtualize(mse, model, 2, dim=2, memory="drop")
