"""Integrals over surfaces: areas, force coefficients, and norms weighted by area. On plain and sharded points."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def area_norm(value: Tensor, area: Tensor) -> Tensor:
    """Return the root of the integral of `value` squared over each surface: (..., points, channels) to (...)."""
    return (value.square() * area).sum((-2, -1)).sqrt()


def force_coefficients(pressure: Tensor, normal: Tensor, area: Tensor) -> Tensor:
    """Return the force on each body, (..., points, columns) to (..., 3), over dynamic pressure times frontal area.

    `pressure` (one column) is the pressure coefficient, `normal` (three) points outwards and `area` (one) is that of
    the points' shares of the surface. The stream flows along x: the first component is the drag coefficient. The
    frontal area is the projected area along x; the body must be convex.

    >>> import torch
    >>> normal = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])  # a plate across the stream
    >>> force_coefficients(torch.tensor([[-0.2], [1.0]]), normal, torch.tensor([[2.0], [2.0]]))
    tensor([1.2000, -0.0000, -0.0000])
    """
    frontal: Any = (normal[..., :1].abs() * area).sum((-2, -1)) / 2
    return -(pressure * normal * area).sum(-2) / frontal.unsqueeze(-1)
