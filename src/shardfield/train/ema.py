"""An exponential moving average of a model's parameters, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class ParameterEMA:
    """mean = decay * mean + (1 - decay) * parameters, after each step."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
        self.parameters = list(named.values())
        self.means: dict[str, Tensor] = {f"ema.{n}": p.detach().clone() for n, p in named.items()}

    @torch.no_grad()
    def update(self, active: Tensor | None = None) -> None:
        """Update the mean after a step; where `active` is a tensor 0, the mean does not change."""
        for mean, parameter in zip(self.means.values(), self.parameters, strict=True):
            mean, share = _local(mean), 1 - self.decay
            mean.lerp_(_local(parameter), share if active is None else active.to(mean.dtype) * share)

    def load_into_model(self) -> None:
        """Replace the model's parameters by their average."""
        pairs = [(_local(m), _local(p)) for m, p in zip(self.means.values(), self.parameters, strict=True)]
        _copy_values([m for m, _ in pairs], pairs)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's parameters by their average inside this context."""
        pairs = [(_local(m), _local(p)) for m, p in zip(self.means.values(), self.parameters, strict=True)]
        held = [p.clone() for _, p in pairs]
        self.load_into_model()
        try:
            yield
        finally:
            _copy_values(held, pairs)


@torch.no_grad()
def _copy_values(values: list[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> None:
    for value, (_, parameter) in zip(values, pairs, strict=True):
        parameter.copy_(value)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
