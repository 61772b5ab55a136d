"""Autoregressive rollouts: a model of one time step applied to its own output, on a state that stays sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from ..errors import ShardingError
from ..layout import Layout
from ..tensor import ShardTensor


class Normalizer(Protocol):
    """Shift and scale of a state, as of `shardfield.data.UnitGaussian`."""

    def transform(self, x: Tensor, /) -> Tensor: ...

    def inverse_transform(self, x: Tensor, /) -> Tensor: ...


def rollout(
    model: Callable[[Tensor], Any],
    state: Tensor,
    steps: int,
    *,
    forcings: Callable[[int], Tensor] | Sequence[Tensor] | Tensor | None = None,
    constants: Tensor | None = None,
    normalizer: Normalizer | None = None,
    grad_steps: int | None = None,
    checkpoint: bool = False,
    push_forward: bool = False,
    first_step: int = 0,
) -> Iterator[Tensor]:
    """Yield the states after 1, 2, ... `steps` steps of a model that maps a state to the next one.

        for state in rollout(model, x0, 40, forcings=solar, constants=orography, normalizer=normalizer):
            ...

    A state is (sample, channel, ...), plain or sharded in any way. The model is called with the state, the forcings of
    the step and the constants, concatenated along dim 1, and returns the next state. The forcings of the step from time
    i to time i + 1 are `forcings(i)`, or item i of a sequence. Forcings and constants of one sample are those of all. A
    sharded state has the same layout at every step, so that plans and compiled programs are made once. Only the current
    state is held: without gradients the memory of a rollout does not grow with its length.

    `normalizer` (`transform`, `inverse_transform`): the model maps normalized states to normalized states, and the
    states that are given and returned are in the units of the data. Forcings and constants are not normalized.
    `first_step` is the time of `state`, for a rollout that continues another one: the first forcings are
    `forcings(first_step)`.

    Gradients go through all steps. `grad_steps=k` runs all but the last k steps without gradients; their states do not
    require grad. `checkpoint=True` recomputes the activations of each step in backward: a rollout stores one state per
    step. `push_forward=True` detaches the state between steps: each step learns to correct the states that the model
    itself produces, and the memory of backward is that of one step if `backward` is called for each state (Brandstetter
    et al. 2022 use it with `grad_steps=1`).
    """
    if steps < 0 or first_step < 0:
        raise ValueError(f"rollout: steps is {steps} and first_step {first_step}; both are 0 or more")
    if grad_steps is not None and grad_steps < 0:
        raise ValueError(f"rollout: grad_steps is {grad_steps}; 0 or more is needed")
    if state.ndim < 2:
        raise ShardingError(f"rollout: a state is (sample, channel, ...), not {tuple(state.shape)}")
    if isinstance(forcings, (Tensor, Sequence)) and len(forcings) < first_step + steps:
        raise ShardingError(f"rollout: forcings of {len(forcings)} steps for a rollout to step {first_step + steps}")
    if isinstance(state, ShardTensor):
        state = state._unmerged_value()
    inputs = _Inputs(state, forcings, constants)
    # Only the generator holds the state, so that the first one is freed after a step unless the caller keeps it.
    return _states(
        model, state, range(first_step, first_step + steps), inputs, normalizer, grad_steps, checkpoint, push_forward
    )


def _states(
    model: Callable[[Tensor], Any],
    x: Tensor,
    times: range,
    inputs: _Inputs,
    normalizer: Normalizer | None,
    grad_steps: int | None,
    checkpoint: bool,
    push_forward: bool,
) -> Iterator[Tensor]:
    layout = x._layout if isinstance(x, ShardTensor) else None

    def advance(x: Tensor, *others: Tensor) -> Tensor:
        given = x if normalizer is None else normalizer.transform(x)
        output = _restored(model(torch.cat([given, *others], 1) if others else given), x, layout)
        return output if normalizer is None else normalizer.inverse_transform(output)

    for time in times:
        others = inputs.at(time)
        # Gradients are off inside a step only: between steps the caller's code runs in its own grad mode.
        wanted = grad_steps is None or time >= times.stop - grad_steps
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
            x = x.detach() if push_forward else x
            if checkpoint and torch.is_grad_enabled():
                x = checkpointed(advance, x, *others, use_reentrant=False)
            else:
                x = advance(x, *others)
        yield x


class _Inputs:
    """The inputs of a step other than the state, checked against the shape of the state."""

    def __init__(self, state: Tensor, forcings: Any, constants: Tensor | None):
        self.shape, self.forcings = state.shape, forcings
        self.constants = () if constants is None else (self._fitted("constants", constants),)

    def at(self, time: int) -> tuple[Tensor, ...]:
        if self.forcings is None:
            return self.constants
        force = self.forcings(time) if callable(self.forcings) else self.forcings[time]
        return (self._fitted(f"forcings of step {time}", force), *self.constants)

    def _fitted(self, name: str, value: Tensor) -> Tensor:
        """Return forcings or constants for all samples of a state; those of one sample are the same for all."""
        samples, _, *points = self.shape
        if value.ndim != len(self.shape) or [*value.shape[2:]] != points or value.shape[0] not in (1, samples):
            raise ShardingError(
                f"rollout: {name} have shape {tuple(value.shape)}, which does not fit a state of {tuple(self.shape)}: "
                "the dims after the channels (dim 1) must be equal, and the samples (dim 0) equal or 1"
            )
        return value.expand(samples, *value.shape[1:]) if value.shape[0] != samples else value


def _restored(output: Any, x: Tensor, layout: Layout | None) -> Tensor:
    """Return a model's output in the layout of the state."""
    if not isinstance(output, Tensor) or output.shape != x.shape:
        found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ShardingError(
            f"rollout: the model maps a state of shape {tuple(x.shape)} to {found}; the next state must have the shape "
            "of the state (wrap a model that returns more, or a change of the state)"
        )
    if layout is None:
        return output
    if not isinstance(output, ShardTensor):
        raise ShardingError(f"rollout: the state is sharded ({layout}), and the model returns a plain tensor")
    return output._redistribute_to(layout)
