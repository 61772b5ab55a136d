"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sin(nn.Module):
    """sin(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class SquarePlus(nn.Module):
    """(x + sqrt(x^2 + b)) / 2 with b = 4: a softplus without exponentials."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.sqrt(x * x + 4)) / 2


class Stan(nn.Module):
    """tanh(x) (1 + beta x), with one learned beta per feature of the last dim, initialized to 1."""

    def __init__(self, features: int):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * (1 + self.beta * x)


class Capped(nn.Module):
    """An activation clamped to at most `cap`."""

    def __init__(self, fn: Callable[[Tensor], Tensor], cap: float = 1.0):
        super().__init__()
        self.fn, self.cap = fn, cap

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x).clamp(max=self.cap)


# name -> function of the number of features that returns the module
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda n: nn.ReLU(),
    "leaky_relu": lambda n: nn.LeakyReLU(0.1),
    "prelu": lambda n: nn.PReLU(),
    "relu6": lambda n: nn.ReLU6(),
    "elu": lambda n: nn.ELU(),
    "celu": lambda n: nn.CELU(),
    "selu": lambda n: nn.SELU(),
    "silu": lambda n: nn.SiLU(),
    "gelu": lambda n: nn.GELU(),
    "sin": lambda n: Sin(),
    "sigmoid": lambda n: nn.Sigmoid(),
    "logsigmoid": lambda n: nn.LogSigmoid(),
    "softplus": lambda n: nn.Softplus(),
    "softshrink": lambda n: nn.Softshrink(),
    "softsign": lambda n: nn.Softsign(),
    "tanh": lambda n: nn.Tanh(),
    "tanhshrink": lambda n: nn.Tanhshrink(),
    "threshold": lambda n: nn.Threshold(1.0, 1.0),
    "hardtanh": lambda n: nn.Hardtanh(),
    "identity": lambda n: nn.Identity(),
    "stan": Stan,
    "squareplus": lambda n: SquarePlus(),
    "capped_leaky_relu": lambda n: Capped(nn.LeakyReLU()),
    "capped_gelu": lambda n: Capped(F.gelu),
}


def get_activation(name: str, features: int) -> nn.Module:
    """Return the activation `name` for tensors of `features` features.

    >>> get_activation("silu", 8)
    SiLU()
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation is named {name!r}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name](features)
