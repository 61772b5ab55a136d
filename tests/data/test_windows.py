"""Weather data: packed and missing values, NetCDF, zarr, xarray and URLs, and windows in time, each rank its block."""

from __future__ import annotations

import shutil
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardingError
from shardfield.data import ShardedLoader, TimeWindows, open_field
from shardfield.data.coordinates import Coordinate, describe_difference, irregular_steps
from shardfield.data.sharding import align_to_chunks
from shardfield.testing import run_on_ranks

xarray = pytest.importorskip("xarray")
TIMES, LEVELS, LAT, LON = 9, 3, 6, 8
KEYS = ("x", "y", "static", "mask", "x_mask")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Write a dataset as NetCDF and zarr, packed, with missing values; return the folder and the true values."""
    folder = tmp_path_factory.mktemp("weather")
    rng = np.random.default_rng(0)
    t2m = (280 + 10 * rng.standard_normal((TIMES, LAT, LON))).round(2)
    t2m[2, :2, 3] = np.nan
    dataset = xarray.Dataset(
        {
            "z": (("time", "level", "lat", "lon"), rng.standard_normal((TIMES, LEVELS, LAT, LON)).astype("float32")),
            "t2m": (("time", "lat", "lon"), t2m),
            "orography": (("lat", "lon"), rng.standard_normal((LAT, LON)).astype("float32")),
        },
        {"lat": np.linspace(75, -75, LAT), "lon": np.arange(LON) * 45.0, "time": np.arange(TIMES)},
    )
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.to_netcdf(folder / "w.nc", engine="h5netcdf", encoding={"t2m": packed})
        encoding = {"t2m": packed | {"chunks": (1, 2, LON)}, "z": {"chunks": (1, 1, 2, 4)}}
        dataset.to_zarr(folder / "w.zarr", zarr_format=3, encoding=encoding, consolidated=True)
    return folder, dataset.load()


class RangeHandler(SimpleHTTPRequestHandler):
    """Serve files in ranges of bytes, as object stores do."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.translate_path(self.path)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            self.send_error(404)
            return
        first, last = 0, len(data) - 1
        wanted = self.headers.get("Range")
        if wanted:
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(last, int(end)) if end else last
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if body:
            self.wfile.write(data[first : last + 1])


@pytest.fixture(scope="module")
def url(stored):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(RangeHandler, directory=str(stored[0])))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def read_shards(source, name) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's block of one time, and the global values."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("lat",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        field = open_field(source, mesh, [Shard(1)], name=name, sizes={"lat": (4, 2)})
        x = field[2]
    return x.to_local(), x.full_tensor()


def test_formats_and_urls(stored, url):
    """Packed values are decoded, missing ones are NaN, from files, folders, URLs and xarray objects."""
    folder, dataset = stored
    expected = torch.from_numpy(dataset.t2m.values[2].astype("float32"))
    assert expected.isnan().sum() == 2
    sources = [folder / "w.nc", folder / "w.zarr", f"{url}/w.nc", f"{url}/w.zarr"]
    for source in sources:
        for rank, (local, full) in enumerate(run_on_ranks(read_shards, 2, source, "t2m")):
            torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
            assert local.shape == ((4, 2)[rank], LON)
    field = open_field(dataset, name="z")
    assert torch.equal(field[1, 2], torch.from_numpy(dataset.z.values[1, 2]))
    assert torch.equal(open_field(dataset.orography)[:], torch.from_numpy(dataset.orography.values))
    raw = open_field(folder / "w.nc", name="t2m", decode=False)
    assert raw.dtype == torch.int16 and (raw[2] == -32768).sum() == 2


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", ["packed", "unsigned", "json", "plain"])
def test_decodes_as_xarray(kind, version, tmp_path):
    """Missing values are found wherever xarray writes them: attributes, numbers of JSON, or zarr's own fill value."""
    values = np.arange(12.0).reshape(3, 4)
    values[1, 2] = np.nan
    encoding = {
        "packed": {"dtype": "int16", "scale_factor": 0.5, "add_offset": 3.0, "_FillValue": -32768},
        "unsigned": {"dtype": "int8", "_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": 0.5},
        "json": {"dtype": "float32", "missing_value": np.float32(1e20), "_FillValue": np.float32(1e20)},
        "plain": {"dtype": "float32"},
    }[kind]
    dataset = xarray.Dataset({"t": (("y", "x"), values)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.to_zarr(tmp_path / "t.zarr", zarr_format=version, encoding={"t": encoding}, consolidated=False)
        dataset.to_netcdf(tmp_path / "t.nc", engine="h5netcdf", encoding={"t": encoding})
        expected = xarray.open_zarr(tmp_path / "t.zarr", consolidated=False).t.values
    np.testing.assert_array_equal(expected, values)
    for path in (tmp_path / "t.zarr", tmp_path / "t.nc"):
        found = open_field(path, name="t")[:]
        torch.testing.assert_close(found.double(), torch.from_numpy(values), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_coordinates(stored, url):
    """Of files, folders, URLs and xarray objects; None for a dim without one."""
    folder, dataset = stored
    for source in (folder / "w.nc", folder / "w.zarr", f"{url}/w.nc", f"{url}/w.zarr", dataset):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            field = open_field(source, name="z")
            found = field.coordinate(2)
            assert found is not None and found.name == "lat" and np.array_equal(found.values, dataset.lat.values)
            assert field.coordinate(1) is None  # levels without values


def test_calendars():
    """Times of any units, calendar and type are compared as times."""
    hours = Coordinate("time", np.array([0, 6, 12]), "hours since 2000-02-28 00:00:00")
    days = Coordinate("time", np.array([59, 59.25, 59.5]) - 1, "days since 2000-01-01", "proleptic_gregorian")
    stamps = np.array(["2000-02-28T00", "2000-02-28T06", "2000-02-28T12"], "datetime64[h]")
    assert describe_difference(hours, days) is None
    assert describe_difference(hours, Coordinate("time", stamps.astype("datetime64[ns]"))) is None
    later = Coordinate("time", hours.values + 6, hours.units)
    assert describe_difference(hours, later) == "0 and 6 at index 0"
    # 28 February and 1 March: one day apart without leap years, three days in one of 360 days
    for calendar, apart in (("noleap", 1), ("365_day", 1), ("all_leap", 2), ("360_day", 3), ("", 2)):
        ends = [
            Coordinate("time", np.array([0]), f"days since 2000-{d}", calendar).numbers()[1] for d in ("02-28", "03-01")
        ]
        assert (ends[1] - ends[0]).item() == apart * 86400
    other = Coordinate("time", hours.values, hours.units, "noleap")
    assert "cannot be compared" in (describe_difference(hours, other) or "")
    assert "cannot be compared" in (
        describe_difference(hours, Coordinate("time", hours.values, "days since 0001-01-01")) or ""
    )
    uneven, usual = irregular_steps(Coordinate("time", np.array([0, 6, 12, 24, 30]), hours.units))
    assert uneven.tolist() == [False, False, True, False] and usual == "6 hours"
    south = Coordinate("lat", np.array([-75.0, 0, 75]))
    north = Coordinate("lat", np.array([75.0, 0, -75], "float32"), "degrees_north")
    assert describe_difference(south, north) == "from -75.0 to 75.0, and in the opposite order"


def aligned(folder) -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("lat",))
    field = open_field(folder / "w.zarr", mesh, [Shard(1)], name="t2m", sizes="chunks")
    return field.layout.shard_sizes(1)


def test_shards_at_chunk_boundaries(stored):
    assert align_to_chunks(721, 100, 4) == (200, 200, 200, 121) and align_to_chunks(5, 5, 3) == (5, 0, 0)
    assert run_on_ranks(aligned, 2, stored[0]) == [(4, 2)] * 2  # chunks of 2 latitudes


# ---------------------------------------------------------------------- windows


def make_windows(folder, **options) -> TimeWindows:
    fields = {name: open_field(folder / "w.zarr", name=name) for name in ("z", "t2m", "orography")}
    static = {"orography": fields.pop("orography")}
    return TimeWindows(fields, levels={"z": [0, 2]}, static=static, **options)


def test_windows(stored):
    folder, dataset = stored
    windows = make_windows(folder, history=2, leads=[1, 3], times=slice(1, 8))
    assert windows.channels == ["z0", "z2", "t2m"] and list(windows.times) == [2, 3, 4]
    assert windows.shapes == {"x": (6, LAT, LON), "y": (2, 3, LAT, LON), "static": (1, LAT, LON)}
    sample = windows[1]

    def state(time):
        z, t = dataset.z.values[time][[0, 2]], dataset.t2m.values[time].astype("float32")
        return torch.from_numpy(np.concatenate([z, t[None]]))

    torch.testing.assert_close(sample["x"], torch.cat([state(2), state(3)]), rtol=1e-5, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(sample["y"], torch.stack([state(4), state(6)]), rtol=1e-5, atol=1e-4)
    assert torch.equal(sample["static"][0], torch.from_numpy(dataset.orography.values))
    known = make_windows(folder, mask=True)[1]
    assert not known["y"].isnan().any() and (~known["mask"]).sum() == 2 and not known["mask"][0, 2, 0, 3]


def field_of(shape, times=None, lat=None, name="t"):
    """Return a field of xarray with the coordinates that are given."""
    coords = {key: value for key, value in (("time", times), ("lat", lat)) if value is not None}
    values = np.arange(float(np.prod(shape))).reshape(shape)
    return open_field(xarray.DataArray(values, coords, ("time", "lat", "lon")[-len(shape) :], name))


def test_times_and_rows_that_do_not_fit():
    """Variables of other times, or with their rows in the opposite order, would be combined silently."""
    hours = np.arange(6) * np.timedelta64(6, "h") + np.datetime64("2020-01-01", "ns")
    z = field_of((6, 3, 4), hours, [60.0, 0, -60])
    assert len(TimeWindows({"z": z, "t": field_of((6, 3, 4))})) == 5  # a variable without coordinates
    for said, other in {
        "the times of z and t differ: 2020-01-01T00:00:00.000000000 and 2020-01-01T06": field_of(
            (6, 3, 4), hours + np.timedelta64(6, "h"), [60.0, 0, -60]
        ),
        "the rows of z and t differ: from 60.0 to -60.0, and in the opposite order": field_of(
            (6, 3, 4), hours, [-60.0, 0, 60]
        ),
    }.items():
        with pytest.raises(ShardingError) as caught:
            TimeWindows({"z": z, "t": other})
        assert said in str(caught.value)
    with pytest.raises(ShardingError, match="the rows of z and height differ"):
        TimeWindows({"z": z}, static={"height": field_of((3, 4), lat=[-60.0, 0, 60])})


def test_uneven_times():
    hours = np.array([0, 6, 12, 24, 30, 36, 42]) * np.timedelta64(1, "h") + np.datetime64("2020-01-01", "ns")
    z = field_of((7, 3, 4), hours)
    with pytest.raises(ShardingError, match=r"are 6 hours apart, but not .*T12.* and 2020-01-02T00.* \(index 2\)"):
        TimeWindows({"z": z})
    assert TimeWindows({"z": z}, gaps="skip").times == [0, 1, 3, 4, 5]
    assert TimeWindows({"z": z}, gaps="skip", history=2, leads=[2]).times == [4]
    assert TimeWindows({"z": z}, gaps="allow").times == list(range(6))
    assert TimeWindows({"z": z}, times=slice(3, None)).times == [3, 4, 5]  # the gap is outside
    with pytest.raises(ShardingError, match="too few .* without gaps"):
        TimeWindows({"z": z}, gaps="skip", leads=[4])
    with pytest.raises(ValueError, match="'error', 'skip' or 'allow'"):
        TimeWindows({"z": z}, gaps="fill")


def test_ends_levels_and_missing_values():
    """The first and the last sample, one level, a lead of 0, fields that are all NaN, and infinities."""
    values = np.arange(48.0).reshape(4, 1, 3, 4)
    values[1], values[2, 0, 0, 0] = np.nan, np.inf
    z = open_field(xarray.DataArray(values, dims=("time", "level", "lat", "lon")))
    windows = TimeWindows(
        {"z": z}, history=2, leads=[0, 2], mask=True, static={"s": open_field(xarray.DataArray(values[1, 0]))}
    )
    assert windows.channels == ["z0"] and len(windows) == 1 and windows.times == [1]
    sample = windows[-1]
    assert torch.equal(sample["x"][0], torch.from_numpy(values[0, 0])) and not sample["x"][1].any()
    assert not sample["mask"][0].any() and sample["mask"][1].all()
    assert sample["x_mask"][0].all() and not sample["x_mask"][1].any() and not sample["static"].any()
    assert TimeWindows({"z": z}, leads=[1], mask=True)[1]["y"].isinf().sum() == 1
    with pytest.raises(IndexError, match="sample 1 of 1"):
        windows.read(1, {})


def damaged_chunk(path) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "lat"))
    loader = ShardedLoader(TimeWindows({"t2m": open_field(path, name="t2m")}), 2, mesh, shuffle=False)
    with pytest.raises(ShardingError) as caught:
        next(iter(loader))
    return str(caught.value)


def test_unreadable_chunk(stored, tmp_path):
    """Rows 4 and 5 of one time, which rank 1 reads: both ranks raise."""
    shutil.copytree(stored[0] / "w.zarr", tmp_path / "w.zarr")
    (tmp_path / "w.zarr/t2m/c/1/2/0").write_bytes(b"damaged")
    for text in run_on_ranks(damaged_chunk, 2, tmp_path / "w.zarr"):
        assert "rank 1" in text and "cannot read" in text and "w.zarr" in text


def one_rank_fails(folder) -> str:
    """Open a field that only rank 0 can read; the loader raises on both ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "lat"))
    path = folder / ("w.zarr" if mesh.get_rank() == 0 else "none.zarr")
    windows = TimeWindows({"t2m": open_field(path, name="t2m")})
    with pytest.raises(ShardingError) as caught:
        ShardedLoader(windows, 1, mesh)
    return str(caught.value)


def test_a_field_that_one_rank_cannot_open(stored):
    for text in run_on_ranks(one_rank_fails, 2, stored[0]):
        assert "rank 1" in text and "none.zarr" in text


def loaded(folder) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "lat"))
    windows = make_windows(folder, leads=2, mask=True)
    loader = ShardedLoader(windows, 3, mesh, shuffle=False)
    batch = next(iter(loader))
    return [batch[key].full_tensor() for key in KEYS]


def test_loader_reads_blocks(stored):
    windows = make_windows(stored[0], leads=2, mask=True)
    for found in run_on_ranks(loaded, 2, stored[0]):
        for key, value in zip(KEYS, found, strict=True):
            assert torch.equal(value, torch.stack([windows[i][key] for i in range(3)]))


def test_refused(stored, url):
    folder, dataset = stored
    z, t = (open_field(folder / "w.zarr", name=name) for name in ("z", "t2m"))
    for said, call in {
        "has no array called 'u'": lambda: open_field(folder / "w.nc", name="u"),
        "has no variable 'u'": lambda: open_field(dataset, name="u"),
        "cannot open": lambda: open_field(f"{url}/none.nc", name="t2m"),
        "has no array called 'v'": lambda: open_field(f"{url}/w.zarr", name="v"),
        "too few for a history of 4": lambda: TimeWindows({"t2m": t}, history=4, leads=8),
        "levels [3] of z, which has 3": lambda: TimeWindows({"z": z}, levels={"z": [3]}),
        "t2m has no levels": lambda: TimeWindows({"t2m": t}, levels={"t2m": [0]}),
        "unknown variables ['u']": lambda: TimeWindows({"t2m": t}, levels={"u": [0]}),
        "different numbers of times": lambda: TimeWindows({"t2m": t, "half": open_field(dataset.t2m[:4])}),
        "(6, 4) points": lambda: TimeWindows({"t2m": t, "half": open_field(dataset.t2m[..., ::2])}),
    }.items():
        with pytest.raises(ShardingError) as caught:
            call()
        assert said in str(caught.value)
    with pytest.raises(ValueError, match="local files"):
        open_field(f"{url}/w.nc", name="t2m", missing="error")


def test_plan_suggests_aligned_shards(stored, capsys):
    from shardfield.planning.cli import command

    words = [
        "darcy_tfno",
        "--resolution",
        "64",
        "--gpus",
        "2",
        "--data",
        str(stored[0] / "w.zarr"),
        "--variable",
        "t2m",
    ]
    assert command([*words, "--batch", "1", "--modes", "4", "--width", "4", "--layers", "1"]) == 0
    said = capsys.readouterr().out
    assert 'chunks of 1 x 2 x 8; with sizes="chunks"' in said and "dim -2 (6) as 4 + 2" in said
