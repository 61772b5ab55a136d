"""A recipe's input to the training loop: model, data, loss, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..data import ShardedLoader

Score = Callable[[Any, Any], Tensor]


def first_input(batch: Any) -> tuple[Any, ...]:
    """Return the model's arguments: a batch's "x", or the first of its tensors."""
    return (batch["x"] if isinstance(batch, Mapping) else batch[0],)


@dataclass
class TaskSpec:
    """A task without data: model, shapes and loss, enough for `shardfield plan` to count a step.

    `sample_shapes` are the shapes of one sample's tensors; those with more than one dim are fields, sharded along
    `dims` in order of preference. `integer_keys` are the tensors of class numbers.
    """

    model: nn.Module
    sample_shapes: dict[str, tuple[int, ...]]
    loss: Score
    integer_keys: tuple[str, ...] = ()
    dims: tuple[int, ...] = (1, 2)


@dataclass
class Task:
    """A model, its data, its loss and its metrics.

    `loss(output, batch)` is the mean over the samples of a batch. Each of `metrics` returns one number per sample, so
    that the mean over a test set is exact for any distribution of the samples.

    A task with `lead` can be trained with rollouts: `lead(batch, i)` is the batch that the state after i + 1 steps is
    compared with (the default loss compares with its "y"), and `forcings(batch, i)` are the inputs of that step other
    than the state. Without `lead` a sample has one step.

    `draw(folder, fields)` plots on rank 0:
    `fields` maps the names of the first test batch, and "prediction", to the global field and its shard boundaries.
    """

    model: nn.Module
    train: ShardedLoader
    loss: Score
    tests: dict[str, ShardedLoader] = field(default_factory=dict)
    metrics: dict[str, Score] = field(default_factory=dict)
    inputs: Callable[[Any], tuple[Any, ...]] = first_input
    draw: Callable[..., None] | None = None
    lead: Callable[[Any, int], Any] | None = None
    forcings: Callable[[Any, int], Tensor] | None = None


@dataclass
class ForecastSpec:
    """What `shardfield predict` needs of a recipe: the model without its weights, and the states to start from.

    `read(case, i, slices)` returns a block (variable, ...) of the known state of a case at lead time i, 0 for the
    initial one. `variables` maps names to attributes (units), `coords` the dims of a field to their coordinates.
    `weights` are those of the area in scores. `scale(model)` is the standard deviation of each variable, of a model
    with its weights: noise is given in its units.
    """

    model: nn.Module
    variables: dict[str, dict[str, str]]
    coords: dict[str, Any]
    hours: float
    read: Callable[[int, int, Any], Tensor]
    weights: Tensor | None = None
    scale: Callable[[Any], Tensor | float] = lambda model: 1.0
    title: str = ""
