"""Keys and values of one rank as one flat block, which circulates around a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import runtime
from ...comm.ring import pack, unpack


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
    return torch.stack([t.movedim(-2, 0) for t in (key, value)], 1).view(-1)


def unpack_pair(block: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a flat block as views of it."""
    if shapes[0] != shapes[1]:
        key, value = unpack(block, shapes)
        return key, value
    batch, heads, rows, features = shapes[0]
    key, value = block.view(rows, 2, batch, heads, features).movedim(0, -2).unbind(0)
    return key, value
