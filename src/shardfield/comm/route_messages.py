"""The messages of a route, without autograd: pack the regions for each peer, send, assemble the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat import add_to_all, is_zero_tensor
from .._compat.autocast import concatenate, stack
from ..native import leaf
from . import collectives
from .route import Region, Route, Shapes
from .route_split import RouteSplit

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by ndim
# Devices on which received rows are added to a small block by a concatenation. The result is contiguous, so that its
# consumer does not copy it. Elsewhere, and for more elements, adding in place takes less time.
CONCATENATING = frozenset(["cpu"])
SMALL = 4096


def exchange_no_grad(tensor: Tensor, route: Route, group: ProcessGroup, fill: Any = 0) -> Tensor:
    """Exchange shards by a route, without autograd."""
    shapes, split = route.shapes.get(tensor.shape) or route.shapes_for(tensor.shape), route.split
    started = None if split is None else _start_split(tensor, route, split, shapes, group)
    if split is not None and started is not None:
        block, messages = started
        return _finish_split(block, messages.wait(), split, block is not tensor)
    received = collectives.start_sends(
        _pack(tensor, route), shapes.receives, group, tensor, packed=shapes.filled
    ).wait()
    return _assemble(tensor, route, shapes, received, fill, False)


def start_route(
    tensor: Tensor, route: Route, group: ProcessGroup, fill: Any = 0, owned: bool = False
) -> collectives.Pending[Tensor]:
    """Start the messages of a route, without autograd. Waiting for the result assembles it: one kernel, if possible.

    `owned`: the tensor may be overwritten, and the result may be a view of it.
    """
    shapes, split = route.shapes.get(tensor.shape) or route.shapes_for(tensor.shape), route.split
    started = None if split is None else _start_split(tensor, route, split, shapes, group)
    if split is not None and started is not None:
        block, messages = started
        owned = owned or block is not tensor
        return collectives.Pending((), (), lambda: _finish_split(block, messages.wait(), split, owned))
    pending = collectives.start_sends(_pack(tensor, route), shapes.receives, group, tensor, packed=shapes.filled)
    return collectives.Pending((), (), lambda: _assemble(tensor, route, shapes, pending.wait(), fill, owned))


# ---------------------------------------------------------------------- one region for each peer


def _start_split(
    tensor: Tensor, route: Route, split: RouteSplit, shapes: Shapes, group: ProcessGroup
) -> tuple[Tensor, collectives.Pending[list[Tensor]]] | None:
    """Return the block that `split` divides, and its messages; None if it must not: a sum is accumulated in its dtype.

    The block is the tensor, or a copy of one that repeats its elements.
    """
    if not shapes.filled or runtime.active.tracer is not None:
        return None
    if split.added is not None and collectives.accumulate_dtype(tensor.dtype) is not tensor.dtype:
        return None
    stacked = route.equal_sends and tensor.device.type != "cpu"  # one kernel packs the messages to all peers
    packed = pack_split(tensor, *split.sources, split.peers, shapes.receives, stacked)
    if packed is None:
        return None
    block, sends, incoming, received = packed
    return block, collectives.start_packed(sends, incoming, received, group, block)


def _finish_split(block: Tensor, received: list[Tensor], split: RouteSplit, owned: bool) -> Tensor:
    """Return the result from the part that this rank keeps and the received ones.

    `owned`: the block may be overwritten, and the result may be a view of it.
    """
    if split.added is None:
        return join_split(block, received, split.kept, split.dim, split.order)
    joins = owned and bool(split.kept) and block.device.type in CONCATENATING and block.numel() <= SMALL
    return add_split(block, received, split.kept, *split.added, owned, joins)


@leaf
def pack_split(
    tensor: Tensor,
    dim: int,
    sizes: list[int],
    chosen: list[int],
    peers: Sequence[int],
    receives: Sequence[tuple[int, Sequence[int]]],
    stacked: bool,
) -> tuple[Tensor, list[tuple[int, Tensor]], list[tuple[int, Tensor]], list[Tensor]] | None:
    """Return the block, what is sent to each peer and the buffer for what it sends, with their coords, and the buffers.

    Return None if the memory of the tensor is not that of its elements, or has another format, which must be kept. A
    tensor that repeats its elements, like the gradient of a sum, is copied.
    """
    if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):
        return None
    block = tensor
    if not tensor.is_contiguous():
        if 0 not in tensor.stride():
            return None
        block = tensor.contiguous()
    parts = block.split_with_sizes(sizes, dim)
    if stacked:
        packed = stack([parts[i] for i in chosen[: len(peers)]])
        sends = list(zip(peers, packed.unbind(), strict=True))
    else:
        sends = [(peer, parts[i].contiguous()) for peer, i in zip(peers, chosen, strict=False)]
    incoming, buffers = [], []
    for peer, shape in receives:  # one pass: a comprehension is a call
        buffer = block.new_empty(shape)
        incoming.append((peer, buffer))
        buffers.append(buffer)
    return block, sends, incoming, buffers


@leaf
def join_split(block: Tensor, received: list[Tensor], kept: Sequence[int], dim: int, order: Sequence[int]) -> Tensor:
    """Return the concatenation of the part that this rank keeps and the received ones."""
    own = block.narrow(*kept) if kept else block
    return concatenate([own if i < 0 else received[i] for i in order], dim)


@leaf
def add_split(
    block: Tensor,
    received: list[Tensor],
    kept: Sequence[int],
    dim: int,
    sizes: list[int],
    chosen: list[int],
    owned: bool,
    joins: bool,
) -> Tensor:
    """Return the part that this rank keeps with received parts added to it: joined from sums, or added in place."""
    own = block.narrow(*kept) if kept else block
    out = own if owned else own.clone(memory_format=torch.contiguous_format)
    parts = list(out.split_with_sizes(sizes, dim))
    if joins:
        for i, part in zip(chosen, received, strict=True):
            parts[i] = part.add_(parts[i])
        return concatenate(parts, dim)
    add_to_all([parts[i] for i in chosen], received)
    return out


# ---------------------------------------------------------------------- any route


def _pack(block: Tensor, route: Route) -> list[tuple[int, Tensor]]:
    """Return a contiguous tensor for each peer. One kernel packs all messages if their shapes are equal."""
    if route.equal_sends:
        packed = stack([_region(block, regions[0]) for _, regions in route.send])
        parts = (packed if packed.is_contiguous() else packed.contiguous()).unbind(0)
        return [(peer, part) for (peer, _), part in zip(route.send, parts, strict=True)]
    sends = []
    for peer, regions in route.send:
        views = [_region(block, region) for region in regions]
        one = views[0] if len(views) == 1 else concatenate([view.reshape(-1) for view in views])
        sends.append((peer, collectives.contiguous(one)))
    return sends


def _region(block: Tensor, region: Region) -> Tensor:
    return region.view(block).flip(region.flip) if region.flip else region.view(block)


def _assemble(
    block: Tensor, route: Route, shapes: Shapes, received: Sequence[Tensor], fill: Any, owned: bool
) -> Tensor:
    """Return the result of a route from the block and the received tensors."""
    parts = received
    if not shapes.single:
        parts = []
        for flat, of in zip(received, shapes.regions, strict=True):
            sizes = [math.prod(shape) for shape in of]
            parts += [part.view(shape) for part, shape in zip(flat.view(-1).split(sizes), of, strict=True)]
    if route.steps is not None:
        return _concatenate(block, route, route.steps, shapes.result, parts, fill)
    wide = collectives.accumulate_dtype(block.dtype) if route.add else block.dtype
    if route.add and route.keeps_all:
        out = _region(block, route.own[0][0])
        if not owned or wide != block.dtype:
            out = out.to(wide, copy=True, memory_format=torch.contiguous_format)
    else:
        out = block.new_full(shapes.result, 0 if route.add else fill, dtype=wide)
        for source, target in route.own:
            _place(out, target, _region(block, source), route.add)
    for target, part in zip(route.targets, parts, strict=True):
        _place(out, target, part, route.add)
    return out if wide == block.dtype else out.to(block.dtype)


def _concatenate(
    block: Tensor,
    route: Route,
    steps: Sequence[tuple[int, int, int]],
    shape: Sequence[int],
    parts: Sequence[Tensor],
    fill: Any,
) -> Tensor:
    dim = (route.own[0][1] if route.own else route.targets[0]).ranges[0][0]
    blocks = []
    for kind, index, length in steps:
        if kind == 0:
            source, target = route.own[index]
            part = _region(block, source)
            blocks.append(part.flip(target.flip) if target.flip else part)
        elif kind == 1 and len(route.targets[index].ranges) == 1:
            flip = route.targets[index].flip
            blocks.append(parts[index].flip(flip) if flip else parts[index])
        else:
            part = block.new_full([length if d == dim % block.ndim else n for d, n in enumerate(shape)], fill)
            if kind == 1:
                Region(route.targets[index].ranges[1:]).view(part).copy_(parts[index])
            blocks.append(part)
    if not block.is_contiguous():
        kept = CHANNELS_LAST.get(block.ndim)
        if kept is not None and block.is_contiguous(memory_format=kept):  # torch.cat keeps it if all parts have it
            blocks = [part.contiguous(memory_format=kept) for part in blocks]
    return concatenate(blocks, dim)


def _place(out: Tensor, region: Region, part: Tensor, add: bool) -> None:
    target, part = region.view(out), part.flip(region.flip) if region.flip else part
    target.add_(part) if add else target.copy_(part)
