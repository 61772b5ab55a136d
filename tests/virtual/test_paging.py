"""Paging: a program gives the same bits while its tensors are moved out, and a step fits less memory than it takes."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardfield.errors import ShardfieldError
from shardfield.virtual import VirtualWorld
from shardfield.virtual.page_store import FileStore
from shardfield.virtual.paging import Pager
from tests.virtual.test_world import train


@pytest.mark.parametrize("case", ["unet", "norms", "vit", "tfno"])
def test_paged_programs_give_the_same_bits(case):
    with VirtualWorld(3) as world:
        expected = world.run(train, case)
    for options in ({"memory": "offload"}, {"memory": "auto", "budget": 20_000}, {"memory": "auto", "budget": 0}):
        with VirtualWorld(3, **options) as world:
            world.pager.minimum = 64
            found = world.run(train, case)
            assert world.pager.moved_in > 0
        for (losses, ours), (theirs, plain) in zip(found, expected, strict=True):
            assert losses == theirs and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_parallelize_with_paging():
    with VirtualWorld(3) as world:
        expected = world.run(train, "unet", strategy="fsdp")
    with VirtualWorld(3, memory="auto", budget=20_000) as world:
        world.pager.minimum = 64
        found = world.run(train, "unet", strategy="fsdp")
    for (losses, ours), (theirs, plain) in zip(found, expected, strict=True):
        assert losses == theirs and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def read_by_address():
    """Read tensors by paths that the operators of torch do not see."""
    first = torch.arange(1000.0) + dist.get_rank()
    array = first.numpy()
    for _ in range(20):
        torch.ones(1000).sum()
        dist.barrier()
    return float(array.sum()), first.tolist()[:2], (torch.arange(10.0) * 2).tolist()[3]


def test_exposed_memory_stays():
    with VirtualWorld(2, memory="auto", budget=0) as world:
        world.pager.minimum = 1
        assert world.run(read_by_address)[1] == (499500.0 + 1000, [1.0, 2.0], 6.0)


def test_budget_and_peak():
    pager = Pager(budget=100_000, minimum=1)

    def program():
        kept = [torch.full((5000,), float(i)) for i in range(10)]  # 20 kB each
        return [float(t.mean()) for t in kept]

    with VirtualWorld(1, memory="auto", budget=100_000) as world:
        world.pager.minimum = pager.minimum
        assert world.run(program) == [[float(i) for i in range(10)]]
        assert 80_000 <= world.pager.peak <= 100_000
        assert world.pager.moved_out >= world.pager.moved_in >= 100_000


@pytest.mark.parametrize("memory", ["recomputed", None])
def test_unknown_policies(memory):
    with pytest.raises(ValueError, match="none of 'keep', 'offload', 'auto'"):
        VirtualWorld(2, memory=memory)


def test_a_full_disk_is_an_error(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with VirtualWorld(1, memory="auto", budget=0) as world:
        world.pager.minimum = 1
        with pytest.raises(ShardfieldError, match="cannot be written to disk.*No space left"):
            world.run(lambda: [torch.ones(1000) for _ in range(3)])


LIMITED = """
import resource, sys
import torch, torch.distributed as dist
import torch._dynamo  # imported by the first operator in backward, and large
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
import shardfield
from shardfield.layout import DimSharding, Layout, balanced
from shardfield.tensor import wrap
from shardfield.virtual import VirtualWorld

ROWS, COLUMNS, CHANNELS, LAYERS = 1024, 256, 8, 10
held = ROWS * COLUMNS * CHANNELS * 4 * 2 * LAYERS  # what backward of plain torch reads

def program():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, CHANNELS, 3, padding=1)]
    layers += [m for _ in range(LAYERS) for m in (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GELU())]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    sizes = balanced(ROWS, mesh.size())
    rows, columns = DimSharding(ROWS, (0,), sizes), DimSharding(COLUMNS)
    layout = Layout.make(mesh, [[DimSharding(1)], [DimSharding(1)], [rows], [columns]])
    begin = sum(sizes[: dist.get_rank()])
    local = torch.arange(begin, begin + sizes[dist.get_rank()]).view(1, 1, -1, 1).expand(1, 1, -1, COLUMNS) / ROWS
    loss = model(wrap(local.contiguous(), layout)).square().mean()
    loss.backward()
    return loss.item()

memory, share = sys.argv[1], float(sys.argv[2])
with VirtualWorld(8, memory="keep" if memory == "keep" else "auto", budget=int(held * share / 2)) as world:
    world.run(dist.barrier)
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(held * share), -1))
    print(world.run(program)[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of data is Linux's")
def test_a_step_in_a_quarter_of_its_memory(tmp_path):
    """A step whose activations take 168 MB runs in 42 MB, and does not without paging."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)

    def run(*words: str) -> subprocess.CompletedProcess:
        root = Path(__file__).parents[2]
        env = {"PYTHONPATH": f"{root / 'src'}", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=200, env=env)

    free, paged, kept = run("keep", "4"), run("auto", "0.25"), run("keep", "0.25")
    assert free.returncode == 0, free.stderr
    assert paged.returncode == 0, paged.stderr
    assert float(paged.stdout) == float(free.stdout)
    assert kept.returncode != 0 and "allocate memory" in kept.stderr, kept.stderr


# ---------------------------------------------------------------------- programs that reach memory in other ways


def wait() -> None:
    """Let all other tensors be moved out, and other ranks run."""
    torch.ones(5000).sum()
    dist.barrier()


def views_and_writes():
    base = torch.arange(1000.0) + dist.get_rank()
    part, rows = base[10:20], base.view(10, 100)
    wait()
    part.add_(5)
    wait()
    rows[3].mul_(2)
    wait()
    expected = torch.arange(1000.0) + dist.get_rank()
    expected[10:20] += 5
    expected.view(10, 100)[3] *= 2
    return torch.equal(base, expected) and torch.equal(part, expected[10:20])


def saved_pickled_copied_and_printed():
    tensor, model = torch.arange(1000.0), nn.Linear(50, 50)
    wait()
    file = io.BytesIO()
    torch.save({"tensor": tensor, "model": model.state_dict()}, file)
    wait()
    loaded = torch.load(io.BytesIO(file.getvalue()))
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(tensor))
    fresh = torch.arange(1000.0)
    wait()
    equal = [(loaded["tensor"], tensor), (pickled, tensor), (copied.weight, model.weight)]
    equal += [(loaded["model"]["bias"], model.bias)]
    return all(torch.equal(a, b) for a, b in equal) and "999." in f"{fresh}"


def sparse_and_subclasses():
    class Named(torch.Tensor):
        pass

    indices = torch.arange(200).view(1, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse tensors are in beta state
        sparse = torch.sparse_coo_tensor(indices, torch.ones(200), (200,))
        wait()
        values = sparse.coalesce().values()
        wait()
        dense = torch.diag(sparse.to_dense()).to_sparse_csr()
    named = torch.arange(1000.0).as_subclass(Named)
    wait()
    return values.sum() == 200 and dense.values().sum() == 200 and named.sum() == 499500


def workers():
    data = DataLoader(TensorDataset(torch.arange(40.0).view(40, 1).repeat(1, 50)), batch_size=10, num_workers=1)
    wait()
    return sum(float(x.sum()) for (x,) in data) == 780 * 50


def shared_by_ranks(box):
    if dist.get_rank() == 0:
        box.append(torch.ones(1000))
    dist.barrier()
    for _ in range(3):
        box[0].add_(1)
        wait()
    return float(box[0].sum()) == 1000 * (1 + 3 * dist.get_world_size())


@pytest.mark.parametrize(
    "program",
    [
        views_and_writes,
        saved_pickled_copied_and_printed,
        sparse_and_subclasses,
        workers,
        functools.partial(shared_by_ranks, []),
    ],
    ids=["views", "saved", "sparse", "workers", "shared"],
)
def test_programs_with_a_budget_of_nothing(program):
    with VirtualWorld(2, memory="auto", budget=0) as world:
        world.pager.minimum = 1
        assert world.run(program) == [True, True]


def test_a_small_disk(tmp_path):
    """Writing fails after some pages: an error, tensors keep their values, and the world goes on."""
    held = []

    def program():
        for _ in range(50):
            held.append(torch.full((10_000,), float(dist.get_rank())))
            dist.barrier()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with VirtualWorld(2, memory="auto", budget=0, folder=str(tmp_path)) as world:
        world.pager.minimum = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
            with pytest.raises(ShardfieldError, match="40000 bytes cannot be written to disk"):
                world.run(program)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert len(held) > 5 and all(float(t.min()) == float(t.max()) in (0.0, 1.0) for t in held)
        assert world.run(dist.get_rank) == [0, 1]


class SlowStore:
    """A store whose transfers end when they are waited for, or when `finish` is called."""

    def __init__(self):
        self.bytes, self.waited, self.finished = {}, [], False

    def write(self, storage):
        place = object()
        self.bytes[place] = bytes(storage)
        return place, SlowTransfer(self, "write")

    def read(self, place, storage):
        storage.copy_(torch.UntypedStorage(list(self.bytes[place])))
        return SlowTransfer(self, "read")

    def release(self, place):
        del self.bytes[place]

    def close(self):
        pass


class SlowTransfer:
    def __init__(self, store, kind):
        self.store, self.kind = store, kind

    def done(self):
        return self.store.finished

    def wait(self):
        self.store.waited.append(self.kind)


def test_pages_are_copied_ahead_and_leave_without_waiting():
    """The logic of overlap, with a store that says what was waited for."""
    store = SlowStore()
    pager = Pager(budget=4000, minimum=1)
    pager.make_store = lambda device: store
    tensors = [torch.full((100,), float(i)) for i in range(10)]  # 400 bytes each
    for tensor in tensors[:9]:
        pager.make_room(400, set())
        pager.add([tensor], 0)
    assert store.waited == [] and pager.moved_out == 400  # one page is copied ahead, its memory still there
    store.finished = True
    pager.make_room(800, set())
    assert pager.left_clean == 400 and tensors[0].untyped_storage().nbytes() == 0 and pager.held == 3200
    store.finished = False
    pager.use([tensors[1]])
    pager.will_write([tensors[1]])  # being copied: the copy is dropped
    tensors[1].fill_(7.0)
    pager.use([tensors[0]])
    assert tensors[0].tolist() == [0.0] * 100
    pager.evict_all(set())
    pager.restore_all()
    assert [float(t[0]) for t in tensors[:9]] == [0.0, 7.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0] and not store.bytes


def test_a_page_that_is_read_stays_clean_and_a_full_store_drops_copies():
    store, full = SlowStore(), []
    write = store.write

    def write_if_room(storage):
        if full and store.bytes:
            raise ShardfieldError("no host memory")
        return write(storage)

    store.write, store.finished = write_if_room, True
    pager = Pager(minimum=1)
    pager.make_store = lambda device: store
    tensors = [torch.full((100,), float(i)) for i in range(3)]
    pager.add(tensors, 0)
    pager.evict_all(set())
    assert pager.moved_out == 1200
    pager.use(tensors[:1])
    pager.evict_all(set())
    assert pager.moved_out == 1200
    pager.use(tensors[:1])
    pager.will_write(tensors[:1])
    tensors[0].fill_(5.0)
    pager.use(tensors[1:])
    full.append(True)
    pager._move_out(
        400, set(), lambda page: True
    )  # the copies of pages that are in memory make room for that of another one
    assert pager.moved_out == 1600 and pager.held == 800
    pager.restore_all()
    assert [float(t.mean()) for t in tensors] == [5.0, 1.0, 2.0]


def mapped_blocks():
    """Return how many blocks of memory glibc has mapped for this process, each of which it returns when it is freed."""

    class Info(ctypes.Structure):
        _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    return mallinfo().field3


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or newer")
def test_memory_of_pages_is_returned_to_the_system():
    FileStore(None).close()
    for _ in range(2):
        torch.empty(30 << 20, dtype=torch.uint8)  # when it is freed, glibc would keep blocks up to its size
    before = mapped_blocks()
    pages = [torch.empty(24 << 20, dtype=torch.uint8) for _ in range(3)]  # larger than what earlier tests have freed
    assert mapped_blocks() == before + len(pages)
