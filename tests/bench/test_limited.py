"""A sample that is too large for one process trains on several, each under a memory limit."""

import re

PROGRAM = "from shardfield.bench.limited import main\nmain()\n"
LIMIT = 60  # megabytes of a process that a step may use


def test_sample_four_times_the_limit(forks, tmp_path):
    """Four processes run the step that one process cannot run within the limit."""
    program = tmp_path / "limited.py"
    program.write_text(PROGRAM)
    (alone,) = forks.run(program, tmp_path, 1, str(4 * LIMIT), "1000")
    assert f"{4 * LIMIT} MB each: does not fit" in alone
    first, *others = forks.run(program, tmp_path, 4, str(LIMIT), "--recompute")
    (before, after), there = [re.findall(r"trains, loss ([\d.]+) to ([\d.]+)", out)[0] for out in (alone, first)]
    assert (before, after) == there and not any(others), "the losses equal those of one process without a limit"
    assert float(after) < float(before), "the loss decreases"
