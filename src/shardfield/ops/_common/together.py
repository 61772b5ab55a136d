"""Local work on several operands: their gradients leave it together, and an empty shard stays in the graph.

A rank's backward must issue its collectives in the order of all other ranks. If the gradients of two operands became
ready at different times, the order would depend on the local graph, which a rank with an empty shard does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...comm.adjoints import Collective


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, through one node of the graph: identity, whose backward runs when all gradients are there.

    A gradient that the local work does not compute is zero.
    """
    wanted = [t for t in tensors if t.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return list(tensors)
    joined = iter(_Together.apply(*wanted))
    return [next(joined) if t.requires_grad else t for t in tensors]


def empty_result_of(tensors: Iterable[Tensor], shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return an empty result, on the device of `like`, that is in the graph of all `tensors`."""
    out = torch.empty(shape, dtype=dtype, device=like.device)
    if dtype.is_floating_point or dtype.is_complex:
        for tensor in tensors:
            if tensor.requires_grad:
                out = out + tensor.reshape(-1)[:0].sum().to(dtype)
    return out


class _Together(Collective):
    @staticmethod
    def forward(ctx, *tensors):
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        return _Together.adjoint(*grads)
