"""The models of the recipes with an input, by name, for `shardfield check RECIPE`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..train.config import UsageError
from ..train.recipes import RECIPES, TASK_SPECS


def build(recipe: str) -> tuple[nn.Module, Tensor]:
    """Return the model of a recipe in its default size, and two random samples of its input."""
    spec = TASK_SPECS[recipe](RECIPES[recipe][0]())
    shape = next(iter(spec.sample_shapes.values()))
    return spec.model, torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def find_dims(recipe: str, axes: int) -> tuple[int, ...]:
    """Return the dims of that input that a domain of `axes` mesh axes shards."""
    dims = TASK_SPECS[recipe](RECIPES[recipe][0]()).dims
    if axes > len(dims):
        raise UsageError(f"check: {recipe} is sharded along {len(dims)} dim{'s' * (len(dims) > 1)}, not {axes}")
    return tuple(d + 1 for d in dims[:axes])


def find_dtype(recipe: str) -> str:
    """Return the highest precision that the model of a recipe computes in."""
    try:
        TASK_SPECS[recipe](RECIPES[recipe][0](precision="fp64"))
    except UsageError:
        return "float32"
    return "float64"


def __getattr__(name: str) -> Any:
    """Return the factory of a recipe's model: `shardfield.debug.recipe_models:vit` can be checked like any other."""
    if name in TASK_SPECS:
        return partial(build, name)
    raise AttributeError(name)
