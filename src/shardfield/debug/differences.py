"""Compare two values: finite numbers relative to the largest, others exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensor import ShardTensor

NOISE_FACTOR = 10.0  # a sharded run may differ from one device by this times the rounding noise of one device
WORST_LIMIT = 1e-2  # a model whose rounding noise is larger cannot be judged


@dataclass
class Line:
    """One comparison: the largest difference on any rank, relative to the largest finite number on one device.

    A gradient that consists of rounding errors (of a bias before a batch norm) is compared relative to the largest
    gradient. `noise`: the same difference between two runs on one device that round differently. Numbers that are not
    finite must be the same, else the error is inf.
    """

    kind: str  # "output", "input gradient", "parameter gradient", "buffer", "parameter after", "buffer after"
    name: str
    error: float
    noise: float = 0.0
    rank: int = 0  # the rank with the largest error

    def limit(self, tolerance: float) -> float:
        """Return the largest error that passes: the tolerance, or a multiple of the noise where that is larger."""
        return max(tolerance, min(NOISE_FACTOR * self.noise, WORST_LIMIT))

    def agrees(self, tolerance: float) -> bool:
        return self.error <= self.limit(tolerance)

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank else ""
        return f"{self.kind:<18} {self.name:<48} {self.error:9.1e} (noise {self.noise:.0e}){where}"


def is_number(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def max_abs(value: Any) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    if not is_number(value):
        return 0.0
    found = value.detach().abs()
    found = found[found.isfinite()]
    return found.max().item() if found.numel() else 0.0


def relative_error(value: Any, wanted: Any, floor: float = 0.0) -> float:
    """Return the largest difference of finite numbers, divided by the largest of them or by `floor` if that is larger.

    inf if a value is missing or has another shape or dtype, or if values that are not finite numbers differ: a nan must
    be a nan, an infinity the same infinity, an integer or bool the same.
    """
    value = value.full_tensor() if isinstance(value, ShardTensor) else value
    if value is None or wanted is None:
        return 0.0 if value is wanted else math.inf
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return math.inf
    if not is_number(wanted):
        return 0.0 if torch.equal(value, wanted) else math.inf
    value, wanted = value.detach(), wanted.detach()
    if wanted.is_complex():
        value, wanted = torch.view_as_real(value.resolve_conj()), torch.view_as_real(wanted.resolve_conj())
    finite = wanted.isfinite()
    if not torch.equal(finite, value.isfinite()):
        return math.inf
    others = [torch.nan_to_num(t[~finite], nan=1.0, posinf=2.0, neginf=3.0) for t in (value, wanted)]
    if not torch.equal(*others):
        return math.inf
    difference = (value - wanted)[finite].abs()
    return difference.max().item() / max(max_abs(wanted), floor, 1e-30) if difference.numel() else 0.0
