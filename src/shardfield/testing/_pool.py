"""A world of processes on this machine that answers calls, seen from the process that makes them."""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import _stacks
from ._failures import RankError, RanksFailed, name_exit
from ._worker import serve

START_S = 120.0
GRACE_S = 2.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Pool:
    """`world_size` ranks of one gloo world, started once and called many times.

    The processes are forked from a server that has imported torch, so a new pool costs a fraction of a
    second. The rendezvous store lives in this process on a port the system chose, so no port can be taken.
    MASTER_PORT is another one, held but not listened on: a call that leaves the world may start its own there.
    """

    def __init__(self, world_size: int) -> None:
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="shardfield-ranks-", ignore_cleanup_errors=True)
        self._stacks = [Path(self._folder.name, f"rank{rank}") for rank in range(world_size)]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._master = _hold_port()
        context = multiprocessing.get_context("forkserver")
        preload = ["numpy", "torch.distributed", "shardfield.testing._worker"]
        # Every rank imports the caller's __main__; under pytest that is most of pytest.
        context.set_forkserver_preload(preload + ["pytest"] * ("pytest" in sys.modules))
        self._conns, self._processes = [], []
        try:
            with _environ(_ONE_THREAD):
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    env = self._rank_env(rank, world_size)
                    args = (env, self._store.port, str(self._stacks[rank]), theirs)
                    process = context.Process(target=serve, args=args, name=f"rank {rank} of {world_size}")
                    process.start()
                    theirs.close()
                    self._conns.append(ours)
                    self._processes.append(process)
            self._threads: list[int] = []
            answers = self._collect(f"starting {world_size} ranks", time.monotonic() + START_S, START_S)
            self._threads = [pickle.loads(answer) for answer in answers]
        except BaseException:
            self.close()
            raise

    def call(self, name: str, head: bytes, body: bytes, timeout: float) -> list[Any]:
        """Run a packed call on every rank; any failure ends the pool, since the ranks may be out of step."""
        try:
            for conn in self._conns:
                try:
                    conn.send_bytes(head)
                    conn.send_bytes(body)
                except OSError:  # the rank has died; collecting says so
                    pass
            answers = self._collect(name, time.monotonic() + timeout, timeout)
            if self.alive:
                for conn in self._conns:
                    conn.send_bytes(b"")
                self._collect(name, time.monotonic() + timeout, timeout)
        except BaseException:
            self.close()
            raise
        return [_load(rank, answer) for rank, answer in enumerate(answers)]

    def usable(self) -> bool:
        return self.alive and not wait([process.sentinel for process in self._processes], 0)

    def close(self) -> None:
        """End the ranks, whatever they are doing."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for conn in self._conns:
            conn.close()
        self._master.close()
        self._folder.cleanup()

    def _rank_env(self, rank: int, world_size: int) -> dict[str, str]:
        return _ONE_THREAD | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._master.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }

    def _collect(self, name: str, deadline: float, timeout: float) -> list[bytes]:
        """One answer per rank, or RanksFailed once all have answered or waiting longer makes no sense."""
        answers: dict[int, bytes] = {}
        errors: dict[int, RankError] = {}
        waiting = set(range(len(self._conns)))
        while waiting:
            sources: dict[Any, int] = {self._conns[rank]: rank for rank in waiting}
            sources |= {self._processes[rank].sentinel: rank for rank in waiting}
            ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {sources[source] for source in ready}:
                waiting.discard(rank)
                try:
                    error, reusable = pickle.loads(self._conns[rank].recv_bytes())
                    answers[rank] = self._conns[rank].recv_bytes()
                    self.alive &= reusable
                except (EOFError, OSError):
                    error = self._death(rank)
                if error is not None:
                    errors[rank] = error
                    # The others may wait for this rank in a collective: they get a moment to find out, no more.
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            after = f"not done after {timeout:g} s" if not errors else "still running when another rank had failed"
            errors |= self._stuck(sorted(waiting), after)
        if errors:
            raise RanksFailed(name, errors)
        return [answers[rank] for rank in range(len(self._conns))]

    def _death(self, rank: int) -> RankError:
        self._processes[rank].join(GRACE_S)
        text = self._stacks[rank].read_text() if self._stacks[rank].exists() else ""
        frames = _stacks.read_stack(text, self._threads[rank]) if self._threads else []
        where = f", {_stacks.describe(frames)}" if frames else ""
        message = name_exit(self._processes[rank].exitcode) + where
        return RankError("died", "", message, _stacks.format_stack(frames))

    def _stuck(self, ranks: list[int], after: str) -> dict[int, RankError]:
        """Ask the given ranks for their stacks and say where they are."""
        paths = [self._stacks[rank] for rank in ranks]
        for path in paths:
            path.touch()
        sizes = [path.stat().st_size for path in paths]
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            if self._threads:  # before it is ready, a rank may not have its handler yet and the signal would end it
                os.kill(pid, signal.SIGUSR1)
        _stacks.wait_for_dumps(paths, sizes, seconds=2.0 if self._threads else 0.0)
        errors = {}
        for rank in ranks:
            text = self._stacks[rank].read_text()
            frames = _stacks.read_stack(text, self._threads[rank]) if self._threads else []
            message = f"{after}, {_stacks.describe(frames)}"
            errors[rank] = RankError("stuck", "", message, _stacks.format_stack(frames))
        return errors


def _load(rank: int, answer: bytes) -> Any:
    try:
        return pickle.loads(answer)
    except Exception as error:
        error.add_note(f"while unpickling what rank {rank} returned")
        raise


def _hold_port() -> socket.socket:
    """A socket on a free port that others may listen on, as SO_REUSEADDR allows while this one does not."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


@contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
