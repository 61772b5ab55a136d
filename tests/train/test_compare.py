"""`shardfield compare`: where two runs begin to differ; fingerprints of modules do not depend on the mesh."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardfield.cli import main
from shardfield.testing import run_on_ranks
from shardfield.train.compare import compare_losses, compare_modules
from shardfield.train.config import UsageError
from tests.train.test_loop import CNN, run

SHORT = replace(CNN, max_steps=3, record=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run on one rank, the same on four with recomputation, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    run_on_ranks(run, 1, "cnn", replace(SHORT, out=folder / "one"))
    tiles = replace(SHORT, out=folder / "four", domain=(2,), strategy="ddp", recompute=True)
    run_on_ranks(run, 4, "cnn", tiles, timeout=90)
    run_on_ranks(run, 1, "cnn", replace(SHORT, out=folder / "other", learning_rate=0.1))
    for name, values in (("one", {"domain": [1]}), ("four", {"domain": [2]})):
        (folder / name / "config.json").write_text(json.dumps(values | {"precision": "fp64", "out": name}))
    return folder


def test_equal_runs_agree_module_by_module(runs, capsys):
    assert main(["compare", str(runs / "one"), str(runs / "four"), "--modules"]) == 0
    text = capsys.readouterr().out
    assert "domain: [1] and [2]" in text and "out:" not in text
    assert "3 steps in both" in text and "modules: all within 1e-10" in text and text.endswith("the runs agree\n")
    recorded = [json.loads(line) for line in (runs / "four" / "modules.jsonl").read_text().splitlines()]
    assert [line["step"] for line in recorded] == [1, 2]
    assert [name for name, _ in recorded[0]["outputs"]][-2:] == ["features (Sequential)", "head (Linear)"]
    assert len(recorded[0]["outputs"]) == 9 and "features.0.weight" in recorded[0]["gradients"]


def test_first_step_and_module_that_differ(runs, capsys):
    gaps = compare_losses(runs / "one", runs / "other")
    assert gaps[0].error == 0 and gaps[1].error > 1e-3  # the first loss is that of the initial parameters
    found, _ = compare_modules(runs / "one", runs / "other", 1e-10)
    assert found.where == "step 2, output of features.0 (Conv2d)" and found.error > 1e-3
    assert main(["compare", str(runs / "one"), str(runs / "other"), "--modules", "--tolerance", "1e-6"]) == 1
    text = capsys.readouterr().out
    assert "first beyond 1e-06 at step 2:" in text and text.endswith("the runs DIFFER\n")
    assert main(["compare", str(runs / "one"), str(runs / "one")]) == 0
    assert "bit-identical at every step" in capsys.readouterr().out


def test_bad_input(runs, tmp_path, capsys):
    assert main(["compare", str(runs / "one"), str(tmp_path)]) == 2
    assert f"{tmp_path}: no losses in metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert main(["compare", str(runs / "one"), str(tmp_path), "--modules"]) == 2
    assert "--record 3" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    assert main(["compare", str(runs / "one"), str(tmp_path)]) == 2
    assert "no step in common" in capsys.readouterr().err
    other = {"step": 1, "outputs": [["stem (Conv2d)", [0.0, 1.0, 1.0]]], "gradients": {}}
    (tmp_path / "modules.jsonl").write_text(json.dumps(other) + "\n")
    with pytest.raises(
        UsageError, match=r"call 0 is features.0 \(Conv2d\) in one run and stem \(Conv2d\) in the other"
    ):
        compare_modules(runs / "one", tmp_path, 1e-10)
