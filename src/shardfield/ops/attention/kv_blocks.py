"""Keys and values of one rank as one flat block, which circulates around a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ... import runtime
from ..._compat.autocast import concatenate, stack
from ...comm.ring import pack, unpack
from ...layout import Span


def pack_pair(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values (batch, heads, rows, features), or gradients of them, as one flat block.

    If they have one shape, the sequence is the outermost dim: blocks that follow each other in memory are then one
    block of a longer sequence, without a copy.
    """
    if key.shape != value.shape:
        return pack([key, value])
    if key.is_cuda and runtime.active.tracer is None:  # torch.stack takes twice as long there for such strides
        batch, heads, rows, features = key.shape
        block = key.new_empty(rows, 2, batch, heads, features)
        for number, tensor in enumerate((key, value)):
            block[:, number].copy_(tensor.movedim(-2, 0))
        return block.view(-1)
    return stack([t.movedim(-2, 0) for t in (key, value)], 1).view(-1)


def unpack_pair(block: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a flat block as views of it."""
    if shapes[0] != shapes[1]:
        key, value = unpack(block, shapes)
        return key, value
    batch, heads, rows, features = shapes[0]
    key, value = block.view(rows, 2, batch, heads, features).movedim(0, -2).unbind(0)
    return key, value


def take(tensor: Tensor, dim: int, span: Span) -> Tensor:
    """Return a span of a dim: most tiles have all rows and columns, and slicing takes host time."""
    return tensor if span == (0, tensor.shape[dim]) else tensor.narrow(dim, span.start, span.stop - span.start)


def take_spans(block: Tensor, spans: Sequence[Span], dim: int = -2) -> Tensor:
    """Return the rows of a block in some spans, one behind the other: a view if there is one span."""
    if len(spans) > 1:
        return concatenate([take(block, dim, span) for span in spans], dim)
    return take(block, dim, spans[0] if spans else Span(0, 0))


def restore_spans(grad: Tensor, spans: Sequence[Span], length: int) -> Tensor:
    """Apply the adjoint of `take_spans` on a block of `length` rows: the other rows have gradients of zero."""
    if spans == (Span(0, length),):
        return grad
    full = grad.new_zeros(*grad.shape[:-2], length, grad.shape[-1])
    _copy_spans(full, grad, spans)
    return full


def pack_spans(key: Tensor, value: Tensor, spans: Sequence[Span], length: int) -> Tensor:
    """Return gradients of keys and values in some spans as those of the block of `length` rows, which is flat."""
    if spans == (Span(0, length),):
        return pack_pair(key, value)
    shapes = [[*t.shape[:-2], length, t.shape[-1]] for t in (key, value)]
    block = key.new_zeros(sum(map(math.prod, shapes)))
    for target, grad in zip(unpack_pair(block, shapes), (key, value), strict=True):
        _copy_spans(target, grad, spans)
    return block


def _copy_spans(target: Tensor, rows: Tensor, spans: Sequence[Span]) -> None:
    """Copy rows, in their order, to some spans of a block."""
    start = 0
    for span in spans:
        size = span.stop - span.start
        take(target, -2, span).copy_(take(rows, -2, Span(start, start + size)))
        start += size
