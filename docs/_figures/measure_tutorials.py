"""Measure the operation of each tutorial on 1, 2, 4 (and 8) ranks for several sizes: writes docs/tutorials.json.

`make tutorial-times`; `make figures` plots the file. The rounds of all numbers of ranks are interleaved, and the
shortest time counts, because other programs may use the same cores.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, scatter_tensor, sync_module_over_mesh
from shardfield.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/tutorials.json"
RANKS = (1, 2, 4, 8) if (os.cpu_count() or 1) >= 8 else (1, 2, 4)
ROUNDS, SECONDS = 3, 0.5
Step = Callable[[], object]


def line_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


def sharded(mesh, *shape: int, dim: int = 0, grad: bool = False) -> ShardTensor:
    return scatter_tensor(torch.randn(shape), 0, mesh, (Shard(dim),), requires_grad=grad)


def vector_add(size: int) -> Step:
    mesh = line_mesh()
    a, b = sharded(mesh, size), sharded(mesh, size)
    return lambda: a + b


def dot_product(size: int) -> Step:
    mesh = line_mesh()
    a, b = sharded(mesh, size, grad=True), sharded(mesh, size, grad=True)
    return lambda: torch.autograd.grad(torch.dot(a, b), (a, b))


def knn_ring(size: int) -> Step:
    sys.path.insert(0, str(ROOT / "examples"))
    import knn

    ShardTensor.register_function_handler(knn.knn, knn.knn_ring)
    mesh = line_mesh()
    points, queries = sharded(mesh, size, 3), sharded(mesh, size // 8, 3)
    return lambda: knn.knn(points, queries, 8)


def reshape_subtract(size: int) -> Step:
    mesh = line_mesh()
    points, queries = sharded(mesh, size, 3), sharded(mesh, size // 8, 3)
    return lambda: points[None, :, :] - queries[:, None, :]


def cnn_fsdp(size: int) -> Step:
    warnings.simplefilter("ignore")  # of FSDP: one rank shards nothing
    mesh = init_device_mesh(
        "cpu", (-(-dist.get_world_size() // 2), min(dist.get_world_size(), 2)), mesh_dim_names=("data", "spatial")
    )
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    model = nn.Sequential(*layers)
    sync_module_over_mesh(model, mesh["spatial"])
    model = FullyShardedDataParallel(
        model, device_mesh=mesh["data"], use_orig_params=True, device_id=torch.device("cpu")
    )
    batch = 16 // mesh.size(0)  # 16 images in all
    rows = torch.randn(batch, 3, size // mesh.size(1), size)
    images, labels = ShardTensor.from_local(rows, mesh["spatial"], (Shard(2),)), torch.zeros(batch, dtype=torch.long)
    return lambda: nn.functional.cross_entropy(model(images), labels).backward()


def tfno_darcy(size: int) -> Step:
    from neuralop.models import TFNO

    torch.manual_seed(0)
    model = TFNO(n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2, rank=0.3)
    field = sharded(line_mesh(), 2, 1, size, size, dim=2)
    return lambda: model(field).square().mean().backward()


def process_groups(size: int) -> Step:
    mesh = init_device_mesh("cpu", (-(-dist.get_world_size() // 2), min(dist.get_world_size(), 2)))
    row, data = mesh.get_group(1), torch.randn(size)
    return lambda: dist.all_reduce(data, group=row)


CASES = {
    "vector-add": (vector_add, (10**4, 10**5, 10**6, 10**7)),
    "dot-product": (dot_product, (10**4, 10**5, 10**6, 10**7)),
    "knn-ring": (knn_ring, (1000, 2000, 4000, 8000)),
    "reshape-subtract": (reshape_subtract, (500, 1000, 2000, 4000)),
    "cnn-fsdp": (cnn_fsdp, (32, 64, 128, 256)),
    "tfno-darcy": (tfno_darcy, (32, 64, 128, 256)),
    "process-groups": (process_groups, (10**3, 10**4, 10**5, 10**6, 10**7)),
}


def shortest(name: str) -> dict[int, float]:
    """Return {size: shortest seconds of a step}, the slowest rank counts."""
    make, sizes = CASES[name]
    found = {}
    for size in sizes:
        step, times = make(size), []
        step()
        repeats = torch.tensor(0.0)
        begun = time.perf_counter()
        step()
        repeats[...] = min(max(SECONDS / (time.perf_counter() - begun), 3), 200)
        dist.all_reduce(repeats, op=dist.ReduceOp.MIN)  # the same number of steps on all ranks
        for _ in range(int(repeats)):
            dist.barrier()
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        slowest = torch.tensor(times)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[size] = slowest.min().item()
    return found


def main() -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or CASES:
        best: dict[str, dict[str, float]] = {}
        for _ in range(ROUNDS):
            for ranks in RANKS:
                for size, seconds in run_on_ranks(shortest, ranks, name, timeout=300)[0].items():
                    row = best.setdefault(str(ranks), {})
                    row[str(size)] = round(min(seconds * 1e3, row.get(str(size), 1e9)), 4)
        found[name] = best
        print(name, best, flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
