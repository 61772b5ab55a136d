"""`shardfield convert`: to and from safetensors and torch.distributed.checkpoint, and what is refused."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from shardfield import cli
from shardfield.testing import run_on_ranks
from shardfield.train import Checkpoints, full_state_dict, parallelize
from shardfield.train.storage import read_checkpoint

safetensors = pytest.importorskip("safetensors.torch")


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.mix = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, x):
        return (x @ torch.view_as_real(self.modes).float().sum(-1)).sum()


def built(seed):
    torch.manual_seed(seed)
    model = parallelize(
        Spectral(), init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), domain=None, strategy="ddp"
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.25)


def saves(folder):
    model, optimizer = built(0)
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    kept = Checkpoints(folder)
    kept.save(4, model, optimizer, {"step": 4, "note": "é"}, {"mean": torch.arange(3.0)})
    kept.wait()
    return full_state_dict(model)


def loads(path):
    """Load a converted checkpoint into a new model and optimizer."""
    model, optimizer = built(1)
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    scalars = Checkpoints(path.parent).load(path, model, optimizer, {"mean": torch.zeros(3)})
    return full_state_dict(model), scalars, optimizer.param_groups[0]["lr"]


def loads_weights(path):
    model, _ = built(1)
    Checkpoints(path.parent).load(path, model)
    return full_state_dict(model)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder / "step-000004", run_on_ranks(saves, 2, folder)[0]


@pytest.mark.parametrize("name", ["all.safetensors", "dcp"])
def test_there_and_back(saved, tmp_path, name):
    path, weights = saved
    scalars, tensors = read_checkpoint(path)
    there, back = tmp_path / name, tmp_path / "back" / "step-000004"
    assert cli.main(["convert", str(path), str(there)]) == 0
    assert cli.main(["convert", str(there), str(back)]) == 0
    again = read_checkpoint(back)
    assert again[0] == scalars and same(again[1], tensors)
    for found, said, rate in run_on_ranks(loads, 2, back):
        assert same(found, weights) and said == {"step": 4, "note": "é"} and rate == 0.25
    assert not list(tmp_path.rglob("*.part"))


def test_weights_of_a_plain_model(saved, tmp_path):
    path, weights = saved
    assert cli.main(["convert", str(path), str(tmp_path / "w.safetensors"), "--weights"]) == 0
    assert cli.main(["convert", str(path), str(tmp_path / "dcp"), "--weights"]) == 0
    found = safetensors.load_file(tmp_path / "w.safetensors")
    assert same(found, weights) and found["modes"].dtype == torch.complex64
    plain = Spectral()
    plain.load_state_dict(found)
    state = {name: torch.zeros_like(value) for name, value in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state, weights)
    # files of other programs: any names
    for number, source in enumerate(("w.safetensors", "dcp")):
        target = tmp_path / f"ours{number}" / "step-000000"
        assert cli.main(["convert", str(tmp_path / source), str(target)]) == 0
        for loaded in run_on_ranks(loads_weights, 2, target):
            assert same(loaded, weights)


def test_refused_conversions(saved, tmp_path, capsys, monkeypatch):
    path, _ = saved
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": torch.ones(2), "note": "text"}, checkpoint_id=tmp_path / "mixed", no_dist=True)
        dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    for source, target, why in (
        (tmp_path / "none", "x", "none: neither a checkpoint, nor a DCP folder, nor a .safetensors file"),
        (path, "dcp", "dcp: exists already"),
        (tmp_path / "bad.safetensors", "x", "bad.safetensors: cannot be read"),
        (tmp_path / "dcp", "x", "dcp: cannot be read"),
        (tmp_path / "mixed", "x", "mixed: has values that are not tensors (note)"),
    ):
        assert cli.main(["convert", str(source), str(tmp_path / target)]) == 2
        assert why in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "other"), str(tmp_path / "y.safetensors"), "--weights"]) == 2
    assert "has no tensor of a model" in capsys.readouterr().err
    assert cli.main(["convert", str(path)]) == 2 and "target" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert cli.main(["convert", str(path), str(tmp_path / "x.safetensors")]) == 2
    assert "pip install 'shardfield[safetensors]'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists() and not list(Path(tmp_path).rglob("*.part"))
