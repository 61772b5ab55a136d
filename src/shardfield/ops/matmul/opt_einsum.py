"""The functions that opt_einsum looks up in the package of a tensor's class, with numpy's names and conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Call `torch.einsum`."""
    return torch.einsum(equation, *operands)


def tensordot(x: Tensor, y: Tensor, axes: Any = 2) -> Tensor:
    """Call `torch.tensordot` over the dims in `axes`."""
    return torch.tensordot(x, y, dims=axes)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Call `torch.permute`."""
    return torch.permute(x, tuple(axes))
