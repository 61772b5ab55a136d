"""Recipe: train the spherical Fourier neural operator (SFNO) of torch-harmonics to forecast shallow water flows."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ...data import ShallowWater, ShardedLoader, UnitGaussian, swe_solver
from ...data.swe import coordinates
from ...data.swe_solver import area_weights, latitudes
from ...metrics import mse
from ..config import TrainConfig, UsageError
from ..log import Log
from ..task import ForecastSpec, Task, TaskSpec
from .darcy import CastDataset

VARIABLES = len(ShallowWater.variables)


@dataclass(kw_only=True)
class SWEConfig(TrainConfig):
    """A spherical neural operator learns to forecast shallow water flows on the rotating sphere."""

    out: Path = Path("runs/swe_sfno")
    domain: tuple[int, ...] = (1, 1)
    epochs: int = 8
    evaluate_every: int = 4
    batch_size: int = 8
    learning_rate: float = 4e-3
    rollout: tuple[int, ...] = (1, 2, 4)
    nlat: int = 32
    """Latitudes of the Gauss-Legendre grid, sharded by the first domain axis."""
    nlon: int = 64
    """Longitudes, sharded by the second domain axis."""
    hours: int = 6
    """Hours of a model step."""
    records: int = 40
    """Steps of a trajectory."""
    n_train: int = 24
    """Trajectories to train on."""
    n_test: int = 4
    """Trajectories of the test set, which are not among those of the training."""
    width: int = 24
    """Channels of the SFNO."""
    layers: int = 3
    """Blocks of the SFNO."""
    cache: Path | None = None
    """Cache folder of the flows; by default the environment variable SHARDFIELD_CACHE, else ~/.cache/shardfield."""


class ForecastStep(nn.Module):
    """A time step: the state plus the increment that a model returns, both normalized.

    The model gets the normalized state and the sine of the latitude, since the rotation distinguishes latitudes.
    """

    sine: Tensor

    def __init__(self, model: nn.Module, state: UnitGaussian, increment: UnitGaussian, nlat: int, nlon: int):
        super().__init__()
        self.model, self.state, self.increment = model, state, increment
        sine = torch.sin(torch.deg2rad(latitudes(nlat)))
        self.register_buffer("sine", sine[:, None].expand(1, 1, nlat, nlon).float().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        sine = self.sine.to(x.dtype).expand(len(x), -1, -1, -1)
        return x + self.increment.inverse_transform(self.model(torch.cat([self.state.transform(x), sine], 1)))


def task_spec(config: SWEConfig) -> TaskSpec:
    if config.precision == "fp64":
        raise UsageError("--precision fp64: the SFNO of torch-harmonics transforms in single precision; use fp32")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the package, about parts of torch
            from torch_harmonics.examples.models import SphericalFourierNeuralOperator
    except ImportError as error:
        raise UsageError(
            f"the recipe swe_sfno needs torch-harmonics ({error}): pip install --no-deps torch-harmonics"
        ) from None
    sfno = SphericalFourierNeuralOperator(
        img_size=(config.nlat, config.nlon),
        grid="legendre-gauss",
        scale_factor=1,
        in_chans=VARIABLES + 1,
        out_chans=VARIABLES,
        embed_dim=config.width,
        num_layers=config.layers,
        mlp_ratio=2.0,
    )
    unset = [UnitGaussian(torch.zeros(VARIABLES, 1, 1), torch.ones(VARIABLES, 1, 1), eps=0.0) for _ in range(2)]
    model = ForecastStep(sfno, unset[0], unset[1], config.nlat, config.nlon)
    state = (VARIABLES, config.nlat, config.nlon)
    return TaskSpec(model=model, sample_shapes={"x": state, "y": state}, loss=NormalizedError(model, config).loss)


class NormalizedError:
    """Area-weighted errors in units of the change of each variable in a step: 1 is the error of persistence.

    In units of the variables themselves, the fast waves of the divergence would be most of the loss.
    """

    def __init__(self, model: ForecastStep, config: SWEConfig):
        self.model, self.weights = model, area_weights(config.nlat)[:, None]

    def squares(self, output: Tensor, batch: Any) -> Tensor:
        """Return the mean square of each sample and variable."""
        std = self.model.increment.std.to(output.dtype)
        return mse(output / std, batch["y"] / std, self.weights.to(output.device, output.dtype))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return self.squares(output, batch).mean()

    def rmse(self, output: Tensor, batch: Any) -> Tensor:
        """Return one number per sample: the root mean square over the variables."""
        return self.squares(output, batch).mean(1).sqrt()


def flows(config: SWEConfig, n: int, start: int, leads: int) -> CastDataset:
    found = ShallowWater(
        n,
        nlat=config.nlat,
        nlon=config.nlon,
        hours=config.hours,
        records=config.records,
        leads=leads,
        seed=config.seed,
        start=start,
        cache=config.cache,
    )
    return CastDataset(found, config.dtype)


def lead(batch: Any, i: int) -> Any:
    """Return the batch whose "y" is the state after i + 1 steps."""
    return {"x": batch["x"], "y": batch["y"][:, i]}


def fit_step(model: ForecastStep, loader: ShardedLoader) -> None:
    """Set the normalizers to the statistics of states and of their first increments."""
    model.state = UnitGaussian.fit(loader, "x", eps=0.0)
    increments = (batch["y"][:, 0] - batch["x"] for batch in loader.sweep())
    found = UnitGaussian.fit(increments, group=loader.data_group, eps=0.0)
    model.increment = UnitGaussian(torch.zeros_like(found.mean), found.std, eps=0.0)


def forecast(config: SWEConfig, mesh: DeviceMesh, cases: int, steps: int) -> ForecastSpec:
    """Forecast the first flows of the test set, each from the first time of its trajectory."""
    if steps > config.records:
        raise UsageError(f"--steps {steps}: the truth is known for {config.records} steps")
    if cases > config.n_test:
        raise UsageError(f"--cases {cases}: the test set has {config.n_test} trajectories")
    dataset: Any = flows(config, cases, config.n_train, config.records)
    dataset.dataset.prepare(mesh)
    return ForecastSpec(
        model=task_spec(config).model,
        variables={name: {"units": unit} for name, unit in swe_solver.VARIABLES.items()},
        coords=coordinates(dataset.dataset),
        hours=config.hours,
        read=lambda case, i, slices: _read_state(dataset, case, i, slices),
        weights=area_weights(config.nlat)[:, None],
        scale=lambda model: model.state.std,
        title="shallow water on the rotating sphere, forecast by an SFNO",
    )


def _read_state(dataset: Any, case: int, i: int, slices: Any) -> Tensor:
    """Return a block of the state at lead time i; a case is the only window of its trajectory."""
    none = slice(0, 0)
    if i == 0:
        return dataset.read(case, {"x": slices, "y": (none, *slices)})["x"]
    return dataset.read(case, {"x": (none, *slices[1:]), "y": (slice(i - 1, i), *slices)})["y"][0]


def swe_sfno(config: SWEConfig, mesh: DeviceMesh, log: Log) -> Task:
    if len(config.domain) > 2 or config.nlat < config.domain[0] or config.nlon < config.domain[-1]:
        raise UsageError(
            f"--domain {' x '.join(map(str, config.domain))}: a grid of {config.nlat} x {config.nlon} is sharded along "
            "latitudes, or along latitudes and longitudes"
        )
    torch.manual_seed(config.seed)
    spec = task_spec(config)
    begun = time.monotonic()
    log.print_line(
        f"shallow water: {config.n_train} + {config.n_test} trajectories of {config.records} x {config.hours} hours on "
        f"{config.nlat} x {config.nlon} points"
    )

    def loader(n: int, start: int, size: int, **options: Any) -> ShardedLoader:
        dataset = flows(config, n, start, max(config.rollout))
        dataset.dataset.prepare(mesh)
        axes = range(len(config.domain))
        placements = {"x": [Shard(1 + a) for a in axes], "y": [Shard(2 + a) for a in axes]}
        return ShardedLoader(
            dataset, size, mesh, domain=config.axes, placements=placements, seed=config.seed, **options
        )

    each = config.batch_size // mesh.size(0) // config.accumulate
    train = loader(config.n_train, 0, each, drop_last=True)
    test = loader(config.n_test, config.n_train, 16, shuffle=False)
    model: Any = spec.model
    fit_step(model, train)
    log.print_line(f"data ready after {time.monotonic() - begun:.0f} s")
    return Task(
        model=model,
        train=train,
        loss=spec.loss,
        tests={f"{config.hours}h": test},
        metrics={"rmse": NormalizedError(model, config).rmse},
        lead=lead,
    )
