"""A ring: every rank's block visits every rank of some mesh axes, the next one in flight while this one is worked on.

Blocks are flat tensors whose lengths all ranks know. A ring over several mesh axes is a walk over their torus: each
hop goes one coord on along one axis, so that no group beyond the axes' own is needed. No autograd here but for
`all_blocks`: whoever folds blocks knows its own adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import moves, wire


class Ring(NamedTuple):
    """The ranks of some mesh axes, outermost axis first: their groups, sizes, and this rank's coord on each."""

    groups: tuple[ProcessGroup, ...]
    sizes: tuple[int, ...]
    coords: tuple[int, ...]

    @property
    def stops(self) -> int:
        """How many blocks come by, this rank's own (the first) included."""
        return math.prod(self.sizes)

    def hop(self, stop: int) -> int:
        """Along which of the ring's axes a block comes to a stop after the first: the innermost, and an outer one
        whenever the inner ones have gone all the way round."""
        inner = 1
        for axis in reversed(range(len(self.sizes))):
            inner *= self.sizes[axis]
            if stop % inner:
                return axis
        raise AssertionError(f"stop {stop} of a ring of {self.sizes}")

    def offset(self, stop: int) -> tuple[int, ...]:
        """How far back, axis by axis, the owner of the block at a stop is."""
        back = [0] * len(self.sizes)
        for s in range(1, stop + 1):
            back[self.hop(s)] += 1
        return tuple(b % n for b, n in zip(back, self.sizes, strict=True))

    def position(self, back: Sequence[int]) -> int:
        """The row-major position on the ring of the rank `back` coords before this one."""
        flat = 0
        for coord, b, size in zip(self.coords, back, self.sizes, strict=True):
            flat = flat * size + (coord - b) % size
        return flat

    def owner(self, stop: int) -> int:
        """The position of the rank whose block is here at a stop."""
        return self.position(self.offset(stop))


def visit(block: Tensor, lengths: Sequence[int], ring: Ring) -> Iterator[Tensor]:
    """Every rank's flat block in turn, this rank's own first; `lengths` by position on the ring.

    stops - 1 messages of one block each. The next block is on its way while the caller works on the one it was given.
    """
    for stop in range(1, ring.stops):
        axis = ring.hop(stop)
        pending = _pass(block, lengths[ring.owner(stop)], 1, ring, axis)
        yield block
        block = pending()
    yield block


def send_home(piece: Tensor, stop: int, lengths: Sequence[int], ring: Ring) -> Callable[[], Tensor]:
    """Send what was made of the block at `stop` to its owner; calling the result waits for what came for this rank's.

    One message an axis on which the two ranks differ, straight to the owner (forwarded where several axes differ).
    """
    back = list(ring.offset(stop))
    axes = [a for a, b in enumerate(back) if b]

    def start(piece: Tensor, left: Sequence[int]) -> Callable[[], Tensor]:
        axis, *rest = left
        step, back[axis] = back[axis], 0
        # The piece that comes is meant for the rank that is still `back` away along the axes not yet gone.
        pending = _pass(piece, lengths[ring.position(back)], -step, ring, axis)
        return pending if not rest else lambda: start(pending(), rest)()

    return start(piece, axes)


def _pass(block: Tensor, length: int, step: int, ring: Ring, axis: int) -> Callable[[], Tensor]:
    """Send a block `step` coords on along an axis and receive one of `length` from `step` back."""
    size, coord = ring.sizes[axis], ring.coords[axis]
    to, source = (coord + step) % size, (coord - step) % size
    nothing = block.new_empty(0)
    sends, shapes = [nothing] * size, [(0,)] * size
    sends[to], shapes[source] = block, (length,)
    pending = wire.start_exchange(sends, shapes, ring.groups[axis])
    return lambda: pending.wait()[source]


def all_blocks(block: Tensor, lengths: Sequence[int], ring: Ring) -> list[Tensor]:
    """Every rank's flat block in the order of the stops, all kept. Adjoint, of any order: each gradient goes back."""
    blocks = [block]
    for stop in range(1, ring.stops):
        shape = (lengths[ring.owner(stop)],)
        blocks.append(moves.shift(blocks[-1], shape, 1, ring.groups[ring.hop(stop)]))
    return blocks


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Several tensors as one flat block."""
    # Two dims, because an empty vector would drop out of the graph of cat, and its rank out of the moves behind it.
    return torch.cat([t.reshape(-1, 1) for t in tensors]).view(-1)


def unpack(block: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of a flat block, as views of it."""
    parts = block.split([math.prod(s) for s in shapes])
    return [p.view(tuple(s)) for p, s in zip(parts, shapes, strict=True)]
