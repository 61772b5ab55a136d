"""Sums of the tensors of several virtual ranks, in the order in which gloo adds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import WorldError

RING_SEGMENT = 1 << 20  # bytes of a segment of gloo's ring

_BINARY: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}


def reduce(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Return the reduction of flat tensors, by coord: on a CPU in the order in which gloo's ring adds them.

    The ring divides the tensors into one chunk per rank. Chunk c begins at coord c - 1, and those of c - 2
    and so on around the ring are added to it.
    """
    kind = next((k for k in _BINARY if op == k), None)
    if kind is None:
        raise WorldError(f"virtual ranks cannot reduce with {op}")
    combine, size = _BINARY[kind], len(tensors)
    if tensors[0].is_cuda:  # gloo's order would take a launch for each chunk of each rank
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            combine(total, tensor)
        return total.div_(size) if kind == ReduceOp.AVG else total
    total = torch.empty_like(tensors[0])
    for chunk, (start, stop) in enumerate(ring_chunks(total.numel(), total.element_size(), size)):
        if start == stop:
            continue
        first = (chunk - 1) % size
        part = tensors[first][start:stop].clone()
        for step in range(1, size):
            combine(part, tensors[(first - step) % size][start:stop])
        total[start:stop] = part
    if kind == ReduceOp.AVG:
        total.div_(size)
    return total


def ring_chunks(numel: int, element_size: int, size: int) -> list[tuple[int, int]]:
    """Return the element ranges of the chunks into which gloo's ring splits a tensor."""
    nbytes = numel * element_size
    segments = max(-(-nbytes // RING_SEGMENT), 2 * size)
    segments = -(-segments // size) * size
    segment = -(-nbytes // segments)
    segment = -(-segment // element_size) * element_size
    chunk = segments // size * segment // element_size
    return [(min(c * chunk, numel), min((c + 1) * chunk, numel)) for c in range(size)]
