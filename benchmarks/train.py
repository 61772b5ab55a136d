"""Training a model on a cut field: how a step scales, whether reading hides behind it, and what then fits into memory.

    python benchmarks/train.py [--points 256] [--ranks 2] [--rounds 5] [--json FILE]
    python benchmarks/train.py --limited MB ... [--recompute]     (one rank of the memory question, under a launcher)

Three questions, each a ratio of one run:

* scaling: a step of neuraloperator's TFNO (parallelize, H1 loss, AdamW) on 1 rank against several, one thread each.
  The two take turns, so that a busy machine slows them alike. As the clock has it, and in processor seconds of the
  busiest rank, which other programs on the machine do not change;
* reading: the share of the steps' time that was spent waiting for a batch, which a thread reads from an HDF5 file;
* memory: one sample, the data segment of each process limited (RLIMIT_DATA) to so many megabytes above what it has
  after a small step. What does not fit into one process at four times the limit trains on four at the limit, with
  activations computed again in backward; doing so is not enough for one process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, parallelize
from shardfield.data import ShardedLoader, UnitGaussian, open_field
from shardfield.distributed import DistributedManager
from shardfield.layout import chunk
from shardfield.testing import run_on_ranks
from shardfield.train import clip_grad_norm_
from shardfield.train.recipes.darcy import Normalized

MEGABYTE = 1 << 20


def steps(path: str, batch: int, rounds: int) -> list[list[float]]:
    """On a rank: clock seconds, processor seconds and seconds of waiting for data, of each step after the first."""
    from neuralop.losses import H1Loss
    from neuralop.models import TFNO

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "spatial"))
    loader = ShardedLoader({name: open_field(path, name=name) for name in "xy"}, batch, mesh)
    model = TFNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=24, factorization="tucker", rank=0.42)
    unit = UnitGaussian(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    model = parallelize(Normalized(model, unit, unit), mesh)  # as the recipe has it
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    criterion = H1Loss(d=2, reduction="mean")

    def now() -> list[float]:
        return [time.perf_counter(), time.process_time(), loader.waited]

    found, batches = [], iter(loader)
    for _ in range(rounds + 1):
        before = now()
        data = next(batches)
        optimizer.zero_grad()
        criterion(model(data["x"]), data["y"]).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        found.append([after - start for after, start in zip(now(), before, strict=True)])
    batches.close()
    return found[1:]


def scaling(points: int, ranks: int, batch: int, rounds: int) -> dict[str, float]:
    """How many times as fast several ranks are, and the share of their time that reading takes."""
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "fields.h5")
        with h5py.File(path, "w") as file:
            for name in "xy":
                file[name] = torch.randn(batch * 4, 1, points, points).numpy()
        clock, processor, seconds, waited, total = [], [], [], 0.0, 0.0
        for _ in range(rounds):
            one = run_on_ranks(steps, 1, path, batch, 2, timeout=600)[0]
            several = run_on_ranks(steps, ranks, path, batch, 2, timeout=600)
            slowest = [[max(at) for at in zip(*step, strict=True)] for step in zip(*several, strict=True)]
            clock.append(sum(s[0] for s in one) / sum(s[0] for s in slowest))
            processor.append(sum(s[1] for s in one) / sum(s[1] for s in slowest))
            seconds.append(sum(s[1] for s in one) / len(one))
            waited += sum(s[2] for s in slowest)
            total += sum(s[0] for s in slowest)
    return {
        "clock": statistics.median(clock),
        "clock, best": max(clock),
        "processor": statistics.median(processor),
        "seconds": statistics.median(seconds),
        "waited": waited / total,
    }


# ---------------------------------------------------------------------- memory


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x):
        return x + self.body(x)


class Network(nn.Module):
    def __init__(self, width: int = 8, depth: int = 8):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def limited(limits: list[float], points: int, recompute: bool) -> None:
    """Under a launcher: a step on one sample under each limit on this process's data segment; says how it went."""
    torch.set_num_threads(1)
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, -1), mesh_dim_names=("data", "spatial"))

    def losses(size: int, steps: int) -> list[float]:
        """Of a new model's first steps; a model is not used on after an error, which leaves FSDP in mid-step."""
        torch.manual_seed(0)
        model = parallelize(Network(), mesh, checkpoint=[Block] if recompute else False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = chunk(size, manager.world_size)[manager.rank]
        first = sum(chunk(size, manager.world_size)[: manager.rank])
        made = torch.sin(torch.arange(first * size, (first + rows) * size) * 1e-3).reshape(1, 1, rows, size)
        x = ShardTensor.from_local(made, mesh["spatial"], [Shard(2)], "chunk", (1, 1, size, size))
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    losses(32, 2)  # threads, buffers and kernels that any step needs
    base, hard = data_segment(), resource.getrlimit(resource.RLIMIT_DATA)[1]
    for megabytes in limits:
        resource.setrlimit(resource.RLIMIT_DATA, (base + int(megabytes * MEGABYTE), hard))
        try:
            before, after = losses(points, 2)
            told = f"trains, loss {before:.5f} to {after:.5f}"
        except (RuntimeError, MemoryError) as error:
            short = isinstance(error, MemoryError) or any(t in str(error) for t in ("alloc", "could not"))
            if not short or manager.world_size > 1:  # other ranks would wait for this one
                raise
            told = "does not fit"
        if manager.rank == 0:
            print(f"{manager.world_size} ranks, {megabytes:g} MB each: {told}", flush=True)


def data_segment() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


def launched(ranks: int, megabytes: float, *more: str) -> str:
    """What a rank says of the memory question; processes of its own, whose memory nothing has used before."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    done = subprocess.run(
        [*command, "--limited", str(megabytes), *more],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    return done.stdout.strip() or f"{ranks} ranks, {megabytes:g} MB each: failed\n{done.stderr[-2000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limited", type=float, nargs="+", metavar="MB")
    parser.add_argument("--limited-points", type=int, default=512)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    if args.limited is not None:
        limited(args.limited, args.limited_points, args.recompute)
        return

    found: dict = scaling(args.points, args.ranks, args.batch, args.rounds)
    print(f"TFNO step at {args.points} x {args.points}, {args.batch} samples, one thread a rank, {args.rounds} rounds")
    several, best = f"{args.ranks} ranks against 1", found["clock, best"]
    print(f"  {several}, by the clock: {found['clock']:.2f} times as fast (best {best:.2f})")
    busy = f"{found['processor']:.2f} ({found['seconds']:.2f} s on 1 rank)"
    print(f"  the same in processor seconds of the busiest rank: {busy}")
    print(f"  waiting for data: {found['waited']:.2%} of the steps' time")
    print("one sample, limited memory")
    found["memory"] = [launched(1, 4 * LIMIT), launched(1, LIMIT, "--recompute"), launched(4, LIMIT, "--recompute")]
    print(*(f"  {line}" for line in found["memory"]), sep="\n")
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "found": found}, indent=1) + "\n")


LIMIT = 60  # megabytes a process may take for the step

if __name__ == "__main__":
    main()
