"""Install the wheel and the sdist in an environment of their own, and train outside the repository."""

import subprocess
import sys
from pathlib import Path

import pytest

import shardfield
from tests.distributions import build
from tests.launch import ROOT, clean_env

SIZES = ["--epochs", "1", "--n-train", "32", "--n-test", "8", "--batch-size", "8"]
TFNO = [*SIZES, "--resolution", "16", "--fine", "31", "--test-resolutions", "16", "--modes", "4", "--width", "8"]
CNN = ["cnn", *SIZES, "--height", "8", "--width", "8"]


def run(*words: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in clean_env().items() if k != "PYTHONPATH"}
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_release_trains_outside_the_repository(kind, tmp_path):
    path, place = build(kind, tmp_path), tmp_path / "elsewhere"
    place.mkdir()
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=place)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt"]
    if kind == "sdist":
        run(*install, "torch", "numpy", "hatchling", cwd=place)
        run(*install, "--no-deps", "--no-build-isolation", path, cwd=place)
    else:
        run(*install, "torch", cwd=place)  # first and alone, so that no other package decides which build is taken
        run(*install, f"{path}[recipes]", cwd=place)
    told = run(python, "-c", "import shardfield; print(shardfield.__file__, shardfield.__version__)", cwd=place)
    assert str(tmp_path / "venv") in told and told.split()[-1] == shardfield.__version__
    assert f"shardfield {shardfield.__version__}" in run(tmp_path / "venv/bin/shardfield", "info", cwd=place)
    if kind == "wheel":
        out = run(tmp_path / "venv/bin/shardfield", "train", *TFNO, "--cache", place / "cache", cwd=place)
        assert "16x16/l2" in out and (place / "runs/darcy_tfno/prediction.png").exists()
        launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = ["-m", "shardfield", "train", *CNN, "--domain", "2", "--out", "two"]
        assert "test/wrong" in run(*launcher, *words, cwd=place)
