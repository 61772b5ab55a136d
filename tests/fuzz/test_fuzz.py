"""A sample of random programs, and the fuzzer itself: it finds planted faults, and shrinks them."""

from __future__ import annotations

import pytest
import torch

from shardfield import ShardTensor

from .block import run_block
from .execute import judge
from .program import Input, Program, Ref, Sharding, Step


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_sample_of_random_programs(seed):
    block = run_block(seed, size=13, shrink=False)
    assert not block.failure, block.failure
    assert block.counts["right"] >= 6


def wrong_on_ranks(x):
    """Return the sine; on ranks, of this rank's rows only."""
    return torch.sin(x) if not isinstance(x, ShardTensor) else torch.sin(x) + (x._layout.coords[0] == 0)


def hanging(x):
    """Return x; on ranks, the first waits for a message that no other sends."""
    if isinstance(x, ShardTensor) and x._layout.coords[0] == 0:
        torch.distributed.all_reduce(torch.zeros(1))
    return x * 1


def program(fn: str) -> Program:
    sharding = Sharding(("S0",), ((0, (2, 0)),))
    return Program((2,), (Input("x0", (2, 3), 1, sharding=sharding),), (Step("t0", fn, (Ref("x0"),)),))


def test_planted_faults_are_found():
    assert judge(program("torch.sin")).kind == "right"
    verdict = judge(program(f"{__name__}:wrong_on_ranks"))
    assert verdict.kind == "wrong" and "wrong_on_ranks(x0): values differ by 1" in verdict.why
    assert judge(program(f"{__name__}:hanging"), timeout=3).kind == "hang"
