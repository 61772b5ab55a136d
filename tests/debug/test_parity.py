"""`shardfield check` passes models that agree with one device and names the first layer that differs."""

import pytest
import torch
from torch import nn

from shardfield import ShardfieldError, ShardTensor, check, cli
from shardfield.debug.parity import command
from shardfield.debug.recipe_models import find_dims, find_dtype
from tests.launch import ROOT


def good():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
    )


class OwnMean(nn.Module):
    """Take the mean of the local shard, which differs from one device."""

    def forward(self, x):
        if isinstance(x, ShardTensor):
            local = x.to_local()
            return ShardTensor.from_local(local - local.mean(), x.device_mesh, x.placements)
        return x - x.mean()


class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.own, self.last = nn.Conv2d(3, 4, 3, padding=1), OwnMean(), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.own(self.first(x)))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1, 1, dtype=torch.complex64))

    def forward(self, x, shift):
        spectrum = torch.fft.fftn(x + shift, dim=(-2, -1)) * self.weight
        return {"field": torch.fft.ifftn(spectrum, dim=(-2, -1)), "sizes": [x.abs().amax((-2, -1))]}


class Bound(nn.Module):
    """Hold a function that calls a submodule."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(1, 1, 3, padding=1)
        self.run = lambda x: self.mix(x)

    def forward(self, x):
        return self.run(x)


class Gathers(nn.Module):
    """Call an op that has no rule."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return x @ torch.linalg.lu_factor(self.mix(x)).LU


def with_tensors():
    return Complex(), (torch.randn(2, 3, 6, 5), torch.randn(3, 1, 1))


def test_model_that_agrees():
    found = check(good, (2, 3, 16, 21), (2, 2))
    assert found and found.worst < 1e-9 and not found.gathers and found.first is None
    kinds = {line.kind for line in found.lines}
    assert kinds == {"output", "input gradient", "parameter gradient", "buffer"} and len(found.lines) == 11
    assert found.bytes > 0 and "conv2d" in found.table
    assert "detach" not in found.table, "a call of the check, not of the model"
    assert str(found).endswith("same as one device") and "11 of 11 agree" in str(found)


def test_given_tensors_and_several_outputs():
    found = check(with_tensors, mesh=(2,), dims=(2,), even=True, steps=3)
    assert found, found
    assert [line.name for line in found.lines if line.kind == "parameter after"] == ["weight"]
    assert [line.name for line in found.lines if line.kind == "output"] == ["0", "1"]


def test_model_that_cannot_be_deepcopied():
    found = check(Bound, (1, 1, 6, 6), (2,))
    assert found and {"mix.weight", "mix.bias"} <= {line.name for line in found.lines}, found


def test_model_that_gathers():
    found = check(Gathers, (1, 1, 6, 6), (2,))
    assert found and found.gathers == ["linalg_lu_factor"], found


def test_model_that_differs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    assert command(["tests.debug.test_parity:Bad", "--shape", "2,3,8,8", "--mesh", "2"]) == 1
    said = capsys.readouterr().out
    assert "the first submodule whose output differs: own (OwnMean)" in said
    assert (
        "DIFFERS parameter gradient first.weight" in said
        and "ok      buffer" not in said
        and "conv2d" in said
        and said.endswith("NOT the same as one device\n")
    )
    assert command(["tests.debug.test_parity:good", "--shape", "1,3,8,8", "--mesh", "2", "--no-table"]) == 0


def test_bad_input():
    for words, given in (
        ("no attribute 'nothing'", {"factory": "tests.debug.test_parity:nothing", "shape": (1,)}),
        ("not of the form", {"factory": "tests.debug.test_parity", "shape": (1,)}),
        ("No module named", {"factory": "no_such_module:x", "shape": (1,)}),
        ("2 dims .* for a mesh of 1 axes", {"factory": good, "shape": (1,), "dims": (0, 1)}),
        ("one to three axes", {"factory": good, "shape": (1,), "mesh": ()}),
        ("pass the shape", {"factory": good}),
    ):
        with pytest.raises(ShardfieldError, match=words):
            check(**given)


def test_recipes_by_name(capsys):
    assert cli.main(["check", "cnn", "--no-table"]) == 0
    assert "same as one device" in capsys.readouterr().out
    assert find_dims("aero_transolver", 1) == (1,) and find_dims("vit", 2) == (2, 3)
    assert find_dtype("swe_sfno") == "float32" and find_dtype("vit") == "float64"
    for words, why in (
        (["vti"], "unknown recipe 'vti'; did you mean 'vit'"),
        (["aero_transolver", "--mesh", "2,2"], "aero_transolver is sharded along 1 dim, not 2"),
        (["vit", "--shape", "1,1,8,8"], "--shape and --shard are for package.module:name"),
    ):
        assert cli.main(["check", *words]) == 2
        assert why in capsys.readouterr().err
