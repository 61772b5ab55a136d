"""`shardfield predict`: forecast with the model of a training run, sharded, and write and score the states.

    shardfield predict runs/swe_sfno --steps 40 --out forecast.zarr
    torchrun --nproc-per-node 8 -m shardfield predict runs/swe_sfno --steps 40 --out ensemble.zarr \\
        --domain 2 2 --members 8 --ensemble 2 --noise 0.02

The mesh need not be that of the training. The same command continues a forecast that was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ..comm import collectives
from ..comm.consensus import ask_first_rank
from ..data.error_sync import run_with_error_sync
from ..data.sharding import build_layout, local_slices
from ..distributed.session import process_world
from ..errors import ShardfieldError
from ..tensor import ShardTensor, wrap
from ..train.checkpoint import Checkpoints, latest_checkpoint
from ..train.checkpoint_index import INDEX
from ..train.complex_params import real_pairs
from ..train.config import DOMAIN_AXES, TrainConfig, UsageError, apply_overrides
from ..train.ema import ParameterEMA
from ..train.recipes import FORECASTS, RECIPES
from ..train.task import ForecastSpec
from .ensemble import ensemble_state
from .netcdf import export_netcdf
from .pictures import plot_forecast
from .run import Forecast, predict
from .store import Grid


def command(words: list[str]) -> int:
    """Run `shardfield predict` on all ranks and return the exit code."""
    options = _parser().parse_args(words)
    with process_world() as manager:
        mesh = _mesh(options, manager.device.type)
        say = print if manager.rank == 0 else None
        _run(options, mesh, say)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "shardfield predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a training run, or one of its checkpoints")
    parser.add_argument("--steps", type=int, default=40, help="model steps")
    parser.add_argument("--out", type=Path, required=True, help="zarr folder of the forecast")
    parser.add_argument("--weights", type=Path, help="state dict of the plain model (.pt, .safetensors) to use instead")
    parser.add_argument("--cases", type=int, default=1, help="initial states, from the first of the test set")
    parser.add_argument("--domain", type=int, nargs="+", default=[1], help="ranks along each sharded dim of the field")
    parser.add_argument("--members", type=int, default=1, help="members of the ensemble of each case")
    parser.add_argument("--ensemble", type=int, default=1, help="ranks that share the members")
    parser.add_argument("--noise", type=float, default=0.01, help="initial noise, in standard deviations of a variable")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument("--netcdf", type=Path, help="also write a NetCDF-4 file")
    parser.add_argument("--picture", type=Path, help="plot the first case and the scores by lead time (.png)")
    return parser


def _mesh(options: argparse.Namespace, device_type: str) -> DeviceMesh:
    """Return the mesh (ensemble, domain axes) of all ranks."""
    shape, ranks = (options.ensemble, *options.domain), dist.get_world_size()
    if min(shape) < 1 or len(options.domain) > len(DOMAIN_AXES) or math.prod(shape) != ranks:
        raise UsageError(
            f"--ensemble {options.ensemble} --domain {' '.join(map(str, options.domain))} is a mesh of "
            f"{math.prod(shape)} ranks, and there are {ranks}"
        )
    if options.members % options.ensemble:
        raise UsageError(f"--members {options.members} cannot be divided among --ensemble {options.ensemble} ranks")
    return init_device_mesh(device_type, shape, mesh_dim_names=("ensemble", *DOMAIN_AXES[: len(options.domain)]))


def _run(options: argparse.Namespace, mesh: DeviceMesh, say: Any) -> None:
    for name in ("steps", "cases", "members"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    recipe, settings, checkpoint, source = ask_first_rank(lambda: _find(options), dist.group.WORLD, UsageError)
    config = apply_overrides(RECIPES[recipe][0](), settings, f"{options.run}/config.json")
    spec = FORECASTS[recipe](config, mesh, options.cases, options.steps)
    model = _with_weights(spec.model, config, checkpoint, options.weights, mesh)
    grid = Grid(spec.variables, spec.coords, spec.hours, {"title": spec.title} if spec.title else {})
    state = _read(spec, config, mesh, options.cases, 0)
    if options.members > 1:
        scale = spec.scale(model)
        noise = scale.to(state.dtype) * options.noise if isinstance(scale, Tensor) else scale * options.noise
        state = ensemble_state(state, options.members, noise=noise, seed=options.seed)
        source += f", noise {options.noise:g}, seed {options.seed}"
    found = predict(
        model,
        state,
        options.steps,
        options.out,
        grid,
        members=options.members,
        truth=lambda i: _read(spec, config, mesh, options.cases, i),
        weights=None if spec.weights is None else spec.weights.to(state.device, state.dtype),
        source=source,
        progress=say,
    )
    if say is not None:
        say(_table(found, spec))
    ask_first_rank(lambda: _finish(options, spec, found), dist.group.WORLD)


def _find(options: argparse.Namespace) -> list[Any]:
    """Return the recipe, the settings and the checkpoint of a run, and a name of the weights. Called on one rank."""
    named = options.run.name.startswith("step-")
    folder, checkpoint = (options.run.parent, options.run) if named else (options.run, latest_checkpoint(options.run))
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: is not the folder of a training run: {error}") from None
    kind = settings.pop("recipe", None)
    names = [name for name, (config, _) in RECIPES.items() if config.__name__ == kind]
    if not names or (checkpoint is None and options.weights is None):
        missing = "its config.json names no recipe" if not names else "there is no checkpoint"
        raise UsageError(f"{folder}: cannot predict: {missing}")
    if names[0] not in FORECASTS:
        raise UsageError(f"{options.run}: the recipe {names[0]} has no time steps; {', '.join(FORECASTS)} have")
    for option, package in (("netcdf", "h5py"), ("picture", "matplotlib")):
        path = getattr(options, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"--{option} {path}: there is no folder {path.parent}")
        if path is not None and find_spec(package) is None:
            raise UsageError(f"--{option} needs {package}: pip install 'shardfield[recipes]'")
    weights = options.weights or Path(str(checkpoint)) / INDEX
    with open(weights, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    source = f"{folder.name}, {weights.name if options.weights else weights.parent.name}, sha256 {digest}"
    # A value of None means "not set", which is the default.
    return [names[0], {k: v for k, v in settings.items() if v is not None}, str(checkpoint or ""), source]


def _with_weights(
    model: nn.Module, config: TrainConfig, checkpoint: str, weights: Path | None, mesh: DeviceMesh
) -> nn.Module:
    """Load a checkpoint of any mesh and strategy, or the state dict of the plain model, on every rank."""
    if weights is not None:
        state = run_with_error_sync(f"--weights {weights}", mesh, lambda: _read_weights(weights))
        try:
            model.load_state_dict(state)
        except (RuntimeError, TypeError, AttributeError) as error:  # other names or shapes, or no state dict at all
            raise UsageError(f"--weights {weights}: {' '.join(str(error).split())}") from None
    # Real pairs first: a module's `to(float32)` would drop the imaginary parts of complex parameters.
    model = real_pairs(model).to(collectives.device_of(mesh), config.dtype).eval()
    if weights is not None:
        return model
    average = None if config.ema is None else ParameterEMA(model, config.ema)
    Checkpoints(Path(checkpoint).parent).load(checkpoint, model, extra=None if average is None else average.means)
    if average is not None:
        average.load_into_model()
    return model


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _read(spec: ForecastSpec, config: TrainConfig, mesh: DeviceMesh, cases: int, i: int) -> ShardTensor:
    """Return the known state of all cases at a lead time, Replicate along the axis of the ensemble."""
    shape = (cases, len(spec.variables), *(len(values) for values in spec.coords.values()))
    placements = [Replicate(), *(Shard(2 + axis) for axis in range(mesh.ndim - 1))]
    layout = build_layout(mesh, placements, shape, None)
    _, *slices = local_slices(layout)

    def read() -> Tensor:
        return torch.stack([spec.read(case, i, tuple(slices)) for case in range(cases)]).to(config.dtype)

    local = run_with_error_sync(f"predict: the state at lead time {i}", mesh, read)
    return wrap(local.to(collectives.device_of(mesh)), layout)


def _table(found: Forecast, spec: ForecastSpec) -> str:
    """Return the scores at a few lead times as text."""
    steps = len(next(iter(next(iter(found.scores.values())).values())))
    shown = sorted({1, *(max(1, round(steps * part / 4)) for part in range(1, 5))})
    lines = ["lead time (hours)".ljust(28) + "".join(f"{spec.hours * i:12g}" for i in shown)]
    for name, by_variable in found.scores.items():
        for variable, values in by_variable.items():
            lines.append(f"{name} {variable}".ljust(28) + "".join(f"{values[i - 1]:12.4g}" for i in shown))
    return "\n".join(lines)


def _finish(options: argparse.Namespace, spec: ForecastSpec, found: Forecast) -> None:
    """Write the NetCDF file and the plot, on one rank."""
    for option, write in (
        ("netcdf", lambda path: export_netcdf(found.path, path)),
        ("picture", lambda path: plot_forecast(found, spec, path)),
    ):
        path = getattr(options, option)
        try:
            if path is not None:
                write(path)
        except Exception as error:  # whatever h5py or matplotlib raises: the other ranks wait for this one
            raise ShardfieldError(f"--{option} {path}: {error}; the forecast is complete: {found.path}") from error
