"""Loggers of a run: they get what metrics.jsonl gets, rank 0 alone writes, and none of them can end or block a run."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardfield import cli
from shardfield.testing import run_on_ranks
from shardfield.train import loggers
from shardfield.train.config import UsageError
from shardfield.train.log import Log
from shardfield.train.loggers import LOGGERS, LoggerThread, check_loggers
from shardfield.train.loop import fit
from shardfield.train.recipes.cnn import CNNConfig, cnn

CONFIG = CNNConfig(height=8, width=8, channels=4, batch_size=4, n_train=8, n_test=4, epochs=1, log_every=1)
WORDS = ["--height", "8", "--width", "8", "--channels", "4", "--batch-size", "4", "--n-train", "8", "--n-test", "4"]


def picture(folder):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, panel = plt.subplots()
    panel.plot([1, 2])
    figure.savefig(folder / "prediction.png")
    plt.close(figure)


def write_all(name, folder):
    """Write scalars and an image through a Log with one logger."""
    picture(folder)
    told = []
    log = Log(folder, True, loggers=[name], settings={"epochs": 3, "out": "x"})
    log.print_line = told.append
    log.record((1, {"loss": 2.0}), (2, {"loss": 1.0, "test/l2": 0.5}))
    log.image("prediction", folder / "prediction.png", 2)
    log.image("missing", folder / "missing.png", 2)
    log.close()
    assert told == []
    assert [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [2.0, 1.0]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_all("tensorboard", tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [e.value for e in found.Scalars("test/l2")] == [0.5]
    assert found.Images("prediction")[0].step == 2


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_against_a_fake_module(tmp_path, monkeypatch):
    run, options = FakeRun(), {}

    def init(**given):
        options.update(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Image=lambda path: f"image {path}"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write_all("wandb", tmp_path)
    assert options["mode"] == "offline" and options["config"] == {"epochs": 3, "out": "x"}
    image = (2, {"prediction": f"image {tmp_path / 'prediction.png'}"})
    assert run.logged == [(1, {"loss": 2.0}), (2, {"loss": 1.0, "test/l2": 0.5}), image] and run.finished


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    write_all("wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("warnings.warn", lambda *a, **k: None)  # MLflow's own
    write_all("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("shardfield").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [(1, 2.0), (2, 1.0)]
    assert run.data.params["epochs"] == "3" and run.info.status == "FINISHED"
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["step-2"]


class Recorder:
    """A logger that writes to a file which rank wrote what."""

    def __init__(self, folder, settings, first_step):
        self.path = folder / "recorded"
        self.write("open", settings["batch_size"])

    def write(self, *words):
        with open(self.path, "a") as file:
            file.write(" ".join(map(str, (dist.get_rank(), *words))) + "\n")

    def scalars(self, values):
        for step, row in values:
            self.write(step, *row)

    def image(self, name, path, step):
        self.write(name)

    def close(self):
        self.write("close")


class Failing(Recorder):
    def scalars(self, values):
        raise OSError("disk full\nmore")


class Hanging(Recorder):
    def scalars(self, values):
        threading.Event().wait()


def train_with(folder, make, seconds):
    """Train the recipe cnn with a logger of a class that stands in for TensorBoard."""
    before, LOGGERS["tensorboard"] = LOGGERS["tensorboard"], (make, "torch")
    loggers.CLOSE_SECONDS, told = seconds, []
    close = LoggerThread.close
    LoggerThread.close = lambda self, limit=seconds: close(self, limit)
    show, Log.print_line = Log.print_line, lambda self, text: told.append(text) if self.is_main else None
    begun = time.monotonic()
    try:
        config = replace(CONFIG, out=folder, domain=(2,), logger=("tensorboard",))
        mesh = config.mesh("cpu")
        results = fit(cnn(config, mesh, Log(folder, False)), config, mesh)
    finally:
        LOGGERS["tensorboard"], LoggerThread.close, Log.print_line = before, close, show
    return results, [text for text in told if "logger" in text], time.monotonic() - begun


def test_rank_0_alone_writes(tmp_path):
    (results, told, _), (_, others, _) = run_on_ranks(train_with, 2, tmp_path, Recorder, 20.0)
    assert "test/wrong" in results and told == others == []
    lines = (tmp_path / "recorded").read_text().splitlines()
    assert lines[0] == "0 open 4" and lines[-1] == "0 close" and all(line.startswith("0 ") for line in lines)
    assert "0 1 loss learning_rate samples_per_s" in lines and "0 2 test/wrong" in lines


def test_a_logger_that_fails_is_dropped(tmp_path):
    (results, told, _), _ = run_on_ranks(train_with, 2, tmp_path, Failing, 20.0)
    assert "test/wrong" in results
    assert told == ["the logger tensorboard failed with OSError: disk full; the run goes on without it"]


def test_a_logger_that_blocks_is_dropped(tmp_path):
    (results, told, seconds), _ = run_on_ranks(train_with, 2, tmp_path, Hanging, 0.5)
    assert "test/wrong" in results and seconds < 50
    assert told == ["the logger tensorboard has not finished after 0.5 s; the run goes on without it"]


def test_a_slow_logger_is_dropped_once_its_queue_is_full():
    told, release = [], threading.Event()
    slow = SimpleNamespace(scalars=lambda values: release.wait(30), close=lambda: None)
    thread = LoggerThread("slow", lambda: slow, told.append)
    for _ in range(2 * loggers.WAITING):
        thread.put("scalars", [])
    assert told == [f"the logger slow is {loggers.WAITING} calls behind; the run goes on without it"]
    thread.close()
    release.set()


def test_a_logger_that_cannot_be_opened_is_dropped():
    told = []

    def make():
        raise SystemExit(1)

    thread = LoggerThread("shut", make, told.append)
    thread.close(5.0)
    assert told == ["the logger shut failed with SystemExit: 1; the run goes on without it"]


def without_package(name):
    find, importlib.util.find_spec = importlib.util.find_spec, lambda package: None
    try:
        check_loggers([name])
    except UsageError as error:
        return str(error)
    finally:
        importlib.util.find_spec = find


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named_on_all_ranks(name):
    expected = f"--logger {name} needs the package {name}: pip install 'shardfield[{name}]'"
    assert run_on_ranks(without_package, 2, name) == [expected] * 2


def test_an_unknown_logger_is_refused(tmp_path, capsys):
    assert cli.main(["train", "cnn", "--out", str(tmp_path), "--logger", "papertape", *WORDS]) == 2
    with pytest.raises(UsageError, match="valid are tensorboard, wandb, mlflow"):
        check_loggers(["papertape"])


def test_the_command_logs_pictures(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(LOGGERS, "tensorboard", (Recorder, "torch"))
    out = str(tmp_path)
    assert cli.main(["train", "cnn", "--epochs", "1", "--out", out, "--logger", "tensorboard", *WORDS]) == 0
    lines = (tmp_path / "recorded").read_text().splitlines()
    assert lines[-2:] == ["0 curve", "0 close"]
