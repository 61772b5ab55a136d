"""The state of the process: the registry of rules, the caches of the current world, the active observers.

`runtime.active` is the one mutable module attribute of the package. Read it once per call (`rt = runtime.active`);
never import it by name, since it is replaced when a new world begins. Plans, layouts and memoized results hold process
groups and the coordinates of this rank, so they belong to one world. A new world gets a new `Runtime`:

- on the first `Layout` on a mesh, when `torch.distributed`'s default group is not the one of the last mesh;
- in `DistributedManager.cleanup()`;
- inside `fresh()`, which simulated ranks and tests use.

The `Registry` is shared by all runtimes: users register rules at import, before any world exists.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from ._compat.world import clear_dtensor_caches
from .caches import Cache as Cache
from .caches import PlanCache as PlanCache
from .errors import ShardingError

F = TypeVar("F", bound=Callable)

PLANS = 2048  # size of one generation of the plan cache, which holds two
# A Partial value with fewer elements on a rank (statistics, a loss) is all-reduced, in one message. If it were
# reduce-scattered, combining it with a sharded field would need a second message.
MIN_SCATTERED = 1 << 13


class Registry:
    """Handlers of torch functions, by function object. Process-wide; `version` counts the changes."""

    def __init__(self) -> None:
        self.handlers: dict[Any, Callable] = {}
        self.rules: dict[Any, Callable] = {}  # function -> the planner or handler written for it
        self.named: dict[str, Callable] = {}  # users' handlers of functions, registered by name
        self.dispatch_handlers: dict[Any, Callable] = {}  # users' handlers of aten operators
        self.elementwise: Callable | None = None  # the handler of functions that map single elements
        # Dispatcher functions that ShardTensor calls. dispatch/registry.py sets them: tensor/ cannot import it.
        self.resolve: Callable[[Any], Callable] | Any = None
        self.functions_of: Callable[[Any], Any] | Any = None
        self.dispatch_or: Callable[..., Callable] | Any = None
        self.torch_dispatch: Callable[..., Any] | Any = None
        self.run_backward: Callable[..., None] | Any = None
        self.aliases: Callable[[Any], Iterable[Any]] | Any = None
        self.version = 0
        self._epochs = itertools.count()
        self._runtimes: WeakSet[Runtime] = WeakSet()

    def register(self, func: Any, handler: Callable, rule: Callable | None = None) -> None:
        """Set the handler of `func` and drop its cached plans."""
        self.handlers[func] = handler
        if rule is not None:
            self.rules[func] = rule
        self.changed(func)

    def register_spellings(self, func: Any, handler: Callable) -> None:
        """Set the handler of all spellings of `func`: `torch.sin`, `Tensor.sin`.

        Functions of one name that have another rule take other arguments, as `F.batch_norm` and `torch.batch_norm`.
        """
        rule = self.rules.get(func)
        for alias in self.aliases(func):
            if self.rules.get(alias) is rule:
                self.register(alias, handler)

    def register_named(self, name: str, handler: Callable) -> None:
        """Set the handler of the function with this name."""
        self.named[name] = handler
        self.changed()

    def register_dispatch(self, op: Any, handler: Callable) -> None:
        """Set the handler of an operator, and of the Python functions whose calls select it."""
        self.dispatch_handlers[op] = handler
        for func in self.functions_of(op):
            self.register(func, self.dispatch_or(op, handler, self.handlers.get(func)))
        self.changed(op)

    def unregister(self, func: Any) -> None:
        """Remove the handler and the rule of `func`."""
        del self.handlers[func], self.rules[func]
        self.changed(func)

    def changed(self, func: Any = None) -> None:
        """Drop the plans of `func`, and the resolved handlers of unregistered functions, in all runtimes."""
        self.version += 1
        for runtime in list(self._runtimes):
            runtime.forget(func)

    def copy(self) -> Registry:
        """Return an independent registry with the same entries, for tests that register."""
        made = Registry()
        made.handlers, made.rules, made.named = dict(self.handlers), dict(self.rules), dict(self.named)
        made.dispatch_handlers, made.elementwise = dict(self.dispatch_handlers), self.elementwise
        made.resolve, made.torch_dispatch, made.run_backward = self.resolve, self.torch_dispatch, self.run_backward
        made.aliases = self.aliases
        made.functions_of, made.dispatch_or = self.functions_of, self.dispatch_or
        return made


class MeshState:
    """The layouts of one mesh in one world. Equal meshes share it; `mesh` is the first of them."""

    __slots__ = ("mesh", "sizes", "layouts", "replicated", "_groups")

    def __init__(self, mesh: Any):
        self.mesh = mesh
        self.sizes = tuple(mesh.size(axis) for axis in range(mesh.ndim))
        self.layouts: WeakValueDictionary[tuple, Any] = WeakValueDictionary()  # (dims, partial) -> Layout
        self.replicated = Cache(1024)  # shape -> Layout
        self._groups: dict[int, dist.ProcessGroup] = {}

    def group(self, axis: int) -> dist.ProcessGroup:
        """Return the process group of a mesh axis."""
        found = self._groups.get(axis)
        if found is None:
            found = self._groups[axis] = self.mesh.get_group(axis)
        return found


# Set by context managers; a new world keeps them.
_OBSERVERS = (
    "observer", "strict_depth", "strict_sharding", "meter", "tag", "on_send", "tracer", "fake_tensors", "bridge_depth",
    "transport_override", "before_collective", "promotion", "world_thread", "min_scattered", "virtual",
    "attention_strategy", "sharded_backward", "message_log",
)  # fmt: skip
# Keyed weakly by tensors, which may outlive a world.
_BY_TENSOR = ("write_observers", "exposed_storages", "written_storages", "reduce_hooks")


class Runtime:
    """All mutable state of one world.

    Observers, off by default:
        observer: the Report or lockstep check that runs every call. strict_depth: open contexts that refuse
        gathers, strict_sharding: those that refuse lost shardings; `strict()` does both.
        meter: called as `meter(kind, messages, bytes)` for everything this rank sends. tag: the call for which
        messages are sent; collectives keep it for their backward. on_send: called with the ids of a compiled
        program's calls before it sends a message for them. tracer: records collectives while a program is traced.
        fake_tensors: tensors have no data. bridge_depth: depth inside users' autograd.Functions on ShardTensors.
        transport_override: the transport of all messages. before_collective: called with the group before each message.
        promotion: a TensorPromotionMode that warns or refuses, None if plain tensors are promoted silently.
        world_thread: the thread that initialized the world; None is the main thread. It alone communicates.
        min_scattered: elements on a rank from which Partial values are scattered (`redistribute.without_partial`) and
        results that lost their sharding count. virtual: the messages between virtual ranks, in a rank of a
        `VirtualWorld`. attention_strategy: the one that attention must use (`ops.attention.attention_strategy`).
        sharded_backward: the meshes of ShardTensors that backward was called on, on all of their ranks.
        message_log: what a virtual rank receives in a segment of its model that is recomputed in backward.

    Tables by tensor, kept over worlds:
        write_observers: lazy values that alias a tensor and take a snapshot before it is written.
        exposed_storages: storages of inference tensors that code outside the package can write.
        reduce_hooks: parameter -> {name of a group: hook that sums its gradient}.
        written_storages: storages that a write has changed after a call read them.

    Of this world (`epoch` numbers the runtimes of a registry):
        plans: the plan cache. Keys are tuples that begin with a function, an ArgumentReader or a name. plans_made:
        the number of entries that were added to it. forced_plans: attention strategy -> the cache that serves it.
        readers: (function, argument types) -> ArgumentReader. resolved: handlers of functions without an entry.
        dft_matrices: DFT matrices on their device.
        exchange_lists: index tensor -> (version, {request: lists}). Never evicted, since a miss communicates.
        transports: (group, device type) -> Transport. Never evicted, since the choice communicates.
        transports_by_backend: (backend class, device type) -> Transport.
        deferring_groups: ranks of the groups over which a wrapper averages gradients. trace_counts: group ->
        (number of this world in its store, number of joint traces).
        capture_streams: device index -> stream on which CUDA graphs are captured.
        in_flight: token -> message of a compiled program. warned: functions whose fallback was warned about.
        written_meshes: meshes of tensors that were written after a call read them: ranks agree before backward.
        recorded: the graphs of gradients (`create_graph`) that are alive, a `dispatch.recorded_backward.Recorded`; None
        before the first one.
        thread: the thread that has communicated, 0 before the first message. engine_thread: the thread of autograd's
        engine that has. messages: their number. stalls: the StallMonitor of this world. saves: checkpoints that are
        being written, which send messages.
    """

    __slots__ = (
        *_OBSERVERS, *_BY_TENSOR, "registry", "handlers", "epoch", "world", "meshes", "mesh_states", "ended_meshes",
        "plans", "plans_made", "forced_plans", "readers", "resolved", "dft_matrices", "exchange_lists", "transports",
        "transports_by_backend", "deferring_groups", "trace_counts", "capture_streams", "in_flight", "tokens", "warned",
        "thread", "engine_thread", "messages", "stalls", "saves", "written_meshes", "recorded", "__weakref__",
    )  # fmt: skip

    def __init__(self, registry: Registry):
        self.registry, self.handlers = registry, registry.handlers
        self.epoch = next(registry._epochs)
        registry._runtimes.add(self)
        self.observer: Any = None
        self.strict_depth = self.strict_sharding = 0
        self.meter: Callable[[str, int, int], None] | None = None
        self.tag: Any = None
        self.on_send: Callable | None = None
        self.tracer: Any = None
        self.fake_tensors = False
        self.bridge_depth = 0
        self.transport_override: Any = None
        self.promotion: Any = None
        self.before_collective: Callable[[dist.ProcessGroup], None] | None = None
        self.world_thread: int | None = None
        self.min_scattered = MIN_SCATTERED
        self.virtual: Any = None
        self.attention_strategy: str | None = None
        self.sharded_backward: tuple[Any, ...] = ()
        self.message_log: Any = None
        self.write_observers: WeakSet[Any] = WeakSet()
        self.exposed_storages: WeakSet[Any] = WeakSet()
        self.written_storages: WeakSet[Any] = WeakSet()
        self.reduce_hooks: Any = WeakTensorKeyDictionary()
        self.world: ref[Any] | None = None  # the default group; weak, so that the threads of a destroyed group can end
        self.meshes = Cache(256)  # id(mesh) -> (mesh, MeshState)
        self.mesh_states: dict[Any, MeshState] = {}  # by value: equal meshes share groups
        self.ended_meshes: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.plans_made = 0
        self.plans = PlanCache(PLANS, self)
        self.forced_plans: dict[str, PlanCache] = {}
        self.readers = Cache(1024)
        self.resolved = Cache(1024)
        self.dft_matrices = Cache(256)
        self.exchange_lists: Any = WeakIdKeyDictionary()
        self.transports: dict[tuple[dist.ProcessGroup, str], Any] = {}
        self.transports_by_backend: dict[tuple[type, str], Any] = {}
        self.deferring_groups: set[tuple[int, ...]] = set()
        self.trace_counts: dict[str, tuple[int, int]] = {}
        self.capture_streams: dict[int, Any] = {}
        self.in_flight: dict[int, Any] = {}
        self.tokens = itertools.count(1)
        self.warned: set[str] = set()
        self.written_meshes: dict[Any, bool] = {}
        self.recorded: Any = None
        self.thread = self.engine_thread = self.messages = 0
        self.stalls: Any = None
        self.saves: set[Any] = set()

    def stop_monitor(self) -> None:
        """End the thread that watches for stalls, before the store of the world ends."""
        if self.stalls is not None:
            self.stalls.stop()

    def forget(self, func: Any) -> None:
        """Drop the plans of `func`, and the resolved handlers of unregistered functions."""
        if not (self.resolved or self.readers or self.plans or self.forced_plans):
            return  # nothing is cached, as at import, when the package registers its own rules
        self.resolved = Cache(self.resolved.size)
        self.readers.drop(lambda key: key[0] is func)
        for plans in (self.plans, *self.forced_plans.values()):
            plans.drop(lambda key: any(part is func for part in key) or getattr(key[0], "func", self) is func)

    def successor(self, registry: Registry | None = None) -> Runtime:
        """Return an empty Runtime with the same observers and tables by tensor, and `registry` or the same one."""
        made = Runtime(registry or self.registry)
        for name in (*_OBSERVERS, *_BY_TENSOR):
            setattr(made, name, getattr(self, name))
        return made


active: Runtime = Runtime(Registry())


def mesh_state(mesh: Any) -> MeshState:
    """Return the state of a mesh; begin a new Runtime if the mesh is the first one of another world."""
    seen = active.meshes[id(mesh)]
    return seen[1] if seen is not None else _first_sight(mesh)


def _first_sight(mesh: Any) -> MeshState:
    if _world_has_ended():
        renew()
    runtime, world = active, dist.group.WORLD
    if runtime.world is None and world is not None:
        runtime.world = ref(world)
    if runtime.ended_meshes.get(id(mesh)) is mesh:
        raise ShardingError(f"{mesh} belongs to a world that has ended: make a new mesh and new ShardTensors")
    state = runtime.mesh_states.get(mesh)
    if state is None:
        state = runtime.mesh_states[mesh] = MeshState(mesh)
    runtime.meshes[id(mesh)] = (mesh, state)  # the mesh is kept alive, so that no other mesh gets its id
    return state


def _world_has_ended() -> bool:
    if active.world is None:  # no mesh was seen yet
        return False
    world = active.world()
    return world is None or world is not dist.group.WORLD


def renew() -> None:
    """Begin a new world: `active` becomes an empty Runtime, and meshes of the previous world are refused."""
    global active
    before = active
    before.stop_monitor()
    active = before.successor()
    active.ended_meshes.update(before.ended_meshes)
    for state in before.mesh_states.values():
        active.ended_meshes[id(state.mesh)] = state.mesh
    clear_dtensor_caches()  # DTensor finds the groups of an ended world by an equal mesh


def end_world() -> None:
    """Begin a new world if the current one has ended; if it goes on, refuse the meshes whose groups were destroyed."""
    if _world_has_ended():
        renew()
    runtime = active
    for state in list(runtime.mesh_states.values()):
        if not _has_groups(state.mesh):
            del runtime.mesh_states[state.mesh]
            runtime.meshes = Cache(runtime.meshes.size)
            runtime.ended_meshes[id(state.mesh)] = state.mesh


def _has_groups(mesh: Any) -> bool:
    try:
        return bool(mesh.get_all_groups())
    except (RuntimeError, ValueError, KeyError):  # torch resolves groups by name
        return False


@contextmanager
def fresh(*, registry: Registry | None = None, **fields: Any) -> Iterator[Runtime]:
    """Run the body with a new Runtime that has these `fields`; the previous one is active again afterwards."""
    global active
    before = active
    active = before.successor(registry)
    for name, value in fields.items():
        setattr(active, name, value)
    try:
        yield active
    finally:
        if active.stalls is not before.stalls:
            active.stop_monitor()
        active = before


@contextmanager
def observing(**fields: Any) -> Iterator[None]:
    """Set observers inside the body. They are restored on the Runtime they were set on, and on its successor."""
    first = active
    before = {name: getattr(first, name) for name in fields}
    for name, value in fields.items():
        setattr(first, name, value)
    try:
        yield
    finally:
        for runtime in {first, active}:
            for name, value in before.items():
                setattr(runtime, name, value)


def of_this_rank(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that runs on this rank alone: virtual ranks share torch's global hooks and some modules.

    A module that is the default of an argument (`act=ReLU()`) belongs to the models of all ranks.
    """
    rank = _virtual_rank()

    def run(*args: Any) -> None:
        if _virtual_rank() == rank:
            hook(*args)

    return run


def _virtual_rank() -> int | None:
    """Return the thread of the running virtual rank; None for a process."""
    return None if active.virtual is None else active.world_thread


def memo(function: F) -> F:
    """Cache the results of a pure function of positional, hashable arguments in the plan cache."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        plans = active.plans
        key = (function, *args)
        found = plans[key]
        if found is None:
            found = plans[key] = function(*args)
        return found

    return call  # type: ignore[return-value]
