"""A pool of processes on this machine that form a world and run calls; this is the caller's side."""

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
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from . import _stacks
from ._failures import RankError, RanksFailed, describe_exit
from ._worker import BARRIER, serve

PROCESS_NAME = "shardfield rank"
START_TIMEOUT_S = 120.0
GRACE_S = 2.0
BARRIER_TIMEOUT_S = 10.0
# Ranks share few cores. torch's compiler compiles in the rank itself: it would start a pool of processes for each rank,
# and code from such a pool has corrupted the memory of the process that loads it (pytorch#181618).
_ONE_THREAD = dict.fromkeys(
    ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"], "1"
)
_UNMATCHED = (
    "the function returned on all ranks, but a barrier after it does not complete: "
    "some ranks started a collective that others did not"
)


class Pool:
    """`world_size` ranks of one gloo world, started once and called many times.

    The processes are forked from a server that has imported torch, so that a new pool starts in a fraction of a second.
    The rendezvous store runs in this process on a port that the system chose, so that it is never in use. MASTER_PORT
    is another port, reserved but without a listener: a call that leaves the world may start its own world there.
    """

    def __init__(self, world_size: int) -> None:
        self.alive = True
        self._processes: list[BaseProcess] = []
        self._conns: list[Connection] = []
        self._threads: list[int] = []  # main thread ids of the ranks, known once the world is initialized
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._master_socket = _reserve_port()
        self._stacks: list[TextIO] = []
        try:
            # The folder can be removed once all ranks have opened their files.
            with tempfile.TemporaryDirectory(prefix="shardfield-ranks-") as folder:
                self._start(world_size, Path(folder))
                answers = self._collect(f"starting {world_size} ranks", START_TIMEOUT_S)
            self._threads = [pickle.loads(answer) for answer in answers]
        except BaseException:
            self.close()
            raise

    def _start(self, world_size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        preload = ["numpy", "torch.distributed", "shardfield.testing._worker"]
        # Every rank imports the caller's __main__; under pytest that is most of pytest.
        preload += ["pytest"] * ("pytest" in sys.modules) + os.environ.get("SHARDFIELD_PRELOAD", "").split()
        context.set_forkserver_preload([*preload, "shardfield.testing._frozen"])
        with _importable_main(), _environ(_ONE_THREAD):  # libraries of the server size their thread pools on import
            for rank in range(world_size):
                stack = folder / f"rank{rank}"
                self._stacks.append(open(stack, "w+"))
                ours, theirs = context.Pipe()
                args = (self._rank_env(rank, world_size), self._store.port, str(stack), theirs)
                process = context.Process(target=serve, args=args, name=f"{PROCESS_NAME} {rank}")
                process.start()
                theirs.close()
                self._conns.append(ours)
                self._processes.append(process)

    def _rank_env(self, rank: int, world_size: int) -> dict[str, str]:
        return _ONE_THREAD | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._master_socket.getsockname()[1]),
            # Otherwise gloo looks up the host name, which need not resolve on a test machine.
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }

    def usable(self) -> bool:
        return self.alive and not wait([process.sentinel for process in self._processes], 0)

    def call(self, name: str, head: bytes, body: bytes, timeout: float) -> list[Any]:
        """Run a pickled call on every rank. Any failure closes the pool, since its ranks may be out of step."""
        try:
            self._send(head, body)
            answers = self._collect(name, timeout)
            if self.alive:
                self._send(BARRIER)
                self._collect(name, BARRIER_TIMEOUT_S, _UNMATCHED)
            else:  # a rank left the world or has too many open files
                self.close()
        except BaseException:
            self.close()
            raise
        return [_load_result(rank, answer) for rank, answer in enumerate(answers)]

    def close(self) -> None:
        """Kill the ranks and close all connections."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        resources: list[Connection | TextIO | socket.socket] = [*self._conns, *self._stacks, self._master_socket]
        for resource in resources:
            resource.close()

    def _send(self, *messages: bytes) -> None:
        for conn in self._conns:
            try:
                for message in messages:
                    conn.send_bytes(message)
            except OSError:  # the rank has died, which `_collect` reports
                pass

    def _collect(self, name: str, timeout: float, timeout_message: str = "") -> list[bytes]:
        """Return one answer per rank. Raise RanksFailed if a rank fails, dies or does not answer in time.

        After the first failure, the other ranks have GRACE_S seconds to answer.
        """
        answers: dict[int, bytes] = {}
        errors: dict[int, RankError] = {}
        pending = set(range(len(self._conns)))
        deadline = time.monotonic() + timeout
        while pending:
            sources: dict[Any, int] = {self._conns[rank]: rank for rank in pending}
            sources |= {self._processes[rank].sentinel: rank for rank in pending}
            ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {sources[source] for source in ready}:
                pending.discard(rank)
                error = self._receive(rank, answers)
                if error is not None:
                    errors[rank] = error
                    # The others may be blocked in a collective with this rank and never answer.
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if pending and timeout_message:
            errors |= {rank: RankError("stuck", "", timeout_message) for rank in pending}
        elif pending:
            reason = "still running after another rank failed" if errors else f"not done after {timeout:g} s"
            errors |= self._dump_stacks(sorted(pending), reason)
        if errors:
            raise RanksFailed(name, errors)
        return [answers[rank] for rank in range(len(self._conns))]

    def _receive(self, rank: int, answers: dict[int, bytes]) -> RankError | None:
        """Receive the answer of a rank into `answers`. Return its error, also if the process died."""
        try:
            if not self._conns[rank].poll():  # the process died, but a child of it still has the pipe open
                return self._death_error(rank)
            error, reusable = pickle.loads(self._conns[rank].recv_bytes())
            answers[rank] = self._conns[rank].recv_bytes()
        except (EOFError, OSError):
            return self._death_error(rank)
        self.alive &= reusable
        if error is None:
            return None
        try:
            return replace(error, exception=pickle.loads(answers[rank]))
        except Exception:  # not every exception can be unpickled; `error` holds its text
            return error

    def _death_error(self, rank: int) -> RankError:
        self._processes[rank].join(GRACE_S)
        cause = describe_exit(self._processes[rank].exitcode)
        if not self._threads:
            return RankError("died", "", f"{cause} while starting; its output is on stderr")
        frames = _stacks.read_stack(_stacks.read_all(self._stacks[rank]), self._threads[rank])
        location = f", {_stacks.describe(frames)}" if frames else " before the call returned"
        return RankError("died", "", cause + location, _stacks.format_stack(frames))

    def _dump_stacks(self, ranks: list[int], reason: str) -> dict[int, RankError]:
        """Make ranks that have not answered write their stacks. Return a "stuck" error for each."""
        if not self._threads:  # the signal handler may not be installed yet
            return {rank: RankError("stuck", "", reason) for rank in ranks}
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        dumps = _stacks.wait_for_dumps([self._stacks[rank] for rank in ranks], seconds=2.0)
        errors = {}
        for rank, dump in zip(ranks, dumps, strict=True):
            frames = _stacks.read_stack(dump, self._threads[rank])
            errors[rank] = RankError("stuck", "", f"{reason}, {_stacks.describe(frames)}", _stacks.format_stack(frames))
        return errors


def _load_result(rank: int, answer: bytes) -> Any:
    try:
        return pickle.loads(answer)
    except Exception as error:
        error.add_note(f"while unpickling the return value of rank {rank}")
        raise


def _reserve_port() -> socket.socket:
    """Return a socket bound to a free port. It does not listen, so that with SO_REUSEADDR another socket may."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


@contextmanager
def _importable_main() -> Iterator[None]:
    """Hide the file name "<stdin>" of a program read from a pipe: ranks would try to import it as a file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    hide = file is not None and not os.path.isfile(file)
    if hide:
        del main.__file__
    try:
        yield
    finally:
        if hide:
            main.__file__ = file


@contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the context."""
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
