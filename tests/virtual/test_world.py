"""Virtual ranks: a program gives the same bits as on processes, and the values of one device; faults are errors."""

from __future__ import annotations

import _thread
import gc
import os
import random
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfield
from shardfield import ShardTensor, parallelize
from shardfield.distributed import DistributedManager
from shardfield.errors import WorldError
from shardfield.planning.unet import UNet
from shardfield.testing import run_on_ranks
from shardfield.virtual import VirtualWorld
from tests.ops.spectral.test_neuralop import in_double
from tests.ops.spectral.test_torch_harmonics import sfno
from tests.zoo import zoo


def unet():
    return UNet(1, 8, 2)


def norms():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)
    )


def dropout():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(0.4), nn.Conv2d(4, 1, 3, padding=1))


def vit():  # attention over tokens on all ranks: a ring
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(4, 16), layer, nn.Linear(16, 1))


# factory, shape of the input, sharded dim
CASES = {
    "unet": (unet, (1, 1, 22, 16), 2),
    "norms": (norms, (2, 1, 11, 6), 2),
    "dropout": (dropout, (2, 1, 11, 6), 2),
    "vit": (vit, (2, 37, 4), 1),
    "transolver": (zoo.Transolver, (2, 37, 4), 1),
    "unet3d": (zoo.UNet3D, (1, 2, 9, 8, 6), 2),
    "tfno": (zoo.neuralop_tfno, (1, 2, 17, 12), 2),
    "sfno": (sfno, (1, 2, 12, 24), 2),
}
SINGLE = {"tfno", "sfno"}  # these packages compute in single precision
TOLERANCE = {**dict.fromkeys(SINGLE, 2e-6), "dropout": float("inf")}  # one device draws other numbers for a dropout


def train(case: str, sharded: bool = True, strategy: str | None = None, dtype: torch.dtype | None = None):
    """Train for two steps. Return the losses, and this rank's output, parameters and buffers."""
    factory, shape, dim = CASES[case]
    dtype = dtype or (torch.float32 if case in SINGLE else torch.float64)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of third-party packages
        model = factory() if case in SINGLE else factory().double()
    x = torch.randn(shape, dtype=dtype)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
        x = shardfield.scatter_tensor(x, 0, mesh, (Shard(dim),))
        if strategy:
            model = parallelize(model, mesh, data=None, domain="domain", strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in [*model.parameters(), *model.buffers()]]
    out = model(x).detach()
    return losses, [out.to_local() if isinstance(out, ShardTensor) else out, *(t.detach() for t in held)]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_ranks_bit_for_bit_and_to_one_device(case):
    with VirtualWorld(3) as world:
        found = world.run(train, case)
    real = run_on_ranks(train, 3, case)
    assert [f[0] for f in found] == [r[0] for r in real]
    for (_, ours), (_, theirs) in zip(found, real, strict=True):
        assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    losses, (out, *held) = train(case, sharded=False)
    tolerance = TOLERANCE.get(case, 1e-12)
    assert abs(losses[-1] - found[0][0][-1]) <= tolerance * max(1, losses[-1])
    whole = torch.cat([tensors[0] for _, tensors in found], CASES[case][2])
    for ours, plain in zip([whole, *found[0][1][1:]], [out, *held], strict=True):
        assert (ours - plain).abs().max() <= tolerance * max(1, plain.abs().max())


def train_in_double(sharded: bool):
    with in_double():
        return train("tfno", sharded, dtype=torch.float64)


def test_tfno_in_double_precision():
    """neuraloperator with complex128 in the place of torch.cfloat."""
    with in_double(), VirtualWorld(3) as world:
        found = world.run(train, "tfno", dtype=torch.float64)
    for (losses, ours), (theirs, real) in zip(found, run_on_ranks(train_in_double, 3, True), strict=True):
        assert losses == theirs and all(torch.equal(a, b) for a, b in zip(ours, real, strict=True))
    losses, (out, *held) = train_in_double(False)
    assert out.dtype == torch.float64 and found[0][0] == pytest.approx(losses, rel=1e-12)
    whole = torch.cat([tensors[0] for _, tensors in found], 2)
    for ours, plain in zip([whole, *found[0][1][1:]], [out, *held], strict=True):
        assert (ours - plain).abs().max() <= 1e-12 * max(1, plain.abs().max())


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_parallelize(strategy):
    with VirtualWorld(3) as world:
        found = world.run(train, "unet", strategy=strategy)
    losses, (_, *held) = train("unet", sharded=False)
    assert all(abs(a - b) < 1e-12 for a, b in zip(found[1][0], losses, strict=True))
    for ours, plain in zip(found[2][1][1:], held, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def fsdp1():
    """Train with torch's FullyShardedDataParallel over the data axis of a mesh of 2 x 2, with sharded fields."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({nn.Conv2d})
    on = {"device_mesh": mesh["data"], "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(dropout().eval(), auto_wrap_policy=policy, **on)
    first = dist.get_process_group_ranks(mesh["domain"].get_group())[0]
    x = shardfield.scatter_tensor(torch.ones(1, 1, 11, 6), first, mesh["domain"], (Shard(2),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [t.clone() for t in model.state_dict().values()]


@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated
@pytest.mark.parametrize("options", [{}, {"memory": "auto", "budget": 0}], ids=["kept", "moved"])
def test_fsdp1(options):
    with VirtualWorld(4, **options) as world:
        found = world.run(fsdp1)
    torch.manual_seed(0)
    model, x = dropout().eval(), torch.ones(1, 1, 11, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for ours in found:
        torch.testing.assert_close(ours, list(model.state_dict().values()), rtol=1e-5, atol=1e-6)


def test_a_second_program_and_world_of_the_process():
    before = dist.is_initialized()
    with VirtualWorld(2) as world:
        assert world.run(dist.get_world_size) == [2, 2]
        assert world.run(managers_rank) == [(0, 2), (1, 2)]
        assert world.run(managers_rank) == [(0, 2), (1, 2)]
    assert dist.is_initialized() == before and not DistributedManager.is_initialized()


def managers_rank():
    DistributedManager.initialize()
    manager = DistributedManager()
    dist.barrier()  # the other rank has initialized its own
    found = DistributedManager().rank, manager.world_size
    DistributedManager.cleanup()
    return found


def draw(seed):
    random.seed(seed + dist.get_rank())
    torch.manual_seed(seed + dist.get_rank())
    first = torch.rand(1).item()
    dist.barrier()
    return first, torch.rand(1).item(), random.random()


def test_each_rank_has_its_own_random_numbers():
    with VirtualWorld(2) as world:
        assert world.run(draw, 3) == run_on_ranks(draw, 2, 3)


def draw_from_numpy():
    drawn = []
    for _ in range(3):  # normal numbers come in pairs: one stays in reserve during the wait
        drawn.append(np.random.randn() if dist.get_rank() != 1 else np.random.rand())
        dist.barrier()
    return drawn


def test_each_rank_has_its_own_numbers_of_numpy():
    np.random.seed(0)
    normal = np.random.randn(5).tolist()
    np.random.seed(0)
    uniform = np.random.rand(3).tolist()
    np.random.seed(0)
    with VirtualWorld(3) as world:
        assert world.run(draw_from_numpy) == [normal[:3], uniform, normal[:3]]
    assert np.random.randn(2).tolist() == normal[3:]  # the caller goes on after rank 0


def flags_around_waits():
    """Set flags of the process that differ from rank to rank, around waits."""
    rank, before = dist.get_rank(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if rank == 0 else torch.float32)
    dist.barrier()
    dtype = torch.ones(1).dtype
    torch.set_default_dtype(before)
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("always")
        dist.barrier()
        warnings.warn(f"of rank {rank}", stacklevel=1)
        dist.barrier()
        flash = torch.backends.cuda.flash_sdp_enabled()
    return dtype, [str(w.message) for w in caught], flash


def test_each_rank_has_its_own_flags():
    filters, flash = warnings.filters, torch.backends.cuda.flash_sdp_enabled()
    with VirtualWorld(2) as world:
        first, second = world.run(flags_around_waits)
    assert first == (torch.float64, ["of rank 0"], False) and second == (torch.float32, ["of rank 1"], False)
    assert warnings.filters is filters and torch.backends.cuda.flash_sdp_enabled() == flash


def interrupted():
    for i in range(10**6):
        dist.barrier()
        if i == 10 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_the_ranks():
    # A process that a shell has started in the background ignores the signal.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with VirtualWorld(2) as world:
            with pytest.raises(KeyboardInterrupt):
                world.run(interrupted)
            assert world.run(dist.get_rank) == [0, 1]
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_interrupt_while_the_last_rank_ends():
    def program():
        if dist.get_rank() == 1:
            _thread.interrupt_main()  # seen by the caller when its wait has ended

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with VirtualWorld(2) as world:
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    world.run(program)
            assert world.run(dist.get_rank) == [0, 1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_end_with_the_world():
    gc.collect()  # threads of objects that other tests have left
    before = threading.active_count()
    worlds = [VirtualWorld(3) for _ in range(3)]
    for world in worlds:
        world.run(dist.barrier)
    worlds[0].close()
    del worlds, world
    gc.collect()
    assert threading.active_count() == before


def collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    scattered = torch.zeros(1)
    dist.scatter(scattered, [torch.full((1,), 10.0 + i) for i in range(size)] if rank == 1 else None, src=1)
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(size) + 10.0 * rank)
    reduced = torch.full((3,), 2.0 + rank)
    dist.reduce(reduced, 0, dist.ReduceOp.PRODUCT)
    viewed = torch.ones(4).view(2, 2) if rank else torch.ones(4)  # backends compare the number of elements
    dist.all_reduce(viewed)
    collected = [torch.zeros(1) for _ in range(size)] if rank == 2 else None
    dist.gather(torch.full((1,), -1.0 * rank), collected, dst=2)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(scattered, 0)
    return (
        [g.tolist() for g in gathered],
        objects,
        scattered.tolist(),
        swapped.tolist(),
        viewed.tolist(),
        (reduced.tolist() if rank == 0 else [float(c) for c in collected or ()]),
    )


def test_collectives_of_torch():
    with VirtualWorld(3) as world:
        assert world.run(collectives) == run_on_ranks(collectives, 3)


def compiled():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    model = norms().double()
    x = shardfield.scatter_tensor(torch.randn(1, 1, 11, 6, dtype=torch.float64), 0, mesh, (Shard(2),))
    fast = shardfield.compile(model, backend="aot_eager")
    fast(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_compile():
    with VirtualWorld(2) as world:
        found = world.run(compiled)
    for ours, theirs in zip(found[1], run_on_ranks(compiled, 2)[1], strict=True):
        assert torch.equal(ours, theirs)


def test_compile_is_refused_while_tensors_are_moved():
    with VirtualWorld(2, memory="auto") as world, pytest.raises(shardfield.ShardfieldError, match='use memory="keep"'):
        world.run(compiled)


# ---------------------------------------------------------------------- faults


def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def different_calls():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.barrier()


def fail_on_one():
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()


def refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x = shardfield.scatter_tensor(torch.ones(4, 4), 0, mesh, (Shard(0),))
    return x @ torch.ones(3, 3)


def unequal_sizes():
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(3), 0)


def unequal_counts():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (unequal_counts, WorldError, "different calls: all_reduce"),
        (wait_for_nobody, WorldError, "ended before: rank 1"),
        (different_calls, WorldError, "different calls: all_reduce"),
        (fail_on_one, shardfield.ShardfieldError, "rank 1: KeyError: 'only here'"),
        (refused, RuntimeError, "sizes 4 and 3 must be equal"),
        (unequal_sizes, WorldError, r"sends \(2,\)"),
        (lambda: VirtualWorld(2), WorldError, "of its own"),
    ],
)
def test_faults_are_errors_and_the_world_goes_on(program, error, text):
    with VirtualWorld(2) as world:
        with pytest.raises(error, match=text):
            world.run(program)
        assert world.run(sum_of_ranks) == [1, 1]  # the ranks have started different numbers of collectives


def sum_of_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def test_no_ranks():
    with pytest.raises(ValueError, match="at least 1"):
        VirtualWorld(0)


def on_a_submesh():
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((1, 2), mesh_dim_names=("data", "rows"))
    field = shardfield.scatter_tensor(torch.ones(5, 2), 0, mesh["rows"], (Shard(0),))
    return field.sum().item()


def test_groups_of_a_mesh_are_destroyed():
    """A world that leaves its meshes to `cleanup` ends without an error, also groups that sent nothing."""
    with VirtualWorld(2) as world:
        assert world.run(on_a_submesh) == [10.0, 10.0]
    assert not DistributedManager.is_initialized()


def run_in_a_thread(world):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(world.run, dist.get_rank).exception()


def test_two_worlds_at_the_same_time_are_refused():
    with VirtualWorld(2) as world, VirtualWorld(2) as other:
        other.run(dist.barrier)
        for error in world.run(run_in_a_thread, other):
            assert isinstance(error, WorldError) and "two threads" in str(error)
        assert other.run(dist.get_rank) == world.run(dist.get_rank) == [0, 1]


def test_a_forked_process_is_refused(monkeypatch):
    """It has no threads of the ranks, and would wait for them for ever."""
    with VirtualWorld(2) as world:
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(WorldError, match="forked"):
                world.run(dist.get_rank)
        assert world.run(dist.get_rank) == [0, 1]


def test_a_closed_world_is_refused():
    """Its threads have ended, so that a run would wait for ever."""
    with VirtualWorld(2) as world:
        world.run(dist.get_rank)
    with pytest.raises(WorldError, match="were closed"):
        world.run(dist.get_rank)
    world.close()
