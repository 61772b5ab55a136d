"""Damaged and edited checkpoints are refused with their path; what is accepted is identical to what was saved."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from shardfield.testing import run_on_ranks
from shardfield.train import CheckpointError, Checkpoints, parallelize, storage
from shardfield.train.checkpoint_index import OLD_FORMAT, chunk_checksum, read_index, run_of, tiles, write_index


def saved(folder):
    """Save a sharded model with Adam's state and a buffer, on two ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model = parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), domain=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    kept = Checkpoints(folder)
    kept.save(7, model, optimizer, {"step": 7, "best": 0.25})
    kept.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(saved, 2, folder)
    return folder / "step-000007"


def same(a, b) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


def judge(folder: Path, expected, what) -> bool:
    """Return whether a changed checkpoint is refused; it must be, with its path, unless its content is identical."""
    try:
        found = storage.read_checkpoint(folder)
    except CheckpointError as error:
        assert str(error).startswith(str(folder)), (what, error)
        return True
    assert same(found, expected), (what, "was accepted with another content")
    return False


def test_random_bit_flips(checkpoint, tmp_path):
    """1,000 flips, half of them in the index."""
    draw, expected = random.Random(0), storage.read_checkpoint(checkpoint)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "flipped"))
    files = [folder / "index.json", *folder.glob("rank-*.bin")]
    refused = 0
    for number in range(1000):
        path = files[0] if number % 2 else draw.choice(files[1:])
        data = path.read_bytes()
        bit = draw.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        refused += judge(folder, expected, (path.name, bit))
        path.write_bytes(data)
    assert refused > 990 and not judge(folder, expected, "restored")


def places(value, path=()):
    """Yield the path of each value inside JSON values."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def edit(draw: random.Random, tensors: dict) -> tuple:
    """Change one thing: remove, replace, shift, swap, repeat or permute."""
    path = draw.choice([p for p in places(tensors) if p])
    *above, last = path
    holder = tensors
    for key in above:
        holder = holder[key]
    value, kind = holder[last], draw.choice(["remove", "replace", "shift", "swap", "repeat", "permute"])
    if kind == "remove":
        del holder[last]
    elif kind == "shift" and isinstance(value, int):
        holder[last] = value + draw.choice([-1, 1, 4, -(2**40), 2**40, 2**70])
    elif kind == "swap":
        other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[last], holder[other] = holder[other], holder[last]
    elif kind == "repeat" and isinstance(holder, list):
        holder.append(copy.deepcopy(value))
    elif kind == "permute" and isinstance(value, list):
        draw.shuffle(value)
    else:
        holder[last] = draw.choice(
            [None, -1, 2**63, 1.5, True, "", "float64", "int32", "rank-0.bin", [], {}, [1], "/x"]
        )
    return kind, path


def test_random_edits(checkpoint, tmp_path):
    """200 edits of the index under a right hash: what it says of the files and tensors is checked by itself."""
    draw, expected = random.Random(1), storage.read_checkpoint(checkpoint)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "edited"))
    index, run_id = read_index(checkpoint), run_of(checkpoint)
    refused = 0
    for _ in range(200):
        tensors = copy.deepcopy(index["tensors"])
        what = edit(draw, tensors)
        write_index(folder, run_id, index["scalars"], tensors)
        refused += judge(folder, expected, what)
    assert refused > 120, refused


def last(index, name="model.0.weight"):
    return index["tensors"][name]["chunks"][-1]


WRONG = {
    "chunk removed": (lambda i: i["tensors"]["model.0.weight"]["chunks"].pop(), "do not tile its shape"),
    "other dtype": (lambda i: i["tensors"]["model.0.weight"].update(dtype="int32"), "is not as it was saved"),
    "other item size": (lambda i: i["tensors"]["model.0.weight"].update(dtype="float64"), "bytes for"),
    "no dtype": (lambda i: i["tensors"]["model.0.weight"].update(dtype="Tensor"), "is not a dtype"),
    "permuted sizes": (lambda i: last(i)["sizes"].reverse(), "do not tile its shape"),
    "negative offset": (lambda i: last(i)["offsets"].__setitem__(0, -1), "has -1"),
    "huge offset": (lambda i: last(i)["offsets"].__setitem__(0, 2**40), "do not tile its shape"),
    "negative position": (lambda i: last(i).update(at=-4), "has -4"),
    "huge chunk": (lambda i: last(i).update(bytes=2**40), "bytes for"),
    "another tensor's bytes": (
        lambda i: last(i).update({k: last(i, "optimizer.state.0.weight.exp_avg")[k] for k in ("at", "crc32")}),
        "leave gaps or overlap",
    ),
    "two tensors exchanged": (
        lambda i: i["tensors"].update(
            {
                "model.0.weight": i["tensors"]["optimizer.state.0.weight.exp_avg"],
                "optimizer.state.0.weight.exp_avg": i["tensors"]["model.0.weight"],
            }
        ),
        "is not as it was saved",
    ),
    "file elsewhere": (lambda i: last(i).update(file="../x.bin"), "outside the checkpoint"),
    "tensors missing": (lambda i: i.update(tensors=None), "not dict"),
    "step of another type": (lambda i: i["scalars"].update(step="7"), "step is '7', not int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_index_is_refused(checkpoint, tmp_path, name):
    """Also where the hash of the index is right, and in the older format, which has none."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "wrong"))
    index, (change, why) = read_index(checkpoint), WRONG[name]
    change(index)
    write_index(folder, run_of(checkpoint), index["scalars"], index["tensors"])
    with pytest.raises(CheckpointError, match=re.escape(why)) as caught:
        storage.read_checkpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "null", '{"format": "other"}', '{"format": 1e999}', "\xff\x00"]
)
def test_other_files_are_refused(checkpoint, tmp_path, text):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    (folder / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        read_index(folder)


def test_scalars_are_finite(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "scalars"))
    index = read_index(folder)
    for bad in ("NaN", "-Infinity", "1e999"):
        old = {"format": OLD_FORMAT, "scalars": index["scalars"] | {"run": {"best": [123.5]}}, "tensors": {}}
        (folder / "index.json").write_text(json.dumps(old).replace("123.5", bad))
        with pytest.raises(CheckpointError, match="a scalar is (nan|-?inf)"):
            read_index(folder)


def test_large_file_is_refused_before_it_is_read(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "large"))
    path = folder / "rank-0.bin"
    size = path.stat().st_size
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=f"rank-0.bin: has {1 << 40} bytes, the index names {size} of them"):
        storage.read_checkpoint(folder)


def old_format(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "step-000007"))
    index, expected = read_index(folder), storage.read_checkpoint(folder)
    for name, tensor in index["tensors"].items():
        for chunk in tensor["chunks"]:
            raw = (folder / chunk["file"]).read_bytes()[chunk["at"] : chunk["at"] + chunk["bytes"]]
            assert chunk["crc32"] == chunk_checksum(name, tensor, chunk, bytearray(raw))
            chunk["crc32"] = chunk_checksum(name, tensor, chunk, bytearray(raw), signed=False)
    old = {"format": OLD_FORMAT, "scalars": index["scalars"], "tensors": index["tensors"]}
    (folder / "index.json").write_text(json.dumps(old))
    assert same(storage.read_checkpoint(folder), expected) and run_of(folder) is None
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    kept = Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match="older format, without a checksum of its scalars"):
        assert kept.load(folder, model) == {"step": 7, "best": 0.25}
    assert torch.equal(model[0].weight, expected[1]["model.0.weight"])
    kept.save(8, model)  # the run goes on in the format of today
    kept.wait()
    assert list(kept.steps()) == [7, 8] and list(kept.steps(kept.run_id)) == [8]
    for name in ("chunk removed", "permuted sizes", "another tensor's bytes", "huge offset"):
        changed = copy.deepcopy(old)
        WRONG[name][0](changed)
        (folder / "index.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=re.escape(WRONG[name][1])):
            storage.read_checkpoint(folder)


def test_old_format(checkpoint, tmp_path):
    """Checkpoints without hashes load with a warning; their tensors are checked as those of today."""
    run_on_ranks(old_format, 1, checkpoint, tmp_path)


def dtype_and_settings(tmp_path):
    model = nn.Linear(2, 2)
    optimizer, kept = torch.optim.AdamW(model.parameters(), lr=0.5), Checkpoints(tmp_path)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    kept.save(1, model, optimizer)
    kept.wait()
    path = kept.latest()
    with pytest.raises(CheckpointError, match="model.bias of dtype float32, expected is torch.float64"):
        kept.load(path, nn.Linear(2, 2).double())
    index = read_index(path)
    name = next(n for n in index["scalars"]["optimizer"] if n.endswith(".lr"))
    for value in ("0.5", [0.5], True):
        index["scalars"]["optimizer"][name] = value
        write_index(path, kept.run_id, index["scalars"], index["tensors"])
        with pytest.raises(CheckpointError, match=re.escape(f"{name} is {value!r}")):
            kept.load(path, model, optimizer)
    with pytest.raises(CheckpointError, match="scalars must be finite JSON values"):
        kept.save(2, model, scalars={"best": float("inf")})


def test_dtype_and_settings_of_the_optimizer(tmp_path):
    run_on_ranks(dtype_and_settings, 1, tmp_path)


def test_tiles():
    whole = ((0, 4), (0, 6))
    grid = [((i, i + 2), (j, j + 3)) for i in (0, 2) for j in (0, 3)]
    assert tiles(grid, whole) and tiles([whole], whole) and tiles([], ((0, 0), (0, 6))) and tiles([()], ())
    assert tiles([((0, 4), (0, 1)), ((0, 1), (1, 6)), ((1, 4), (1, 6))], whole)
    for wrong in (
        [],
        grid[1:],
        [*grid, grid[0]],
        [*grid[1:], ((0, 2), (0, 2))],
        [((0, 4), (0, 7))],
        [((0, 3), (0, 6))],
    ):
        assert not tiles(wrong, whole)
    assert not tiles([(), ()], ())
