"""The process of one rank: join the world, then run calls until the caller closes the connection."""

import faulthandler
import io
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import runtime
from ._calls import Call, load_modules
from ._failures import RankError

BARRIER = b""  # sent in place of a call


def serve(rank_env: dict[str, str], store_port: int, stack_path: str, conn: Connection) -> None:
    """Run the process: initialize the world, report it to the caller, then run calls one by one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and closes the pool
    stacks = open(stack_path, "a")  # stays open: faulthandler writes to it
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the output of a killed rank is not lost
    try:
        fresh = _ProcessState(rank_env)
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=60))
        world_size = int(rank_env["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=int(rank_env["RANK"]), world_size=world_size)
    except BaseException as error:
        _answer(conn, error)
        return
    world = dist.group.WORLD
    _answer(conn, result=pickle.dumps(threading.get_ident()))
    while True:
        try:
            head = conn.recv_bytes()
            if head == BARRIER:
                dist.barrier()
                _answer(conn)
            else:
                _answer_call(conn, pickle.loads(head), conn.recv_bytes(), fresh, world)
        except (EOFError, OSError):
            return


def _answer_call(conn: Connection, call: Call, body: bytes, fresh: "_ProcessState", world: Any) -> None:
    """Run one call in the caller's environment and send its result, or the exception that it raised."""
    try:
        fresh.restore(call)
        with warnings.catch_warnings():
            for category in (UserWarning, FutureWarning, DeprecationWarning):
                warnings.filterwarnings("error", category=category, module=r"shardfield(?!\.testing\b)(\.|$)")
            load_modules(call.modules)
            fn, args, kwargs = pickle.loads(body)
            result = fn(*args, **kwargs)
        answer = _pickle_result(result)
    except BaseException as error:
        _answer(conn, error)
    else:
        _answer(
            conn, result=answer, reusable=dist.is_initialized() and dist.group.WORLD is world and not _should_retire()
        )


def _pickle_result(result: Any) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the return value, a {type(result).__name__}, cannot be sent to the caller: {error}"
        ) from error


def _answer(
    conn: Connection, error: BaseException | None = None, *, result: bytes = b"", reusable: bool = True
) -> None:
    """Send two messages: (error or None, whether the process can be reused), and the pickled result or exception."""
    rank_error = None
    if error is not None:
        trace = error.__traceback__
        if trace is not None and trace.tb_frame.f_code is _answer_call.__code__:
            trace = trace.tb_next or trace
        text = "".join(traceback.format_exception(type(error), error, trace))
        rank_error = RankError("raised", type(error).__name__, str(error), text)
        try:
            result = pickle.dumps(error)
        except Exception:  # an exception may hold objects that cannot be pickled; its text is sent anyway
            result = b""
    conn.send_bytes(pickle.dumps((rank_error, reusable)))
    conn.send_bytes(result)


class _ProcessState:
    """The initial state of the process (environment, torch defaults, random seeds), restored before each call."""

    def __init__(self, rank_env: dict[str, str]) -> None:
        self.rank_env = rank_env
        os.environ.update(rank_env)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        torch.set_num_threads(1)
        random.seed(0)
        np.random.seed(0)
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self, call: Call) -> None:
        environ = {k: v for k, v in (call.environ | self.rank_env | call.env).items() if v is not None}
        if dict(os.environ) != environ:
            for name in set(os.environ) - set(environ):
                del os.environ[name]
            os.environ.update(environ)
        os.chdir(call.cwd)
        sys.path[:] = call.path
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        if torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler, which takes a second
            torch.use_deterministic_algorithms(False)
        # After an earlier call that kept a graph or wrote in place, backward would still compare the ranks.
        runtime.active.recorded = None
        runtime.active.written_meshes.clear()
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        torch.set_rng_state(self.random[2])


def _should_retire() -> bool:
    """Return whether too many files are open: each process group keeps about seven open until the process ends."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return len(os.listdir("/dev/fd")) > min(2000, limit // 2)


def _exit_with_parent() -> None:
    """Exit when the caller does: a rank that is blocked in a collective would not notice that its pipe was closed."""
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)
