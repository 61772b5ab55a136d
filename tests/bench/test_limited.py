"""A sample that is too large for one process trains on several: processes are given a limit, and held to it."""

import re

PROGRAM = "from shardfield.bench.limited import main\nmain()\n"
LIMIT = 60  # megabytes that a step may take of a process


def test_a_sample_four_times_the_limit(forks, tmp_path):
    """The step that one process cannot take with four times the memory is taken by four processes."""
    program = tmp_path / "limited.py"
    program.write_text(PROGRAM)
    (alone,) = forks.run(program, tmp_path, 1, str(4 * LIMIT), "1000")
    assert f"{4 * LIMIT} MB each: does not fit" in alone
    first, *others = forks.run(program, tmp_path, 4, str(LIMIT), "--recompute")
    (before, after), there = [re.findall(r"trains, loss ([\d.]+) to ([\d.]+)", out)[0] for out in (alone, first)]
    assert (before, after) == there and not any(others), "with the losses of one process that has room enough"
    assert float(after) < float(before), "and it learns"
