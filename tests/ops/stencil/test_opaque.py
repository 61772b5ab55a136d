"""`stencil` and `local`: what is sent, which functions are replaced, and which declarations are refused."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from shardfield import ShardingError, explain, local, scatter_tensor, stencil, strict
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


def blurred(x):
    return torch.nn.functional.avg_pool2d(x, 3, 1, 1)


def sent_and_placed() -> tuple[int, int, str]:
    """Return the bytes of a call, forward and backward, and the layout of its result."""

    def blur(x):
        return torch.nn.functional.avg_pool2d(x, 3, 1, 1)

    library: Any = types.ModuleType("a_library")
    library.blur, sys.modules["a_library"] = blur, library
    try:
        stencil(radius=1, rebind=True)(blur)
    finally:
        del sys.modules["a_library"]
    assert library.blur is not blur
    full = torch.randn(1, 3, 9, 5)
    x = scatter_tensor(full, 0, world_mesh((3,)), [Shard(2)], requires_grad=True)
    with explain() as report, strict():
        out = library.blur(x)
        out.sum().backward()
    torch.testing.assert_close(out.full_tensor(), blur(full))
    return report.rows[0].bytes, report.rows[0].back_bytes, str(out._layout)


def test_only_the_halo_is_sent_and_callers_see_the_wrapper():
    row = 3 * 5 * 4
    for rank, (sent, sent_back, layout) in enumerate(run_on_ranks(sent_and_placed, 3)):
        assert sent == sent_back == (2 * row if rank == 1 else row)
        assert layout == "(1, 3, 9, 5) Shard(2) as 3+3+3 over 'h'"


def test_declarations_that_mean_nothing_are_refused_at_once():
    for bad in (-1, {0: (1, 2, 3)}, {"h": 1}, "wide"):
        with pytest.raises((ShardingError, ValueError)):
            stencil(radius=bad)(blurred)
    with pytest.raises(ShardingError, match="edge must be one of"):
        stencil(radius=1, edge="zeros")
    with pytest.raises(ShardingError, match="fields names 'y'"):
        local(fields=("y",))(blurred)


def test_plain_tensors_go_to_the_function():
    x = torch.randn(1, 1, 4, 4)
    assert torch.equal(stencil(radius=1)(blurred)(x), blurred(x))
