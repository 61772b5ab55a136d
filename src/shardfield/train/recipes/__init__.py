"""The recipes of `shardfield train`: a configuration class each, and a function that makes a Task from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..config import TrainConfig
from ..log import Log
from ..task import ForecastSpec, Task, TaskSpec
from .aero_transolver import AeroTransolverConfig, aero_transolver
from .aero_transolver import task_spec as aero_transolver_outline
from .cnn import CNNConfig, cnn
from .cnn import task_spec as cnn_outline
from .darcy_tfno import DarcyTFNOConfig, darcy_tfno
from .darcy_tfno import task_spec as darcy_tfno_outline
from .swe_sfno import SWEConfig, swe_sfno
from .swe_sfno import forecast as swe_sfno_forecast
from .swe_sfno import task_spec as swe_sfno_outline
from .vit import ViTConfig, vit
from .vit import task_spec as vit_outline

Recipe = Callable[[Any, DeviceMesh, Log], Task]

RECIPES: dict[str, tuple[type[TrainConfig], Recipe]] = {
    "darcy_tfno": (DarcyTFNOConfig, darcy_tfno),
    "cnn": (CNNConfig, cnn),
    "vit": (ViTConfig, vit),
    "swe_sfno": (SWEConfig, swe_sfno),
    "aero_transolver": (AeroTransolverConfig, aero_transolver),
}
# The tasks without data, for `shardfield plan`.
TASK_SPECS: Mapping[str, Callable[[Any], TaskSpec]] = MappingProxyType(
    {
        "darcy_tfno": darcy_tfno_outline,
        "cnn": cnn_outline,
        "vit": vit_outline,
        "swe_sfno": swe_sfno_outline,
        "aero_transolver": aero_transolver_outline,
    }
)
# Initial states and truth, for `shardfield predict`, from configuration, mesh, and numbers of cases and steps.
FORECASTS: dict[str, Callable[[Any, DeviceMesh, int, int], ForecastSpec]] = {"swe_sfno": swe_sfno_forecast}
DEFAULT_RECIPE = "darcy_tfno"
