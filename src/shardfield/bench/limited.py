"""One rank of the memory benchmark: training steps on one sample, under limits on the data segment of the process.

torchrun --nproc-per-node 4 -m shardfield.bench.limited 60 --points 512 --recompute
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..distributed import DistributedManager
from ..layout import chunk, starts
from ..tensor import ShardTensor
from ..train.parallel import parallelize

MEGABYTE = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Network(nn.Module):
    def __init__(self, width: int = 8, depth: int = 8):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def run_limited(limits: list[float], points: int, recompute: bool) -> None:
    """Run steps under each limit. The first rank prints whether they fit."""
    torch.set_num_threads(1)
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, -1), mesh_dim_names=("data", "spatial"))

    def losses(size: int, steps: int) -> list[float]:
        """Return the losses of the first steps of a new model. No model is reused: an error leaves FSDP in mid-step."""
        torch.manual_seed(0)
        model = parallelize(Network(), mesh, checkpoint=[Block] if recompute else False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        shard_sizes = chunk(size, manager.world_size)
        first, rows = starts(shard_sizes)[manager.rank], shard_sizes[manager.rank]
        local = torch.sin(torch.arange(first * size, (first + rows) * size) * 1e-3).reshape(1, 1, rows, size)
        x = ShardTensor.from_local(local, mesh["spatial"], [Shard(2)], "chunk", (1, 1, size, size))
        values = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    losses(32, 2)  # allocates threads, buffers and kernels that any step needs
    base, hard = data_segment(), resource.getrlimit(resource.RLIMIT_DATA)[1]
    for megabytes in limits:
        resource.setrlimit(resource.RLIMIT_DATA, (base + int(megabytes * MEGABYTE), hard))
        try:
            before, after = losses(points, 2)
            outcome = f"trains, loss {before:.5f} to {after:.5f}"
        except (RuntimeError, MemoryError) as error:
            out_of_memory = isinstance(error, MemoryError) or any(t in str(error) for t in ("alloc", "could not"))
            if not out_of_memory or manager.world_size > 1:  # other ranks would block on this one: end the process
                raise
            outcome = "does not fit"
        if manager.rank == 0:
            print(f"{manager.world_size} ranks, {megabytes:g} MB each: {outcome}", flush=True)


def data_segment() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "limits",
        type=float,
        nargs="+",
        metavar="MB",
        help="limits, beyond the memory that the process has after a small step",
    )
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--recompute", action="store_true", help="recompute activations in backward")
    args = parser.parse_args()
    run_limited(args.limits, args.points, args.recompute)


if __name__ == "__main__":
    main()
