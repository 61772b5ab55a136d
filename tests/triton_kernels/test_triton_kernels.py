"""Interpreted Triton kernels against torch; on a device the case tables run the compiled kernels."""

from __future__ import annotations

import math

import pytest
import torch

from shardfield.triton_kernels import fold, jit
from tests import triton_interpreter as texts


class Traced(torch.Tensor):
    """Emulate a traced tensor, which has no memory."""

    is_cuda = True


@pytest.fixture
def by_text(monkeypatch):
    monkeypatch.setattr(fold, "jit", texts.jit)
    monkeypatch.setattr(jit, "jit", texts.jit)
    monkeypatch.setattr(fold, "on_cuda", lambda *tensors: True)
    monkeypatch.setattr(fold, "tl", None)  # replaced by the interpreter, restored afterwards


def test_kernels_are_for_devices():
    x = torch.zeros(2, 3, 4, 8)
    assert not jit.on_cuda(x)
    assert Traced.is_cuda and not jit.on_cuda(x.as_subclass(Traced))
    assert not fold.supports(x, x[..., 0], x, x[..., 0])


@pytest.mark.parametrize("features", [1, 8, 100, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fold(features, dtype, by_text):
    """Fold rows into the middle of the result, with flash attention's strides and fully masked rows."""
    out, lse = torch.randn(2, 3, 50, features), torch.randn(2, 3, 50) * 3
    part = torch.randn(2, 20, 3, features).to(dtype).transpose(1, 2)
    part_lse = torch.randn(2, 3, 32)[..., :20] * 3
    lse[0, 0, :25], part_lse[0, 0, 3:9] = -math.inf, -math.inf
    out[0, 0, :25] = 0
    before, rows = (out.clone(), lse.clone()), slice(10, 30)
    total = torch.logaddexp(lse[..., rows], part_lse)
    weights = [(x - total).exp().nan_to_num(0).unsqueeze(-1) for x in (lse[..., rows], part_lse)]
    wanted = out[..., rows, :] * weights[0] + part.float() * weights[1]
    given = out[..., rows, :], lse[..., rows], part, part_lse
    assert fold.supports(*given)
    fold.accumulate_block(*given)
    torch.testing.assert_close(given[0], wanted)
    torch.testing.assert_close(given[1], total)
    for now, then in zip((out, lse), before, strict=True):
        assert torch.equal(now[:, :, :10], then[:, :, :10]) and torch.equal(now[:, :, 30:], then[:, :, 30:])
    assert (out[0, 0, 13:19] == 0).all() and (lse[0, 0, 13:19] == -math.inf).all()


def test_fold_of_nan(by_text):
    out, lse, part = torch.zeros(1, 1, 2, 8), torch.full((1, 1, 2), -math.inf), torch.ones(1, 1, 2, 8)
    part[0, 0, 1] = math.nan
    fold.accumulate_block(out, lse, part, torch.tensor([[[0.5, math.nan]]]))
    assert (out[0, 0, 0] == 1).all() and out[0, 0, 1].isnan().all() and lse[0, 0].tolist()[0] == 0.5


def test_fold_leaves_other_tensors_alone(by_text):
    x, lse = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)
    assert fold.supports(x, lse, x, lse)
    assert not fold.supports(x.double(), lse.double(), x, lse.double())
    assert not fold.supports(x.mT, x[..., 0], x.mT, x[..., 0])
    wide = torch.zeros(1, 1, 2, fold.MAX_FEATURES + 1)
    assert not fold.supports(wide, wide[..., 0], wide, wide[..., 0])
