"""Questions to all ranks: one answer on all of them, or one error that lists what each rank had."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardfield.comm import consensus
from shardfield.errors import ShardingError
from shardfield.testing import run_on_ranks


def error_of(call) -> str:
    with pytest.raises(ShardingError) as caught:
        call()
    return str(caught.value)


def ask() -> list[str]:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    groups = mesh.get_all_groups()
    assert consensus.any_rank([rank == 3, False], groups) == [True, False]
    assert consensus.gather_texts("ä" * rank, mesh) == ["", "ä", "ää", "äää"]
    assert consensus.check_arguments("f", mesh, {"n": 1}, extra=[rank, 7]) == [[r, 7] for r in range(4)]
    assert consensus.Consensus.start(mesh, "f", flag=rank == 2).wait() is True
    consensus.raise_together("f", mesh, None)
    return [
        error_of(lambda: consensus.check_arguments("f", mesh, {"n": 1 + rank // 3, "m": 0}, {"rank": rank})),
        error_of(lambda: consensus.check_arguments("g" if rank < 2 else "f", groups[0], {"n": 1})),
        error_of(consensus.Consensus.start(mesh, f"f({rank % 2})").wait),
        error_of(consensus.Consensus.start(mesh, "f", problem="no memory" if rank == 1 else None).wait),
        error_of(lambda: consensus.raise_together("f", mesh, "bad file" if rank == 2 else None)),
        error_of(lambda: consensus.raise_together("f", mesh, "bad file")),
    ]


def test_ranks_raise_the_same_error():
    first, *others = run_on_ranks(ask, 4)
    assert all([e[0], *e[2:]] == [first[0], *first[2:]] for e in others)  # the second asks one of two groups
    assert first[0] == "f: the ranks do not agree on n\n" + "\n".join(
        f"  rank {r}: n {1 + r // 3}, m 0, rank {r}" for r in range(4)
    )
    assert first[1].startswith("the ranks are in different calls: g, f\n  rank 0: n 1")
    assert "do not make the same call\n  at (0, 0): f(0)\n  at (0, 1): f(1)" in first[2]
    assert "cannot do this\n  at (0, 0): f\n  at (0, 1): f: no memory" in first[3]
    assert first[4:] == ["f: cannot be done\n  rank 2: bad file", "f: bad file"]
