"""A block of programs drawn from one seed; hypothesis shrinks the first failure."""

from __future__ import annotations

import collections
import traceback
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.harness.virtual import VirtualRanks

from .execute import UNTRACED, Verdict, judge
from .generate import programs

BLOCK = 25
COMPILED = 6  # the programs of one block in so many are compiled too: that takes ten times as long
BAD = ("wrong", "error", "hang", "died")


@dataclass
class Block:
    """Hold the counts of verdicts, and the smallest failing program with its verdict."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    refusals: collections.Counter = field(default_factory=collections.Counter)
    failure: str = ""


class Failure(AssertionError):
    """A program whose result on the ranks is not that of one device."""


def run_block(
    seed: int, size: int = BLOCK, timeout: float = 60.0, shrink: bool = True, virtual: VirtualRanks | None = None
) -> Block:
    """Run `size` programs; stop at the first failure, shrunk."""
    block = Block()
    shrinking = [False]

    @seeded(seed)
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(seed % COMPILED == 0))
    def run(program):
        # A hang is shrunk with a shorter limit: each attempt that hangs takes all of it.
        verdict: Verdict = judge(program, min(timeout, 20.0) if shrinking[0] else timeout, virtual)
        if not shrinking[0] and (len(program.steps) >= 5 or verdict.kind in BAD):
            block.counts["failed" if verdict.kind in BAD else verdict.kind] += 1
            if program.compiled and virtual is None and verdict.kind == "right":
                block.counts["untraced" if verdict.why == UNTRACED else "compiled"] += 1
            if verdict.kind == "refused":
                block.refusals[verdict.why] += 1
        if verdict.kind in BAD:
            if not shrinking[0]:
                print(f"seed {seed}: {verdict.kind}: {verdict.why.splitlines()[0]}; shrinking it", flush=True)
            shrinking[0] = True
            raise Failure(f"{verdict.kind}: {verdict.why}\n{program}\n{program!r}")

    try:
        run()
    except Failure as failure:
        block.failure = str(failure)
    except Exception:  # of the fuzzer itself
        block.counts["failed"] += 1
        block.failure = traceback.format_exc()
    return block
