"""A spectral layer on a field cut into rows: what is sent and how long it takes, in four ways.

    python benchmarks/fft.py [--ranks 2 4] [--grid 256 256] [--channels 16] [--modes 32 32] [--json FILE]

The layer of a Fourier neural operator (transform, keep modes, mix channels, transform back), forward and backward:

* written: as models write it, in torch.fft; spectra wait until it is known which modes are wanted;
* swap: the same with spectra taken at once; cuts move to dims that are not transformed;
* gather: the field is made whole on every rank, and cut again after the layer;
* modes: `shardfield.ops.spectral.spectral_conv`, which forms and sends kept modes only.

Ways take turns within one run, so that a busy machine slows them alike. Bytes are those of the rank that sends most.
`benchmarks/tfno.py` has a layer of a model, on more or fewer ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor
from shardfield.comm import wire
from shardfield.layout import chunk
from shardfield.ops.deferred import HOMES
from shardfield.ops.spectral import spectral_conv
from shardfield.testing import run_on_ranks


def written_out(
    x: Tensor, weight: Tensor, modes: tuple[int, int], take: Callable = lambda spectrum: spectrum
) -> Tensor:
    """The layer in torch.fft."""
    height, width = x.shape[2:]
    spectrum = torch.fft.fftshift(take(torch.fft.rfftn(x, dim=(2, 3), norm="forward")), dim=(2,))
    first = height // 2 - modes[0] // 2
    kept = (slice(None), slice(None), slice(first, first + modes[0]), slice(0, modes[1] // 2 + 1))
    out = torch.zeros(x.shape[0], weight.shape[1], height, width // 2 + 1, dtype=weight.dtype)
    out[kept] = torch.einsum("bixy,ioxy->boxy", spectrum[kept], weight)
    out = torch.fft.ifftshift(out, dim=(2,))
    return torch.fft.irfftn(out, s=(height, width), dim=(2, 3), norm="forward")


def swapped(x: ShardTensor, weight: Tensor, modes: tuple[int, int]) -> Tensor:
    """Spectra that are there at once: what the other ways left to be known about them is forgotten."""
    HOMES.clear()
    return written_out(x, weight, modes, lambda spectrum: spectrum.view_as(spectrum))


def gathered(x: ShardTensor, weight: Tensor, modes: tuple[int, int]) -> Tensor:
    """Everything everywhere."""
    whole = x.redistribute(placements=[Replicate()])
    return written_out(whole, weight, modes).redistribute(placements=[Shard(2)])


WAYS: dict[str, Callable] = {"written": written_out, "swap": swapped, "gather": gathered, "modes": spectral_conv}


def measure(grid: tuple[int, int], channels: int, modes: tuple[int, int], rounds: int) -> dict[str, dict[str, float]]:
    """On a rank: bytes forward and backward, and the median time of both, of each way."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("h",))
    shape = (1, channels, *grid)
    torch.manual_seed(0)
    whole = torch.randn(shape)
    local = whole.split(chunk(grid[0], mesh.size()), 2)[mesh.get_local_rank()].clone().requires_grad_()
    x = ShardTensor.from_local(local, mesh, [Shard(2)], "chunk", shape)
    weight = torch.randn(channels, channels, modes[0], modes[1] // 2 + 1, dtype=torch.cfloat, requires_grad=True)
    found: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    count = [0]

    def step(layer: Callable) -> tuple[int, int, Tensor, float]:
        weight.grad = local.grad = None
        count[0] = 0
        dist.barrier()
        start = time.perf_counter()
        out = layer(x, weight, modes)
        forward = count[0]
        out.square().sum().backward()
        return forward, count[0] - forward, out, time.perf_counter() - start

    wire.meter = lambda kind, messages, nbytes: count.__setitem__(0, count[0] + nbytes)
    results = []
    for way, layer in WAYS.items():
        forward, backward, out, _ = step(layer)
        found[way] = {"forward": forward, "backward": backward}
        results.append((out.full_tensor().detach(), local.grad.clone(), weight.grad.clone()))
    wire.meter = None
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
    for _ in range(rounds):
        for way, layer in WAYS.items():
            times[way].append(step(layer)[-1])
    for way in WAYS:
        found[way]["seconds"] = statistics.median(times[way])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--grid", type=int, nargs=2, default=[256, 256])
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--modes", type=int, nargs=2, default=[32, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{args.grid[0]} x {args.grid[1]}, {args.channels} channels, {args.modes} modes, one thread a rank")
    found: dict = {}
    for ranks in args.ranks:
        rows = run_on_ranks(
            measure, ranks, tuple(args.grid), args.channels, tuple(args.modes), args.rounds, timeout=600
        )
        most = {way: {k: max(r[way][k] for r in rows) for k in rows[0][way]} for way in WAYS}
        found[str(ranks)] = most
        base = most["modes"]
        print(f"{ranks} ranks     forward kB  backward kB       ms  | bytes and time against modes")
        for way, row in most.items():
            sent = (row["forward"] + row["backward"]) / max(base["forward"] + base["backward"], 1)
            print(
                f"  {way:9} {row['forward'] / 1e3:10.1f} {row['backward'] / 1e3:12.1f} {row['seconds'] * 1e3:8.1f}  | "
                f"{sent:7.2f} {row['seconds'] / base['seconds']:6.2f}"
            )
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
