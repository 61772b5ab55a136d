"""The lock on a run's folder: one run uses it at a time, and a restarted run continues its own.

Rank 0 holds a lock on the file `run.lock` of the folder as long as its process runs. The system drops the lock when the
process ends in any way, so a lock is never stale; the text of the file is that of the last holder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..comm.consensus import ask_first_rank, raise_together
from ..distributed.launch import detect
from .checkpoint import Checkpoints
from .checkpoint_index import CheckpointError
from .config import TrainConfig
from .log import Log
from .preemption import Preempted

LOCK = "run.lock"


def check_writable(folder: Path) -> None:
    """Raise on all ranks unless every rank can write to a run's folder, and sees there what rank 0 writes.

    Ranks whose folders have one name and are not one folder, on hosts without a shared file system, could save nothing.
    """
    group, rank = dist.group.WORLD, dist.get_rank()

    def make() -> list[str | None]:
        try:
            probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
            probe.mkdir(parents=True)
            return [probe.name, None]
        except OSError as error:
            return [None, error.strerror or str(error)]

    name, failed = ask_first_rank(make, group)
    problem = failed if rank == 0 else None
    if name is not None:
        try:
            # NFS may have cached that there is no such folder: this call asks the server.
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name / f"rank-{rank}").write_text("0")
        except FileNotFoundError:
            problem = f"does not see what rank 0 writes in {folder.absolute()}: all ranks need one folder"
        except OSError as error:
            problem = error.strerror or str(error)
    try:
        raise_together(f"--out {folder}", group, problem)
    finally:
        if rank == 0 and name is not None:
            shutil.rmtree(folder / name, ignore_errors=True)


class FolderLock:
    """The lock on a run's folder, and what its file says.

    A POSIX record lock: it is not inherited by forked processes, which may outlive a killed rank, and works on shared
    file systems.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.previous = self._read()  # the last holder's text
        self.unsupported: str | None = None  # why the file system cannot lock
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(self._file)
                raise CheckpointError(
                    f"{folder}: in use by another run, {_describe(self.previous)}; end it, or choose another folder"
                ) from None
            self.unsupported = error.strerror or str(error)

    def take(self, run_id: str) -> None:
        """Write who holds the lock, for a second run and for a restart of this one."""
        holder = {"run": run_id, "launch": launch_id(os.environ), "host": socket.gethostname(), "pid": os.getpid()}
        self._write(holder | {"parent": os.getppid(), "restarts": restarts(os.environ)})

    def refuse(self) -> None:
        """Write that this launch does not continue the last run here, so that no restart of it does either.

        torchrun restarts ranks that were refused, and its id may be that of an earlier launch (`--rdzv-id 7`).
        """
        if self.previous.get("launch") == launch_id(os.environ):
            self._write(self.previous | {"launch": None})

    def release(self, ended: bool) -> None:
        """Release the lock. ended: the run is complete, or was saved and stopped."""
        with suppress(OSError):  # a full disk must not hide the error that ends the run
            self._write(self._read() | {"pid": None, "ended": ended})
        os.close(self._file)

    def restarted_run(self) -> str | None:
        """Return the run that this process continues if its launcher has restarted it.

        Also a run that has ended: a rank may be killed after the last step, and SLURM queues a job again that was
        preempted. The next command of one job, and a later launch with the same id, are no restarts of it.
        """
        last, count = self.previous, restarts(os.environ)
        if not any(count) or not last.get("launch") or last["launch"] != launch_id(os.environ):
            return None
        if last.get("ended"):
            slurm, torchrun = last["restarts"]
            same_agent = (last["host"], last["parent"]) == (socket.gethostname(), os.getppid())
            if not (count[0] > slurm or (same_agent and count[1] > torchrun)):
                return None
        return last.get("run")

    def abandoned(self) -> str | None:
        """Return which process held the lock before and ended without releasing it."""
        return _describe(self.previous) if self.previous.get("pid") else None

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._file, 4096, 0))
        except ValueError:  # empty, or truncated by a kill
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, holder: dict[str, Any]) -> None:
        data = json.dumps(holder | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


def _describe(holder: Mapping[str, Any]) -> str:
    if not holder.get("pid"):
        return "process unknown"
    return f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}"


def launch_id(env: Mapping[str, str]) -> str:
    """Return what the restarts of a launch have in common: the launcher's id, or its process where it has none."""
    if job := detect(env).job.removesuffix("."):
        return (
            job if job != "none" else f"{socket.gethostname()}:{os.getppid()}"
        )  # "none": torchrun's static rendezvous
    return ""


def restarts(env: Mapping[str, str]) -> list[int]:
    """Return how often SLURM and torchrun have started this program before: requeued jobs, restarts of ranks."""
    counts = (env.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return [int(count) if count.isdigit() else 0 for count in counts]


@contextmanager
def own_folder(config: TrainConfig, checkpoints: Checkpoints, log: Log) -> Iterator[Path | None]:
    """Lock the run's folder, and yield the checkpoint to continue from; rank 0 decides."""
    locks: list[FolderLock] = []

    def begin() -> list[str | None]:
        lock = FolderLock(config.out)
        locks.append(lock)
        path = _choose_checkpoint(lock, config, checkpoints, log)
        try:
            run_id = checkpoints.claim_alone(path)
        except CheckpointError:
            lock.refuse()
            raise
        settings = {"recipe": type(config).__name__, **config.as_json()}
        (config.out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        lock.take(run_id)
        return [run_id, None if path is None else str(path)]

    ended = False
    try:
        checkpoints.run_id, path = ask_first_rank(begin, checkpoints.group, CheckpointError)
        yield None if path is None else Path(path)
        ended = True
    except Preempted:
        ended = True
        raise
    finally:
        for lock in locks:
            lock.release(ended)


def _choose_checkpoint(lock: FolderLock, config: TrainConfig, checkpoints: Checkpoints, log: Log) -> Path | None:
    if lock.unsupported:
        log.print_line(f"{lock.path}: cannot be locked ({lock.unsupported}): a second run would go unnoticed")
    run_id = lock.restarted_run()
    if run_id is not None and (found := checkpoints.steps(run_id)):
        return found[max(found)]  # a restart continues its run, whatever this run began from
    if run_id is None and (process := lock.abandoned()):
        log.print_line(f"{lock.path}: the last run here, {process}, was killed")
    if config.resume == "auto":
        return checkpoints.latest()
    return None if config.resume == "never" else Path(config.resume)
