"""The process behind one rank: join the world, then serve calls until the caller goes away."""

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ._calls import Call, load_modules
from ._failures import RankError

CLOSING_BARRIER_S = 10.0


def serve(rank_env: dict[str, str], store_port: int, stack_path: str, conn: Connection) -> None:
    """Body of the process: report readiness with the id of the main thread, then answer calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's: it ends the pool
    stacks = open(stack_path, "a")  # noqa: SIM115 - faulthandler keeps writing to it
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    os.environ.update(rank_env)
    rank, world_size = int(rank_env["RANK"]), int(rank_env["WORLD_SIZE"])
    try:
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    except BaseException as error:
        _answer(conn, _raised(error), False, b"")
        return
    world = dist.group.WORLD
    fresh = _State()
    _answer(conn, None, True, pickle.dumps(threading.get_ident()))
    while True:
        try:
            head = conn.recv_bytes()
            body = conn.recv_bytes() if head else b""
        except EOFError:
            return
        if not head:
            _answer(conn, *_closing_barrier())
            continue
        error, result = _run(pickle.loads(head), body, rank_env, fresh)
        sys.stdout.flush()
        _answer(conn, error, dist.is_initialized() and dist.group.WORLD is world, result)


def _run(call: Call, body: bytes, rank_env: dict[str, str], fresh: "_State") -> tuple[RankError | None, bytes]:
    """Run one call in the caller's surroundings; whatever it raises is an answer, not an end."""
    try:
        fresh.restore(call, rank_env)
        with warnings.catch_warnings():
            for category in (UserWarning, FutureWarning, DeprecationWarning):
                warnings.filterwarnings("error", category=category, module=r"shardfield(\.|$)")
            load_modules(call.modules)
            fn, args, kwargs = pickle.loads(body)
            result = fn(*args, **kwargs)
    except BaseException as error:
        return _raised(error), b""
    try:
        return None, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note(f"while pickling the return value, a {type(result).__name__}, for the caller")
        return _raised(error), b""


class _State:
    """What calls may change about a process, as it was before the first of them."""

    def __init__(self) -> None:
        self.torch_rng = torch.get_rng_state()
        self.numpy_rng = np.random.get_state()
        self.python_rng = random.getstate()
        self.dtype = torch.get_default_dtype()

    def restore(self, call: Call, rank_env: dict[str, str]) -> None:
        environ = {k: v for k, v in (rank_env | call.environ).items() if k not in call.unset}
        if dict(os.environ) != environ:
            for name in set(os.environ) - set(environ):
                del os.environ[name]
            os.environ.update(environ)
        os.chdir(call.cwd)
        sys.path[:] = call.path
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        if torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler: over a second
            torch.use_deterministic_algorithms(False)
        torch.set_rng_state(self.torch_rng)
        np.random.set_state(self.numpy_rng)
        random.setstate(self.python_rng)


def _closing_barrier() -> tuple[RankError | None, bool, bytes]:
    """Find collectives that some rank started and others did not, before they reach the next call."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=CLOSING_BARRIER_S))
    except Exception as error:
        text = f"the function returned on all ranks, but its collectives do not match across ranks ({error})"
        return replace(_raised(error), message=text), False, b""
    return None, True, b""


def _answer(conn: Connection, error: RankError | None, reusable: bool, result: bytes) -> None:
    try:
        head = pickle.dumps((error, reusable))
    except Exception:  # an exception may hold anything; its text always travels
        assert error is not None
        head = pickle.dumps((replace(error, exception=None), reusable))
    conn.send_bytes(head)
    conn.send_bytes(result)


def _raised(error: BaseException) -> RankError:
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None and trace.tb_frame.f_code is _run.__code__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return RankError("raised", type(error).__name__, str(error), text, _travels(error))


def _travels(error: BaseException) -> BaseException | None:
    """The exception if a pickled copy can be made and read back: some take other arguments than they keep."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _end_with_caller() -> None:
    """A rank blocked in a collective does not see its pipe close; without this it would outlive the caller."""
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)
