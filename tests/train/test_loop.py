"""The training loop: equal losses on any mesh and after any interruption; clean exits on errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from shardfield import ShardfieldError
from shardfield.data import ShardedLoader
from shardfield.testing import run_on_ranks
from shardfield.train import Checkpoints
from shardfield.train.config import UsageError, from_file
from shardfield.train.log import Log, read_curves
from shardfield.train.loop import Trainer
from shardfield.train.nonfinite import NonFinite
from shardfield.train.plots import shard_boundaries
from shardfield.train.preemption import Preempted
from shardfield.train.recipes import RECIPES
from shardfield.train.recipes.cnn import CNNConfig
from shardfield.train.recipes.darcy_tfno import DarcyTFNOConfig
from shardfield.train.recipes.vit import ViTConfig
from tests.launch import clean_env

CNN = CNNConfig(
    height=9,
    width=8,
    channels=4,
    n_train=26,
    n_test=7,
    batch_size=8,
    epochs=2,
    warmup=2,
    precision="fp64",
    picture=False,
)
TFNO = DarcyTFNOConfig(
    resolution=22, test_resolutions=(22, 8), fine=22, n_train=8, n_test=1, batch_size=4, epochs=1, modes=4, width=4,
    layers=1, precision="fp64",
)  # fmt: skip
VIT = ViTConfig(
    resolution=22, test_resolutions=(22,), fine=22, n_train=8, n_test=3, batch_size=4, epochs=1, patch=2, width=8,
    heads=2, layers=1, precision="fp64",
)  # fmt: skip


def run(name: str, config, stop_after: int | None = None):
    """Run a recipe; return its losses by step, its test metrics and the number of gathers."""
    torch.distributed.barrier()
    mesh = config.mesh("cpu")
    log = Log(config.out, dist.get_rank() == 0, 10**6)
    config.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(RECIPES[name][1](config, mesh, log), config, mesh, log)
    if stop_after is not None:  # as after SIGTERM
        trainer._sync_ranks = lambda *flags: (trainer.step >= stop_after, False, 9.0)
        with pytest.raises(Preempted, match=f"step {stop_after}: received SIGTERM"):
            trainer.run()
        return None
    results = trainer.run()
    if config.picture:
        trainer.draw()
    dist.barrier()
    losses, _ = read_curves(config.out / "metrics.jsonl")
    return losses, results


def same(found, expected, rtol=1e-8):
    """Check that losses by step and test metrics are equal."""
    assert [s for s, _ in found[0]] == [s for s, _ in expected[0]]
    torch.testing.assert_close([v for _, v in found[0]], [v for _, v in expected[0]], rtol=rtol, atol=1e-10)
    assert found[1].keys() == expected[1].keys()
    torch.testing.assert_close(found[1], expected[1], rtol=rtol, atol=1e-10)


def test_equal_losses_on_any_mesh(tmp_path):
    """Also with accumulation, recomputation and a running mean, and test sets that the ranks do not divide."""
    configs = {
        "plain": replace(CNN, out=tmp_path / "one"),
        "options": replace(CNN, out=tmp_path / "one-options", accumulate=2, recompute=True, ema=0.8, clip=0.1),
    }
    alone = {key: run_on_ranks(run, 1, "cnn", config)[0] for key, config in configs.items()}
    assert len(alone["plain"][0]) == 6 and set(alone["plain"][1]) == {"test/wrong"}
    assert alone["plain"][0] != alone["options"][0]
    for key, domain, strategy in [("plain", (2,), "fsdp"), ("options", (2,), "ddp"), ("plain", (2, 2), "fsdp")]:
        config = replace(configs[key], out=tmp_path / f"{key}{len(domain)}{strategy}", domain=domain, strategy=strategy)
        for found in run_on_ranks(run, 4, "cnn", config, timeout=90):
            same(found, alone[key])


@pytest.mark.slow
def test_other_recipes(tmp_path):
    for name, given in (("darcy_tfno", TFNO), ("vit", VIT)):
        config = replace(given, out=tmp_path / name, cache=tmp_path / "cache")
        (alone,) = run_on_ranks(run, 1, name, config, timeout=90)
        assert all((config.out / picture).stat().st_size > 10_000 for picture in ["prediction.png"])
        # one test sample for two data ranks: one rank has none
        config = replace(config, out=tmp_path / f"{name}4", domain=(2,), picture=False)
        for found in run_on_ranks(run, 4, name, config, timeout=90):
            same(found, alone)


def interrupted(config):
    """Stop after 2 and 4 of 6 steps, in the middle of epochs."""
    run("cnn", config, stop_after=2)
    run("cnn", config, stop_after=4)
    return run("cnn", config)


def test_resume_gives_the_same_losses(tmp_path):
    config = replace(CNN, out=tmp_path / "whole", ema=0.8)
    (undisturbed,) = run_on_ranks(run, 1, "cnn", config)
    (found,) = run_on_ranks(interrupted, 1, replace(config, out=tmp_path / "parts"))
    same(found, undisturbed, rtol=1e-12)
    # the last part runs on another mesh under another strategy
    elsewhere = replace(config, out=tmp_path / "elsewhere")
    run_on_ranks(run, 1, "cnn", elsewhere, 3)
    for found in run_on_ranks(run, 4, "cnn", replace(elsewhere, domain=(2,), strategy="hsdp"), timeout=90):
        same(found, undisturbed)
    # "never" starts from scratch, a path names the checkpoint
    before = sorted(Checkpoints(config.out).steps().values())
    (again,) = run_on_ranks(run, 1, "cnn", replace(config, out=tmp_path / "again", resume="never"))
    same(again, undisturbed, rtol=1e-12)
    (there,) = run_on_ranks(run, 1, "cnn", replace(config, out=tmp_path / "there", resume=str(before[-1])))
    assert there[0] == [] and there[1] == pytest.approx(undisturbed[1])


def command(*words, ranks: int | None = None, restarts: int = 0) -> list[str]:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--max-restarts={restarts}",
        f"--nproc-per-node={ranks}",
    ]
    launched = [sys.executable, *(launcher if ranks else []), "-m", "shardfield", "train", "cnn"]
    return [*launched, *map(str, words)]


SMALL = "--height 9 --width 8 --channels 4 --n-train 64 --n-test 4 --batch-size 4 --precision fp64 --no-picture".split()


def last_logged_step(path: Path) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(x)["step"] for x in lines if x.endswith("}")), default=0)


def wait_for(path: Path, step: int, process) -> None:
    end = time.monotonic() + 90
    while last_logged_step(path) < step:
        assert process.poll() is None and time.monotonic() < end, f"no step {step} in {path}"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_rank_under_torchrun(tmp_path):
    """Kill one rank twice at arbitrary times: the losses equal those of an undisturbed run.

    The command says to start from the beginning; a restart does not.
    """
    out, words = tmp_path / "killed", [*SMALL, "--epochs", 3, "--save-every", 3, "--domain", 2, "--resume", "never"]
    process = subprocess.Popen(
        command(*words, "--out", out, ranks=2, restarts=3),
        env=clean_env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for step in (8, 25):
            wait_for(out / "metrics.jsonl", step, process)
            ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            time.sleep(1)
        assert process.wait(120) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    config = replace(CNN, out=tmp_path / "whole", n_train=64, n_test=4, batch_size=4, epochs=3, warmup=20)
    (undisturbed,) = run_on_ranks(run, 1, "cnn", config)
    losses, tests = read_curves(out / "metrics.jsonl")
    assert len(losses) == 48
    same((losses, {n: v[-1][1] for n, v in tests.items()}), undisturbed)


def test_sigterm_saves_and_exits(tmp_path):
    """SIGTERM saves and exits 0; the next start resumes."""
    words = [*SMALL, "--epochs", 500, "--save-every", 0, "--evaluate-every", 0, "--out", tmp_path]
    process = subprocess.Popen(command(*words), env=clean_env(), stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path / "metrics.jsonl", 3, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    step = int(re.search(r"step (\d+): received SIGTERM; saved in .*step-0*\1", said).group(1))
    assert list(Checkpoints(tmp_path).steps()) == [step]
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 500


def unwritable(folder):
    """Replace metrics.jsonl by a folder during a run: all ranks raise, and the checkpoints remain."""
    config = replace(CNN, out=folder, domain=(2,), save_every=1)
    mesh, log = config.mesh("cpu"), Log(folder, dist.get_rank() == 0, 10**6)
    trainer = Trainer(RECIPES["cnn"][1](config, mesh, log), config, mesh, log)
    record = log.record

    def spoiled(*steps):
        if steps[-1][0] == 2 and dist.get_rank() == 0:
            (folder / "metrics.jsonl").unlink()
            (folder / "metrics.jsonl").mkdir()
        record(*steps)

    log.record = spoiled
    with pytest.raises(ShardfieldError, match="step 2: rank 0 cannot write") as caught:
        trainer.run()
    trainer.checkpoints.wait()
    return str(caught.value), list(trainer.checkpoints.steps())


def test_unwritable_file(tmp_path):
    (first, steps), (other, _) = run_on_ranks(unwritable, 2, tmp_path)
    assert "metrics.jsonl: Is a directory" in first and "its files" in other and steps == [1]


class Poisoned:
    """Dataset whose sample 5 has a NaN in its last row."""

    shapes = {"x": (1, 6, 4)}

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((1, 6, 4), float(i))
        if i == 5:
            x[0, -1, 0] = torch.nan
        return {"x": x}


def poisoned(folder):
    from shardfield.train.task import Task

    config = replace(CNN, out=folder, domain=(3,), batch_size=1, precision="fp32", ema=0.5)
    mesh = config.mesh("cpu")

    def trainer(**options):
        torch.manual_seed(0)
        loader = ShardedLoader(Poisoned(), 1, mesh, domain=("h",), placements=[Shard(1)], shuffle=False)
        score = lambda output, batch: output.square().mean() + 0 * batch["x"].sum()  # noqa: E731
        task = Task(torch.nn.Conv2d(1, 1, 1), loader, score)
        made = Trainer(task, replace(config, **options), mesh, Log(folder, dist.get_rank() == 0))
        made._sync_ranks = lambda *flags: (False, False, 1e-3)  # all steps but the first are read together
        return made

    def state(of):
        tensors = [*of.model.state_dict().values(), *of.ema_average.means.values()]
        return [t.full_tensor().tolist() for t in tensors]

    five = trainer(out=folder / "five")
    five._sync_ranks = lambda *flags: (five.step == 5, False, 9.0)
    with pytest.raises(Preempted):
        five.run()
    bad = trainer()
    with pytest.raises(NonFinite) as caught:
        bad.run()
    assert (bad.step, state(bad)) == (5, state(five)), "the steps after the bad one have changed the state"
    return str(caught.value)


def test_loss_that_is_not_finite(tmp_path):
    first, *others = run_on_ranks(poisoned, 3, tmp_path)
    assert set(others) == {first}, "all ranks stop with the same message"
    assert re.search(r"step 5: the loss is nan; first seen on rank 2, in its shard of 'batch.x'", first), first
    kept = tmp_path / "nonfinite-step-5"
    assert list(Checkpoints(kept).steps()) == [5]
    shards = [np.load(kept / f"shards-rank-{rank}.npz") for rank in range(3)]
    assert [int(np.isnan(p["batch.x"]).sum()) for p in shards] == [0, 0, 1]


BAD = """
import os, sys
from shardfield.cli import main
file = open("bad.toml", "w"); file.write("epochz = 3"); file.close()
file = open("wrong.toml", "w"); file.write("epochs = 'many'"); file.close()
open("file", "w").close()
for words in (
    [], ["trian"], ["train", "cnm"], ["train", "cnn", "--epochz", "3"], ["train", "--config", "none.toml"],
    ["train", "--config", "bad.toml"], ["train", "--config", "wrong.toml"], ["train", "cnn", "--epochs", "0"],
    ["train", "cnn", "--domain", "2"], ["train", "cnn", "--out", "file/below"], ["train", "cnn", "--resume", "nowhere"],
    ["train", "cnn", "--height", "0"], ["train", "vit", "--patch", "5"], ["train", "--modes", "40"],
    ["train", "--resolution", "50"], ["train", "cnn", "--n-train", "2"], ["train", "cnn", "--graphs"],
):
    print("#", *words, flush=True)
    print("exit", main(words), flush=True)
print("# help", flush=True)
print("exit", main(["train", "cnn", "--help"]), flush=True)
print("exit", main(["info"]), flush=True)
"""


def test_bad_configurations_are_refused_in_one_line(tmp_path, forks):
    program = tmp_path / "bad.py"
    program.write_text(BAD)
    (out,) = forks.run(program, tmp_path)
    output = (tmp_path / "alone.err").read_text()
    codes = re.findall(r"^exit (\d)", out, re.M)
    assert codes == ["2"] * 17 + ["0", "0"], out + output
    for text in (
        "unknown command 'trian'; did you mean 'train'?",
        "unknown recipe 'cnm'; did you mean 'cnn'?",
        "--epochs",  # tyro's suggestion
        "--config none.toml: No such file or directory",
        "unknown key 'epochz'; did you mean 'epochs'?",
        "a value has the wrong type",
        "--epochs is 0",
        "needs groups of 2 ranks",
        "--out file/below: Not a directory",
        "nowhere: not a shardfield checkpoint",
        "cannot be sharded",
        "--patch 5 must divide",
        "--modes 40",
        "no stride keeps 50 of 253 points",
        "do not fill one batch",
        "--graphs: a CUDA graph needs tensors on a CUDA device",
    ):
        assert text in output, (text, output)
    assert "--learning-rate" in out and "torch" in out
    assert "Traceback" not in output


def uneven_world():
    """Return the refusal, which is the same on every rank."""
    with pytest.raises(UsageError, match="needs groups of 2 ranks, and there are 3") as caught:
        replace(CNN, domain=(2,)).mesh("cpu")
    with pytest.raises(UsageError, match="--batch-size 8 is not a multiple of 3 data ranks"):
        CNN.mesh("cpu")
    return str(caught.value)


def test_mesh_that_does_not_fit():
    assert len(set(run_on_ranks(uneven_world, 3))) == 1


def test_configuration_files(tmp_path):
    (tmp_path / "a.toml").write_text('epochs = 3\ndomain = [2, 2]\nclip = "None"\npicture = false\nout = "there"\n')
    found = from_file(CNNConfig, tmp_path / "a.toml")
    assert (found.epochs, found.domain, found.clip, found.picture, found.out) == (3, (2, 2), None, False, Path("there"))
    (tmp_path / "b.json").write_text(json.dumps(found.as_json()))
    assert from_file(CNNConfig, tmp_path / "b.json") == found and found.graphs is None
    for value in (True, False):
        (tmp_path / "c.json").write_text(json.dumps({"graphs": value}))
        assert from_file(CNNConfig, tmp_path / "c.json").graphs is value


def test_learning_rate():
    config = replace(CNN, learning_rate=1.0, warmup=4, final_learning_rate=0.1)
    rates = [config.rate(step, 14) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and rates[14] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False)) and rates[9] == pytest.approx(0.55)


def boundaries():
    from shardfield import ShardTensor

    mesh = replace(CNN, domain=(2, 2)).mesh("cpu")["h", "w"]
    h, w = (3, 2)[mesh.get_local_rank("h")], (1, 4)[mesh.get_local_rank("w")]
    field = ShardTensor.from_local(torch.zeros(2, h, w), mesh, [Shard(1), Shard(2)])
    return shard_boundaries(field), shard_boundaries(torch.zeros(2, 5, 5))


def test_field_sharding():
    assert run_on_ranks(boundaries, 4) == [(([3], [1]), ([], []))] * 4
