"""The process world as one object: rank, device, process groups and meshes of this process."""

import atexit
import contextlib
import functools
import os
import random
import threading
import warnings
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import runtime
from .._compat.patches import patches
from .._compat.world import set_group_timeout, uncounted_group
from ..errors import UndefinedGroupError, UninitializedManagerError, WorldError
from . import launch as launching
from . import world as worlds
from .groups import RankLists, complete_shape, mesh_axis_groups
from .launch import Launch
from .named_groups import NamedGroups, format_names

# The names of PhysicsNeMo.
PhysicsNeMoUndefinedGroupError = UndefinedGroupError
PhysicsNeMoUninitializedDistributedManagerWarning = UninitializedManagerError


class DistributedManager(NamedGroups):
    """The process world. All instances share one state, so any code can use `DistributedManager()`.

    `initialize()` detects how the program was started (torchrun or anything else that sets torch's variables, SLURM's
    srun, Open MPI's mpirun, plain python) and connects the processes, with NCCL if there are CUDA devices and gloo
    otherwise. An existing world of torch.distributed is adopted. Environment variables do not change, and without
    `initialize(seed=...)` no generator is seeded.

    >>> DistributedManager.initialize()
    >>> dm = DistributedManager()
    >>> dm.rank, dm.world_size
    (0, 1)
    >>> mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])
    >>> dm.mesh("domain").size()
    1
    """

    _shared_state: dict[str, Any] = {}
    # Attributes of the shared state.
    _broadcast_buffers: bool
    _find_unused_parameters: bool
    _global_mesh: DeviceMesh | None
    _mesh_dims: dict[str, int]
    _mesh_groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup]
    _meshes: list[DeviceMesh]

    def __new__(cls):
        manager = super().__new__(cls)
        manager.__dict__ = cls._shared_state
        return manager

    def __init__(self):
        if not self.is_initialized():
            raise UninitializedManagerError(
                "DistributedManager() before DistributedManager.initialize(): call that first"
            )

    def __getattr__(self, name: str):
        # Called only for missing attributes: after cleanup() a manager has lost its state.
        if name.startswith("_") and not name.startswith("__") and not self.is_initialized():
            raise UninitializedManagerError(
                "this DistributedManager was cleaned up; call DistributedManager.initialize() again"
            )
        raise AttributeError(f"DistributedManager has no attribute {name!r}")

    def __str__(self) -> str:
        return f"process {self.rank} of {self.world_size} on {self.device}, started by {self.method!r}"

    # This process.

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._world.launch.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host."""
        return self._world.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._world.launch.world_size

    @property
    def device(self) -> torch.device:
        """The device of this process: its CUDA device if there are any, else the CPU."""
        return self._world.device

    @property
    def distributed(self) -> bool:
        """Whether a launcher started this process; False for plain `python train.py`."""
        return self._world.distributed

    @property
    def cuda(self) -> bool:
        """Whether this process uses a CUDA device."""
        return self._world.device.type == "cuda"

    @property
    def method(self) -> str:
        """The launch method: env, slurm, openmpi, single, or existing for an adopted world of torch."""
        return self._world.launch.method

    @property
    def broadcast_buffers(self) -> bool:
        """An argument for DistributedDataParallel; False unless set."""
        return self._broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, broadcast: bool) -> None:
        self._broadcast_buffers = broadcast

    @property
    def find_unused_parameters(self) -> bool:
        """An argument for DistributedDataParallel; False unless set."""
        return self._find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, find: bool) -> None:
        if find:
            warnings.warn("find_unused_parameters=True makes DDP walk the graph in every step", stacklevel=2)
        self._find_unused_parameters = find

    # Meshes.

    @property
    def mesh_dims(self) -> dict[str, int]:
        """The axes of the mesh, from name to size."""
        return self._mesh_dims

    def mesh_names(self) -> list[str]:
        """Return the names of the mesh's axes."""
        return list(self._mesh_dims)

    def mesh_sizes(self) -> list[int]:
        """Return the sizes of the mesh's axes."""
        return list(self._mesh_dims.values())

    @property
    def global_mesh(self) -> DeviceMesh:
        """The mesh over all ranks; one axis "world" if none was initialized."""
        if self._global_mesh is None:
            self.initialize_mesh((-1,), ("world",))
        return self._global_mesh

    def mesh(self, name: str | Sequence[str] | None = None) -> DeviceMesh:
        """Return the submesh of one axis, or of several in mesh order; without a name the global mesh."""
        if self._global_mesh is None:
            raise WorldError("there is no mesh yet: call initialize_mesh(mesh_shape, mesh_dim_names) first")
        if name is None:
            return self._global_mesh
        names = (name,) if isinstance(name, str) else tuple(name)
        unknown = [n for n in names if n not in self._mesh_dims]
        if unknown:
            raise UndefinedGroupError(
                f"no mesh axis is named {format_names(unknown)}; the mesh has {format_names(self._mesh_dims)}"
            )
        if names != tuple(n for n in self._mesh_dims if n in names):
            raise WorldError(
                f"axes {format_names(names)}: name each once, in the mesh's order {format_names(self._mesh_dims)}"
            )
        return self._global_mesh[names]

    def get_mesh_group(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """Return one process group of all ranks of a mesh with any number of axes.

        For several axes of the manager's mesh the first call creates the groups of all ranks, so all ranks must call
        it; for another mesh, all ranks of that mesh must.
        """
        if mesh.ndim == 1:
            return mesh.get_group()
        ranks = sorted(mesh.mesh.flatten().tolist())
        if ranks == list(range(self.world_size)):
            return dist.group.WORLD
        if self.rank not in ranks:
            raise WorldError(f"rank {self.rank} requests the group of a mesh over the ranks {ranks}")
        siblings = self._sibling_ranks(mesh)
        key = tuple(map(tuple, siblings or [ranks]))
        if key not in self._mesh_groups:
            made = functools.partial(dist.new_group, timeout=self._world.timeout)
            if siblings:  # torch numbers groups, so every rank must create all of them in the same order
                groups = {members: made(list(members)) for members in key}
                group = next(group for members, group in groups.items() if self.rank in members)
            else:
                with uncounted_group():
                    group = made(ranks, use_local_synchronization=True)
            worlds.wait_until_joined(group)
            self._mesh_groups[key] = group
        return self._mesh_groups[key]

    def _sibling_ranks(self, mesh: DeviceMesh) -> RankLists | None:
        """Return the ranks of this submesh of the manager's mesh and of its parallel ones; None for another mesh."""
        names = tuple(mesh.mesh_dim_names or ())
        if not names or names != tuple(n for n in self._mesh_dims if n in names) or mesh != self.mesh(names):
            return None
        return mesh_axis_groups(self.mesh().mesh, [self.mesh_names().index(n) for n in names])

    @staticmethod
    def initialize_mesh(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """Arrange all ranks as a mesh with named axes; one size may be -1. All ranks must call it together."""
        self = DistributedManager()
        names = tuple(mesh_dim_names)
        shape = complete_shape(mesh_shape, names, self.world_size)
        self._ensure_process_group()
        self._global_mesh = mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            if self._world.timeout:
                set_group_timeout(self._world.timeout, group)
            worlds.wait_until_joined(group)
        self._meshes.append(mesh)
        self._mesh_dims = dict(zip(names, shape, strict=True))
        return self._global_mesh

    # Setup and cleanup.

    def _ensure_process_group(self) -> None:
        """Start the process group of a single process when it is first needed; it opens no connection."""
        if not dist.is_initialized():
            worlds.start_group(self._world, dist.HashStore())

    @staticmethod
    def is_initialized() -> bool:
        """Return whether `initialize` was called, and no `cleanup` since."""
        return DistributedManager._shared_state.get("_is_initialized", False)

    @staticmethod
    def get_available_backend() -> str:
        """Return the backend for the devices of this machine."""
        return worlds.available_backend()

    @staticmethod
    def initialize(seed: int | None = None) -> None:
        """Set up the world from the variables of the launcher; see `shardfield.distributed.launch.detect`.

        SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD=ENV|SLURM|OPENMPI forces one launcher's variables. A second
        call warns and does nothing. With `seed`, the generators of numpy, torch and `random` are seeded with
        `seed + rank`; without it, none is.
        """
        if DistributedManager.is_initialized():
            warnings.warn("DistributedManager is initialized already: this call does nothing", stacklevel=2)
            return
        DistributedManager._set_world(DistributedManager._detect_world())
        if seed is not None:
            _seed_generators(seed + DistributedManager().rank)

    @staticmethod
    def _detect_world() -> worlds.World:
        if dist.is_initialized():
            return worlds.adopt_existing()
        launch = launching.detect(os.environ)
        return worlds.single_process(launch) if launch.method == "single" else worlds.start(launch)

    @staticmethod
    def initialize_env() -> None:
        """Set up the world from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
        DistributedManager._start(launching.from_env(os.environ))

    @staticmethod
    def initialize_slurm(port: int | str | None = None) -> None:
        """Set up the world from SLURM's variables; the default port follows from the job id."""
        DistributedManager._start(launching.from_slurm(os.environ, _parse_port(port)))

    @staticmethod
    def initialize_open_mpi(addr: str | None = None, port: int | str | None = None) -> None:
        """Set up the world from Open MPI's variables; `addr` is the host of rank 0."""
        DistributedManager._start(launching.from_open_mpi(os.environ, addr, _parse_port(port)))

    @staticmethod
    def setup(
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: int | str = "12355",
        backend: str | None = None,
        method: str = "env",
        timeout: float | None = None,
    ) -> None:
        """Set up the world from the arguments: rank 0 listens at addr:port until all ranks have connected.

        `timeout`, in seconds, limits the rendezvous, each collective, and the time that the other ranks keep running
        after one has died. By default it is SHARDFIELD_TIMEOUT, else each of the three has its own default.
        """
        number = _parse_port(port) or launching.DEFAULT_PORT
        agent = launching.agent_store_prefix(number, os.environ)
        launch = Launch(method, rank, world_size, local_rank, addr, number, store_prefix=agent)
        DistributedManager._start(launch, backend, timeout)

    @staticmethod
    def _start(launch: Launch, backend: str | None = None, timeout: float | None = None) -> None:
        if DistributedManager.is_initialized():
            raise WorldError("DistributedManager is initialised already; call DistributedManager.cleanup() first")
        DistributedManager._set_world(worlds.start(launch, backend, timeout))

    @staticmethod
    def _set_world(world: worlds.World) -> None:
        """Fill the shared state: from here on the manager is initialized, and this thread communicates."""
        runtime.active.world_thread, runtime.active.thread = threading.get_ident(), 0
        patches.install_early()  # a script may load ShardTensors, and compile its model, before it makes one
        DistributedManager._shared_state.update(
            _world=world,
            _broadcast_buffers=False,
            _find_unused_parameters=False,
            _groups={},
            _group_ranks={},
            _group_names={},
            _global_mesh=None,
            _mesh_dims={},
            _mesh_groups={},
            _meshes=[],
            _pid=os.getpid(),
            _is_initialized=True,
        )

    @staticmethod
    def cleanup(barrier: bool = False) -> None:
        """Leave the world and destroy the groups that this class created; an adopted process group is kept.

        Blocks until a checkpoint that is being written is complete. Also called at exit. After it, `initialize` may be
        called again; a second call does nothing, nor does a call in a forked process, which shares its parent's
        connections and must not end them.
        """
        if not DistributedManager.is_initialized() or DistributedManager._shared_state["_pid"] != os.getpid():
            return
        self = DistributedManager()
        of_meshes = [group for mesh in self._meshes for group in mesh.get_all_groups()]
        created_here = [*self._groups.values(), *self._mesh_groups.values(), *of_meshes]
        futures.wait(runtime.active.saves)
        runtime.active.stop_monitor()
        try:
            worlds.shut_down(self._world, barrier, created_here)
        finally:
            DistributedManager._shared_state.clear()
            runtime.end_world()


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _parse_port(port: int | str | None) -> int | None:
    try:
        return None if port is None else int(port)
    except ValueError:
        raise WorldError(f"{port!r} is not a port") from None


def _at_exit() -> None:
    runtime.active.stop_monitor()  # a thread must not be inside a call of the store while Python ends
    with contextlib.suppress(Exception):
        DistributedManager.cleanup()


atexit.register(_at_exit)
