"""The recipes that `shardfield train` knows: a configuration and a function from it to a Task, each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..config import TrainConfig
from ..log import Log
from ..task import Task
from .cnn import CNNConfig, cnn
from .darcy_tfno import DarcyTFNOConfig, darcy_tfno
from .vit import ViTConfig, vit

Recipe = Callable[[Any, DeviceMesh, Log], Task]

RECIPES: dict[str, tuple[type[TrainConfig], Recipe]] = {
    "darcy_tfno": (DarcyTFNOConfig, darcy_tfno),
    "cnn": (CNNConfig, cnn),
    "vit": (ViTConfig, vit),
}
DEFAULT = "darcy_tfno"
