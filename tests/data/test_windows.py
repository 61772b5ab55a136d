"""Weather data: packed and missing values, NetCDF, zarr, xarray and URLs, and windows in time, each rank its block."""

from __future__ import annotations

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
from shardfield.data.sharding import align_to_chunks
from shardfield.testing import run_on_ranks

xarray = pytest.importorskip("xarray")
TIMES, LEVELS, LAT, LON = 9, 3, 6, 8


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


def loaded(folder) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "lat"))
    windows = make_windows(folder, leads=2, mask=True)
    loader = ShardedLoader(windows, 3, mesh, shuffle=False)
    batch = next(iter(loader))
    return [batch[key].full_tensor() for key in ("x", "y", "static", "mask")]


def test_loader_reads_blocks(stored):
    windows = make_windows(stored[0], leads=2, mask=True)
    for found in run_on_ranks(loaded, 2, stored[0]):
        for key, value in zip(("x", "y", "static", "mask"), found, strict=True):
            assert torch.equal(value, torch.stack([windows[i][key] for i in range(3)]))


def test_refused(stored, url):
    folder, dataset = stored
    z, t = (open_field(folder / "w.zarr", name=name) for name in ("z", "t2m"))
    for said, call in {
        "has no array called 'u'": lambda: open_field(folder / "w.nc", name="u"),
        "has no variable 'u'": lambda: open_field(dataset, name="u"),
        "cannot open": lambda: open_field(f"{url}/none.nc", name="t2m"),
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
