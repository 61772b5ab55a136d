"""Every curve the same: training on 1, 2, 4 and 2 x 2 ranks under each strategy, against plain torch in one process.

`python -m tests.train.curves` (`make curves`) trains a TFNO, a UNet and a ViT for 300 steps in fp64 and fp32, writes
the losses to docs/curves.json, and fails if a loss at the last step differs from that of plain torch by more than
`LIMITS`. Curves that the file has are not run again (`--again` runs them). `make figures` plots the file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import parallelize, scatter_tensor
from shardfield.testing import run_on_ranks
from shardfield.train.recipes.vit import ViT
from tests.ops.spectral.test_neuralop import in_double

LIMITS = {"fp64": 1e-10, "fp32": 1e-4}  # relative gap of the loss at the last step
MODELS = ("TFNO", "UNet", "ViT")
MESHES = {"1": (1, 1), "2": (1, 2), "4": (1, 4), "2x2": (2, 2)}  # data x domain
STRATEGIES = ("fsdp", "hsdp", "ddp")
STEPS, BATCH, POINTS = 300, 2, 16
DOCS = Path(__file__).parents[2] / "docs"


class UNet(nn.Module):
    """Two levels, with strided and transposed convolutions, group norms and a skip connection."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.enter, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width)
        self.down, self.low_norm = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * width)
        self.low, self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join, self.head = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.enter(x)))
        low = F.silu(self.low(F.silu(self.low_norm(self.down(x)))))
        return self.head(F.silu(self.join(torch.cat([x, self.up(low)], 1))))


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Build a small model; its parameters are the same in every process."""
    torch.manual_seed(0)
    if name == "TFNO":
        from neuralop.models import TFNO

        model: nn.Module = TFNO((4, 4), 1, 1, hidden_channels=6, n_layers=2, factorization="tucker", rank=0.5)
        return model._apply(lambda t: t.to(dtype.to_complex() if t.is_complex() else dtype))
    model = UNet() if name == "UNet" else ViT(POINTS, 4, 16, 2, 1)
    return model.to(dtype)


def sample(step: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return one sample: a smooth random field, and its derivative along the rows."""
    generator = torch.Generator().manual_seed(1000 * (step % 20) + number)  # an epoch of 20 steps
    a, b = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    rows = torch.arange(POINTS, dtype=torch.float64)[:, None] * (2 * math.pi / POINTS)
    columns = rows.reshape(1, -1)
    x = sum(a[k] * torch.sin((k + 1) * rows + 6 * b[k] * columns) for k in range(3))
    y = torch.roll(x, -1, 0) - x
    return x[None, None].to(dtype), y[None, None].to(dtype)


def batch(step: int, numbers: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*(sample(step, n, dtype) for n in numbers), strict=True)
    return torch.cat(xs), torch.cat(ys)


def computing_in(name: str, precision: str) -> AbstractContextManager[None]:
    """Let neuraloperator compute in fp64: it creates spectra in complex64 whatever the dtype of the model."""
    return in_double() if (name, precision) == ("TFNO", "fp64") else nullcontext()


def train_plain(name: str, precision: str, steps: int) -> list[float]:
    """Return the losses of plain torch in one process."""
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    model = make_model(name, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x, y = batch(step, range(BATCH), dtype)
        with computing_in(name, precision):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_ranks(name: str, precision: str, shape: tuple[int, int], strategy: str, steps: int) -> list[float]:
    """Return the losses of `parallelize` on the ranks of a mesh; called on every rank."""
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "spatial"))
    model = parallelize(make_model(name, dtype), mesh, strategy=strategy)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = BATCH // shape[0]
    mine = range(mesh.get_local_rank("data") * share, (mesh.get_local_rank("data") + 1) * share)
    source = dist.get_rank() - mesh.get_local_rank("spatial")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the output is a view, and is not written
    losses = []
    for step in range(steps):
        fields = [scatter_tensor(t, source, mesh["spatial"], [Shard(2)]) for t in batch(step, mine, dtype)]
        with computing_in(name, precision):
            loss = F.mse_loss(model(fields[0]), fields[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().full_tensor())
    found = torch.stack(losses).double()
    dist.all_reduce(found, group=mesh.get_group("data"))
    return (found / shape[0]).tolist()


def gap(curve: list[float], reference: list[float]) -> float:
    """Return the relative gap of the loss at the last step."""
    return abs(curve[-1] / reference[len(curve) - 1] - 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.train.curves", description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--precisions", nargs="+", default=list(LIMITS), choices=LIMITS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--again", action="store_true", help="run curves that the file has")
    parser.add_argument("--data", type=Path, default=DOCS / "curves.json")
    args = parser.parse_args()
    curves: dict[str, list[float]] = json.loads(args.data.read_text()) if args.data.exists() else {}
    failed = 0
    for precision in args.precisions:
        for mesh in args.meshes:
            for model in args.models:
                first = f"{model} {precision} plain"
                if len(curves.get(first, ())) < args.steps or args.again:
                    curves[first] = train_plain(model, precision, args.steps)
                for strategy in args.strategies:
                    key, begun = f"{model} {precision} {mesh} {strategy}", time.monotonic()
                    if args.again or len(curves.get(key, ())) < args.steps:
                        shape = MESHES[mesh]
                        given = model, precision, shape, strategy, args.steps
                        curves[key] = run_on_ranks(train_on_ranks, math.prod(shape), *given, timeout=3600)[0]
                        args.data.write_text(json.dumps(curves))
                    found = gap(curves[key], curves[first])
                    verdict = "ok" if found <= LIMITS[precision] else "DIFFERS"
                    failed += verdict != "ok"
                    print(f"{verdict:8} {key:24} {found:.1e}  {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
