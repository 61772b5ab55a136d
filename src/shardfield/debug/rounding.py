"""Measure the rounding noise of a model: run it with the sums of its linear operators rounded differently.

A sharded model adds in another order than one device, so the two differ by rounding. How much that is depends on the
model. A run whose matrix products, convolutions, sums and transforms are rounded differently shows it on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._compat import DispatchMode
from ..dispatch.arguments import map_tensors

aten = torch.ops.aten
SCALE = 0.7  # not a power of two: scaled operands are rounded, and so is each of their products


def _linear_operators() -> Mapping[Any, tuple[int, ...]]:
    """Return the operators that are linear in the arguments at these positions, taken together."""
    first = (
        aten.mm, aten.bmm, aten.mv, aten.dot, aten.convolution_backward, aten.sum, aten.mean, aten.cumsum,
        aten._fft_c2c, aten._fft_r2c, aten._fft_c2r, aten.embedding_dense_backward, aten.upsample_bilinear2d,
    )  # fmt: skip
    return {
        **dict.fromkeys(first, (0,)),
        aten.addmm: (0, 1),
        aten.baddbmm: (0, 1),
        aten.addmv: (0, 1),
        aten.convolution: (0, 2),  # input and bias
        aten.index_add: (0, 3),
        aten.scatter_add: (0, 3),
    }


class OtherRounding(DispatchMode):
    """Round the results of linear operators differently: their operands are scaled by 0.7, the results scaled back."""

    def __init__(self) -> None:
        super().__init__()
        self._linear = _linear_operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        positions = self._linear.get(getattr(func, "_overloadpacket", None))
        if positions is None or "out" in (kwargs or {}) or func._schema.is_mutable or not _can_scale(args):
            return func(*args, **(kwargs or {}))
        given = list(args)
        for i in positions:
            if i < len(given) and isinstance(given[i], Tensor):
                given[i] = given[i] * SCALE
        return map_tensors(func(*given, **(kwargs or {})), lambda t: t / SCALE)


def _can_scale(args: Any) -> bool:
    """Return whether the first operand has floating-point numbers and no operand is sparse."""
    first = args[0]
    if not isinstance(first, Tensor) or not (first.is_floating_point() or first.is_complex()):
        return False
    return not any(isinstance(t, Tensor) and t.layout is not torch.strided for t in args)
