"""The process world as one object: rank, device, process groups and meshes of this process."""

import atexit
import contextlib
import functools
import os
import random
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import runtime
from .._compat.world import set_group_timeout, uncounted_group
from ..errors import UndefinedGroupError, UninitializedManagerError, WorldError
from . import launch as launching
from . import world as worlds
from .config import ProcessGroupConfig, ProcessGroupNode
from .groups import RankLists, complete_shape, mesh_axis_groups, orthogonal_groups, split_groups
from .launch import Launch

# The names of PhysicsNeMo.
PhysicsNeMoUndefinedGroupError = UndefinedGroupError
PhysicsNeMoUninitializedDistributedManagerWarning = UninitializedManagerError


class DistributedManager:
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
    _world: worlds.World
    _broadcast_buffers: bool
    _find_unused_parameters: bool
    _groups: dict[str, dist.ProcessGroup]
    _group_ranks: dict[str, RankLists]
    _group_names: dict[dist.ProcessGroup, str]
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

    # Groups by name.

    @property
    def group_names(self) -> list[str]:
        """The names of the process groups created so far."""
        return list(self._groups)

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """Return this rank's group of that name; without a name return None, which means all ranks in torch."""
        if name is None:
            return None
        if name not in self._groups:
            raise UndefinedGroupError(f"no process group is named {name!r}; there are {_format_names(self._groups)}")
        return self._groups[name]

    def group_size(self, name: str | None = None) -> int:
        """Return the number of ranks in a group."""
        return self.world_size if name is None else dist.get_world_size(self.group(name))

    def group_rank(self, name: str | None = None) -> int:
        """Return this rank's position in a group."""
        return self.rank if name is None else dist.get_rank(self.group(name))

    def group_name(self, group: dist.ProcessGroup | None = None) -> str | None:
        """Return the name of a group; None for None."""
        if group is None:
            return None
        if group not in self._group_names:
            raise UndefinedGroupError(
                f"that process group was not made by name here; there are {_format_names(self._groups)}"
            )
        return self._group_names[group]

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
                f"no mesh axis is named {_format_names(unknown)}; the mesh has {_format_names(self._mesh_dims)}"
            )
        if names != tuple(n for n in self._mesh_dims if n in names):
            raise WorldError(
                f"axes {_format_names(names)}: name each once, in the mesh's order {_format_names(self._mesh_dims)}"
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
            raise WorldError(f"rank {self.rank} asks for the group of a mesh over the ranks {ranks}")
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

    # Creating groups. All ranks must call these together, with the same arguments.

    @staticmethod
    def create_process_subgroup(name: str, size: int, group_name: str | None = None, verbose: bool = False) -> None:
        """Split the group `group_name` (None: all ranks) into groups of `size` consecutive ranks."""
        self = DistributedManager()
        if group_name is None:
            parents = [list(range(self.world_size))]
        else:
            self.group(group_name)  # raises for an unknown name
            parents = self._group_ranks[group_name]
        self._make_groups(name, split_groups(parents, size), verbose)

    @staticmethod
    def create_orthogonal_process_group(orthogonal_group_name: str, group_name: str, verbose: bool = False) -> None:
        """Group the ranks at the same position in their groups `group_name`."""
        self = DistributedManager()
        self.group(group_name)
        self._make_groups(orthogonal_group_name, orthogonal_groups(self._group_ranks[group_name]), verbose)

    @staticmethod
    def create_group_from_node(node: ProcessGroupNode, parent: str | None = None, verbose: bool = False) -> str:
        """Create the group of a node and the group orthogonal to it; return the name of the latter."""
        if node.size is None:
            raise WorldError(f"process group {node.name!r} has no size yet: call config.set_leaf_group_sizes first")
        DistributedManager.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = f"__orthogonal_to_{node.name}"
        DistributedManager.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @staticmethod
    def create_groups_from_config(config: ProcessGroupConfig, verbose: bool = False) -> None:
        """Create all groups of a tree. The children of a node are orthogonal to each other.

        Warns, since the interface is experimental.
        """
        warnings.warn("create_groups_from_config is experimental and may change", stacklevel=2)
        DistributedManager.create_group_from_node(config.root, verbose=verbose)
        pending = [config.root_id]
        while pending:
            parent = pending.pop(0)
            for child in config.children(parent):
                pending.append(child.name)
                # Each child splits the group that is orthogonal to the previous child.
                parent = DistributedManager.create_group_from_node(child, parent, verbose)

    def _make_groups(self, name: str, ranks_of_groups: RankLists, verbose: bool) -> None:
        if name in self._groups:
            raise WorldError(f"there is a process group {name!r} already")
        self._ensure_process_group()
        # torch requires that every rank creates every group in the same order, even groups without this rank.
        for ranks in ranks_of_groups:
            group = dist.new_group(ranks, timeout=self._world.timeout)
            if self.rank in ranks:
                worlds.wait_until_joined(group)
                self._groups[name] = group
                self._group_names[group] = name
        self._group_ranks[name] = ranks_of_groups
        if verbose and self.rank == 0:
            print(f"Process group '{name}':", *ranks_of_groups, sep="\n    ")

    def _ensure_process_group(self) -> None:
        """Start the process group of a single process when it is first needed; it opens no connection."""
        if not dist.is_initialized():
            worlds.start_group(self._world, dist.HashStore())

    # Setup and cleanup.

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

        Also called at exit. After it, `initialize` may be called again; a second call does nothing.
        """
        if not DistributedManager.is_initialized():
            return
        self = DistributedManager()
        of_meshes = [group for mesh in self._meshes for group in mesh.get_all_groups()]
        made_here = [*self._groups.values(), *self._mesh_groups.values(), *of_meshes]
        runtime.active.stop_monitor()
        try:
            worlds.shut_down(self._world, barrier, made_here)
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
        raise WorldError(f"{port!r} is no port") from None


def _format_names(names) -> str:
    return ", ".join(repr(n) for n in names) or "none"


def _at_exit() -> None:
    runtime.active.stop_monitor()  # a thread must not be inside a call of the store while Python ends
    # A forked child shares the connections of its parent and must not end them.
    if DistributedManager.is_initialized() and DistributedManager._shared_state["_pid"] == os.getpid():
        with contextlib.suppress(Exception):
            DistributedManager.cleanup()


atexit.register(_at_exit)
