"""Ring iteration: every rank visits the block of every rank of some mesh axes; the next blocks are in flight meanwhile.

Blocks are flat tensors whose lengths all ranks know. Each block is received from its owner directly, so that delays do
not accumulate. On one mesh axis a visit may take several blocks at once, which saves messages and kernels if they are
small. Over several mesh axes a block is forwarded along one axis after the other, so that only the groups of
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

from .. import runtime
from .._compat.autocast import concatenate, stack
from . import autograd_collectives, collectives

# Visits in flight while one is computed with: a message may take as long as the computation of that many visits.
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
        if stop and len(self.sizes) == 1:
            return 0, 0, stop
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
        if len(self.sizes) == 1:
            return (self.coords[0] - stop) % self.sizes[0]
        return self.position(self.offset(stop))


Visit = tuple[int, ...]  # the steps whose blocks are used together


def plan_visits(ring: Ring, together: int) -> tuple[Visit, ...]:
    """Return the visits of a ring, this rank's own block first, then up to `together` blocks at once.

    On several mesh axes every block is a visit of its own, as some blocks are forwarded.

    >>> plan_visits(Ring((), (6,), (0,)), 3)
    ((0,), (1, 2, 3), (4, 5))
    """
    together = together if len(ring.sizes) == 1 else 1
    rest = range(1, ring.num_steps)
    return (0,), *(tuple(rest[i : i + together]) for i in range(0, len(rest), together))


def visit_at_once(ring: Ring) -> tuple[Visit, ...]:
    """Return one visit of all blocks, also this rank's own, in the order of their positions: `gather_at_once`.

    >>> visit_at_once(Ring((), (4,), (1,)))
    ((1, 0, 3, 2),)
    """
    (size,), (coord,) = ring.sizes, ring.coords
    return (tuple((coord - owner) % size for owner in range(size)),)


def gather_at_once(block: Tensor, lengths: Sequence[int], ring: Ring) -> Tensor:
    """Return the flat blocks of all ranks of a ring on one mesh axis, one behind the other by position."""
    (group,) = ring.groups
    if len(set(lengths)) == 1:
        return collectives.all_gather_even(block, group).view(-1)
    return concatenate(collectives.all_gather(block, [(n,) for n in lengths], group))


def iterate_blocks(
    block: Tensor, lengths: Sequence[int], ring: Ring, visits: Sequence[Visit] | None = None
) -> Iterator[Sequence[Tensor] | Tensor]:
    """Yield every rank's flat block, this rank's own first; `lengths` are ordered by position on the ring.

    Yields the blocks of each visit, by default one. A rank sends its block once per step after the first, in one
    group of messages per visit. The next PREFETCH visits are in flight while the caller computes with the current one
    (on several axes perhaps only the next one: a block must be received before it can be forwarded). Several blocks of
    one length come as one tensor, stacked.
    """
    visits = plan_visits(ring, 1) if visits is None else visits
    routes = [(0, 0, 0), *map(ring.route, range(1, ring.num_steps))]
    last = {source: stop for stop, (source, _, _) in enumerate(routes)}
    to_send, in_flight, started = {0: block}, deque[Callable[[], Sequence[Tensor] | Tensor]](), 1
    blocks: Sequence[Tensor] | Tensor = [block]
    for number, steps in enumerate(visits):
        if number:
            blocks = in_flight.popleft()()
            to_send.update((stop, received) for stop, received in zip(steps, blocks, strict=True) if stop in last)
        while started < min(number + 1 + PREFETCH, len(visits)) and routes[visits[started][0]][0] in to_send:
            (source, axis), peers = routes[visits[started][0]][:2], []
            for stop in visits[started]:
                peers.append((routes[stop][2], lengths[ring.owner(stop)]))
            sent = to_send.pop(source) if last[source] in visits[started] else to_send[source]
            in_flight.append(_send_recv([sent] * len(peers), peers, ring, axis))
            started += 1
        yield blocks


def sum_at_owners(
    results: Sequence[Tensor], visit: Visit, lengths: Sequence[int], ring: Ring, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Start sending flat results for the blocks of a visit to the owners of these blocks.

    Calling the returned function waits for the results that other ranks send for this rank's block, and returns their
    sum in `dtype`; a single result has the dtype in which it was sent.
    """
    if len(visit) == 1:
        return send_to_owner(results[0], visit[0], lengths, ring)
    own = lengths[ring.owner(0)]
    pending = _send_recv(results, [(-stop, own) for stop in visit], ring, 0)

    def receive() -> Tensor:
        received = pending()
        return (received if isinstance(received, Tensor) else stack(list(received))).sum(0, dtype=dtype)

    return receive


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
        pending = _send_recv([payload], [(-step, lengths[ring.position(back)])], ring, axis)
        return lambda: start(pending()[0], rest)() if rest else pending()[0]

    return start(result, axes)


def _send_recv(
    blocks: Sequence[Tensor], peers: Sequence[tuple[int, int]], ring: Ring, axis: int
) -> Callable[[], Sequence[Tensor] | Tensor]:
    """Start one group of messages: for each (step, length) of `peers`, send a block `step` coords ahead on an axis and
    receive one of `length` from `step` coords behind. Several blocks of one length are received as one tensor.
    """
    size, coord, length = ring.sizes[axis], ring.coords[axis], peers[0][1]
    sends = [((coord + step) % size, block) for block, (step, _) in zip(blocks, peers, strict=True)]
    receives = [((coord - step) % size, (length,)) for step, length in peers]
    if len(peers) == 1 or runtime.active.tracer is not None or any(n != length for _, n in peers):
        return collectives.start_sends(sends, receives, ring.groups[axis], blocks[0]).wait
    into = blocks[0].new_empty(len(peers), length)
    packed = length > 0 and all(block.is_contiguous() and block.numel() for block in blocks)
    pending = collectives.start_sends(sends, receives, ring.groups[axis], blocks[0], into.unbind(), packed)

    def receive() -> Tensor:
        pending.wait()
        return into

    return receive


def gather_blocks(block: Tensor, lengths: Sequence[int], ring: Ring) -> list[Tensor]:
    """Return every rank's flat block in the order of the steps. Adjoint: gradients are sent to the owners."""
    blocks = [block]
    for stop in range(1, ring.num_steps):
        source, axis, step = ring.route(stop)
        blocks.append(autograd_collectives.shift(blocks[source], (lengths[ring.owner(stop)],), step, ring.groups[axis]))
    return blocks


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return several tensors as one flat block."""
    if all(t.shape == tensors[0].shape for t in tensors):  # one kernel for any strides
        return stack(list(tensors)).view(-1)
    # Two dims: autograd of cat ignores empty vectors, and a rank with one would skip the collectives of backward.
    return concatenate([t.reshape(-1, 1) for t in tensors]).view(-1)


def unpack(block: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the tensors of a flat block, as views of it."""
    parts = block.split([math.prod(s) for s in shapes])
    return [p.view(tuple(s)) for p, s in zip(parts, shapes, strict=True)]
