"""A ring: every rank's block comes by every rank of some mesh axes, the next ones in flight while one is worked on.

Blocks are flat tensors whose lengths all ranks know. Each comes straight from its owner, so that late messages are late
together; over several mesh axes it goes along one axis after the other, so that no group beyond the axes' own is
needed. No autograd here but for `gather_blocks`: whoever folds blocks knows its own adjoint.
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

# Blocks in flight while one is worked on: a message has the work of that many blocks to hide behind.
PREFETCH = 2


class Ring(NamedTuple):
    """The ranks of some mesh axes, outermost axis first: their groups, sizes, and this rank's coord on each."""

    groups: tuple[ProcessGroup, ...]
    sizes: tuple[int, ...]
    coords: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """How many blocks come by, this rank's own (the first) included."""
        return math.prod(self.sizes)

    def offset(self, stop: int) -> tuple[int, ...]:
        """How far back, axis by axis, the owner of the block at a stop is: the stops count through all offsets."""
        back = []
        for size in reversed(self.sizes):
            stop, digit = divmod(stop, size)
            back.append(digit)
        return tuple(reversed(back))

    def route(self, stop: int) -> tuple[int, int, int]:
        """(source, axis, step): a stop after the first has what the rank `step` back on `axis` had at stop `source`.

        Along the innermost axis on which the owner is elsewhere; on one axis the source is always its own block.
        """
        weight = 1
        for axis in reversed(range(len(self.sizes))):
            step = stop // weight % self.sizes[axis]
            if step:
                return stop - step * weight, axis, step
            weight *= self.sizes[axis]
        raise AssertionError(f"stop {stop} of a ring of {self.sizes}")

    def position(self, back: Sequence[int]) -> int:
        """The row-major position on the ring of the rank `back` coords before this one."""
        flat = 0
        for coord, b, size in zip(self.coords, back, self.sizes, strict=True):
            flat = flat * size + (coord - b) % size
        return flat

    def owner(self, stop: int) -> int:
        """The position of the rank whose block is here at a stop."""
        return self.position(self.offset(stop))


def iterate_blocks(block: Tensor, lengths: Sequence[int], ring: Ring) -> Iterator[Tensor]:
    """Every rank's flat block in turn, this rank's own first; `lengths` by position on the ring.

    stops - 1 messages of one block each. The next AHEAD blocks are on their way while the caller works on the one it
    was given (on several axes perhaps only the next: a block that is to be sent on must have come).
    """
    routes = [(0, 0, 0), *map(ring.route, range(1, ring.num_steps))]
    last = {source: stop for stop, (source, _, _) in enumerate(routes)}
    to_send, flying, started = {0: block}, deque[Callable[[], Tensor]](), 1
    for stop in range(ring.num_steps):
        if stop:
            block = flying.popleft()()
            if stop in last:
                to_send[stop] = block
        while started < min(stop + 1 + PREFETCH, ring.num_steps) and routes[started][0] <= stop:
            source, axis, step = routes[started]
            sent = to_send[source] if started < last[source] else to_send.pop(source)
            flying.append(_send_recv(sent, lengths[ring.owner(started)], step, ring, axis))
            started += 1
        yield block


def send_to_owner(piece: Tensor, stop: int, lengths: Sequence[int], ring: Ring) -> Callable[[], Tensor]:
    """Send what was made of the block at `stop` to its owner; calling the result waits for what came for this rank's.

    One message an axis on which the two ranks differ, straight to the owner (forwarded where several axes differ).
    """
    back = list(ring.offset(stop))
    axes = [a for a, b in enumerate(back) if b]

    def start(piece: Tensor, left: Sequence[int]) -> Callable[[], Tensor]:
        axis, *rest = left
        step, back[axis] = back[axis], 0
        # The piece that comes is meant for the rank that is still `back` away along the axes not yet gone.
        pending = _send_recv(piece, lengths[ring.position(back)], -step, ring, axis)
        return pending if not rest else lambda: start(pending(), rest)()

    return start(piece, axes)


def _send_recv(block: Tensor, length: int, step: int, ring: Ring, axis: int) -> Callable[[], Tensor]:
    """Send a block `step` coords on along an axis and receive one of `length` from `step` back."""
    size, coord = ring.sizes[axis], ring.coords[axis]
    to, source = (coord + step) % size, (coord - step) % size
    nothing = block.new_empty(0)
    sends, shapes = [nothing] * size, [(0,)] * size
    sends[to], shapes[source] = block, (length,)
    pending = collectives.start_exchange(sends, shapes, ring.groups[axis])
    return lambda: pending.wait()[source]


def gather_blocks(block: Tensor, lengths: Sequence[int], ring: Ring) -> list[Tensor]:
    """Every rank's flat block in the order of the stops, all kept. Adjoint, of any order: each gradient goes back."""
    blocks = [block]
    for stop in range(1, ring.num_steps):
        source, axis, step = ring.route(stop)
        blocks.append(autograd_collectives.shift(blocks[source], (lengths[ring.owner(stop)],), step, ring.groups[axis]))
    return blocks


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Several tensors as one flat block."""
    # Two dims, because an empty vector would drop out of the graph of cat, and its rank out of the moves behind it.
    return torch.cat([t.reshape(-1, 1) for t in tensors]).view(-1)


def unpack(block: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of a flat block, as views of it."""
    parts = block.split([math.prod(s) for s in shapes])
    return [p.view(tuple(s)) for p, s in zip(parts, shapes, strict=True)]
