"""Paging: a program gives the same bits while its tensors are moved out, and a step fits less memory than it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardfield.errors import ShardfieldError
from shardfield.virtual import VirtualWorld
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
