"""`shardfield train --virtual P`: the losses of one rank, and refusals."""

from __future__ import annotations

import functools
import json

from shardfield.cli import main
from shardfield.virtual.paging import Pager

OPTIONS = [
    "--precision", "fp64", "--epochs", "1", "--max-steps", "3", "--batch-size", "4", "--n-train", "12", "--height", "9",
    "--width", "8", "--channels", "4", "--n-test", "4", "--no-picture", "--log-every", "1", "--warmup", "1",
]  # fmt: skip


def losses(path) -> list[float]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_train_on_virtual_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("shardfield.virtual.world.Pager", functools.partial(Pager, minimum=64))
    assert main(["train", "cnn", "--out", str(tmp_path / "one"), *OPTIONS]) == 0
    virtual = ["--virtual", "4", "--domain", "2", "--virtual-memory", "offload"]
    assert main(["train", "cnn", "--out", str(tmp_path / "four"), *virtual, *OPTIONS]) == 0
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(one) == 3 and all(abs(a - b) < 1e-10 for a, b in zip(one, four, strict=True))


def test_train_on_virtual_ranks_of_two_processes(tmp_path, forks):
    """Two processes of a launcher with two virtual ranks each have the losses of one rank."""
    program = tmp_path / "train.py"
    program.write_text("import sys\nfrom shardfield.cli import main\nsys.exit(main(['train', 'cnn', *sys.argv[1:]]))\n")
    forks.run(program, tmp_path, None, "--out", "one", *OPTIONS)
    out, silent = forks.run(program, tmp_path, 2, "--out", "four", "--virtual", "2", "--domain", "2", *OPTIONS)
    assert "4 ranks, 2 x 2" in out and not silent
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(one) == 3 and all(abs(a - b) < 1e-10 for a, b in zip(one, four, strict=True))


def test_refusals(tmp_path, capsys):
    assert main(["train", "cnn", "--virtual", "0"]) == 2
    assert "--virtual is 0" in capsys.readouterr().err
    assert main(["train", "cnn", "--out", str(tmp_path), "--virtual", "3", "--domain", "2", *OPTIONS]) == 2
    assert "groups of 2 ranks, and there are 3" in capsys.readouterr().err
