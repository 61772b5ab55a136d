"""Data: each rank generates and reads only its shard, and together the shards equal one process's samples."""

from __future__ import annotations

import errno
import importlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardingError, ShardTensor
from shardfield.data import Darcy, ShardedLoader, UnitGaussian, darcy_solver, open_field
from shardfield.testing import run_on_ranks

SMALL = dict(resolution=5, fine=9)


def mesh_of(**axes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def refused(call, *said):
    with pytest.raises(ShardingError) as caught:
        call()
    wrong = [text for text in said if text not in str(caught.value)]
    assert not wrong, f"{wrong} not in: {caught.value}"
    return str(caught.value)


# ---------------------------------------------------------------------- Darcy flow


def sparse_solution(a: np.ndarray) -> np.ndarray:
    """Solve the same equations with a sparse direct solver."""
    sparse = importlib.import_module("scipy.sparse")
    linalg = importlib.import_module("scipy.sparse.linalg")
    n = a.shape[0] - 1
    rows, columns, values, inside = [], [], [], range(1, n)
    for i in inside:
        for j in inside:
            for k, m in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
                face = (a[i, j] + a[k, m]) / 2 * n**2
                here = (i - 1) * (n - 1) + j - 1
                rows, columns, values = [*rows, here], [*columns, here], [*values, face]
                if k in inside and m in inside:
                    rows, columns, values = [*rows, here], [*columns, (k - 1) * (n - 1) + m - 1], [*values, -face]
    matrix = sparse.coo_matrix((values, (rows, columns))).tocsc()
    return linalg.spsolve(matrix, np.ones((n - 1) ** 2)).reshape(n - 1, n - 1)


def test_solver_against_sparse_solution():
    for points in (3, 13, 18):
        a, u = darcy_solver.solve_sample(3, 1, points)
        assert set(a.flatten().tolist()) <= {3.0, 12.0}
        expected = sparse_solution(a.numpy())
        assert np.abs(u[1:-1, 1:-1].numpy() - expected).max() <= 1e-8 * expected.max()
        assert not u[0].any() and not u[-1].any() and not u[:, 0].any() and not u[:, -1].any()


def test_darcy_statistics():
    drawn = [darcy_solver.solve_sample(0, i, 33) for i in range(60)]
    a, u = (torch.stack(field) for field in zip(*drawn, strict=True))
    assert 0.014 < u.max() < 0.018 and abs(u.mean() - 0.0055) < 3e-4
    assert abs((a == 12).double().mean() - 0.5) < 0.05
    # a finer grid samples the same medium
    again = torch.stack([darcy_solver.solve_sample(0, i, 65)[0] for i in range(10)])[:, ::2, ::2]
    assert (again == a[:10]).double().mean() > 0.98


def test_sample_depends_on_its_index_alone(tmp_path):
    one = Darcy(20, seed=4, **SMALL, cache=tmp_path / "a")
    backwards = [one[i] for i in reversed(range(20))][::-1]
    other = Darcy(7, seed=4, start=13, **SMALL, cache=tmp_path / "b")
    assert len(one) == 20 and len(other) == 7 and other.shapes == {"x": (1, 5, 5), "y": (1, 5, 5)}
    for i in range(7):
        for key in "xy":
            assert torch.equal(other[i][key], backwards[13 + i][key])
    a, u = darcy_solver.solve_sample(4, 15, 9)
    assert torch.equal(one[15]["x"], a[None, ::2, ::2].float()) and torch.equal(one[-5]["y"], u[None, ::2, ::2].float())
    assert not torch.equal(one[0]["x"], Darcy(1, seed=5, **SMALL, cache=tmp_path / "a")[0]["x"])
    with pytest.raises(IndexError, match="sample 20 of 20"):
        one[20]
    assert [len(s) for s in (list(iter_samples(one)),)] == [20]


def iter_samples(dataset):
    return (dataset[i] for i in range(len(dataset)))


def test_block_of_a_sample(tmp_path):
    darcy = Darcy(2, **SMALL, cache=tmp_path)
    full_value = darcy[1]
    block = darcy.read(1, (slice(0, 1), slice(1, 4), slice(2, 2)))
    assert block["x"].shape == (1, 3, 0)
    block = darcy.read(1, {"x": (slice(0, 1), slice(1, 4), slice(2, 5)), "y": (slice(0, 1), slice(0, 5), slice(0, 1))})
    assert torch.equal(block["x"], full_value["x"][:, 1:4, 2:5]) and torch.equal(block["y"], full_value["y"][:, :, :1])
    block["x"].zero_()  # a copy: the file does not change
    assert full_value["x"].min() == 3 and darcy[1]["x"].min() == 3


@pytest.mark.parametrize(
    "bad, said",
    [
        (dict(n=4, resolution=64, fine=250), r"keeps 64 of 250 points.*\[2, 4, 84, 250\]"),
        (dict(n=0), "n 0"),
        (dict(n=1, seed=2**32), "32 bits"),
        (dict(n=1, start=-1), "start -1"),
        (dict(n=1, fine=2), "of 2 points"),
    ],
)
def test_darcy_refuses_bad_arguments(bad, said):
    with pytest.raises(ValueError, match=said):
        Darcy(**bad)


def made_by(monkeypatch):
    """Count the samples that are solved from now on."""
    calls, solve = [], darcy_solver.solve_sample
    monkeypatch.setattr(darcy_solver, "solve_sample", lambda *key: calls.append(key) or solve(*key))
    return calls


def test_cache(tmp_path, monkeypatch):
    calls = made_by(monkeypatch)
    monkeypatch.setenv("SHARDFIELD_CACHE", str(tmp_path))
    first = Darcy(4, **SMALL).prepare()[2]
    made = len(calls)
    assert made >= 4 and torch.equal(Darcy(4, **SMALL)[2]["y"], first["y"]) and len(calls) == made
    (path,) = tmp_path.rglob("*.npy")
    full_value = path.read_bytes()
    other = np.zeros((1, 2, 5, 5), np.float32)
    for what in ("truncated", "header only", "empty", "foreign", "other shape", "zeros", "pickled"):
        with path.open("wb") as file:
            if what in ("other shape", "zeros", "pickled"):
                array = {"other shape": other, "zeros": np.zeros((8, 2, 5, 5), np.float32)}.get(what)
                np.save(file, np.array([{}], object) if array is None else array, allow_pickle=True)
            else:
                file.write(
                    {"truncated": full_value[:-1], "header only": full_value[:128], "foreign": b"PK\3\4 no array"}.get(
                        what, b""
                    )
                )
        assert torch.equal(Darcy(4, **SMALL)[2]["y"], first["y"]), what
        assert path.read_bytes() == full_value, what
    assert [p.name for p in path.parent.iterdir()] == [path.name], "temporary files remain"


def test_finer_grid_is_solved_once(tmp_path, monkeypatch):
    fine = Darcy(2, resolution=9, fine=17, cache=tmp_path)[1]
    calls = made_by(monkeypatch)
    coarse = Darcy(2, resolution=5, fine=17, cache=tmp_path)[1]
    assert (
        not calls
        and torch.equal(coarse["y"], fine["y"][:, ::2, ::2])
        and torch.equal(coarse["x"], fine["x"][:, ::2, ::2])
    )


def test_concurrent_writers(tmp_path):
    sets = [Darcy(8, **SMALL, cache=tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=s.prepare) for s in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(s[3]["y"].flatten().tolist()) for s in sets}) == 1
    assert len(list(tmp_path.rglob("*"))) == 3, "two folders and one file"


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/file/.*npy: Not a directory; choose another folder"):
        Darcy(1, **SMALL, cache=tmp_path / "file")[0]
    refused(Darcy(1, **SMALL, cache=tmp_path / "file").prepare, "Darcy.prepare: cannot write", "Not a directory")

    def full(file, array, **_):
        file.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left on device; choose") as caught:
        Darcy(1, **SMALL, cache=tmp_path)[0]
    assert caught.value.errno == errno.ENOSPC
    assert not [p for p in (tmp_path / "darcy-1").rglob("*") if p.is_file()]


def prepared(folder):
    mesh = mesh_of(data=2, spatial=2)
    patch = pytest.MonkeyPatch()
    calls, results = made_by(patch), []
    darcy = Darcy(40, **SMALL, cache=folder).prepare(mesh, lambda done, total: results.append((done, total)))
    made = len(calls)
    samples = [darcy[i]["y"] for i in range(40)]
    assert len(calls) == made, "samples of other ranks are read from the cache"
    patch.undo()
    bad = Darcy(24, **SMALL, cache=Path(folder) / ("file" if dist.get_rank() == 2 else "good"))
    refused(lambda: bad.prepare(mesh), "Darcy.prepare: cannot be done\n  rank 2: cannot write", "Not a directory")
    return made, results, torch.stack(samples)


def test_ranks_share_the_generation(tmp_path):
    (tmp_path / "file").write_text("")
    made, results, samples = zip(*run_on_ranks(prepared, 4, str(tmp_path)), strict=True)
    assert made == (16, 8, 8, 8) and results[0] == [(8, 16), (16, 16)] and results[3] == [(8, 8)]
    assert all(torch.equal(s, samples[0]) for s in samples)


# ---------------------------------------------------------------------- the loader


class Rows:
    """Dataset that counts the elements read; the values of its samples are unique."""

    shape = (2, 7, 6)

    def __init__(self, n):
        self.n, self.elements, self.fails = n, 0, False

    def __len__(self):
        return self.n

    def full_value(self, i):
        x = torch.arange(84.0).view(self.shape) + 1000 * i
        return {"x": x, "label": torch.tensor(i)}


class Whole(Rows):
    def __getitem__(self, i):
        if self.fails:
            raise KeyError("broken sample")
        return self.full_value(i)


class Blocks(Rows):
    shapes = {"x": Rows.shape, "label": ()}

    def read(self, i, slices):
        found = {key: value[slices[key]] for key, value in self.full_value(i).items()}
        self.elements += found["x"].numel()
        return found


def gathered(batch):
    return {k: v.full_tensor() if isinstance(v, ShardTensor) else v for k, v in batch.items()}


def loaded(axes, n, batch_size, kind, options):
    """Load one epoch; return each rank's global batches, and check that it read its block only."""
    mesh = mesh_of(**axes)
    dataset = {"whole": Whole, "blocks": Blocks}[kind](n)
    loader = ShardedLoader(dataset, batch_size, mesh, **options)
    batches, weights = [], []
    for batch in loader:
        if loader.domain is not None:
            assert batch["x"].shape == (len(loader.indices), 2, 7, 6) and batch["x"].device_mesh == loader.domain
            shard = batch["x"]
            assert torch.equal(shard.to_local(), _expected_shard(dataset, loader.indices, shard))
        full_value = gathered(batch)
        assert full_value["label"].tolist() == loader.indices
        assert torch.equal(full_value["x"], _stacked(dataset, loader.indices))
        batches.append(loader.indices)
        weights.append(loader.weight)
    assert len(batches) == len(loader) and loader.epoch == 1
    swept = [i for batch in loader.sweep() for i in gathered(batch)["label"].tolist()]
    return batches, weights, swept, dataset.elements / 84, [str(p) for p in getattr(batch["x"], "placements", ())]


def _stacked(dataset, indices):
    return torch.stack([dataset.full_value(i)["x"] for i in indices]) if indices else torch.empty(0, 2, 7, 6)


def _expected_shard(dataset, indices, shard):
    spans = [slice(*shard._layout.span(d)) for d in range(1, 4)]
    return _stacked(dataset, indices)[:, spans[0], spans[1], spans[2]]


def columns_first(key, shape):
    return [Shard(2), Shard(1)] if key == "x" else [Replicate(), Replicate()]


LOADERS = [
    (dict(spatial=2), 5, 2, "blocks", dict(data=None)),
    (dict(data=2), 5, 2, "whole", {}),
    (dict(data=2, spatial=2), 11, 2, "blocks", {}),
    (dict(data=2, spatial=2), 11, 3, "whole", dict(prefetch=0, sizes={"spatial": [6, 1]})),
    (dict(h=2, w=2), 3, 2, "blocks", dict(data=None)),
    (dict(data=1, spatial=3), 4, 3, "blocks", dict(placements={"x": [Shard(0)]})),
    (dict(data=4, spatial=1), 9, 2, "blocks", dict(shuffle=False)),
    (dict(spatial=2, data=2), 9, 2, "blocks", dict(drop_last=True, seed=3)),
    (dict(w=2, data=1, h=2), 5, 2, "blocks", dict(domain=("w", "h"), placements=columns_first)),
]


@pytest.mark.parametrize("axes, n, batch_size, kind, options", LOADERS)
def test_epoch(axes, n, batch_size, kind, options):
    ranks = run_on_ranks(loaded, np.prod(list(axes.values())), axes, n, batch_size, kind, options)
    grid = np.arange(len(ranks)).reshape(list(axes.values()))
    names = list(axes)
    data_ranks = np.moveaxis(grid, names.index("data"), 0) if "data" in names else grid[None]
    by_data = []
    for row in data_ranks.reshape(len(data_ranks), -1):
        assert all(ranks[r][:2] == ranks[row[0]][:2] for r in row), "ranks of one data coordinate have the same samples"
        by_data.append(ranks[row[0]])
        read = sum(ranks[r][3] for r in row)
        if kind == "blocks":  # every element once; a few more for the dtype of an empty shard
            assert read == pytest.approx(sum(map(len, ranks[row[0]][0])) + len(ranks[row[0]][2]), abs=1.01)
    parts = len(data_ranks)
    seen = []
    for step in zip(*(batches for batches, *_ in by_data), strict=True):
        seen += [i for share in step for i in share]
        sizes = [len(share) for share in step]
        assert max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    keep = n - n % (parts * batch_size) if options.get("drop_last") else n
    assert len(seen) == keep and len(set(seen)) == keep and set(seen) <= set(range(n))
    assert (seen == sorted(seen)) == (options.get("shuffle") is False)
    for k, step in enumerate(zip(*(batches for batches, *_ in by_data), strict=True)):
        total = sum(map(len, step))
        assert [w[k] for _, w, *_ in by_data] == [len(share) * parts / total for share in step]
    assert sorted(i for _, _, swept, *_ in by_data for i in swept) == list(range(n))


def places():
    mesh = mesh_of(data=2, spatial=2)
    dataset = Blocks(10)
    one = ShardedLoader(dataset, 2, mesh, seed=5)
    epochs = [[loader_step(one) for _ in one] for _ in range(2)]
    assert one.epoch == 2 and epochs[0] != epochs[1]
    again = ShardedLoader(dataset, 2, mesh, seed=5)
    again.set_epoch(1)
    assert [loader_step(again) for _ in again] == epochs[1]
    again.set_epoch(0)
    for _ in again:
        break
    state = again.state_dict()
    assert state["epoch"] == 0 and state["seen"] == 4
    later = ShardedLoader(dataset, 2, mesh, seed=5)
    later.load_state_dict(state)
    assert later.state_dict() == state
    later.set_epoch(0)  # as a training loop does when it resumes
    assert [loader_step(later) for _ in later] == epochs[0][1:] and later.epoch == 1
    assert [loader_step(again) for _ in again] == epochs[0], "an abandoned iteration starts from the beginning"
    assert threading.active_count() < 20 and not [t for t in threading.enumerate() if t.name == "shardfield-ahead"]

    # another data axis resumes with the remaining samples
    wide = ShardedLoader(dataset, 1, mesh_of(spatial=4), data=None, seed=5)
    wide.load_state_dict(state)
    mine = [i for _ in wide for i in wide.indices]
    ends = ShardedLoader(dataset, 2, mesh, seed=5)
    for _ in ends:
        pass_state = ends.state_dict()
    assert pass_state["epoch"] == 1 and pass_state["seen"] == 0, "after the last batch comes the next epoch"
    with pytest.raises(ValueError, match=r"seed 5 \(here 6\)"):
        ShardedLoader(dataset, 2, mesh, seed=6).load_state_dict(state)
    return epochs[0], mine


def loader_step(loader):
    return list(loader.indices)


def test_loader_state():
    ranks = run_on_ranks(places, 4)
    left = [i for step in zip(ranks[0][0][1:], ranks[2][0][1:], strict=True) for share in step for i in share]
    assert all(mine == left for _, mine in ranks)


def exact_mean():
    """Check that the weighted mean over data ranks is the mean over samples, though a last batch is empty."""
    mesh = mesh_of(data=3)
    loader = ShardedLoader(Whole(7), 2, mesh)
    batches, total = 0, torch.zeros(())
    for batch in loader:
        loss = batch["x"].sum() / max(len(batch["x"]), 1) * loader.weight
        dist.all_reduce(loss)
        total += loss / 3 * min(6, 7 - 6 * batches)
        batches += 1
    assert batches == 2
    return len(batch["x"]), batch["x"].dtype, float(total)


def test_means_are_exact():
    ranks = run_on_ranks(exact_mean, 3)
    full_value = float(sum(Whole(7).full_value(i)["x"].sum() for i in range(7)))
    assert [r[0] for r in ranks] == [1, 0, 0] and all(r[2] == pytest.approx(full_value) for r in ranks)


class Careless(Blocks):
    def read(self, i, slices):
        return self.full_value(i)


class NoShapes(Rows):
    read = Blocks.read


class Pairs:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return np.full((4, 4), i, np.float64), i


class Typed:
    """Samples in one dtype, from sample `change` on in another."""

    def __init__(self, dtype, change=99, other=torch.float64):
        self.dtype, self.change, self.other = dtype, change, other

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((2, 4), float(i), dtype=self.other if i >= self.change else self.dtype), i


def dtypes():
    mesh, rank = mesh_of(data=1, spatial=2), dist.get_rank()
    mine = Typed([torch.float32, torch.float64][rank])
    said = refused(lambda: list(ShardedLoader(mine, 2, mesh)), "the ranks do not agree on dtypes")
    assert "rank 0: dtypes [torch.float32, torch.int64]" in said
    assert "rank 1: dtypes [torch.float64, torch.int64]" in said
    later = Typed(torch.float32, [99, 2][rank])  # on one rank, in a later batch
    loader = iter(ShardedLoader(later, 2, mesh, shuffle=False))
    next(loader)
    said = refused(
        lambda: next(loader), "rank 1: a batch has tensors of [torch.float64", "first one had [torch.float32"
    )
    assert "rank 0" not in said
    epochs = ShardedLoader(Typed(torch.float16), 3, mesh)
    assert [x.dtype for _ in range(2) for x, _ in epochs] == [torch.float16] * 4


def test_dtypes_are_compared():
    run_on_ranks(dtypes, 2)


class Shaped:
    """Samples of one shape, under one key; read in blocks, or indexed."""

    def __init__(self, shape, key="x", blocks=False):
        self.shapes, self.key = {key: shape}, key
        if blocks:
            self.read = lambda i, slices: {key: torch.ones(shape)[slices[key]]}

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {self.key: torch.ones(self.shapes[self.key])}


def shapes():
    mesh, rank = mesh_of(data=1, spatial=2), dist.get_rank()
    for blocks in (False, True):
        said = refused(lambda b=blocks: ShardedLoader(Shaped((4, 4 + rank), blocks=b), 2, mesh), "agree on shapes")
        assert "rank 0: keys ['x'], shapes [(4, 4)]" in said and "rank 1: keys ['x'], shapes [(4, 5)]" in said
    refused(lambda: ShardedLoader(Shaped((4, 4), "xy"[rank]), 2, mesh), "the ranks do not agree on keys")
    unlike = [[Shard(0)], [Shard(1)]][rank]
    refused(lambda: ShardedLoader(Shaped((4, 4)), 2, mesh, placements=unlike), "the ranks do not agree on layouts")


def test_shapes_and_keys_are_compared():
    run_on_ranks(shapes, 2)


def structures_and_errors():
    mesh = mesh_of(data=1, spatial=2)
    for x, label in ShardedLoader(Pairs(), 3, mesh, shuffle=False):
        assert isinstance(x, ShardTensor) and x.dtype is torch.float64 and x.placements == (Shard(1),)
        assert label.full_tensor().tolist() == [0, 1, 2]
    (only,) = ShardedLoader([torch.ones(2, 4)] * 3, 3, mesh)
    assert only.shape == (3, 2, 4) and only.to_local().shape == (3, 1, 4)

    dataset = Whole(6)
    loader = ShardedLoader(dataset, 1, mesh)
    batches = iter(loader)
    next(batches)
    dataset.fails = dist.get_rank() == 1
    said = refused(
        lambda: [None for _ in batches], "ShardedLoader: cannot be done", "rank 1: KeyError: 'broken sample'"
    )
    assert "rank 0" not in said
    refused(lambda: ShardedLoader(dataset, 1, mesh), "ShardedLoader: cannot be done", "rank 1: KeyError")
    dataset.fails = False
    refused(lambda: ShardedLoader(dataset, 1, mesh, placements=[Shard(5)]), "names a dim")
    refused(lambda: ShardedLoader(dataset, 1, mesh, placements=[Partial()]), "Shard or Replicate")
    refused(lambda: ShardedLoader(dataset, 1, mesh, sizes={"spatial": [1, 2]}), "do not sum to its size 7")
    refused(lambda: ShardedLoader(dataset, 1, mesh, sizes={"x": [1, 2]}), "'x' is not an axis")
    mine = dict(seed=1) if dist.get_rank() else dict(drop_last=True)
    refused(
        lambda: ShardedLoader(Whole(3 + dist.get_rank()), 1, mesh, **mine),
        "the ranks do not agree on samples, seed, drop_last\n  rank 0: samples 3, batch_size 1, seed 0, shuffle True, "
        "drop_last True\n  rank 1: ",
    )
    uneven = [torch.ones(2, 4), torch.ones(2, 5)]
    refused(
        lambda: list(ShardedLoader(uneven, 1, mesh, shuffle=False)),
        "sample 1 has tensors of shapes [(2, 5)], expected are [(2, 4)]",
    )
    refused(
        lambda: ShardedLoader(dataset, 1, mesh, placements={"u": [Shard(0)]}),
        "placements has ['u'], a sample has ['x',",
    )
    refused(lambda: list(ShardedLoader(Careless(2), 1, mesh)), "(2, 7, 6), ()], expected are [(2, 4, 6), ()]")
    refused(lambda: ShardedLoader(NoShapes(2), 1, mesh), "needs `shapes` too")
    for options, said in [
        (dict(data="dp"), "no data axis 'dp'"),
        (dict(domain="h"), "'h'"),
        (dict(domain=["data"]), "without 'data'"),
        (dict(batch_size=0), "batch_size 0 must be"),
        (dict(dataset=[]), "empty"),
        (dict(batch_size=9, drop_last=True), "do not fill one batch of 9"),
    ]:
        with pytest.raises(ValueError, match=said):
            ShardedLoader(**{"dataset": dataset, "batch_size": 1, "mesh": mesh, **options})


def test_structures_and_errors():
    run_on_ranks(structures_and_errors, 2)


def test_prefetch():
    run_on_ranks(reads_ahead, 1)


def reads_ahead():
    dataset, before = Blocks(9), threading.enumerate()
    loader = ShardedLoader(dataset, 1, mesh_of(data=1), prefetch=3)
    batches = iter(loader)
    next(batches)
    for _ in range(500):
        if dataset.elements == 4 * 84:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert dataset.elements == 4 * 84, "the current batch and three prefetched"
    waited = loader.waited
    next(batches)
    assert 0 < waited < loader.waited
    batches.close()
    assert not [t for t in threading.enumerate() if t not in before and t.name == "shardfield-ahead"]


# ---------------------------------------------------------------------- fields on disk

SHAPE = (4, 2, 48, 512)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fields")
    h5py, zarr = importlib.import_module("h5py"), importlib.import_module("zarr")
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    with h5py.File(folder / "f.h5", "w") as file:
        file["group/u"] = values
        file["names"] = np.array([b"one"])
        file["big"] = np.arange(6, dtype=">i4").reshape(2, 3)
    for version in (2, 3):
        settings = dict(shape=SHAPE, chunks=(1, 1, 12, 256), dtype="f4", zarr_format=version, compressors=None)
        zarr.create_array(str(folder / f"v{version}.zarr"), **settings)[...] = values
    group = zarr.open_group(str(folder / "group.zarr"), mode="w")
    group.create_array("a/u", shape=SHAPE, chunks=(1, 1, 12, 256), dtype="f4", compressors=None)[...] = values
    group.create_array("v", shape=(3,), dtype="i8")
    (folder / "text.h5").write_text("no array")
    (folder / "half.h5").write_bytes((folder / "f.h5").read_bytes()[:-4096])
    (folder / "plain").mkdir()
    np.save(folder / "values.npy", values)
    return str(folder)


def bytes_read(call):
    """Return the bytes that this process read while `call` ran."""

    def so_far():
        return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])

    before = so_far()
    value = call()
    return value, so_far() - before


STORES = [("f.h5", "group/u"), ("v2.zarr", None), ("v3.zarr", None), ("group.zarr", "a/u")]


def opened(folder):
    values = torch.from_numpy(np.load(f"{folder}/values.npy"))
    line = mesh_of(spatial=4)
    tiles = mesh_of(h=2, w=2)
    for file, name in STORES:
        field = open_field(f"{folder}/{file}", line, [Shard(2)], name=name)
        assert field.shape == SHAPE and field.dtype is torch.float32 and len(field) == 4
        x = field[1]
        assert isinstance(x, ShardTensor) and x.placements == (Shard(1),) and torch.equal(x.full_tensor(), values[1])
        block = (slice(0, 2), slice(12 * dist.get_rank(), 12 * dist.get_rank() + 12), slice(0, 512))
        local, read = bytes_read(lambda: field.read(1, block))  # noqa: B023
        assert torch.equal(local, x.to_local())
        assert local.nbytes <= read < local.nbytes + 2048, (file, read, local.nbytes)

        tiled = open_field(f"{folder}/{file}", tiles, [Shard(-2), Shard(-1)], name=name)
        assert torch.equal(tiled[2:4, 0].full_tensor(), values[2:4, 0])
        assert tiled[2:4, 0].placements == (Shard(1), Shard(2)) and torch.equal(tiled[...].full_tensor(), values)
        assert torch.equal(tiled[-1, ..., :].full_tensor(), values[-1])
        assert torch.equal(tiled[::3, 1:1].full_tensor(), values[::3, 1:1])
        if name != "group/u":  # a quarter: only the chunks of the tile
            h, w = tiles.get_coordinate()
            block = (slice(0, 2), slice(24 * h, 24 * h + 24), slice(256 * w, 256 * w + 256))
            local, read = bytes_read(lambda: tiled.read(3, block))  # noqa: B023
            assert local.nbytes <= read < local.nbytes + 2048, (file, read, local.nbytes)
    uneven = open_field(f"{folder}/v3.zarr", line, [Shard(2)], sizes={"spatial": [40, 0, 5, 3]})
    assert (
        torch.equal(uneven[0].full_tensor(), values[0])
        and uneven[0].to_local().shape[1] == [40, 0, 5, 3][dist.get_rank()]
    )
    samples = open_field(f"{folder}/f.h5", line, [Replicate()], name="big")
    assert samples.dtype is torch.int32 and samples[1].full_tensor().tolist() == [3, 4, 5]
    assert "Shard(2) as 12+12+12+12" in repr(field)

    # a field can be used as a dataset
    mesh = mesh_of(data=2, spatial=2)
    plain = open_field(f"{folder}/v2.zarr")
    assert torch.equal(plain[0, 1], values[0, 1]) and plain.shapes == SHAPE[1:]
    loader = ShardedLoader(plain, 2, mesh)
    for batch in loader:
        assert torch.equal(batch.full_tensor(), values[loader.indices])
    pair = {"x": plain, "y": open_field(f"{folder}/f.h5", name="group/u")}
    for batch in ShardedLoader(pair, 4, mesh, placements={"y": [Shard(2)]}, shuffle=False):
        assert batch["x"].placements == (Shard(2),) and batch["y"].placements == (Shard(3),)
        assert torch.equal(batch["x"].full_tensor(), batch["y"].full_tensor())
    for bad, said in [
        ({"x": plain, "y": open_field(f"{folder}/group.zarr", name="v")}, "lengths"),
        ({"x": [1]}, "'x'"),
    ]:
        with pytest.raises(ValueError, match=said):
            ShardedLoader(bad, 1, mesh)

    refused(lambda: uneven[0, 0, 3], "dim 2 is sharded and cannot be indexed on disk")
    for index, said in [
        ((0,) * 5, "5 indices"),
        (4, "out of bounds"),
        (slice(3, 0, -1), "must be positive"),
        ("a", "'a'"),
    ]:
        with pytest.raises(IndexError, match=said):
            field[index]


def test_fields(stores):
    run_on_ranks(opened, 4, stores)


def field_errors(folder):
    mesh = mesh_of(spatial=2)
    cases = [
        ("none.zarr", None, f"open_field: there is no {folder}/none.zarr"),
        ("f.h5", "u", "has no array called 'u'; it has big, group/u, names"),
        ("f.h5", None, "holds several arrays, or none: name one; it has big, group/u, names"),
        ("f.h5", "names", "arrays of |S3 cannot be tensors"),
        ("group.zarr", "w", "has no array called 'w'; it has a/u, v"),
        ("v3.zarr", "w", "is one array, and has none called 'w'"),
        ("plain", None, "it is not a zarr store"),
        ("text.h5", None, "neither an HDF5 file nor a zarr folder"),
        ("half.h5", "group/u", "half.h5"),
    ]
    for file, name, said in cases:
        refused(lambda: open_field(f"{folder}/{file}", mesh, [Shard(0)], name=name), said)  # noqa: B023
    mine = "v2.zarr" if dist.get_rank() == 0 else "none.zarr"
    said = refused(lambda: open_field(f"{folder}/{mine}", mesh, [Shard(0)]), "cannot be done\n  rank 1: there is no")
    assert "rank 0" not in said
    other = dict(name="a/u" if dist.get_rank() == 0 else "v")
    refused(lambda: open_field(f"{folder}/group.zarr", mesh, [Shard(0)], **other), "do not agree on shape")
    good = f"{folder}/v2.zarr"
    refused(lambda: open_field(good, mesh), "a mesh needs placements")
    refused(lambda: open_field(good, mesh, [Shard(7)]), "names a dim")
    refused(lambda: open_field(good, mesh, [Shard(0), Shard(1)]), "2 placements for a mesh of 1 axes")
    refused(lambda: open_field(good, mesh, [Shard(2)], sizes={0: [1, 1]}), "do not sum to its size 48")
    with pytest.raises(ValueError, match="pass the mesh too"):
        open_field(good, None, [Shard(0)])
    with pytest.raises(ValueError, match="neither 'fill' nor 'error'"):
        open_field(good, missing="warn")

    # without a mesh, one rank lacks the file: the loader raises on all ranks
    mine = open_field(f"{folder}/{'v2.zarr' if dist.get_rank() == 0 else 'none.zarr'}")
    for dataset in (mine, {"x": mine}):
        said = refused(lambda: ShardedLoader(dataset, 1, mesh, data=None), "ShardedLoader: cannot be done")  # noqa: B023
        assert f"rank 1: open_field: there is no {folder}/none.zarr" in said and "rank 0" not in said
    if dist.get_rank() == 1:
        assert "not opened" in repr(mine)
        refused(lambda: mine[0], "there is no")
        refused(lambda: mine.shape, "there is no")

    # a file that fails after opening, on one rank
    field = open_field(good, mesh, [Shard(2)])
    if dist.get_rank() == 1:
        field._array = Broken()
    refused(lambda: field[0], "field: cannot be done\n  rank 1: cannot read", "RuntimeError: bad sector")
    patch = pytest.MonkeyPatch()
    patch.setitem(__import__("sys").modules, "zarr", None)
    refused(lambda: open_field(good, mesh, [Shard(0)]), "pip install 'shardfield[recipes]'")
    patch.undo()


class Broken:
    def __getitem__(self, _):
        raise RuntimeError("bad sector")


def test_field_errors(stores):
    run_on_ranks(field_errors, 2, stores)


def test_a_missing_file_of_a_single_process_is_an_error_at_once(tmp_path):
    refused(lambda: open_field(tmp_path / "none.zarr"), "open_field: there is no")


def write_with_holes(folder):
    """Write arrays of 4 x 6 in chunks of 2 x 3, without chunk (1, 0)."""
    zarr, h5py = pytest.importorskip("zarr"), pytest.importorskip("h5py")
    values = np.arange(1.0, 25.0, dtype="float32").reshape(4, 6)
    for version in (2, 3):
        array = zarr.create_array(
            store=str(folder / f"v{version}.zarr"), shape=(4, 6), chunks=(2, 3), dtype="float32", zarr_format=version
        )
        array[...] = values
        (folder / f"v{version}.zarr" / array.metadata.encode_chunk_key((1, 0))).unlink()
    group = zarr.open_group(str(folder / "group.zarr"), mode="w")
    array = group.create_array("a/u", shape=(4, 6), chunks=(2, 3), dtype="float32")
    array[:2], array[:, 3:] = values[:2], values[:, 3:]
    with h5py.File(folder / "f.h5", "w") as file:
        chunked = file.create_dataset("u", (4, 6), "float32", chunks=(2, 3))
        chunked[:2], chunked[:, 3:] = values[:2], values[:, 3:]
        file.create_dataset("never", (4, 6), "float32")
        file["whole"] = values
    return values


def holes(folder):
    mesh = mesh_of(spatial=2)
    for file, name in (("v2.zarr", None), ("v3.zarr", None), ("group.zarr", "a/u"), ("f.h5", "u")):
        field = open_field(f"{folder}/{file}", mesh, [Shard(1)], name=name, missing="error")
        assert field[:2].full_tensor().tolist()[0] == [1, 2, 3, 4, 5, 6], file
        said = refused(lambda: field[2], "field: cannot be done", "chunks of", "are not stored: (1, 0)")  # noqa: B023
        assert "rank 0" in said and "rank 1" not in said  # whose block has the chunk
        plain = open_field(f"{folder}/{file}", name=name, missing="error")
        assert plain[3, 3:].tolist() == [22, 23, 24]
        filled = open_field(f"{folder}/{file}", mesh, [Shard(1)], name=name)
        assert filled[2].full_tensor().tolist() == [0, 0, 0, 16, 17, 18], file
        dataset = open_field(f"{folder}/{file}", name=name, missing="error")
        refused(lambda: list(ShardedLoader(dataset, 4, mesh, data=None, placements=[Shard(0)])), "(1, 0)")  # noqa: B023
    assert open_field(f"{folder}/f.h5", mesh, [Shard(0)], name="whole", missing="error")[:].full_tensor()[3, 5] == 24
    refused(lambda: open_field(f"{folder}/f.h5", mesh, [Shard(0)], name="never", missing="error")[:], "not stored")


def test_missing_chunks(tmp_path):
    write_with_holes(tmp_path)
    run_on_ranks(holes, 2, tmp_path)


# ---------------------------------------------------------------------- normalizers


class Offset:
    """Dataset with a mean that is large against its standard deviation, as temperatures in kelvin."""

    def __len__(self):
        return 7

    def __getitem__(self, i):
        x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(i))
        return {"x": x * torch.tensor([1e-2, 3.0]).view(2, 1, 1) + 300}


def fitted(axes, options):
    mesh = mesh_of(**axes)
    loader = ShardedLoader(Offset(), 2, mesh, drop_last=True, **options)
    found = {}
    for per in ("channel", "point", "all"):
        norm = UnitGaussian.fit(loader, "x", per=per)
        found[per] = norm.mean, norm.std
        for batch in loader.sweep():
            there = norm.transform(batch["x"])
            assert type(there) is type(batch["x"]) and there.dtype is torch.float32
            back = norm.inverse_transform(there)
            full_value = (
                torch.stack([Offset()[i]["x"] for i in loader.indices]) if loader.indices else torch.empty(0, 2, 5, 6)
            )
            for got, want in ((there, norm(full_value)), (back, full_value)):
                got = got.full_tensor() if isinstance(got, ShardTensor) else got
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-4)
    assert loader.epoch == 0 and len(loader) == 7 // (2 * loader.data_size)
    return found


@pytest.mark.parametrize(
    "axes, options",
    [
        (dict(data=2, spatial=2), {}),
        (dict(data=3), {}),
        (dict(h=2, w=2), dict(data=None, sizes={"h": [5, 0]})),
        (dict(data=1, c=2), dict(placements=[Shard(0)])),
        (dict(data=1, spatial=2), dict(placements=[Replicate()])),
    ],
)
def test_statistics_are_global(axes, options):
    x = torch.stack([Offset()[i]["x"] for i in range(7)]).double()
    expected = {
        "channel": (x.mean((0, 2, 3))[:, None, None], x.std((0, 2, 3))[:, None, None]),
        "point": (x.mean(0), x.std(0)),
        "all": (x.mean().view(1, 1, 1), x.std().view(1, 1, 1)),
    }
    for found in run_on_ranks(fitted, np.prod(list(axes.values())), axes, options):
        for per, wanted in expected.items():
            for got, want in zip(found[per], wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-11, atol=0)


def test_normalizer_is_a_module():
    x = torch.randn(3, 2, 4) + 5
    norm = UnitGaussian.fit([x[:1], x[1:1], x[1:]])
    torch.testing.assert_close(norm.mean, x.double().mean((0, 2))[:, None])
    other = UnitGaussian(torch.zeros(2, 1), torch.ones(2, 1))
    other.load_state_dict(norm.state_dict())
    torch.testing.assert_close(other(x), norm.transform(x))
    assert UnitGaussian.fit([torch.ones(2, 1)]).transform(torch.ones(1, 1)).item() == 0  # a constant has zero deviation
    for batches, said in [
        ([], "there are no batches"),
        ([torch.ones(0, 2)], "empty"),
        ([torch.ones(3)], "(sample, channel, ...), not torch.float32 (3,)"),
        ([torch.ones(2, 2, dtype=torch.complex64)], "complex64"),
        (["x"], "not str"),
        ([torch.ones(1, 2), torch.ones(1, 3)], "different layouts"),
    ]:
        refused(lambda: UnitGaussian.fit(batches), said)  # noqa: B023
    with pytest.raises(ValueError, match="not 'pixel'"):
        UnitGaussian.fit([x], per="pixel")
