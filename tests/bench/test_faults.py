"""`bench faults`: what is lost to kills is counted right, and a killed run has the losses of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardfield import ShardfieldError
from shardfield.bench.faults import OPTIONS, Settings, Trace, measure, plan_kills, run_job
from shardfield.bench.supervised import Job
from shardfield.bench.table import Table
from shardfield.testing import run_on_ranks
from shardfield.train.log import read_curves
from shardfield.train.recipes.cnn import CNNConfig
from tests.train.test_run_folder import train


def test_time_lost_is_counted():
    trace = Trace(
        [
            {"at": 10.0, "begin": 0},
            {"at": 14.0, "step": 4},
            {"at": 14.5, "save": 4, "seconds": 0.5},
            {"at": 16.5, "step": 6},  # repeated
            {"at": 20.0, "begin": 4},
            {"at": 22.0, "step": 6},
            {"at": 24.0, "step": 8},
            {"at": 24.1, "save": 8, "seconds": 0.1},
            {"at": 28.1, "save": 12, "seconds": 0.2},
            {"at": 28.0, "step": 12},
        ]
    )
    assert len(trace.attempts()) == 2 and trace.useful_seconds() == 4.0 + 8.0
    assert trace.stalls() == [pytest.approx(0.05)] and trace.step_seconds() == pytest.approx(6.5 / 6)
    kills = plan_kills(Settings(), 5000)
    assert len(kills) == 100 and kills == sorted(kills, key=lambda k: k[0]) and {k[2] for k in kills} == {0, 1}


def test_killed_run(tmp_path):
    options = OPTIONS | {"max_steps": 40, "save_every": 5, "n_train": 64, "epochs": 5}
    job = Job(str(tmp_path / "killed"), 2, options, [(12, 0.0, 1), (12, 0.1, 0)])
    seconds = run_job(job)
    whole = CNNConfig(**options, out=tmp_path / "whole", domain=(2,), picture=False)
    (expected, _) = run_on_ranks(train, 2, whole)
    losses, _ = read_curves(Path(job.out) / "metrics.jsonl")
    assert losses == expected and len(losses) == 40, "to the last bit"
    assert len(Trace.read(Path(job.out) / "trace-0.jsonl").attempts()) in (2, 3)
    (tmp_path / "whole" / "trace-0.jsonl").touch()
    (tmp_path / "whole" / "trace-1.jsonl").touch()
    table = Table("faults", {}, "cpu")
    measure(table, Settings(kills=2), 40, tmp_path / "whole", Path(job.out), seconds)
    rows = {row.candidate: row for row in table.rows}
    assert rows["losses that differ"].met and 0 < rows["time lost"].ratio < 1
    assert rows["equal losses"].found == "40 of 40, to the last bit"


def test_rank_that_fails_by_itself(tmp_path):
    with pytest.raises(ShardfieldError, match="the run failed(.|\n)*a rank failed by itself"):
        run_job(Job(str(tmp_path / "bad"), 1, OPTIONS | {"n_train": 1}))
