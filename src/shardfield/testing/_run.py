"""Call a function on every rank of a cached world."""

import atexit
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._calls import function_name, pack
from ._pool import PROCESS_NAME, Pool

T = TypeVar("T")

# By process too: a forked child of the caller must neither use nor end its parent's ranks.
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
    """Call `fn(*args, **kwargs)` on every rank of a gloo world and return what the ranks return, in rank order.

    >>> import torch.distributed as dist
    >>> from shardfield.testing import run_on_ranks
    >>> run_on_ranks(dist.get_rank, 2)
    [0, 1]

    The world is already initialised: `torch.distributed` has its default group, and RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as a launcher would set them. Each rank
    has one thread. `fn` must be a module-level function (ranks import it by name); arguments and results go
    by value through pickle. A script that calls `run_on_ranks` does so under `if __name__ == "__main__":`.

    If any rank fails, `RanksFailed` tells what happened on each, once all have answered: the exceptions
    raised, a process that died, and for ranks that wait for a failed one or are not done after `timeout`
    seconds the line they are stuck at. They get two seconds after the first failure, so a rank that
    raises does not leave the others waiting. Collectives that were started on some ranks only are a failure too.

    The processes are kept for the next call with the same `world_size`. Each call starts as if they were
    new: the caller's environment, working directory and `sys.path`, with `env` on top (None removes a
    variable); torch's default dtype and device, grad mode and thread count; and the same random seeds on all
    ranks. Process groups and imported modules stay. A call that fails, or that destroys the default
    group, ends its processes; the next one gets new ones. Modules that take long to import can be named in
    SHARDFIELD_PRELOAD, with spaces between: they are imported once, by the process that all ranks are forked from.

    A UserWarning, FutureWarning or DeprecationWarning attributed to a module of shardfield is raised as an
    error, whatever the caller's filters; warnings attributed to other modules are left to Python's defaults.
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
        pool = pool or Pool(world_size)
        try:
            return pool.call(name, head, body, timeout)
        finally:
            if pool.alive:
                _pools[key] = pool


@atexit.register
def _close_pools() -> None:
    for key in [key for key in _pools if key[0] == os.getpid()]:
        _pools.pop(key).close()
