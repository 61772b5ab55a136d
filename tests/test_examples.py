"""Every example runs, started as its reader would start it, and does what it says."""

import re
from pathlib import Path

import pytest

from launch import ROOT, python, torchrun

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_tested(path):
    assert len(path.read_text().splitlines()) < 80
    assert path.name in Path(__file__).read_text(), f"{path.name} is run by no test in {Path(__file__).name}"


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", out)]


def test_train_ddp_in_one_process():
    first, *_, last = losses(python(EXAMPLES / "train_ddp.py"))
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_train_ddp(nproc, tmp_path):
    out = torchrun(EXAMPLES / "train_ddp.py", nproc, tmp_path)
    first, *_, last = losses(out[0])
    assert last < first
    assert out[1:] == [""] * (nproc - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["device_mesh_2d.py", "device_mesh.py"])
def test_device_mesh_by_hand_and_by_mesh(name, tmp_path):
    out = torchrun(EXAMPLES / name, 8, tmp_path)
    for rank, text in enumerate(out):
        row = [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]
        assert f"{rank=} shards with {row} and replicates with {[rank % 4, rank % 4 + 4]}" in text


@pytest.mark.slow
def test_hsdp(tmp_path):
    out = torchrun(EXAMPLES / "hsdp.py", 8, tmp_path)
    held, norms = zip(*(re.findall(r"holds (\d+) of .* norm ([\d.]+)", text)[0] for text in out), strict=True)
    # Four ranks share the 165 numbers, padded to a multiple of four; every rank sees the norm of the same gradient.
    assert set(held) == {"42"}
    assert len(set(norms)) == 1 and float(norms[0]) > 0
