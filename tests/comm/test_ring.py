"""Ring: every rank receives every block once, on one axis and on several, and results return to the owner."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from shardfield.comm import collectives
from shardfield.comm.ring import Ring, gather_blocks, iterate_blocks, pack, plan_visits, sum_at_owners, unpack
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


@pytest.mark.parametrize("sizes", [(), (1,), (2,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (3, 1, 2)], ids=str)
def test_every_block_is_received_once(sizes):
    for coords in product(*map(range, sizes)):
        ring = Ring((), sizes, coords)
        owners = [ring.owner(s) for s in range(ring.num_steps)]
        assert owners[0] == ring.position([0] * len(sizes))
        assert sorted(owners) == list(range(math.prod(sizes)))
        for stop in range(1, ring.num_steps):
            source, axis, step = ring.route(stop)
            there = list(coords)
            there[axis] = (there[axis] - step) % sizes[axis]
            assert source < stop and step
            assert owners[stop] == Ring((), sizes, tuple(there)).owner(source)


LENGTHS = (3, 0, 4, 1)


def here(mesh_shape) -> Ring:
    mesh = world_mesh(mesh_shape)
    axes = range(mesh.ndim)
    return Ring(tuple(mesh.get_group(a) for a in axes), tuple(mesh.shape), tuple(mesh.get_coordinate()))


def round_trip(mesh_shape, together):
    """Return the blocks that a rank received, and its own block as the others sent it back, times the step, summed."""
    ring = here(mesh_shape)
    mine = ring.owner(0)
    lengths = LENGTHS[: ring.num_steps]
    block = torch.arange(lengths[mine]) + 10 * mine
    visits = plan_visits(ring, together)
    came, back, sent = [], [], []
    for visit, found in zip(visits, iterate_blocks(block, lengths, ring, visits), strict=True):
        came += [b.tolist() for b in found]
        if 0 not in visit:
            results = [b * stop for b, stop in zip(found, visit, strict=True)]
            back.append(sum_at_owners(results, visit, lengths, ring, torch.float64)().tolist())
            sent.append(visit)
    return [ring.owner(s) for s in range(ring.num_steps)], came, back, sent


@pytest.mark.parametrize("together", [1, 2, 9])
@pytest.mark.parametrize("mesh", [(1,), (3,), (4,), (2, 2)], ids=str)
def test_blocks_return_to_their_owner(mesh, together):
    size = math.prod(mesh)
    for rank, (owners, came, back, sent) in enumerate(run_on_ranks(round_trip, size, mesh, together)):
        assert came == [[10 * o + i for i in range(LENGTHS[o])] for o in owners]
        assert sum(sent, ()) == tuple(range(1, size))
        assert len(sent) == (size - 1 if len(mesh) == 2 else -(-(size - 1) // together))
        assert back == [[(10 * rank + i) * sum(visit) for i in range(LENGTHS[rank])] for visit in sent]


def in_flight(mesh_shape):
    """Return how many blocks were in flight at each step of a rank."""
    ring, flying, found = here(mesh_shape), 0, []
    start = collectives.start_sends

    def spy(*args):
        nonlocal flying
        flying += 1
        pending = start(*args)

        def receive():
            nonlocal flying
            flying -= 1
            return pending.wait()

        return collectives.Pending((), (), receive)

    collectives.start_sends = spy
    try:
        for _ in iterate_blocks(torch.ones(3), [3] * ring.num_steps, ring):
            found.append(flying)
    finally:
        collectives.start_sends = start
    return found


def test_two_blocks_are_in_flight():
    assert run_on_ranks(in_flight, 4, (4,)) == [[2, 2, 1, 0]] * 4
    assert run_on_ranks(in_flight, 4, (2, 2)) == [[2, 1, 1, 0]] * 4  # the last is forwarded by the one before it


def inner_products(mesh_shape):
    """Return a rank's share of <Ax, y> and <x, A*y>, and of the same for the adjoint, whose blocks may be empty."""
    ring = here(mesh_shape)
    mine, lengths = ring.owner(0), LENGTHS[: ring.num_steps]
    generator = torch.Generator().manual_seed(mine)
    x = torch.randn(lengths[mine], dtype=torch.float64, generator=generator).requires_grad_()
    ys = [torch.randn(lengths[ring.owner(s)], dtype=torch.float64, generator=generator) for s in range(ring.num_steps)]
    ys = [y.requires_grad_() for y in ys]
    forward = sum((a * y).sum() for a, y in zip(gather_blocks(x, lengths, ring), ys, strict=True))
    (adjoint,) = torch.autograd.grad(forward, x, create_graph=True)
    z = torch.randn(lengths[mine], dtype=torch.float64, generator=generator)
    again = torch.autograd.grad((adjoint * z).sum(), ys)
    twice = sum((a * y).sum() for a, y in zip(again, ys, strict=True))
    return [v.item() for v in (forward, (x * adjoint).sum(), (z * adjoint).sum(), twice)]


@pytest.mark.parametrize("mesh", [(3,), (4,), (2, 2)], ids=str)
def test_adjoint_of_all_blocks(mesh):
    results = torch.tensor(run_on_ranks(inner_products, math.prod(mesh), mesh), dtype=torch.float64).sum(0)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[3])


def test_packed_blocks_are_unpacked():
    parts = [torch.randn(2, 3), torch.empty(0, 4), torch.randn(5)]
    for part, found in zip(parts, unpack(pack(parts), [p.shape for p in parts]), strict=True):
        assert torch.equal(part, found)
