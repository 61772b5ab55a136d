"""Virtual ranks in each of several processes: the bits of as many processes as there are ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardfield.errors import ShardfieldError
from shardfield.testing import run_on_ranks
from shardfield.virtual import VirtualWorld
from tests.virtual.test_world import collectives, train


def on_virtual_ranks(function, each, *args, **options):
    with VirtualWorld(each, group=dist.group.WORLD, **options) as world:
        if world.pager is not None:
            world.pager.minimum = 64
        return world.run(function, *args)


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def test_ranks_of_two_processes():
    assert run_on_ranks(on_virtual_ranks, 2, rank_and_size, 2) == [[(0, 4), (1, 4)], [(2, 4), (3, 4)]]


def test_collectives():
    found = run_on_ranks(on_virtual_ranks, 2, collectives, 2)
    assert found[0] + found[1] == run_on_ranks(collectives, 4)


@pytest.mark.parametrize(("case", "options"), [("unet", {}), ("vit", {"memory": "auto", "budget": 20_000})])
def test_bits_of_four_processes(case, options):
    found = run_on_ranks(on_virtual_ranks, 2, train, 2, case, **options)
    expected = run_on_ranks(train, 4, case)
    for (losses, ours), (theirs, plain) in zip(found[0] + found[1], expected, strict=True):
        assert losses == theirs and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def fail_on_rank_3():
    if dist.get_rank() == 3:
        raise KeyError("only here")
    dist.barrier()


def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 3)


def different_calls():
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1))
    else:
        dist.barrier()


def faults():
    with VirtualWorld(2, group=dist.group.WORLD) as world:
        for program in (fail_on_rank_3, wait_for_nobody, different_calls):
            try:
                world.run(program)
            except ShardfieldError as error:
                yield str(error)
            else:
                yield "no error"
        yield world.run(dist.get_rank)


def list_faults():
    return list(faults())


def test_faults_are_raised_in_all_processes():
    first, second = run_on_ranks(list_faults, 2)
    assert "another process failed" in first[0] and "only here" in first[0] and "rank 3: KeyError" in second[0]
    assert "every virtual rank waits" in first[1] and "every virtual rank waits" in second[1]
    assert "different calls" in first[2] and "different calls" in second[2]
    assert first[3] + second[3] == [0, 1, 2, 3]
