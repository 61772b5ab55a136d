"""A sample that is too large for one process trains on several: processes are given a limit, and held to it."""

import re

from launch import ROOT

BENCHMARK = ROOT / "benchmarks" / "train.py"
LIMIT = 60  # megabytes that a step may take of a process


def test_a_sample_four_times_the_limit(forks, tmp_path):
    """The step that one process cannot take with four times the memory is taken by four processes."""
    (alone,) = forks.run(BENCHMARK, tmp_path, 1, "--limited", str(4 * LIMIT), "1000")
    assert f"{4 * LIMIT} MB each: does not fit" in alone
    first, *others = forks.run(BENCHMARK, tmp_path, 4, "--limited", str(LIMIT), "--recompute")
    (before, after), there = [re.findall(r"trains, loss ([\d.]+) to ([\d.]+)", out)[0] for out in (alone, first)]
    assert (before, after) == there and not any(others), "with the losses of one process that has room enough"
    assert float(after) < float(before), "and it learns"
