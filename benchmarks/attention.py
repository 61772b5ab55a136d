"""Attention on a sequence in pieces: the ring against gathering keys and values, and against one rank alone.

    python benchmarks/attention.py [--ranks 2 4] [--length 4096] [--rounds 5] [--delay-ms 5] [--json FILE]

Every round times all systems one after the other on the same ranks (gloo, one thread each), so that a busy machine
slows all of them; ratios are of medians over rounds, of the slowest rank. Printed for each number of ranks:

- the ring's time over that of gathering keys and values and calling torch's function, and over one rank's for all of it
  (the others wait), forward and forward + backward, causal and not; and the memory either takes beyond its inputs;
- how well messages hide: each takes `--delay-ms` more, and the ring is held against the slower of its arithmetic and
  its messages alone;
- how equal causal work is: the largest share of scores over the mean;
- what one rank pays over plain torch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor
from shardfield.comm import ring as rings
from shardfield.comm import wire
from shardfield.ops import attention
from shardfield.testing import run_on_ranks

attend = F.scaled_dot_product_attention
STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    """A line of this process's status, in bytes; 0 where there is none."""
    if not STATUS.exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(field))


def forget_peak() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


class Inputs:
    """Queries, keys and values of one problem, whole and in pieces."""

    def __init__(self, heads: int, length: int, width: int, mesh):
        generator = torch.Generator().manual_seed(0)
        self.whole = [torch.randn(1, heads, length, width, generator=generator).requires_grad_() for _ in range(3)]
        cut = torch.chunk(torch.arange(length), mesh.size(0))[mesh.get_local_rank()]
        self.pieces = [
            ShardTensor.from_local(t.detach()[:, :, cut[0] : cut[-1] + 1].clone().requires_grad_(), mesh, [Shard(2)])
            for t in self.whole
        ]

    def clear(self) -> None:
        for t in (*self.whole, *self.pieces):
            t.grad = None


def ring(x: Inputs, causal: bool, backward: bool):
    out = attend(*x.pieces, is_causal=causal)
    if backward:
        out.to_local().sum().backward()


def gather(x: Inputs, causal: bool, backward: bool):
    """What a user writes without a ring: keys and values on every rank, and a mask for the rows that are here."""
    q, k, v = x.pieces
    local = q.to_local()
    keys, values = (t.redistribute(placements=[Replicate()]).to_local() for t in (k, v))
    mask = None
    if causal:
        first = q.offsets(0)
        rows = torch.arange(first, first + local.shape[2])
        mask = rows[:, None] >= torch.arange(k.shape[2])
    out = attend(local, keys, values, mask)
    if backward:
        out.sum().backward()


def alone(x: Inputs, causal: bool, backward: bool):
    if dist.get_rank() == 0:
        out = attend(*x.whole, is_causal=causal)
        if backward:
            out.sum().backward()


def clock(call: Callable[[], None]) -> tuple[float, int]:
    """Seconds until the slowest rank is done, and the memory this rank took at most."""
    dist.barrier()
    forget_peak()
    before, start = memory("VmRSS"), time.perf_counter()
    call()
    peak = memory("VmHWM") - before
    dist.barrier()
    return time.perf_counter() - start, peak


@contextmanager
def late(delay: float):
    """Every message arrives `delay` seconds later than it would."""
    start = wire.start_exchange

    def delayed(sends, shapes, group):
        pending, due = start(sends, shapes, group), time.perf_counter() + delay

        def finish():
            found = pending.wait()
            time.sleep(max(0.0, due - time.perf_counter()))
            return found

        return wire.Pending((), (), finish)

    wire.start_exchange = delayed
    try:
        yield
    finally:
        wire.start_exchange = start


def overlap(x: Inputs, delay: float, rounds: int) -> dict[str, float]:
    """The ring, its arithmetic alone (all blocks at hand) and its messages alone, with late messages."""
    mesh = x.pieces[0].device_mesh
    size = mesh.size(0)
    q, k, v = (t.to_local().detach() for t in x.pieces)
    blocks = [(k.clone(), v.clone()) for _ in range(size)]
    where = rings.Ring((mesh.get_group(0),), (size,), (mesh.get_local_rank(),))

    def arithmetic():
        for key, value in blocks:
            attend(q, key, value)

    def messages():
        for _ in rings.visit(rings.pack([k, v]), [2 * k.numel()] * size, where):
            pass

    times: dict[str, list[float]] = {"ring": [], "arithmetic": [], "messages": []}
    with torch.no_grad(), late(delay):
        for _ in range(rounds):
            times["ring"].append(clock(lambda: ring(x, False, False))[0])
            times["arithmetic"].append(clock(arithmetic)[0])
            times["messages"].append(clock(messages)[0])
    return {name: statistics.median(found) for name, found in times.items()}


def causal_share(x: Inputs) -> float:
    """The scores this rank computes over the mean of all."""
    works = []
    before = attention.attend
    attention.attend = lambda work, *args: works.append(work) or before(work, *args)
    try:
        with torch.no_grad():
            attend(*x.pieces, is_causal=True)
    finally:
        attention.attend = before
    length = x.whole[0].shape[2]
    return works[0].scores / (length * (length + 1) / 2 / dist.get_world_size()) if works else 1.0


def measure(heads: int, length: int, width: int, rounds: int, delay: float) -> dict:
    """On a rank: seconds and bytes by case and system."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    x = Inputs(heads, length, width, mesh)
    systems = {"ring": ring, "gather": gather, "alone": alone}
    table = {}
    for causal in (False, True):
        for backward in (False, True):
            found: dict[str, list[tuple[float, int]]] = {name: [] for name in systems}
            for turn in range(rounds + 1):  # the first warms up
                for name, call in systems.items():
                    x.clear()
                    told = clock(lambda call=call, c=causal, b=backward: call(x, c, b))
                    if turn:
                        found[name].append(told)
            name = ("causal, " if causal else "") + ("forward + backward" if backward else "forward")
            table[name] = {
                s: (statistics.median(t for t, _ in told), max(m for _, m in told)) for s, told in found.items()
            }
    return {"table": table, "overlap": overlap(x, delay, rounds), "share": causal_share(x)}


def one_rank(heads: int, length: int, width: int, rounds: int) -> float:
    """Time of a ShardTensor call on one rank over that of plain torch."""
    torch.set_num_threads(1)
    x = Inputs(heads, length, width, init_device_mesh("cpu", (1,), mesh_dim_names=("domain",)))
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(rounds + 1):
        x.clear()
        times["ours"].append(clock(lambda: ring(x, False, True))[0])
        times["plain"].append(clock(lambda: alone(x, False, True))[0])
    return statistics.median(times["ours"][1:]) / statistics.median(times["plain"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=3)  # as many as no number of ranks divides: else heads may be cut
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    problem = (args.heads, args.length, args.width)
    report: dict = {"about": {"machine": platform.machine(), "torch": torch.__version__, "problem": problem}}
    report["one rank"] = run_on_ranks(one_rank, 1, *problem, args.rounds, timeout=900)[0]
    print(f"{args.heads} heads, sequence {args.length}, width {args.width}, fp32, one thread a rank")
    print(f"one rank, forward + backward: {report['one rank']:.3f} of plain torch's time")
    for ranks in args.ranks:
        told = run_on_ranks(measure, ranks, *problem, args.rounds, args.delay_ms / 1e3, timeout=900)
        heads = f"{'ring':>9s} {'gather':>9s} {'one rank':>9s} {'/gather':>8s} {'/one':>6s}  peak MB"
        print(f"\n{f'{ranks} ranks':30s} {heads}")
        rows = {}
        for name, systems in told[0]["table"].items():
            seconds = {s: max(t["table"][name][s][0] for t in told) for s in systems}
            peaks = {s: max(t["table"][name][s][1] for t in told) / 1e6 for s in systems}
            rows[name] = {"seconds": seconds, "peak MB": peaks}
            r, g, a = (seconds[s] for s in ("ring", "gather", "alone"))
            shown = " / ".join(f"{peaks[s]:.0f}" for s in ("ring", "gather", "alone"))
            print(f"{name:30s} {r:8.3f}s {g:8.3f}s {a:8.3f}s {r / g:8.2f} {r / a:6.2f}  {shown}")
        hidden = {k: max(t["overlap"][k] for t in told) for k in told[0]["overlap"]}
        ratio = hidden["ring"] / max(hidden["arithmetic"], hidden["messages"])
        share = max(t["share"] for t in told)
        print(
            f"messages {args.delay_ms:g} ms late: ring {hidden['ring']:.3f}s, arithmetic {hidden['arithmetic']:.3f}s, "
            f"messages {hidden['messages']:.3f}s: {ratio:.2f} of the slower"
        )
        print(f"causal work: the largest share is {share:.4f} of the mean")
        report[f"{ranks} ranks"] = {"cases": rows, "late": hidden, "late ratio": ratio, "causal share": share}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
