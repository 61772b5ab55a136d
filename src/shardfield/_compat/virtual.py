"""Private names for several ranks in one process: each has its own state of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

c10d = dist.distributed_c10d


def _own_table(name: str) -> property:
    return property(lambda self: self.__dict__.setdefault(f"_own_{name}", {}))


class RankState(c10d._World):  # type: ignore[name-defined]
    """The state of torch.distributed of one rank. torch 2.11-2.15: `_World` keeps its tables in module attributes."""

    pg_map = _own_table("pg_map")
    pg_names = _own_table("pg_names")
    pg_group_ranks = _own_table("pg_group_ranks")
    pg_backend_config = _own_table("pg_backend_config")
    tags_to_pg = _own_table("tags_to_pg")
    pg_to_tag = _own_table("pg_to_tag")
    group_count = 0


def current_world() -> Any:
    """Return the state of torch.distributed. torch 2.11-2.15; no public name."""
    return c10d._world


def set_rank_state(state: Any, isolated: bool) -> None:
    """Make `state` that of torch.distributed. `isolated`: names of groups are per thread.

    torch 2.11-2.15: as torch's own tests with several ranks in one process do.
    """
    c10d._world = state
    torch._C._distributed_c10d._set_thread_isolation_mode(isolated)


def register_threaded_backend(create: Callable[..., dist.ProcessGroup]) -> None:
    """Register the backend "threaded". torch 2.11-2.15: meshes of this backend compare equal in one thread only."""
    if hasattr(dist.Backend, "THREADED"):  # a second world of virtual ranks, or torch's own tests
        plugin = dist.Backend._plugins["THREADED"]
        dist.Backend._plugins["THREADED"] = plugin._replace(creator_fn=create)
    else:
        dist.Backend.register_backend("threaded", create, devices=["cpu", "cuda"])


def name_of_group(group: Any) -> str:
    """Return the name that torch.distributed has given a group, equal on all its ranks. torch 2.11-2.15."""
    return c10d._world.pg_names[group]


def ranks_of_group(group: Any) -> list[int]:
    """Return the global ranks of a group, by coord. torch 2.11-2.15: the public function asks the current rank."""
    return list(c10d._world.pg_group_ranks[group])


def default_store() -> dist.Store:
    """Return the store with which this process joined its world. torch 2.11-2.15; no public name."""
    return c10d._get_default_store()


class PythonGroup(dist.ProcessGroup):
    """The base of process groups in Python.

    torch 2.15: `batch_isend_irecv` asks every group for the backend of a device, and raises for a group that has none.
    torch 2.11-2.14 ask no subclass.
    """

    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> Any:
        return self


Work = torch._C._distributed_c10d.Work
