"""How a process gets its place in the world: by starting one with the others, or by taking the one torch has."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import WorldError
from .launch import Launch, read_local_rank, read_timeout
from .membership import Membership

# How long the ranks wait for each other at the start, and how long the others outlive one that died. Collectives
# keep torch's own limits unless the user sets one (SHARDFIELD_TIMEOUT, setup(timeout=...)), which then holds for all.
DEFAULT_TIMEOUT = 300.0


@dataclass
class World:
    """This process's place: as launched, with its device, and what has to end with it."""

    launch: Launch
    device: torch.device
    local_rank: int = 0
    distributed: bool = True
    timeout: timedelta | None = None  # of collectives, where the user set one
    group: dist.ProcessGroup | None = None  # torch's default group
    owns_group: bool = False  # whether that group was started here
    membership: Membership | None = None


def available_backend() -> str:
    """The backend for the devices of this machine."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def single_process(launch: Launch) -> World:
    """A process that no launcher started."""
    return World(launch, _select_device(0), distributed=False)


def adopt_existing() -> World:
    """The world that torch.distributed has. gloo alone means that its user works on the CPU."""
    rank = dist.get_rank()
    local_rank = read_local_rank(os.environ)
    local_rank = rank if local_rank is None else local_rank
    device = torch.device("cpu")
    if "nccl" in str(dist.get_backend()):
        # A device that the user has chosen stays; 0 is what one has without choosing.
        chosen = torch.cuda.current_device()
        device = torch.device("cuda", chosen) if chosen else _select_device(local_rank)
    return World(Launch("existing", rank, dist.get_world_size()), device, local_rank, group=dist.group.WORLD)


def start(launch: Launch, backend: str | None = None, timeout: float | None = None) -> World:
    """Meet the other processes and start torch's process group among them."""
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.world_size):
            raise WorldError(
                f"torch.distributed runs already, with this process as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}; asked for was rank {launch.rank} of {launch.world_size}"
            )
        return adopt_existing()
    if timeout is not None and timeout <= 0:
        raise WorldError(f"a time-out of {timeout} s")
    limit = timeout or read_timeout(os.environ)
    local_rank = launch.local_rank
    if local_rank is None:
        local_rank = launch.rank % (torch.cuda.device_count() or launch.world_size)
    world = World(launch, _select_device(local_rank), local_rank, timeout=timedelta(seconds=limit) if limit else None)
    backend = backend or available_backend()
    if launch.world_size > 1:
        world.membership = Membership(launch, limit or DEFAULT_TIMEOUT, gloo="gloo" in backend)
    try:
        start_group(world, world.membership.store if world.membership else dist.HashStore(), backend)
    except BaseException as error:
        if world.membership:
            world.membership.leave(f"failed with {type(error).__name__} while its process group started")
            world.membership.close()
        raise
    return world


def start_group(world: World, store, backend: str | None = None) -> None:
    """Start torch's default process group. The store is ours, so torch reads and needs no environment variable."""
    backend = backend or available_backend()
    dist.init_process_group(
        backend,
        store=store,
        rank=world.launch.rank,
        world_size=world.launch.world_size,
        timeout=world.timeout,
        device_id=world.device if "nccl" in backend else None,
    )
    world.group, world.owns_group = dist.group.WORLD, True
    wait_until_joined(dist.group.WORLD)


def wait_until_joined(group: dist.ProcessGroup) -> None:
    """Return once all members of a new gloo group are in it.

    gloo connects all pairs while a group is made; a member that is done and ends its group at once would cut off those
    that still connect.
    """
    if "gloo" in dist.get_backend_config(group) and dist.get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1), group=group)


def shut_down(world: World, barrier: bool, created_groups: list[dist.ProcessGroup]) -> None:
    """End what was started here: the whole world, or in somebody else's the groups that were made since."""
    member = world.membership
    # With a rank lost, a barrier would wait for it, and so may NCCL on its way out. The end of the process will do.
    broken = member is not None and (member.failed or bool(member.lost_peers))
    ours = dist.is_initialized() and dist.group.WORLD is world.group and not broken
    if barrier and ours:
        dist.barrier(device_ids=[world.device.index] if world.device.type == "cuda" else None)
    if member:
        member.leave()
    if ours and world.owns_group:
        dist.destroy_process_group()
    elif ours:
        for group in dict.fromkeys(created_groups):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    if member:
        member.close()


def _select_device(local_rank: int) -> torch.device:
    """This process's device. A launcher that shows each process its own device alone makes that one cuda:0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
