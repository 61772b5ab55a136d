"""The Runtime: worlds, late rules, bounded memory, and no mutable state outside of it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardfield
from shardfield import ShardTensor, runtime
from shardfield.layout import Layout
from shardfield.planning import simulated
from shardfield.testing import run_on_ranks
from tests.launch import torchrun
from tests.module_state import findings

SRC = Path(shardfield.__file__).parent


# ---------------------------------------------------------------------- worlds

TEN_WORLDS = """
import warnings

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import shardfield
from shardfield import ShardingError, ShardTensor, runtime, scatter_tensor
from shardfield.distributed import DistributedManager


def step(x, weight):
    y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight)
    y = torch.fft.irfft2(torch.fft.rfft2(F.gelu(y)), s=y.shape[-2:])
    return (y[:, 1:].softmax(1) * y[:, :-1]).square().mean() + y[:, :, ::2].amax()


def more(y):
    pooled = F.max_pool2d(y, 2) + F.avg_pool2d(y, 2)
    tokens = y.flatten(2).transpose(1, 2).unsqueeze(1)
    attended = F.scaled_dot_product_attention(tokens, tokens.sin(), tokens)
    if isinstance(y, ShardTensor):
        y = y.redistribute(placements=[Shard(3), Shard(2)][: y.device_mesh.ndim])
    ordered = y.sort(dim=2).values.cumsum(3)
    return pooled.square().mean() + (attended * tokens).mean() + (ordered * y.detach()).mean()


runtimes, old = [], None
for world in range(10):
    DistributedManager.initialize()
    manager = DistributedManager()
    size = manager.world_size
    shape, names = ((size,), ("h",)) if world % 2 else ((2, size // 2), ("h", "w"))
    mesh = DistributedManager.initialize_mesh(shape, names)
    torch.manual_seed(world % 3)
    full = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    a, u = full.clone().requires_grad_(), weight.clone().requires_grad_()
    b, v = full.clone(), weight.clone().requires_grad_()
    placements = [Shard(2), Shard(3)][: mesh.ndim]
    x = scatter_tensor(b, 0, mesh, placements, global_shape=b.shape, dtype=b.dtype).detach().requires_grad_()
    expected, found = step(a, u), step(x, v)
    (expected + more(a)).backward()
    (found + more(x)).backward()
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    torch.testing.assert_close(v.grad, u.grad)
    if world == 1:
        step_ = shardfield.compile(step, backend="aot_eager")
    if world in (1, 2, 9):  # it is traced again in each world
        torch.testing.assert_close(step_(x, v).full_tensor(), expected)
    if old is not None and old.device_mesh == mesh:
        try:
            old + x
        except ShardingError as error:
            assert "has ended" in str(error), error
        else:
            raise AssertionError("a tensor of an ended world was used in a new one")
    runtimes.append(runtime.active)
    assert runtime.active.mesh_states, "the world has a Runtime that knows its mesh"
    old = x
    DistributedManager.cleanup()
    assert runtime.active is not runtimes[-1] and not runtime.active.mesh_states
assert len(set(map(id, runtimes))) == 10
print("ten worlds")
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_worlds_in_one_process(ranks, forks, tmp_path):
    """Under torchrun all worlds share the store of its agent; the four ranks have a store for each world."""
    program = tmp_path / "worlds.py"
    program.write_text(TEN_WORLDS)
    if ranks == 2:
        logs = torchrun(program, ranks, tmp_path / "logs", timeout=300)
    else:
        logs = forks.run(program, tmp_path, ranks, timeout=300)
    assert sum("ten worlds" in log for log in logs) == ranks, logs


def test_a_simulated_rank_has_its_own_runtime():
    outside = runtime.active
    plans = len(outside.plans)
    seen = []
    for rank in (0, 3):
        with simulated(4, rank):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("h",))
            layout = Layout.of(mesh, [Shard(0)], (10, 3))
            x = ShardTensor(torch.ones(layout.local_shape), layout)
            assert (x + torch.ones(3)).sum(0).shape == (3,)
            assert layout.coords == (rank,)
            seen.append(runtime.active)
    assert seen[0] is not seen[1] and outside not in seen
    assert runtime.active is outside and len(outside.plans) == plans


def test_observers_are_restored_on_the_next_runtime():
    with runtime.fresh():
        with shardfield.strict():
            assert runtime.active.strict_depth == 1
            runtime.renew()
            assert runtime.active.strict_depth == 1  # an open context holds in the new world too
        assert runtime.active.strict_depth == 0


# ---------------------------------------------------------------------- late rules


def late_rule():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    with runtime.fresh(registry=runtime.active.registry.copy()):
        layout = Layout.of(mesh, [Shard(0)], (4, 6))
        x = ShardTensor(torch.ones(layout.local_shape), layout)
        calls = {
            torch.sin: (lambda: torch.sin(x), 0.0),
            torch.cumsum: (lambda: torch.cumsum(x, 1), 1.0),
            F.layer_norm: (lambda: F.layer_norm(x, (6,)), 2.0),
            torch.flip: (lambda: x.flip(1), 3.0),
        }
        compiled = shardfield.compile(lambda x: torch.sin(x) + 1, backend="aot_eager")
        for call, _ in calls.values():
            call(), call()
        compiled(x), compiled(x)
        for function, (call, value) in calls.items():

            @shardfield.rule(function)
            def planner(input, *args, value=value, **kwargs):
                return shardfield.Plan(local=lambda input: torch.full_like(input, value), layout=input.layout)

            assert torch.equal(call().to_local(), torch.full(layout.local_shape, value)), function
        assert torch.equal(compiled(x).to_local(), torch.ones(layout.local_shape))
        ShardTensor.register_function_handler(torch.sin, lambda func, types, args, kwargs: "mine")
        assert torch.sin(x) == x.sin() == "mine"
    assert torch.equal(torch.sin(x).to_local(), torch.ones(layout.local_shape).sin())


def test_a_rule_registered_after_its_op_was_called_takes_effect():
    run_on_ranks(late_rule, 2)


def spellings():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("h",))
    x = ShardTensor.from_local(torch.ones(2, 2), mesh, [Replicate()])

    def sin(x):  # of another library
        return torch.overrides.handle_torch_function(sin, (x,), x)

    calls = {
        torch.sin: [lambda: torch.sin(x), lambda: x.sin()],
        torch.Tensor.cos: [lambda: torch.cos(x), lambda: x.cos()],
        torch.add: [lambda: x + 1, lambda: 1 + x, lambda: x.add(1), lambda: torch.add(x, 1)],
        F.layer_norm: [lambda: F.layer_norm(x, (2,)), lambda: torch.layer_norm(x, (2,))],
        torch.cat: [lambda: torch.cat([x, x]), lambda: torch.concat([x, x]), lambda: torch.concatenate([x, x])],
        torch.subtract: [lambda: torch.subtract(x, x), lambda: x - 1, lambda: torch.sub(x, 1), lambda: x.subtract(x)],
        torch.Tensor.clip_: [lambda: x.clone().clip_(1), lambda: x.clone().clamp_(1)],
        torch.logdet: [lambda: x.logdet(), lambda: torch.logdet(x)],
        torch.fft.fft: [lambda: torch.fft.fft(x)],
        F.batch_norm: [lambda: F.batch_norm(x, None, None, training=True)],
        sin: [lambda: sin(x)],
    }
    for function, spelled in calls.items():
        with runtime.fresh(registry=runtime.active.registry.copy()):
            ShardTensor.register_function_handler(function, lambda func, types, args, kwargs: "mine")
            assert [call() for call in spelled] == ["mine"] * len(spelled), function
            others = [calls[other][0] for other in calls if other is not function]
            assert not any(isinstance(call(), str) for call in others[:-1]), function
    with runtime.fresh(registry=runtime.active.registry.copy()):
        ShardTensor.register_function_handler(sin, lambda func, types, args, kwargs: "mine")
        ShardTensor.register_function_handler(F.batch_norm, lambda func, types, args, kwargs: "mine")
        assert isinstance(torch.sin(x), ShardTensor)
        assert isinstance(torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False), ShardTensor)


def test_a_handler_serves_all_spellings_of_its_function():
    run_on_ranks(spellings, 1)


def late_name():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    with runtime.fresh(registry=runtime.active.registry.copy()) as rt:
        x = ShardTensor.from_local(torch.ones(2, 2), mesh, [Replicate()])
        assert F.softmin not in rt.handlers and F.softmin(x, 1).shape == (2, 2)
        ShardTensor.register_named_function_handler("softmin", lambda func, types, args, kwargs: "mine")
        return F.softmin(x, 1)


def test_a_handler_by_name_takes_effect_after_a_call():
    assert run_on_ranks(late_name, 2) == ["mine"] * 2


# ---------------------------------------------------------------------- memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def new_shapes(steps: int, first: int) -> tuple[int, int, int]:
    """Return the growth of resident memory after the `first` steps, and the number of layouts and plans held."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    weight = torch.randn(2, 2, 3, 3, requires_grad=True)
    with runtime.fresh() as rt:
        for step in range(steps):
            layout = Layout.of(mesh, [Shard(2)], (1, 2, 4 + step, 5))
            x = ShardTensor(torch.ones(layout.local_shape), layout)
            y = F.relu(F.conv2d(x, weight, padding=1))
            (y[:, :, 1:] + y.mean(2, keepdim=True)).sum().backward()
            if step == first:
                gc.collect()
                before = resident()
        gc.collect()
        (state,) = rt.mesh_states.values()
        return resident() - before, len(state.layouts), len(rt.plans) + len(rt.plans.old)


def test_memory_is_flat_when_every_step_has_new_shapes():
    # The first half of the steps fills the allocator's arenas, which takes 5 MiB in some processes.
    for growth, layouts, plans in run_on_ranks(new_shapes, 2, 1400, 700, timeout=300):
        assert growth < 3 * 2**20, f"resident memory grew by {growth / 2**20:.1f} MiB"
        assert plans <= 2 * runtime.PLANS and layouts < 4 * runtime.PLANS


def test_a_cache_keeps_what_is_used():
    cache = runtime.Cache(4)
    for i in range(100):
        cache[i] = str(i)
        assert cache[0] == "0" and len(cache) <= 4 and len(cache.old) <= 4
    assert cache[1] is None and cache[99] == "99"


# ---------------------------------------------------------------------- no state elsewhere

# Mutable state outside runtime.py: "file name" -> why it cannot belong to a world. Adding a line needs such a reason.
ALLOWED = {
    "_compat/patches.py patches": "the patches of torch, which are process-wide",
    "_compat/patches.py safe_globals": "one of the patches of torch",
    "comm/transport.py DIRECT": "stateless object",
    "comm/transport.py STAGED": "stateless object",
    "compiler/closures.py _global_names": "pure function of a code object, bounded",
    "compiler/collective_ops.py LIBRARY": "torch's registration of operators, once per process",
    "compiler/collective_ops.py decode_route": "pure function of a text, bounded",
    "compiler/collective_ops.py torch.library.Library": "torch's registration of operators, once per process",
    "compiler/trace_facts.py out.<ZEROS_MARK>": "mark on a tensor of a trace",
    "compiler/trace_facts.py tensor.<ZEROS_MARK>": "mark on a tensor of a trace",
    "data/darcy_solver.py _cosine_modes": "pure function of a size, bounded",
    "data/darcy_solver.py _inverse_eigenvalues": "pure function of a size, bounded",
    "distributed/manager.py DistributedManager._shared_state": "documented: all managers share one state",
    "distributed/manager.py atexit.register": "leaves the world at exit",
    "distributed/membership.py _active_memberships": "the connections of this process, closed at exit",
    "distributed/membership.py _rendezvous_count": "part of a key in a store that outlives worlds: must grow",
    "distributed/membership.py sys.excepthook": "tells the other ranks why this process dies",
    "distributed/tcp.py _open_sockets": "the sockets of this process, closed in forked children",
    "distributed/tcp.py os.register_at_fork": "closes them",
    "neighbors/tree.py kdtree_class": "an optional import, once per process",
    "ops/elementwise/pointwise.py runtime.active.registry.elementwise": "a field of the Registry",
    "ops/attention/block_kernels.py _capability": "fact of a device, bounded",
    "ops/attention/natten.py on_shards": "pure function of a function of natten, bounded",
    "ops/protocol/method_install.py ShardTensor.<name>": "methods of our own class, at import",
    "shard_utils/halo_blocks.py _dim_ranges": "pure function of ints, bounded",
    "ops/stencil/decorators.py module.<key>": "rebind=True: the user replaces a function of a library",
    "testing/_run.py _lock": "guards the pools",
    "testing/_run.py _pools": "rank processes live for the whole test run",
    "native/__init__.py extension": "the library of this process",
    "triton_kernels/jit.py jit": "kernels of this package's functions, bounded",
    "triton_kernels/fold.py _launch": "pure function of shapes and strides, bounded",
    "virtual/process_state.py warnings.<name>": "filters of the running virtual rank, restored when it stops",
}
# Places whose patches are inside context managers that restore them.
CONTEXTS = (
    "_compat/fake.py",
    "planning/fake_world.py",
    "planning/memory.py",
    "virtual/world.py",
    "virtual/process_state.py",
    "virtual/paging.py",
    "bench/",
)
# Read-only tables that the scan takes for written ones, since their names are common or they are passed to functions.
READ_ONLY = {
    "bench/__init__.py BENCHMARKS",
    "bench/overhead.py OPS",
    "bench/rank.py OPS",
    "bench/train.py RandomFields.shapes",
    "bench/virtual_gpu.py PROBLEMS",
    "distributed/rendezvous.py GREETING",
    "ops/spectral/fft.py EAGER",
    "planning/cli.py BYTES",
    "planning/cli.py PLANNABLE",
    "planning/cli.py SECONDS",
    "testing/_pool.py _ONE_THREAD",
    "train/recipes/__init__.py RECIPES",
}


def state_outside_runtime(src: Path) -> set[str]:
    found = set()
    for each in findings(src):
        name = f"{each.file} {each.name}"
        restored = each.kind in ("patch", "rebound") and each.file.startswith(CONTEXTS)
        settings = each.file.startswith("bench/") and each.name == "Settings.quick"
        if each.file != "runtime.py" and "constant" not in each.kind and not restored and not settings:
            found.add(name)
        if "maxsize=None" in each.kind:
            found.add(f"{name}: an unbounded cache")
    return found


def test_modules_keep_no_mutable_state():
    found = state_outside_runtime(SRC)
    assert not found - READ_ONLY - ALLOWED.keys(), (
        f"module state outside runtime.py: {sorted(found - READ_ONLY - ALLOWED.keys())}. "
        "Make it a field of Runtime, or a constant (tuple, frozenset, MappingProxyType)"
    )
    assert not (READ_ONLY | ALLOWED.keys()) - found, "entries that are no longer needed"


def test_the_scan_finds_mutable_state(tmp_path):
    text = """
from functools import cache
from . import other
TABLE = {}
seen: list = []
LIMIT = 3
NAMES = {"a": 1}
def add(x):
    global LIMIT
    LIMIT = x
    TABLE[x] = 1
    seen.append(x)
    other.level = 2
@cache
def load(x): return NAMES["a"]
class Holder:
    table = {}
    def put(self, x): self.table[x] = 1
def default(x=[]): x.append(1)
"""
    (tmp_path / "module.py").write_text(text)
    found = {name.removeprefix("module.py ") for name in state_outside_runtime(tmp_path)}
    assert found == {
        "TABLE",
        "seen",
        "LIMIT",
        "other.level",
        "load",
        "load: an unbounded cache",
        "Holder.table",
        "default",
    }
