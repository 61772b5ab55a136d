"""Promotion: what happens to a plain tensor in a call on ShardTensors."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShardingError


class TensorPromotionMode(enum.Enum):
    """What happens to a plain tensor, such as a weight, in a call on ShardTensors.

    It is treated as Replicate (SILENT, the default), the same with a warning each time (WARN), or refused (DISABLED).
    Tensors without dims count as numbers and are always accepted; WARN warns about those that require grad.
    """

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


def check_promotion(mode: TensorPromotionMode, func: Any, args: tuple, kwargs: dict | None) -> None:
    """Warn about, or refuse, the plain tensors among the arguments of a call on ShardTensors."""
    name = getattr(func, "__name__", str(func))
    for tensor in _plain_tensors((args, kwargs or {})):
        if mode is TensorPromotionMode.DISABLED:
            if tensor.ndim:
                raise ShardingError(
                    f"{name}: a plain tensor of shape {tuple(tensor.shape)} meets ShardTensors, and the promotion mode "
                    "is DISABLED: distribute it first, or call ShardTensor.set_promotion_mode"
                )
        elif tensor.ndim or tensor.requires_grad and torch.is_grad_enabled():
            warnings.warn(
                f"{name}: auto-promoting a plain tensor of shape {tuple(tensor.shape)} and {tensor.dtype} to Replicate",
                stacklevel=4,
            )


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in (Tensor, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_tensors(item)
    elif isinstance(value, dict):
        yield from _plain_tensors(tuple(value.values()))
