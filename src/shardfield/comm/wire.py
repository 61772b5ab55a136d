"""The one place where messages leave this rank.

Plain tensors in, new plain tensors out, no autograd: the differentiable moves are in `moves.py`. Every function
takes a process group, works for pieces of any sizes (0 too) and any dtype the group's backend can carry, and
tells the traffic meter what this rank sent. A group of one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

Shape = Sequence[int]

# Called as meter(kind, messages, bytes) for everything this rank sends; None when nobody listens.
meter: Callable[[str, int, int], None] | None = None

_started: set[ProcessGroup] = set()


def _sent(kind: str, messages: int, nbytes: float) -> None:
    if meter is not None:
        meter(kind, messages, int(nbytes))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def all_reduce(tensor: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """The reduction of every rank's tensor, on every rank. Half precision is summed in fp32."""
    size = dist.get_world_size(group)
    if size == 1 or tensor.numel() == 0:
        return tensor
    work = tensor
    if tensor.dtype in (torch.float16, torch.bfloat16) and op in ("sum", "avg", "prod"):
        work = tensor.float()
    elif tensor.dtype is torch.bool:
        work, op = tensor.to(torch.uint8), {"sum": "max", "prod": "min"}.get(op, op)
    if work is tensor:
        work = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.is_complex() and op == "prod":
        work = torch.stack(all_gather(tensor, [tensor.shape] * size, group)).prod(0)
    elif op == "avg":  # gloo has no AVG
        dist.all_reduce(work, ReduceOp.SUM, group=group)
        work = work / size
    else:
        dist.all_reduce(work, _OPS[op], group=group)
    _sent("all_reduce", 1, 2 * (size - 1) / size * _nbytes(work))
    return work.to(tensor.dtype)


_OPS = {
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
}


def all_gather(tensor: Tensor, shapes: Sequence[Shape], group: ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, by coord; `shapes` are known to all."""
    size = dist.get_world_size(group)
    if size == 1:
        return [tensor]
    first = tuple(shapes[0])
    if any(tuple(s) != first for s in shapes):
        return exchange([tensor] * size, shapes, group)
    if tensor.numel() == 0:
        return [tensor.new_empty(first) for _ in range(size)]
    source = as_bytes_if_bool(tensor.contiguous())
    flat = source.new_empty(size * source.numel())
    dist.all_gather_into_tensor(flat, source.reshape(-1), group=group)
    _sent("all_gather", 1, (size - 1) * _nbytes(source))
    return [piece.view(first).to(tensor.dtype) for piece in flat.chunk(size)]


def as_bytes_if_bool(tensor: Tensor) -> Tensor:
    """uint8 for bool, which not every backend carries."""
    return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


def reduce_scatter(pieces: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """The sum over ranks of the piece meant for this coord: pieces travel once, sums are taken in fp32 or better."""
    size, coord = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return pieces[0]
    mine = pieces[coord]
    received = exchange(pieces, [mine.shape] * size, group)
    if mine.dtype in (torch.float16, torch.bfloat16):
        received = [piece.float() for piece in received]
    total = received[0].clone()
    for piece in received[1:]:
        total += piece
    return total.to(mine.dtype)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """The tensor of the rank at coord `source`; the others pass one of the same shape and dtype."""
    size = dist.get_world_size(group)
    if size == 1 or tensor.numel() == 0:
        return tensor
    work = as_bytes_if_bool(tensor).clone(memory_format=torch.contiguous_format)
    dist.broadcast(work, group_src=source, group=group)
    _sent("broadcast", 1, _nbytes(work) if dist.get_rank(group) == source else 0)
    return work.to(tensor.dtype)


class Pending:
    """Messages in flight; `wait()` gives the received pieces by coord."""

    def __init__(self, pieces: list[Tensor], works: list, kept: list[Tensor], dtype: torch.dtype):
        self._pieces, self._works, self._kept, self._dtype = pieces, works, kept, dtype

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._works, self._kept = [], []
        return [piece.to(self._dtype) for piece in self._pieces]


def start_exchange(sends: Sequence[Tensor], shapes: Sequence[Shape], group: ProcessGroup) -> Pending:
    """Send `sends[c]` to coord c and receive a tensor of `shapes[c]` from it; one message a peer, empty ones none.

    Both ends know the shapes, so a rank with nothing to send or receive takes part without a message.
    """
    coord = dist.get_rank(group)
    like = sends[coord]
    ops, kept, pieces = [], [], []
    wire_dtype = torch.uint8 if like.dtype is torch.bool else like.dtype
    messages = nbytes = 0
    for peer, shape in enumerate(shapes):
        if peer == coord:
            pieces.append(sends[coord])
            continue
        piece = torch.empty(tuple(shape), dtype=wire_dtype, device=like.device)
        pieces.append(piece)
        if piece.numel():
            ops.append(dist.P2POp(dist.irecv, piece, group=group, group_peer=peer))
    for peer, piece in enumerate(sends):
        if peer != coord and piece.numel():
            piece = as_bytes_if_bool(piece).contiguous()
            kept.append(piece)
            ops.append(dist.P2POp(dist.isend, piece, group=group, group_peer=peer))
            messages, nbytes = messages + 1, nbytes + _nbytes(piece)
    _start(group, like.device)
    works = dist.batch_isend_irecv(ops) if ops else []
    _sent("exchange", messages, nbytes)
    return Pending(pieces, works, kept, like.dtype)


def exchange(sends: Sequence[Tensor], shapes: Sequence[Shape], group: ProcessGroup) -> list[Tensor]:
    """`start_exchange` and wait."""
    return start_exchange(sends, shapes, group).wait()


def _start(group: ProcessGroup, device: torch.device) -> None:
    """NCCL wants a group's first call to be one that all its ranks make; a point-to-point call may not be."""
    if device.type == "cpu" or group in _started:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _started.add(group)


def gather_ints(values: Sequence[int], group: ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's list of integers (equal length on all ranks), by coord."""
    size = dist.get_world_size(group)
    if size == 1:
        return [list(values)]
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    return [t.tolist() for t in all_gather(mine, [mine.shape] * size, group)]
