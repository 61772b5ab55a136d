"""A folder belongs to one run: its checkpoints, its lock, its restarts; ranks agree before the first step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from shardfield import ShardfieldError
from shardfield.testing import run_on_ranks
from shardfield.train import CheckpointError, Checkpoints, storage
from shardfield.train.checkpoint_index import run_of
from shardfield.train.config import UsageError
from shardfield.train.log import Log, read_curves
from shardfield.train.loop import Trainer
from shardfield.train.preemption import Preempted
from shardfield.train.recipes import RECIPES
from shardfield.train.run_folder import FolderLock, launch_id
from tests.train.test_loop import CNN

SHORT = replace(CNN, n_test=1, save_every=1, evaluate_every=0, keep=2)  # 6 steps


def train(config, fail_at: int | None = None):
    """Run the recipe; with `fail_at`, stop after that step as a failing rank does. Return its losses by step."""
    mesh, log = config.mesh("cpu"), Log(config.out, dist.get_rank() == 0, 10**6)
    trainer = Trainer(RECIPES["cnn"][1](config, mesh, log), config, mesh, log)
    results = log.steps

    def steps(first, total, losses, *rest):
        results(first, total, losses, *rest)
        if first + len(losses) == fail_at:
            trainer.checkpoints.wait()
            raise ConnectionError("a peer died")

    log.steps = steps
    try:
        trainer.run()
    except ConnectionError:
        return None
    return read_curves(config.out / "metrics.jsonl")[0]


@contextmanager
def attempt(number: int):
    """Set torchrun's variables for the first start (0) or a restart of one launch."""
    before = dict(os.environ)
    os.environ |= {"TORCHELASTIC_RUN_ID": "one-launch", "TORCHELASTIC_RESTART_COUNT": str(number)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


# ---------------------------------------------------------------------- whose checkpoints


def owners(folder):
    """Return the refusals of checkpoints in a folder of another run."""
    model, mine = nn.Linear(2, 2), Checkpoints(folder, keep=2)
    for step in (10, 20):
        mine.save(step, model)
    mine.wait()
    results = []
    for path in (None, mine.steps()[10]):
        other = Checkpoints(folder, keep=1)
        if path is not None:
            other.load(path, model)
        with pytest.raises(CheckpointError) as caught:
            other.save(1, model)
        results.append(str(caught.value))
    dist.barrier()
    assert list(mine.steps()) == [10, 20], "nothing was pruned"
    heir = Checkpoints(folder, keep=2)
    heir.load(heir.latest(), model)
    heir.save(30, model)
    heir.wait()
    fork = Checkpoints(folder / "fork")
    fork.load(mine.steps()[20], model)
    fork.save(30, model)
    fork.wait()
    with pytest.raises(CheckpointError, match="of another run") as caught:
        late = Checkpoints(folder / "fork")
        late.load(heir.latest(), model)
        late.save(40, model)
    results.append(str(caught.value))
    return results, list(heir.steps()), [mine.run_id == heir.run_id, fork.run_id == heir.run_id]


def test_run_owns_its_checkpoints(tmp_path):
    first, second = run_on_ranks(owners, 2, tmp_path)
    assert first == second, "ranks agree on the run and on every refusal"
    (new, older, elsewhere), steps, same = first
    assert "has checkpoints of another run: continue from the newest one, step-000020, or choose another folder" in new
    assert f"has newer checkpoints than {tmp_path / 'step-000010'}" in older and "step-000030" in elsewhere
    assert steps == [20, 30] and same == [True, False]


def test_new_run_in_a_used_folder_is_refused(tmp_path):
    config = replace(SHORT, out=tmp_path)
    run_on_ranks(train, 1, replace(config, max_steps=4))
    before = {path: run_of(path) for path in Checkpoints(tmp_path).steps().values()}
    with pytest.raises(Exception, match="has checkpoints of another run: continue from the newest one, step-000004"):
        run_on_ranks(train, 1, replace(config, resume="never"))
    assert {path: run_of(path) for path in Checkpoints(tmp_path).steps().values()} == before
    assert json.loads((tmp_path / "config.json").read_text())["resume"] == "auto"
    (losses,) = run_on_ranks(train, 1, config)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]


def half_pruned(folder):
    """Save with a removal that does nothing, as if killed before it."""
    model, kept = nn.Linear(2, 2), Checkpoints(folder, keep=1)
    remove, shutil.rmtree = shutil.rmtree, lambda *args, **kwargs: None
    try:
        for step in (1, 2):
            kept.save(step, model)
        kept.wait()
    finally:
        shutil.rmtree = remove
    return list(kept.steps())


def test_half_pruned_checkpoint_has_no_final_name(tmp_path):
    assert run_on_ranks(half_pruned, 1, tmp_path) == [[2]]
    assert len(list(tmp_path.glob("step-000001.*.part"))) == 1


# ---------------------------------------------------------------------- restarts


def restarted(folder, resume):
    """Die after step 3 in a run that began as `resume` says, then restart it."""
    config = replace(SHORT, out=folder, resume=resume)
    with attempt(0):
        train(config, fail_at=3)
    begun = []
    load = Checkpoints.load
    Checkpoints.load = lambda self, path, *rest: (begun.append(Path(path).name), load(self, path, *rest))[1]
    try:
        with attempt(1):
            losses = train(config)
    finally:
        Checkpoints.load = load
    return begun, losses, len(set(map(run_of, Checkpoints(folder).steps().values())))


def test_restart_continues_its_run(tmp_path):
    (whole,) = run_on_ranks(train, 1, replace(SHORT, out=tmp_path / "whole"))
    for found in run_on_ranks(restarted, 1, tmp_path / "never", "never"):
        assert found == (["step-000002"], whole, 1)
    run_on_ranks(train, 1, replace(SHORT, out=tmp_path / "other", max_steps=1))
    begin = tmp_path / "other" / "step-000001"
    for began, losses, runs in run_on_ranks(restarted, 1, tmp_path / "path", str(begin)):
        assert began == ["step-000002"] and runs == 1
        assert losses == whole[1:]


def after_the_end(folder):
    """Restart runs that were complete, preempted, or refused."""
    save = Checkpoints.save

    def stopped(self, *args):
        save(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)

    def begin(restart, out, fail_at=None, **env):
        with attempt(restart):
            os.environ |= env
            try:
                losses = train(replace(SHORT, out=folder / out, resume="never"), fail_at)
                return "failed" if losses is None else len(losses)
            except Preempted:
                return "preempted"
            except CheckpointError as error:
                return "refused" if "has checkpoints of another run" in str(error) else str(error)

    assert begin(0, "complete") == 6
    assert begin(1, "complete") == 6, "a rank was killed after the last step"
    assert begin(1, "complete") == "refused", "this start has run it already"
    assert begin(2, "complete") == "refused", "a restart of what was refused"
    with mock.patch.object(Checkpoints, "save", stopped):
        assert begin(0, "preempted") == "preempted"
    assert begin(0, "preempted", SLURM_RESTART_COUNT="1") == 6, "SLURM has queued the job again"
    assert begin(0, "later") == 6
    with mock.patch.object(os, "getppid", lambda: 1):
        assert begin(1, "later") == "refused", "a restart by a later launch with the same id"
    assert begin(0, "crashed", fail_at=3) == "failed"
    assert begin(0, "crashed") == "refused" and begin(1, "crashed") == "refused", "a later launch with the same id"


def test_restart_of_a_run_that_has_ended(tmp_path):
    run_on_ranks(after_the_end, 1, tmp_path)


def test_launches_have_different_ids():
    def of(**env):
        return launch_id({"RANK": "0", "WORLD_SIZE": "1", **env})

    assert of() == "" and of(TORCHELASTIC_RUN_ID="7") == "7"
    assert of(TORCHELASTIC_RUN_ID="none") == f"{socket.gethostname()}:{os.getppid()}"
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "a"}
    assert launch_id(slurm | {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}) == "12.0"


# ---------------------------------------------------------------------- the lock


def test_second_run_is_refused(tmp_path):
    lock = FolderLock(tmp_path)
    lock.take("ab12")
    for _ in range(2):
        with pytest.raises(Exception, match=f"in use by another run, process {os.getpid()} on {socket.gethostname()}"):
            run_on_ranks(train, 2, replace(SHORT, out=tmp_path, domain=(2,)))
    lock.release(ended=True)
    assert len(run_on_ranks(train, 2, replace(SHORT, out=tmp_path, domain=(2,)))[0]) == 6


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_stale_lock(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        FolderLock(tmp_path).take("ab12")
        worker = os.fork()  # outlives the run, as a data worker may
        if worker:
            os.write(writer, str(worker).encode())
        time.sleep(30)
        os._exit(0)
    worker = int(os.read(reader, 20))
    with pytest.raises(CheckpointError, match=f"in use by another run, process {child}"):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock = FolderLock(tmp_path)
    os.kill(worker, signal.SIGKILL)
    assert f"process {child} on" in lock.abandoned() and lock.restarted_run() is None
    lock.release(ended=True)
    for text in ("", "{", "[1]", "\x00" * 50):  # of a kill or a full disk
        (tmp_path / "run.lock").write_text(text)
        lock = FolderLock(tmp_path)
        assert lock.previous == {} and lock.abandoned() is None
        lock.release(ended=True)


# ---------------------------------------------------------------------- SIGTERM


def terminated_in_the_last_save(folder):
    """Send SIGTERM to this process while its only checkpoint is written."""
    write = storage.CheckpointWriter.write_data

    def slowly(self, plan, planner):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        return write(self, plan, planner)

    storage.CheckpointWriter.write_data = slowly
    try:
        train(replace(SHORT, out=folder, save_every=0))
    finally:
        storage.CheckpointWriter.write_data = write


def test_sigterm_in_the_last_save(tmp_path):
    run_on_ranks(terminated_in_the_last_save, 1, tmp_path)
    assert list(Checkpoints(tmp_path).steps()) == [6]


# ---------------------------------------------------------------------- ranks agree


def disagreeing(folder):
    """Return what every rank raises if one of them differs in an option, or cannot write."""
    first, config = dist.get_rank() == 0, replace(SHORT, out=folder, domain=(2,))
    with pytest.raises(UsageError) as options:
        train(config if first else replace(config, learning_rate=0.5))
    write = Path.write_text

    def read_only(self, *args):
        raise OSError(30, "Read-only file system")

    try:
        if not first:
            Path.write_text = read_only
        with pytest.raises(ShardfieldError) as writing:
            train(config)
    finally:
        Path.write_text = write
    return str(options.value), str(writing.value)


def test_ranks_agree_before_the_first_step(tmp_path):
    first, second = run_on_ranks(disagreeing, 2, tmp_path)
    assert first == second
    options, writing = first
    assert options == "the ranks have different configurations: --learning-rate is 0.003 on rank 0, 0.5 on rank 1"
    assert writing == f"--out {tmp_path}: cannot be done\n  rank 1: Read-only file system"
    assert not (tmp_path / "metrics.jsonl").exists()


def folders_of_one_name(folder):
    """Return what every rank raises where a relative --out is a folder of its own on each of them, as on two hosts."""
    here, mine = os.getcwd(), folder / str(dist.get_rank())
    mine.mkdir()
    os.chdir(mine)
    try:
        with pytest.raises(ShardfieldError) as caught:
            train(replace(SHORT, out=Path("out"), domain=(2,), save_every=0))
    finally:
        os.chdir(here)
    return str(caught.value)


def test_ranks_without_a_common_folder_are_refused_before_the_first_step(tmp_path):
    first, second = run_on_ranks(folders_of_one_name, 2, tmp_path)
    assert first == second
    reason = f"does not see what rank 0 writes in {tmp_path / '1' / 'out'}: all ranks need one folder"
    assert first == f"--out out: cannot be done\n  rank 1: {reason}"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [], "nothing is left of the probe"


def unlike_views(folder):
    """Resume where rank 1 sees no checkpoint yet, as on a file system that caches listings."""
    config = replace(SHORT, out=folder, domain=(2,))
    train(replace(config, max_steps=3))
    latest = Checkpoints.latest
    try:
        if dist.get_rank() == 1:
            Checkpoints.latest = lambda self: None
        return train(config)
    finally:
        Checkpoints.latest = latest


def test_rank_0_decides_what_is_resumed(tmp_path):
    first, _ = run_on_ranks(unlike_views, 2, tmp_path)
    assert [step for step, _ in first] == [1, 2, 3, 4, 5, 6]


def unreadable(folder):
    """Return what every rank raises if only the first one can see that a checkpoint is damaged."""
    model, kept = nn.Linear(2, 2), Checkpoints(folder)
    kept.save(1, model)
    kept.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        (kept.latest() / "index.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        kept.load(folder / "step-000001", model)
    return str(caught.value)


def test_damage_is_refused_on_all_ranks(tmp_path):
    first, second = run_on_ranks(unreadable, 2, tmp_path)
    assert first == second and "index.json: not in the format" in first
