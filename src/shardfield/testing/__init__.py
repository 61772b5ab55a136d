"""Run a function on several ranks from an ordinary test, and get the result of every rank or a report of the failure.

`run_on_ranks` keeps one pool of processes per world size, so that a test does not pay for starting them. It never
hangs: a deadlock, a dead rank or an exception on one rank raises `RanksFailed` within seconds, with the error or the
stack of each rank. Define the function at module level of the test file:

    import torch
    import torch.distributed as dist
    from shardfield.testing import run_on_ranks

    def total(x):
        x = x + dist.get_rank()
        dist.all_reduce(x)
        return x

    def test_total():
        assert [float(x) for x in run_on_ranks(total, 3, torch.zeros(()))] == [3.0, 3.0, 3.0]
"""

from ._failures import RankError as RankError
from ._failures import RanksFailed as RanksFailed
from ._run import run_on_ranks as run_on_ranks
