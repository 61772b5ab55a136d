"""Forecasts: states on disk equal a rollout in one process, for every mesh, and after any interruption."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardfieldError, ShardingError, metrics, rollout
from shardfield.layout import Layout
from shardfield.predict import ForecastStore, Grid, ensemble_state, export_netcdf, predict
from shardfield.tensor import ShardTensor
from shardfield.testing import RanksFailed, run_on_ranks
from tests.launch import clean_env

LAT, LON, STEPS = 7, 6, 5
GRID = Grid(
    {"height": {"units": "m"}, "wind": {"units": "m s-1"}},
    {"lat": np.linspace(75, -75, LAT), "lon": np.arange(LON) * 60.0},
    hours=6,
    attrs={"title": "a test"},
)
WEIGHTS = metrics.latitude_weights(torch.linspace(75, -75, LAT, dtype=torch.float64))
# mesh (ensemble, h, w), shard sizes of h
MESHES = [((1, 1, 1), (7,)), ((1, 2, 1), (7, 0)), ((2, 2, 1), (4, 3)), ((1, 2, 2), (1, 6)), ((1, 4, 1), (0, 3, 0, 4))]


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return x + 0.1 * torch.tanh(self.layer(x))


def seeded_step() -> Step:
    torch.manual_seed(0)
    return Step().double()


def initial() -> torch.Tensor:
    """Return two cases."""
    return torch.randn(2, 2, LAT, LON, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def truth_at(i: int) -> torch.Tensor:
    return torch.randn(2, 2, LAT, LON, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + i))


def expected(members: int = 1) -> torch.Tensor:
    """Return the states of a rollout in one process, (time, sample, ...)."""
    x = initial()
    with torch.no_grad():
        return torch.stack([x, *rollout(seeded_step(), x, STEPS)])


def sharded(full: torch.Tensor, mesh, rows) -> ShardTensor:
    layout = Layout.of(mesh, [Replicate(), Shard(2), Shard(3)], full.shape, {2: rows})
    return ShardTensor(full[:, :, slice(*layout.span(2)), slice(*layout.span(3))].clone(), layout)


def make_mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("ensemble", "h", "w"))


def forecast(shape, rows, out: Path, members: int = 1, noise: float = 0.0, stop: int | None = None):
    """Write a forecast on a mesh; with `stop`, the model fails at that step."""
    mesh = make_mesh(shape)
    model, calls = seeded_step(), []

    def step(x):
        calls.append(1)
        if stop is not None and len(calls) > stop:
            raise RuntimeError("killed")
        return model(x)

    state = sharded(initial(), mesh, rows)
    if members > 1:
        state = ensemble_state(state, members, noise=noise, seed=3)
    found = predict(
        step,
        state,
        STEPS,
        out,
        GRID,
        members=members,
        truth=lambda i: sharded(truth_at(i), mesh, rows),
        weights=WEIGHTS,
    )
    return found.scores, len(calls)


def opened(path: Path):
    import xarray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about consolidated metadata
        return xarray.open_zarr(path)


def states(path: Path) -> torch.Tensor:
    """Return the states of a forecast as (time, member, case, variable, lat, lon), read with xarray."""
    dataset = opened(path)
    values = np.stack([dataset[name].values for name in GRID.variables], 3)
    return torch.from_numpy(values).movedim(2, 0)


@pytest.mark.parametrize(("shape", "rows"), MESHES, ids=str)
def test_equals_one_process(shape, rows, tmp_path):
    ranks = int(np.prod(shape))
    (scores, calls), *_ = run_on_ranks(forecast, ranks, shape, rows, tmp_path / "f.zarr")
    assert calls == STEPS
    found, want = states(tmp_path / "f.zarr"), expected()
    torch.testing.assert_close(found[:, 0], want, rtol=1e-12, atol=1e-13)
    for i in range(1, STEPS + 1):
        rmse = metrics.rmse(want[i], truth_at(i), WEIGHTS).mean(0)
        assert [scores["rmse"][name][i - 1] for name in GRID.variables] == pytest.approx(rmse.tolist(), rel=1e-12)
        persistence = metrics.rmse(want[0], truth_at(i), WEIGHTS).mean(0)
        assert [v[i - 1] for v in scores["persistence"].values()] == pytest.approx(persistence.tolist(), rel=1e-12)
    assert set(scores) == {"rmse", "bias", "persistence"}


def test_dataset_of_xarray(tmp_path):
    run_on_ranks(forecast, 4, (1, 2, 2), (4, 3), tmp_path / "f.zarr")
    dataset = opened(tmp_path / "f.zarr")
    assert dataset.height.dims == ("member", "case", "lead_time", "lat", "lon")
    assert dataset.height.attrs["units"] == "m" and dataset.lat.attrs["units"] == "degrees_north"
    assert dataset.attrs["title"] == "a test" and dataset.attrs["complete"] == STEPS + 1
    day = dataset.wind.sel(lead_time=24, lat=75.0)
    assert day.shape == (1, 2, LON)
    np.testing.assert_allclose(day.values[0], expected()[4, :, 1, 0].numpy(), rtol=1e-12)
    # each file is of one rank: a quarter of the points, of one time
    shards = ForecastStore(tmp_path / "f.zarr").arrays[0].shards
    assert shards == (1, 2, 1, 4, 3)
    files = [p for p in (tmp_path / "f.zarr" / "height" / "c").rglob("*") if p.is_file()]
    assert len(files) == (STEPS + 1) * 4


def test_netcdf(tmp_path):
    import xarray

    run_on_ranks(forecast, 2, (1, 2, 1), (5, 2), tmp_path / "f.zarr")
    path = export_netcdf(tmp_path / "f.zarr", tmp_path / "f.nc")
    with xarray.open_dataset(path, engine="h5netcdf") as dataset:
        xarray.testing.assert_identical(dataset.drop_attrs(), opened(tmp_path / "f.zarr").load().drop_attrs())
        assert dataset.wind.attrs["units"] == "m s-1" and dataset.attrs["Conventions"].startswith("CF")


# ---------------------------------------------------------------------- interruptions


def test_resumes_on_another_mesh(tmp_path):
    """The states of steps before and after the error are those of an undisturbed run, and no step is run twice."""
    with pytest.raises(RanksFailed, match="killed"):
        run_on_ranks(forecast, 4, (1, 2, 2), (4, 3), tmp_path / "f.zarr", stop=3)
    complete = ForecastStore(tmp_path / "f.zarr").attrs["complete"]
    assert 1 <= complete <= 4
    torch.testing.assert_close(states(tmp_path / "f.zarr")[:complete, 0], expected()[:complete], rtol=1e-12, atol=1e-13)
    with pytest.raises(ShardfieldError, match=f"has {complete} of 6 lead times"):
        export_netcdf(tmp_path / "f.zarr", tmp_path / "f.nc")
    checked = int(complete > 1)  # the last step on disk is computed again, to compare it
    for scores, calls in run_on_ranks(forecast, 2, (1, 2, 1), (5, 2), tmp_path / "f.zarr"):
        assert calls == STEPS + 1 - complete + checked
        assert all(len(values) == STEPS for named in scores.values() for values in named.values())
    torch.testing.assert_close(states(tmp_path / "f.zarr")[:, 0], expected(), rtol=1e-12, atol=1e-13)
    # a complete forecast has no steps left, and its scores are those that it has
    for again, calls in run_on_ranks(forecast, 2, (1, 2, 1), (5, 2), tmp_path / "f.zarr"):
        assert calls == 1 and again == scores


@pytest.mark.parametrize(("shape", "rows"), [((1, 2, 1), (5, 2)), ((2, 1, 2), (7,))], ids=str)
def test_resumes_on_more_ranks_than_files(shape, rows, tmp_path):
    """One rank wrote each state into one file: of the ranks that continue, one reads and writes all of it."""
    with pytest.raises(RanksFailed, match="killed"):
        run_on_ranks(forecast, 1, (1, 1, 1), (7,), tmp_path / "f.zarr", stop=3)
    run_on_ranks(forecast, math.prod(shape), shape, rows, tmp_path / "f.zarr")
    torch.testing.assert_close(states(tmp_path / "f.zarr")[:, 0], expected(), rtol=1e-12, atol=1e-13)


KILLED = """
import sys, time
from pathlib import Path
from tests.predict import test_predict as t
from shardfield.predict import predict

def slow(x, model=t.seeded_step()):
    time.sleep(0.05)
    return model(x)

predict(slow, t.initial(), 40, Path(sys.argv[1]), t.GRID)
"""


def test_kill_at_any_moment(tmp_path):
    """SIGKILL twice: the forecast goes on after the last complete time and equals an undisturbed one."""
    seen = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "f.zarr")], env=clean_env())
        while process.poll() is None and len(seen) < 40:
            if (tmp_path / "f.zarr").exists():
                complete = json.loads((tmp_path / "f.zarr" / "zarr.json").read_text())["attributes"]["complete"]
                if complete > 5 + (seen[-1] if seen else 0):
                    break
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        seen.append(ForecastStore(tmp_path / "f.zarr").attrs["complete"])
    assert 5 < seen[0] < seen[1] < 41
    predict(seeded_step(), initial(), 40, tmp_path / "f.zarr", GRID)
    with torch.no_grad():
        want = torch.stack([initial(), *rollout(seeded_step(), initial(), 40)])
    assert torch.equal(states(tmp_path / "f.zarr")[:, 0], want)


# ---------------------------------------------------------------------- ensembles


def test_ensembles(tmp_path):
    """Members, noise and scores are equal on every mesh, and a mesh of one rank."""
    found = {}
    for shape, rows in (((1, 1, 1), (7,)), ((2, 1, 1), (7,)), ((2, 2, 1), (5, 2))):
        out = tmp_path / f"{shape}.zarr"
        scores, _ = run_on_ranks(forecast, int(np.prod(shape)), shape, rows, out, 4, 0.1)[0]
        found[shape] = states(out), scores
    (one, one_scores), *others = found.values()
    assert one.shape == (STEPS + 1, 4, 2, 2, LAT, LON)
    torch.testing.assert_close(one[:, 0], expected(), rtol=1e-12, atol=1e-13)  # the first member has no noise
    assert (one[0, 1:] - one[0, :1]).std().item() == pytest.approx(0.1, rel=0.1)
    for other, scores in others:
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(scores, one_scores, rtol=1e-11, atol=1e-12)
    truth = truth_at(STEPS)
    assert set(one_scores) == {"rmse", "crps", "spread_skill", "persistence"}
    persistence = metrics.rmse(initial(), truth, WEIGHTS).mean(0)  # of the first member, which has no noise
    assert [v[-1] for v in one_scores["persistence"].values()] == pytest.approx(persistence.tolist(), rel=1e-11)
    crps = metrics.crps(one[-1], truth, WEIGHTS, fair=True).mean(0)
    assert [v[-1] for v in one_scores["crps"].values()] == pytest.approx(crps.tolist(), rel=1e-11)


def members_refused() -> str:
    mesh = make_mesh((2, 1, 1))
    with pytest.raises(ShardingError) as caught:
        ensemble_state(sharded(initial(), mesh, (7,)), 5)
    return str(caught.value)


def test_mesh_that_does_not_divide_members():
    for text in run_on_ranks(members_refused, 2):
        assert "5 members cannot be divided among the 2 ranks of the axis 'ensemble': 1, 5 divide them" in text


# ---------------------------------------------------------------------- errors


def disk_full(out: Path) -> tuple[str, int]:
    """Let the last rank write files of no more than 100 bytes after step 2, as on a full disk."""
    mesh = make_mesh((1, 2, 2))
    model, calls = seeded_step(), []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def step(x):
        calls.append(1)
        time.sleep(0.2 if len(calls) == 3 else 0)  # until the states before it are written
        if len(calls) == 3 and mesh.get_rank() == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        return model(x)

    try:
        with pytest.raises(ShardingError) as caught:
            predict(step, sharded(initial(), mesh, (4, 3)), STEPS, out, GRID)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value), ForecastStore(out).attrs["complete"]


def test_full_disk(tmp_path):
    """One error on all ranks, and what was written before stays readable and is continued."""
    for text, complete in run_on_ranks(disk_full, 4, tmp_path / "f.zarr"):
        assert "rank 3: OSError: [Errno 27] File too large" in text and 1 <= complete <= 3
    torch.testing.assert_close(states(tmp_path / "f.zarr")[:complete, 0], expected()[:complete], rtol=1e-12, atol=1e-13)
    run_on_ranks(forecast, 4, (1, 2, 2), (4, 3), tmp_path / "f.zarr")
    torch.testing.assert_close(states(tmp_path / "f.zarr")[:, 0], expected(), rtol=1e-12, atol=1e-13)


def full_from_the_start(out: Path) -> str:
    """Refuse to create the files on rank 0."""
    mesh = make_mesh((1, 2, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if mesh.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        with pytest.raises(ShardfieldError) as caught:
            predict(seeded_step(), sharded(initial(), mesh, (4, 3)), STEPS, out, GRID)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


def test_a_forecast_that_cannot_be_created_leaves_nothing(tmp_path):
    for text in run_on_ranks(full_from_the_start, 2, tmp_path / "f.zarr"):
        assert "File too large" in text
    assert not list(tmp_path.iterdir())


def marker_fails(out: Path) -> str:
    """Fail to replace the marker of step 3 on the rank that writes it."""
    mesh = make_mesh((1, 2, 1))
    mark = ForecastStore.mark

    def failing(self, complete, scores):
        if complete == 4:
            raise OSError(28, "No space left on device")
        mark(self, complete, scores)

    ForecastStore.mark = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(ShardingError) as caught:
            predict(seeded_step(), sharded(initial(), mesh, (4, 3)), STEPS, out, GRID)
    finally:
        ForecastStore.mark = mark  # type: ignore[method-assign]
    return str(caught.value)


def test_marker_that_cannot_be_written(tmp_path):
    for text in run_on_ranks(marker_fails, 2, tmp_path / "f.zarr"):
        assert "rank 0: OSError: [Errno 28]" in text


def damaged(out: Path) -> str:
    mesh = make_mesh((1, 2, 1))
    with pytest.raises(ShardingError) as caught:
        predict(seeded_step(), sharded(initial(), mesh, (4, 3)), STEPS, out, GRID)
    return str(caught.value)


def test_unreadable_chunk(tmp_path):
    out = tmp_path / "f.zarr"
    run_on_ranks(forecast, 2, (1, 2, 1), (4, 3), out)
    store = ForecastStore(out)
    store.mark(3, {})
    (out / "height/c/0/0/2/1/0").write_bytes(b"damaged")
    for text in run_on_ranks(damaged, 2, out):
        assert str(out) in text and "rank 1" in text


def refused_together(out: Path) -> list[str]:
    """Errors that the first rank finds, and those that only a sharded state has."""
    mesh = make_mesh((1, 2, 1))
    x = sharded(initial(), mesh, (4, 3))
    found = []
    for state, grid, model in (
        (x, replace(GRID, attrs={"title": object()}), seeded_step()),
        (x, replace(GRID, variables={"lat": {}, "wind": {}}), seeded_step()),
        (x.bfloat16(), GRID, seeded_step()),
        (x, GRID, lambda x: x + torch.linalg.lu_factor(x[0, 0]).LU),  # gathers the matrix
    ):
        with pytest.raises(ShardfieldError) as caught:
            predict(model, state, 1, out, grid)
        found.append(str(caught.value))
    return found


def test_refused_on_all_ranks(tmp_path):
    for attrs, name, dtype, gather in run_on_ranks(refused_together, 2, tmp_path / "f.zarr"):
        assert "cannot be created: TypeError" in attrs and "a variable cannot have the name of a dim: lat" in name
        assert "zarr has no torch.bfloat16" in dtype and "strict()" in gather


def test_another_model_or_state_is_refused(tmp_path):
    """The path of an older forecast is never taken for the new one."""
    out, x = tmp_path / "f.zarr", initial()
    predict(seeded_step(), x, 3, out, GRID)
    other = seeded_step()
    with torch.no_grad():
        other.layer.bias += 1e-3
    for said, call in {
        "another model: the step to lead time 3": lambda: predict(other, x, 3, out, GRID),
        "from another initial state": lambda: predict(seeded_step(), x + 1e-3, 3, out, GRID),
        "other values of lead_time": lambda: predict(seeded_step(), x, 3, out, replace(GRID, hours=3)),
        "other values of lat": lambda: predict(
            seeded_step(), x, 3, out, replace(GRID, coords={**GRID.coords, "lat": GRID.coords["lat"][::-1]})
        ),
    }.items():
        with pytest.raises(ShardfieldError) as caught:
            call()
        assert said in str(caught.value)
    predict(seeded_step(), x, 3, out, GRID)


def test_scores_that_are_not_known(tmp_path):
    """Lead times without a truth, and truths with missing values, have no score, or one of the other points."""
    out, x, model = tmp_path / "f.zarr", initial(), seeded_step()

    calls = []

    def stop(state):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("killed")
        return model(state)

    with pytest.raises(RuntimeError, match="killed"):
        predict(stop, x, STEPS, out, GRID, depth=1)
    complete = ForecastStore(out).attrs["complete"]
    assert complete > 1

    def truth(i):
        found = truth_at(i)
        found[:, 0, :2] = torch.nan
        return found if i < STEPS else torch.full_like(found, torch.nan)

    scores = predict(model, x, STEPS, out, GRID, truth=truth, skipna=True).scores
    known = [math.isfinite(value) for value in scores["rmse"]["height"]]
    assert known == [complete <= i < STEPS for i in range(1, STEPS + 1)]
    wanted = metrics.rmse(expected()[STEPS - 1], truth(STEPS - 1), skipna=True).mean(0).tolist()
    assert [values[STEPS - 2] for values in scores["rmse"].values()] == pytest.approx(wanted, rel=1e-12)
    text = (out / "zarr.json").read_text()
    assert "NaN" not in text.split('"consolidated_metadata"')[0] and "null" in text  # JSON has no NaN
    again = ForecastStore(out).scores
    np.testing.assert_equal(again, scores)


def test_refused(tmp_path):
    out, x = tmp_path / "f.zarr", initial()
    predict(seeded_step(), x, 2, out, GRID, source="one")
    for said, call in {
        "has another forecast: source one (here two)": lambda: predict(seeded_step(), x, 2, out, GRID, source="two"),
        "steps 2 (here 3)": lambda: predict(seeded_step(), x, 3, out, GRID, source="one"),
        "whose variables are height, wind": lambda: predict(seeded_step(), x[:, :1], 2, tmp_path / "a", GRID),
        "dims are lat, lon": lambda: predict(seeded_step(), x[..., 1:], 2, tmp_path / "a", GRID),
        "0 steps": lambda: predict(seeded_step(), x, 0, tmp_path / "a", GRID),
        "with 3 members": lambda: predict(seeded_step(), x, 1, tmp_path / "a", GRID, members=3),
    }.items():
        with pytest.raises(ShardfieldError) as caught:
            call()
        assert said in str(caught.value)
    (out / "lat/c/0").write_bytes(b"damaged")
    with pytest.raises(ShardfieldError, match=r"f\.zarr: cannot be opened"):
        predict(seeded_step(), x, 2, out, GRID, source="one")
    (tmp_path / "other.zarr").mkdir()
    with pytest.raises(ShardfieldError, match="other.zarr"):
        predict(seeded_step(), x, 1, tmp_path / "other.zarr", GRID)
    assert not (tmp_path / "a").exists()
