"""`shardfield predict` after `shardfield train swe_sfno`: any mesh, checkpoints and plain weights, and its errors."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardfield import ShardfieldError
from shardfield.predict import ForecastStore, cli
from shardfield.predict.pictures import PIXELS, _globe
from shardfield.testing import run_on_ranks
from shardfield.train import Trainer, full_state_dict
from shardfield.train.log import Log, read_curves
from shardfield.train.recipes import RECIPES
from shardfield.train.recipes.swe_sfno import SWEConfig

CONFIG = SWEConfig(
    nlat=8, nlon=16, hours=3, records=4, n_train=4, n_test=4, width=4, layers=1, epochs=1, rollout=(1, 2), batch_size=6,
    evaluate_every=0, picture=False, ema=0.5,
)  # fmt: skip


def train(config: SWEConfig, weights: Path | None = None):
    """Train, and return the losses and the test metrics; save the state dict of the plain model."""
    mesh = config.mesh("cpu")
    log = Log(config.out, dist.get_rank() == 0, 10**6)
    trainer = Trainer(RECIPES["swe_sfno"][1](config, mesh, log), config, mesh, log)
    results = trainer.run()
    if weights is not None:
        assert trainer.ema_average is not None
        trainer.ema_average.load_into_model()
        state = full_state_dict(trainer.model)
        if dist.get_rank() == 0:
            torch.save(state, weights)
    dist.barrier()
    losses, _ = read_curves(config.out / "metrics.jsonl")
    return losses, results


def run_command(options: list[str]):
    """Run the command in a world that exists, and return its error."""
    parsed = cli._parser().parse_args(options)
    try:
        cli._run(parsed, cli._mesh(parsed, "cpu"), None)
    except ShardfieldError as error:
        return str(error)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train on one rank and on 2 x 2 ranks; return the folder of both runs."""
    folder = tmp_path_factory.mktemp("weather")
    config = replace(CONFIG, cache=folder / "cache")
    (alone,) = run_on_ranks(train, 1, replace(config, out=folder / "one", domain=(1, 1)), folder / "weights.pt")
    for found in run_on_ranks(train, 4, replace(config, out=folder / "four", domain=(2, 2)), timeout=90):
        torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-5)
    assert len(alone[0]) == 2 and set(alone[1]) == {"3h/rmse"}
    return folder


def read(path: Path) -> np.ndarray:
    return np.stack([a[:] for a in ForecastStore(path).arrays], 3)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Compare in units of the largest value of each variable: the model computes in single precision."""
    largest = np.abs(expected).max((0, 1, 2, 4, 5), keepdims=True)
    assert (np.abs(found - expected) / largest).max() < tolerance


def test_any_mesh_and_plain_weights(runs):
    base = [str(runs / "one"), "--steps", "4", "--cases", "2", "--out"]
    run_on_ranks(run_command, 1, [*base, str(runs / "a.zarr"), "--picture", str(runs / "a.png")])
    expected = read(runs / "a.zarr")
    assert expected.shape == (1, 2, 5, 3, 8, 16) and np.isfinite(expected).all()
    assert (runs / "a.png").stat().st_size > 10_000
    scores = ForecastStore(runs / "a.zarr").attrs["scores"]
    assert len(scores["rmse"]["vorticity"]) == 4 and set(scores) == {"rmse", "bias", "persistence"}
    more = ["--domain", "2", "2", "--netcdf", str(runs / "b.nc")]
    run_on_ranks(run_command, 4, [*base, str(runs / "b.zarr"), *more], timeout=90)
    close(read(runs / "b.zarr"), expected, 1e-5)
    assert (runs / "b.nc").stat().st_size > 10_000
    # the weights as the state dict of a plain model; the averaged ones, as in the checkpoint
    save_file(torch.load(runs / "weights.pt"), runs / "weights.safetensors")
    for ranks, out, more in ((1, "c.zarr", []), (4, "d.zarr", ["--domain", "2", "2"])):
        weights = runs / ("weights.pt" if ranks == 1 else "weights.safetensors")
        run_on_ranks(run_command, ranks, [*base, str(runs / out), "--weights", str(weights), *more], timeout=90)
        close(read(runs / out), expected, 1e-5)


def test_another_training_is_refused(runs):
    """A forecast is not continued with a checkpoint of the same name from another training."""
    run = [str(runs / "one"), "--steps", "2", "--out", str(runs / "f.zarr")]
    assert run_on_ranks(run_command, 1, run) == [None]
    assert ForecastStore(runs / "f.zarr").source.startswith("one, step-000002, sha256 ")
    (text,) = run_on_ranks(run_command, 1, [str(runs / "four"), *run[1:]])
    assert "has another forecast: source one, step-000002" in text


def test_globe():
    """The picture does not depend on the order of latitudes and longitudes, nor on where longitudes begin."""
    lat, lon = np.linspace(75, -75, 6), np.arange(8) * 45.0
    field = np.sin(np.deg2rad(lat))[:, None] + np.cos(np.deg2rad(lon))
    image = _globe(field, {"lat": lat, "lon": lon})
    middle = PIXELS // 2
    assert np.isnan(image[0, 0]) and image[middle, middle] == pytest.approx(np.sin(np.deg2rad(35)) + 1, abs=0.1)
    centered = np.argsort((lon + 180) % 360)
    other = {"lat": lat[::-1], "lon": (lon[centered] + 180) % 360 - 180}
    np.testing.assert_allclose(_globe(field[::-1][:, centered], other), image, atol=1e-12)


def test_ensemble(runs):
    base = [str(runs / "one"), "--steps", "2", "--members", "4", "--noise", "0.1", "--out"]
    run_on_ranks(run_command, 1, [*base, str(runs / "e1.zarr")])
    run_on_ranks(run_command, 2, [*base, str(runs / "e2.zarr"), "--ensemble", "2"])
    close(read(runs / "e2.zarr"), read(runs / "e1.zarr"), 1e-5)
    assert set(ForecastStore(runs / "e1.zarr").scores) == {"rmse", "crps", "spread_skill", "persistence"}


def test_refused(runs):
    """One clear error on all ranks."""
    other = runs / "other"
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text(json.dumps({"recipe": "CNNConfig"}))
    (other / "step-000001").mkdir(exist_ok=True)
    torch.save({}, other / "few.pt")
    for said, options in {
        "is not the folder of a training run": [str(runs / "nothing")],
        "the recipe cnn has no time steps; swe_sfno have": [str(other)],
        "--steps 9: the truth is known for 4 steps": [str(runs / "one"), "--steps", "9"],
        "--cases 5: the test set has 4": [str(runs / "one"), "--steps", "2", "--cases", "5"],
        "is a mesh of 4 ranks, and there are 2": [str(runs / "one"), "--domain", "4"],
        "--members 3 cannot be divided among --ensemble 2": [str(runs / "one"), "--members", "3", "--ensemble", "2"],
        "there is no folder": [str(runs / "one"), "--steps", "2", "--picture", str(runs / "none" / "a.png")],
        "No such file": [str(runs / "one"), "--steps", "2", "--weights", str(runs / "none.pt")],
        "Missing key(s)": [str(runs / "one"), "--steps", "2", "--weights", str(other / "few.pt")],
    }.items():
        mesh = [] if {"--domain", "--ensemble"} & set(options) else ["--domain", "2"]
        for text in run_on_ranks(run_command, 2, [*options, *mesh, "--out", str(runs / "x.zarr")]):
            assert text is not None and said in text
    assert not os.path.exists(runs / "x.zarr")
