"""Start a process world, or adopt the one that torch.distributed has."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import WorldError
from .launch import Launch, read_local_rank, read_timeout
from .membership import Membership

# Seconds that ranks wait for each other at the start, and that the others keep running after one has died. Collectives
# have torch's timeout unless the user sets one (SHARDFIELD_TIMEOUT, setup(timeout=...)), which then holds for all.
DEFAULT_TIMEOUT = 300.0


@dataclass
class World:
    """This process's launch, device, process group and membership."""

    launch: Launch
    device: torch.device
    local_rank: int = 0
    distributed: bool = True
    timeout: timedelta | None = None  # of collectives, if the user set one
    group: dist.ProcessGroup | None = None  # torch's default group
    owns_group: bool = False  # whether that group was started here
    membership: Membership | None = None


def available_backend() -> str:
    """Return the backend for the devices of this machine."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def single_process(launch: Launch) -> World:
    """Return the world of a process that no launcher started."""
    return World(launch, _select_device(0), distributed=False)


def adopt_existing() -> World:
    """Adopt the world that torch.distributed has. gloo alone means that its tensors are on the CPU.

    Virtual ranks ("threaded") share the current CUDA device, if there is one.
    """
    rank = dist.get_rank()
    local_rank = read_local_rank(os.environ)
    local_rank = rank if local_rank is None else local_rank
    device = torch.device("cpu")
    if "threaded" in str(dist.get_backend()) and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif "nccl" in str(dist.get_backend()):
        # Keep a device that the user has set; 0 is the default.
        chosen = torch.cuda.current_device()
        device = torch.device("cuda", chosen) if chosen else _select_device(local_rank)
    return World(Launch("existing", rank, dist.get_world_size()), device, local_rank, group=dist.group.WORLD)


def start(launch: Launch, backend: str | None = None, timeout: float | None = None) -> World:
    """Rendezvous with the other processes and start torch's process group."""
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.world_size):
            raise WorldError(
                f"torch.distributed runs already, with this process as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}; requested was rank {launch.rank} of {launch.world_size}"
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
    """Start torch's default process group with our store, so that torch needs no environment variables."""
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

    gloo connects all pairs when a group is created. A member that destroys its group at once would disconnect others
    that are still connecting.
    """
    if "gloo" in dist.get_backend_config(group) and dist.get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1), group=group)


def shut_down(world: World, barrier: bool, created_groups: list[dist.ProcessGroup]) -> None:
    """End the world if it was started here; in an adopted world, destroy the groups that were created since."""
    member = world.membership
    # With a rank lost, a barrier would block forever, and so may NCCL's shutdown. The end of the process is enough.
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
    """Select this process's device. If the launcher makes one device visible per process, it is cuda:0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
