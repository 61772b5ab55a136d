"""Private names of torch.distributed: groups, stores, meshes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from . import without_modes

# torch 2.11-2.12 have all_gather_into_tensor; 2.13 renames it all_gather_single and warns. Can go with 2.12.
reduce_scatter_flat = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)
all_gather_flat = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor

# The option of DDP that syncs buffers before a forward. torch 2.13 renames it and warns. Can go with 2.12.
BUFFER_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def process_group(name: str) -> Any:
    """Return the process group with this name, as traced programs refer to it. torch 2.11-2.15; no public name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


@contextmanager
def uncounted_group() -> Iterator[None]:
    """Keep the count of groups unchanged over `new_group(..., use_local_synchronization=True)`.

    Only the members of the group call it. torch 2.15 counts it on the members and names later groups by the count:
    ranks would differ in the names, and messages of different groups would be mixed up. The name of this group contains
    its ranks and the count, which is fixed here.
    """
    world = torch.distributed.distributed_c10d._world
    before, world.group_count = world.group_count, -1
    try:
        yield
    finally:
        world.group_count = before


@contextmanager
def observed_waits(observe: Callable[[], Any]) -> Iterator[None]:
    """Run every wait for a message inside the context `observe()`, the waits of FSDP and of other libraries too.

    torch 2.11-2.15: all collectives of torch.distributed return a `Work`, or wait for one themselves. There is no hook
    for waits. `Work.wait` is restored at the end of the context.
    """
    work = torch.distributed.distributed_c10d.Work
    before = work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with observe():
            return before(self, *args, **kwargs)

    work.wait = wait
    try:
        yield
    finally:
        work.wait = before


def world_store() -> Any:
    """Return the store of the default process group; None if there is none or the store is a fake one.

    torch 2.11-2.15: a store that was made by `init_process_group` has no public name.
    """
    if not torch.distributed.is_initialized():
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return None if type(store).__name__ == "FakeStore" else store


def store_client(store: Any) -> Any:
    """Return a client of the same store with a connection of its own, so that a blocked call on one stops no other.

    torch 2.11-2.15; stores without `clone` are returned as they are.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        return store


def group_timeout(group: Any) -> float:
    """Return the time limit of the messages of a group, in seconds. torch 2.11-2.15; no public name."""
    kinds = torch.distributed.get_backend_config(group).split(",")
    return group._get_backend(torch.device(kinds[0].split(":")[0])).options._timeout.total_seconds()


def backend_class(group: Any, device: torch.device) -> type:
    """Return the class of the backend of a group for a device. torch 2.11-2.15; no public name."""
    return type(group._get_backend(device))


# torch 2.11-2.15: the groups that a DeviceMesh makes have torch's time-outs, and init_device_mesh takes no other.
set_group_timeout = torch.distributed.distributed_c10d._set_pg_timeout


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Return the mesh with all axes flattened into one, named `name`. torch 2.11-2.15: cached; no public name.

    It reads this rank's coordinate from a tensor, which must have data even while a step runs on fake tensors.
    """
    with without_modes():
        return mesh._flatten(name)


def group_argument(args: Any) -> Any:
    """Return the process group among the arguments of an operator of torch.distributed.

    torch 2.11-2.15: operators get groups boxed, or by name where they are traceable; no public name unboxes them.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return torch.distributed.ProcessGroup.unbox(value)
            except RuntimeError:  # another boxed object
                continue
    return process_group(args[-1])


def clear_dtensor_caches() -> None:
    """Clear DTensor's caches, whose entries hold process groups and are found by every equal mesh.

    torch 2.11-2.15: no public name; a second world in one process would send through the groups of the first.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    for name in ("propagate_op_sharding", "_propagate_tensor_meta"):
        table = getattr(propagator, name, None)
        if table is not None and hasattr(table, "cache_clear"):
            table.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and not isinstance(value, type):
                    value.cache_clear()
