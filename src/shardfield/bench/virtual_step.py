"""One process of the benchmark of virtual ranks: steps of a UNet, and the memory that they take.

python -m shardfield.bench.virtual_step --points 512 --ranks 8 --budget 64 --limit 128
python -m shardfield.bench.virtual_step --model unet3d --points 128 --ranks 32 --memory recompute --budget 190

A limit is of the data segment of the process (RLIMIT_DATA), beyond what it has after a small step, in MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..planning.unet import UNet
from ..virtual import virtualize
from .limited import MEGABYTE, data_segment
from .models import unet

# The model, its channels and the dims of its field.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "unet2d": (lambda: UNet(1, 8, 2), 1, 2),
    "unet3d": (lambda: unet(32, 3), 3, 3),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def make_step(model: nn.Module, ranks: int, memory: str, budget: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes loss and gradients: with virtual ranks, or of plain torch with 0 ranks."""
    if ranks:
        return virtualize(loss_of, model, ranks, dim=2, memory=memory, budget=budget)  # type: ignore[arg-type]

    def plain(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss.detach()

    return plain


def measure(
    points: int, ranks: int, memory: str, budget: int | None, steps: int, limit: int | None, model_name: str = "unet2d"
) -> dict[str, Any]:
    """Return seconds and CPU seconds per step, peak of resident bytes beyond the start, bytes moved, and the loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, channels, dims = MODELS[model_name]
    model = make()
    step = make_step(model, ranks, memory, budget)
    small = torch.ones(1, channels, 8 * max(ranks, 4), *[8] * (dims - 1))
    step(small, small)  # allocates what any step needs
    x = torch.sin(torch.arange(channels * points**dims) * 1e-3).reshape(1, channels, *[points] * dims)
    pager = step.world.pager if ranks else None  # type: ignore[attr-defined]
    base = data_segment()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (base + limit, resource.RLIM_INFINITY))
    before = _reset_peak()
    seconds, cpu = [], []
    for _ in range(steps):
        model.zero_grad()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(x, 0.5 * x)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    found = {"seconds": seconds, "cpu": cpu, "peak": _status("VmHWM") - before, "loss": loss.item()}
    if pager is not None:
        found |= {"moved": pager.moved_out / steps, "pages": pager.peak, "clean": pager.left_clean / steps}
    return found


def _reset_peak() -> int:
    """Reset the peak of resident memory and return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], default="unet2d")
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=0, help="virtual ranks; 0: plain torch")
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--budget", type=float, metavar="MB")
    parser.add_argument("--limit", type=float, metavar="MB")
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    budget, limit = (None if v is None else int(v * MEGABYTE) for v in (args.budget, args.limit))
    print(json.dumps(measure(args.points, args.ranks, args.memory, budget, args.steps, limit, args.model)))


if __name__ == "__main__":
    main()
