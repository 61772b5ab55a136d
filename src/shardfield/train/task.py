"""What a recipe hands to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..data import ShardedLoader

Score = Callable[[Any, Any], Tensor]


def first_input(batch: Any) -> tuple[Any, ...]:
    """What the model is called with: a sample's "x", or the first of its tensors."""
    return (batch["x"] if isinstance(batch, Mapping) else batch[0],)


@dataclass
class TaskSpec:
    """A task before it has data: enough to say what a step computes and sends, which is what plans are made of.

    `sample_shapes` are the shapes of one sample's tensors; those with dims behind the first are fields, whose dims
    from the second on are cut. `integer_keys` names those that hold class numbers.
    """

    model: nn.Module
    sample_shapes: dict[str, tuple[int, ...]]
    loss: Score
    integer_keys: tuple[str, ...] = ()


@dataclass
class Task:
    """A model, its data, and what to make small.

    `loss(output, batch)` is the mean over the samples of a batch. Each of `metrics` gives one number per sample, so
    that the mean over a test set is exact however it is dealt out. `draw(folder, shown)` makes a picture on rank 0:
    `shown` maps the names of the first test batch, and "prediction", to whole fields and where they are cut.
    """

    model: nn.Module
    train: ShardedLoader
    loss: Score
    tests: dict[str, ShardedLoader] = field(default_factory=dict)
    metrics: dict[str, Score] = field(default_factory=dict)
    inputs: Callable[[Any], tuple[Any, ...]] = first_input
    draw: Callable[..., None] | None = None
