"""Call a function on every rank of a cached world."""

import multiprocessing
import multiprocessing.util
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._calls import function_name, pack
from ._pool import PROCESS_NAME, Pool

T = TypeVar("T")

# Keyed by process id and world size: a forked child of the caller must neither use nor kill its parent's ranks.
_pools: dict[tuple[int, int], Pool] = {}
_lock = threading.Lock()


def run_on_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank of a gloo world and return the results in rank order.

    >>> import torch.distributed as dist
    >>> from shardfield.testing import run_on_ranks
    >>> run_on_ranks(dist.get_rank, 2)
    [0, 1]

    The world is already initialized: `torch.distributed` has its default group, and RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as by a launcher. Each rank has one thread. `fn` must be a
    module-level function, since ranks import it by name. Arguments and results are copied through pickle. A script
    must call `run_on_ranks` under `if __name__ == "__main__":`.

    If any rank fails, `RanksFailed` is raised with an error for each failed rank. A rank may raise, die, or be stuck:
    stuck are ranks that have not returned after `timeout` seconds, or two seconds after the first failure. The error of
    a stuck rank names the line at which it blocks. A collective that only some ranks started is a failure too.

    The processes are reused by the next call with the same `world_size`. Before each call they are reset: environment,
    working directory and `sys.path` are those of the caller, with `env` on top (None removes a variable); torch's
    default dtype and device, grad mode and thread count have their initial values; random seeds are equal on all ranks.
    Process groups and imported modules stay. A call that fails, or that destroys the default group, ends the processes,
    and the next call starts new ones. SHARDFIELD_PRELOAD names modules, separated by spaces, that take long to import:
    the process from which all ranks are forked imports them once.

    A UserWarning, FutureWarning or DeprecationWarning attributed to a module of shardfield is raised as an error,
    regardless of the caller's filters. Warnings attributed to other modules follow Python's defaults.
    """
    name = f"run_on_ranks({function_name(fn)}, {world_size})"
    if multiprocessing.current_process().name.startswith(PROCESS_NAME):
        raise RuntimeError(
            f"{name}: called on a rank, which cannot start ranks of its own; "
            'in a script, put the call under `if __name__ == "__main__":`, since ranks import the script'
        )
    if world_size < 1:
        raise ValueError(f"{name}: world_size must be at least 1")
    head, body = pack(fn, args, kwargs, env)
    key = os.getpid(), world_size
    with _lock:
        pool = _pools.pop(key, None)
        if pool is not None and not pool.usable():
            pool.close()
            pool = None
        if pool is None:
            # Not atexit: a process of multiprocessing waits for its children before it runs what atexit registered.
            multiprocessing.util.Finalize(None, _close_pools, exitpriority=10)
            pool = Pool(world_size)
        try:
            return pool.call(name, head, body, timeout)
        finally:
            if pool.alive:
                _pools[key] = pool


def _close_pools() -> None:
    for key in [key for key in _pools if key[0] == os.getpid()]:
        _pools.pop(key).close()
