"""Keep the graphs of all ranks equal where a rank has an empty shard, for derivatives of any order.

Backward must issue the same collectives on all ranks, so every rank must reach the same ones. In a first backward that
is so if the result depends on every operand. In a second one it depends on the formulas that backward recorded: torch's
kernels record others for empty tensors, or none. So where any rank has an empty shard, local work is connected on all
ranks: each gradient depends on all operands and on all gradients of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import runtime
from .._compat import after_backward
from ..layout import Layout, shard_sizes_of
from .arguments import map_tensors


def _has_empty_shard(layouts: Iterable[Layout]) -> bool:
    """Return whether any rank has an empty shard under any of the layouts, which is equal on all ranks."""
    return any(
        0 in shard_sizes_of(factor) for layout in layouts for dim in layout.dims for factor in dim if factor.axes
    )


def connected(local: Callable, layouts: Iterable[Layout]) -> Callable:
    """Return `local` such that each gradient that it computes depends on all its operands and output gradients.

    layouts: of its operands and results; if none has an empty shard on any rank, `local` is returned as it is. The
    values are those of `local`: what connects them is the sum of no elements.
    """
    if not _has_empty_shard(layouts):
        return local

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled() or runtime.active.tracer is not None:
            return local(*args)
        operands: list[Tensor] = []
        map_tensors(args, lambda t: operands.append(t) if t.requires_grad else None)
        if not operands:
            return local(*args)
        zero = sum(map(sum_of_nothing, operands))
        output_grads: list[Tensor] = []
        out = local(*map_tensors(args, lambda t: _enter(t, zero, output_grads) if t.requires_grad else t))
        return map_tensors(out, lambda t: _leave(t, output_grads) if t.requires_grad else t)

    return run


def _enter(operand: Tensor, zero: Any, output_grads: list[Tensor]) -> Tensor:
    """Return an operand for one local computation: the graph of its gradient depends on `zero` and `output_grads`.

    It is a view, not the result of a Function: the operand may be written afterwards.
    """
    entered = operand.view_as(operand)
    like = operand.detach()[tuple(slice(0) for _ in operand.shape)] if operand.ndim else operand.detach()
    shape = operand.shape

    def connect(grad: Tensor | None) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        grad = like.new_zeros(shape) if grad is None else grad
        return grad + sum(map(sum_of_nothing, output_grads), zero).to(grad.dtype)

    entered.register_hook(connect)
    return entered


def _leave(out: Tensor, output_grads: list[Tensor]) -> Tensor:
    """Return a result of the local work, whose gradients are recorded while a graph of backward is."""
    out = out.clone() if out._is_view() else out  # no view of an operand

    def record(grad: Tensor | None) -> None:
        if grad is not None and torch.is_grad_enabled():
            output_grads.append(grad)
            after_backward(output_grads.clear)  # their graph may lead back to this hook, and would never be freed

    out.register_hook(record)
    return out


def sum_of_nothing(tensor: Tensor) -> Tensor:
    """Return the sum of no elements of a tensor, a real number 0 in its graph."""
    empty = tensor.reshape(-1)[:0]
    return (empty.real if empty.is_complex() else empty).sum()
