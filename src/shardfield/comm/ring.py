"""Ring iteration: every rank visits the block of every rank of some mesh axes; the next blocks are in flight meanwhile.

Blocks are flat tensors whose lengths all ranks know. Each block is received from its owner directly, so that delays do
not accumulate. Over several mesh axes a block is forwarded along one axis after the other, so that only the groups of
the axes are needed. Only `gather_blocks` is differentiable: callers that accumulate blocks implement their own adjoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import autograd_collectives, collectives

# Blocks in flight while one is computed with: a message may take as long as the computation with that many blocks.
PREFETCH = 2


class Ring(NamedTuple):
    """The ranks of some mesh axes, outermost axis first: their groups, sizes, and this rank's coord on each."""

    groups: tuple[ProcessGroup, ...]
    sizes: tuple[int, ...]
    coords: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """The number of blocks visited, this rank's own (the first) included."""
        return math.prod(self.sizes)

    def offset(self, stop: int) -> tuple[int, ...]:
        """Return the distance to the owner of the block at step `stop`, in coords per axis."""
        back = []
        for size in reversed(self.sizes):
            stop, digit = divmod(stop, size)
            back.append(digit)
        return tuple(reversed(back))

    def route(self, stop: int) -> tuple[int, int, int]:
        """Return (source, axis, distance): where to receive the block of step `stop` from.

        The rank `distance` coords back on `axis` had this block at its step `source`. The axis is the innermost one on
        which the owner has another coord. On a single axis `source` is always 0: the peer sends its own block.
        """
        weight = 1
        for axis in reversed(range(len(self.sizes))):
            step = stop // weight % self.sizes[axis]
            if step:
                return stop - step * weight, axis, step
            weight *= self.sizes[axis]
        raise AssertionError(f"stop {stop} of a ring of {self.sizes}")

    def position(self, back: Sequence[int]) -> int:
        """Return the row-major position on the ring of the rank `back` coords before this one."""
        flat = 0
        for coord, b, size in zip(self.coords, back, self.sizes, strict=True):
            flat = flat * size + (coord - b) % size
        return flat

    def owner(self, stop: int) -> int:
        """Return the position of the owner of the block at step `stop`."""
        return self.position(self.offset(stop))


def iterate_blocks(block: Tensor, lengths: Sequence[int], ring: Ring) -> Iterator[Tensor]:
    """Yield every rank's flat block, this rank's own first; `lengths` are ordered by position on the ring.

    Sends one block per step after the first. The next PREFETCH blocks are in flight while the caller computes with the
    current one (on several axes perhaps only the next one: a block must be received before it can be forwarded).
    """
    routes = [(0, 0, 0), *map(ring.route, range(1, ring.num_steps))]
    last = {source: stop for stop, (source, _, _) in enumerate(routes)}
    to_send, in_flight, started = {0: block}, deque[Callable[[], Tensor]](), 1
    for stop in range(ring.num_steps):
        if stop:
            block = in_flight.popleft()()
            if stop in last:
                to_send[stop] = block
        while started < min(stop + 1 + PREFETCH, ring.num_steps) and routes[started][0] <= stop:
            source, axis, step = routes[started]
            sent = to_send[source] if started < last[source] else to_send.pop(source)
            in_flight.append(_send_recv(sent, lengths[ring.owner(started)], step, ring, axis))
            started += 1
        yield block


def send_to_owner(result: Tensor, stop: int, lengths: Sequence[int], ring: Ring) -> Callable[[], Tensor]:
    """Start sending a result for the block at step `stop` to the owner of that block.

    Calling the returned function waits for the result that another rank sends for this rank's block. One message per
    axis on which the two ranks differ.
    """
    back = list(ring.offset(stop))
    axes = [a for a, b in enumerate(back) if b]

    def start(payload: Tensor, remaining: Sequence[int]) -> Callable[[], Tensor]:
        axis, *rest = remaining
        step, back[axis] = back[axis], 0
        # The received payload is for the rank that is still `back` away along the remaining axes.
        pending = _send_recv(payload, lengths[ring.position(back)], -step, ring, axis)
        return pending if not rest else lambda: start(pending(), rest)()

    return start(result, axes)


def _send_recv(block: Tensor, length: int, step: int, ring: Ring, axis: int) -> Callable[[], Tensor]:
    """Start sending a block to the coord `step` ahead on an axis and receiving one of `length` from `step` behind."""
    size, coord = ring.sizes[axis], ring.coords[axis]
    to, source = (coord + step) % size, (coord - step) % size
    pending = collectives.start_sends([(to, block)], [(source, (length,))], ring.groups[axis], block)
    return lambda: pending.wait()[0]


def gather_blocks(block: Tensor, lengths: Sequence[int], ring: Ring) -> list[Tensor]:
    """Return every rank's flat block in the order of the steps. Adjoint: gradients are sent to the owners."""
    blocks = [block]
    for stop in range(1, ring.num_steps):
        source, axis, step = ring.route(stop)
        blocks.append(autograd_collectives.shift(blocks[source], (lengths[ring.owner(stop)],), step, ring.groups[axis]))
    return blocks


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return several tensors as one flat block."""
    # Two dims: autograd of cat ignores empty vectors, and a rank with one would skip the collectives of backward.
    return torch.cat([t.reshape(-1, 1) for t in tensors]).view(-1)


def unpack(block: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the tensors of a flat block, as views of it."""
    parts = block.split([math.prod(s) for s in shapes])
    return [p.view(tuple(s)) for p, s in zip(parts, shapes, strict=True)]
