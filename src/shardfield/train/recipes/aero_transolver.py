"""Recipe: train a Transolver on the pressure on bodies in a stream; the points of each surface are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ...data import ShardedLoader
from ...data.ellipsoids import Ellipsoids
from ...data.surface import area_norm, force_coefficients
from ..config import TrainConfig, UsageError
from ..log import Log
from ..plots import plot_surfaces
from ..task import Task, TaskSpec


@dataclass(kw_only=True)
class AeroTransolverConfig(TrainConfig):
    """A Transolver learns the pressure on ellipsoids in potential flow."""

    out: Path = Path("runs/aero_transolver")
    epochs: int = 15
    evaluate_every: int = 5
    batch_size: int = 8
    learning_rate: float = 6e-3
    n_train: int = 800
    """Training bodies."""
    n_test: int = 80
    """Test bodies."""
    points: int = 512
    """Points on a body in training."""
    test_points: tuple[int, ...] = (2048, 512)
    """Points on a body in the test sets; the first of them is plotted."""
    width: int = 48
    """Channels."""
    heads: int = 4
    """Attention heads."""
    slices: int = 16
    """Slices: the states per head that the points are pooled into."""
    layers: int = 3
    """Transolver blocks."""


class SliceAttention(nn.Module):
    """A Transolver block: pool the points into a few states, which attend to each other; then an MLP.

    With `area` (samples, points, 1) the points are pooled by area: a state is a mean over the surface, which does not
    depend on where the points are dense, and points without area do not count.
    """

    def __init__(self, width: int, slices: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.values, self.assign = nn.Linear(width, width), nn.Linear(width // heads, slices)
        self.qkv, self.out = nn.Linear(width // heads, 3 * (width // heads)), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, area: Tensor | None = None) -> Tensor:
        points = self.values(self.norm1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = torch.softmax(self.assign(points), -1)
        pooling = weights if area is None else weights * area.unsqueeze(1)
        states = pooling.transpose(-1, -2) @ points / (pooling.sum(-2).unsqueeze(-1) + 1e-5)
        q, k, v = self.qkv(states).chunk(3, -1)
        x = x + self.out((weights @ F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transolver(nn.Module):
    """Features of points in, fields on the same points out: (samples, points, inputs) to (samples, points, outputs)."""

    def __init__(self, inputs: int, outputs: int, width: int, slices: int, heads: int, layers: int):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(inputs, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(SliceAttention(width, slices, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, x: Tensor, area: Tensor | None = None) -> Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = block(x, area)
        return self.head(x)


class SurfacePressure(nn.Module):
    """The pressure coefficient by Bernoulli, 1 minus the square of the speed, which the Transolver predicts."""

    def __init__(self, transolver: Transolver):
        super().__init__()
        self.transolver = transolver

    def forward(self, x: Tensor) -> Tensor:
        return 1 - self.transolver(x)


def relative_l2(output: Tensor, batch: Any) -> Tensor:
    """Return |output - y| / |y| on each body, norms over its surface."""
    return area_norm(output - batch["y"], batch["area"]) / area_norm(batch["y"], batch["area"])


def drag(output: Tensor, batch: Any) -> Tensor:
    """Return the drag coefficient's magnitude; by d'Alembert it is zero, up to the quadrature over the points."""
    return force_coefficients(output, batch["x"][..., 3:], batch["area"])[..., 0].abs()


def task_spec(config: AeroTransolverConfig) -> TaskSpec:
    if config.width % config.heads:
        raise UsageError(f"--heads {config.heads} must divide --width {config.width}")
    return TaskSpec(
        model=SurfacePressure(Transolver(6, 1, config.width, config.slices, config.heads, config.layers)),
        sample_shapes={"x": (config.points, 6), "y": (config.points, 1), "area": (config.points, 1)},
        loss=lambda output, batch: relative_l2(output, batch).mean(),
        dims=(0,),
    )


def aero_transolver(config: AeroTransolverConfig, mesh: DeviceMesh, log: Log) -> Task:
    torch.manual_seed(config.seed)
    spec = task_spec(config)
    fewest, ranks = min(config.points, *config.test_points), torch.Size(config.domain).numel()
    if fewest < ranks:
        raise UsageError(f"a body of {fewest} points cannot be sharded over {ranks} ranks")

    def loader(points: int, start: int, n: int, **options: Any) -> ShardedLoader:
        bodies = Ellipsoids(n, points=points, seed=config.seed, start=start, dtype=config.dtype)
        return ShardedLoader(
            bodies,
            config.batch_size // mesh.size(0) // config.accumulate,
            mesh,
            domain=config.axes,
            placements=[Shard(0)] * len(config.domain),
            seed=config.seed,
            **options,
        )

    return Task(
        model=spec.model,
        train=loader(config.points, 0, config.n_train, drop_last=True),
        loss=spec.loss,
        tests={f"{n} points": loader(n, config.n_train, config.n_test, shuffle=False) for n in config.test_points},
        metrics={"l2": relative_l2, "drag": drag},
        draw=plot_surfaces,
    )
