"""Halos of a CNN on a field cut into rows: what is sent, whether it hides behind the work, how the step scales.

    python benchmarks/halo.py [--ranks 2 4] [--channels 32] [--json FILE]

A 6-layer CNN (3x3, padding 1, relu) takes a training step. Four questions, each a ratio or a count of one run:

* sent: bytes and messages of a convolution's forward and backward, against the rows of its halo;
* delayed: every message is made to arrive 5 ms late; the step's time against the slower of its work and its messages,
  and the same with one wide halo for all layers (`halo_blocks`);
* scaling: the step's time on 1 rank against 2, one thread each;
* memory: the peak of a rank among 4 against that of 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor
from shardfield.comm import wire
from shardfield.layout import chunk
from shardfield.shard_utils import halo_blocks
from shardfield.testing import run_on_ranks


def cnn(channels: int, depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(depth):
        inputs, outputs = 3 if i == 0 else channels, 3 if i == depth - 1 else channels
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1)] + ([nn.ReLU()] if i < depth - 1 else [])
    return nn.Sequential(*layers)


def field(size: int) -> ShardTensor:
    """This rank's rows of a size x size image with three channels."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("h",))
    rows = chunk(size, mesh.size())[mesh.get_local_rank()]
    return ShardTensor.from_local(torch.randn(1, 3, rows, size), mesh, [Shard(2)], "chunk", (1, 3, size, size))


def step(model: nn.Module, x) -> float:
    """Seconds of one training step."""
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return time.perf_counter() - start


def sent(size: int, channels: int) -> dict[str, list[int]]:
    """(messages, bytes) of one convolution, forward and backward, parameters frozen: the halo alone."""
    x = field(size).requires_grad_()
    weight = torch.randn(channels, 3, 3, 3)
    count = [0, 0]
    wire.meter = lambda kind, messages, nbytes: count.__setitem__(slice(None), [count[0] + messages, count[1] + nbytes])
    out = F.conv2d(x, weight, padding=1)
    forward = list(count)
    out.backward(torch.ones(out.shape))
    wire.meter = None
    return {"forward": forward, "backward": [count[0] - forward[0], count[1] - forward[1]]}


def late(seconds: float) -> None:
    """Messages arrive that much later than they were sent."""
    exchange, reduce = wire.start_exchange, wire.start_all_reduce

    def delayed(start):
        def run(*args, **kwargs):
            pending, sent_at = start(*args, **kwargs), time.perf_counter()
            arrive = pending._finish

            def finish():
                time.sleep(max(0.0, sent_at + seconds - time.perf_counter()))
                return arrive()

            pending._finish = finish
            return pending

        return run

    wire.start_exchange, wire.start_all_reduce = delayed(exchange), delayed(reduce)


def delayed(size: int, channels: int, rounds: int, seconds: float = 0.005) -> dict[str, float]:
    """Medians of the step with late messages, of its work alone, and of its messages alone."""
    model, blocked, x = cnn(channels), halo_blocks(cnn(channels), redundancy=0.2), field(size)
    local = x.to_local().detach()
    messages = [0]

    def count(kind: str, number: int, nbytes: int) -> None:
        messages[0] += 1  # what one rank waits for: messages to both neighbours travel at once

    wire.meter = count
    step(model, x)
    wire.meter = None
    real = wire.start_exchange, wire.start_all_reduce
    times: dict[str, list[float]] = {"step": [], "work": [], "blocked": []}
    step(blocked, x)
    for _ in range(rounds):
        dist.barrier()
        times["work"].append(step(model, local))
        late(seconds)
        dist.barrier()
        times["step"].append(step(model, x))
        dist.barrier()
        times["blocked"].append(step(blocked, x))
        wire.start_exchange, wire.start_all_reduce = real
    found = {name: statistics.median(values) for name, values in times.items()}
    return found | {"messages": messages[0] * seconds}


def timed(size: int, channels: int, rounds: int) -> list[float]:
    """Seconds of each step after a warm-up."""
    torch.set_num_threads(1)
    model, x = cnn(channels), field(size)
    step(model, x)
    times = []
    for _ in range(rounds):
        dist.barrier()
        times.append(step(model, x))
    return times


def peak(size: int, channels: int) -> float:
    """Bytes by which a step raises this process's peak memory."""
    model = cnn(channels)
    step(model, field(64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(model, field(size))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict = {}

    print("peak memory of a step at 1024 x 1024 (MB a rank)")
    whole = run_on_ranks(peak, 1, 1024, args.channels, timeout=600)[0]
    parts = run_on_ranks(peak, 4, 1024, args.channels, timeout=600)
    found["memory"] = max(parts) / whole
    print(f"  1 rank {whole / 1e6:.0f}, 4 ranks {max(parts) / 1e6:.0f}: ratio {found['memory']:.3f}")

    for ranks in args.ranks:
        row = 3 * 512 * 4
        per_rank = run_on_ranks(sent, ranks, 512, args.channels)
        found[f"sent {ranks}"] = per_rank
        for rank, counts in enumerate(per_rank):
            neighbours = (rank > 0) + (rank < ranks - 1)
            assert counts["forward"] == counts["backward"] == [neighbours, neighbours * row], (rank, counts)
        print(f"{ranks} ranks: each convolution sends one row of {row} bytes to each neighbour, forward and backward")

        rows = run_on_ranks(delayed, ranks, 512, args.channels, args.rounds, timeout=600)
        slowest = {k: max(r[k] for r in rows) for k in rows[0]}
        found[f"delayed {ranks}"] = slowest["step"] / max(slowest["work"], slowest["messages"])
        print(
            f"{ranks} ranks, messages 5 ms late, 512 x 512: step {slowest['step'] * 1e3:.0f} ms, work "
            f"{slowest['work'] * 1e3:.0f} ms, messages {slowest['messages'] * 1e3:.0f} ms: ratio "
            f"{found[f'delayed {ranks}']:.3f}; one halo for all layers {slowest['blocked'] * 1e3:.0f} ms"
        )

    pairs = []
    for _ in range(3):
        one = run_on_ranks(timed, 1, 1024, args.channels, 2, timeout=600)[0]
        two = run_on_ranks(timed, 2, 1024, args.channels, 2, timeout=600)
        pairs.append((statistics.median(one), max(statistics.median(t) for t in two)))
    found["speed-up 2"] = statistics.median(one / two for one, two in pairs)
    print(f"1024 x 1024, one thread a rank: 2 ranks are {found['speed-up 2']:.2f} times as fast as 1")
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "channels": args.channels, "found": found}, indent=1))


if __name__ == "__main__":
    main()
