"""The lock on a run's folder: one run uses it at a time, and a restarted run continues its own.

Rank 0 holds a lock on the file `run.lock` of the folder as long as its process runs. The system drops the lock when the
process ends in any way, so a lock is never stale; the text of the file is that of the last holder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
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
    """Raise on all ranks unless every rank can write to a run's folder."""
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
        probe.write_text("0")
        probe.unlink()
    except OSError as error:
        problem = error.strerror or str(error)
    raise_together(f"--out {folder}", dist.group.WORLD, problem)


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
        self._write({"run": run_id, "launch": launch_id(os.environ), "host": socket.gethostname(), "pid": os.getpid()})

    def release(self, ended: bool) -> None:
        """Release the lock. ended: the run is not to be restarted."""
        with suppress(OSError):  # a full disk must not hide the error that ends the run
            self._write(self._read() | {"pid": None} | ({"launch": None} if ended else {}))
        os.close(self._file)

    def restarted_run(self) -> str | None:
        """Return the run that this process continues if its launcher has restarted it."""
        launch = launch_id(os.environ) if is_restart(os.environ) else None
        return self.previous.get("run") if launch and self.previous.get("launch") == launch else None

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


def is_restart(env: Mapping[str, str]) -> bool:
    """Return whether the launcher has started this program before: torchrun's restarts, SLURM's requeued jobs."""
    return any(env.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


@contextmanager
def own_folder(config: TrainConfig, checkpoints: Checkpoints, log: Log) -> Iterator[Path | None]:
    """Lock the run's folder, and yield the checkpoint to continue from; rank 0 decides."""
    locks: list[FolderLock] = []

    def begin() -> list[str | None]:
        lock = FolderLock(config.out)
        locks.append(lock)
        path = _choose_checkpoint(lock, config, checkpoints, log)
        run_id = checkpoints.claim_alone(path)
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
