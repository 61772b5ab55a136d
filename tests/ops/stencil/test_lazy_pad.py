"""Lazy pads: padding and convolution take one halo exchange; other uses materialize the padded field."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardfield import ShardingError, explain, scatter_tensor, strict
from shardfield.debug.work import WorkCounter
from shardfield.testing import run_on_ranks
from shardfield.virtual import VirtualWorld
from tests.harness import world_mesh
from tests.ops.stencil.lazy_pad_cases import causal
from tests.ops.stencil.test_conv import field

SIZE = (1, 3, 12, 10)
ROW, COLUMN = 3 * 10 * 8, 3 * 8  # bytes: three channels of ten columns, and of one cell, float64


def sphere(x):
    """Pad longitudes circularly and latitudes by reflection."""
    x = F.pad(x, (1, 1, 0, 0), mode="circular")
    return F.pad(x, (0, 0, 1, 1), mode="reflect")


def latitudes(x):
    """Pad longitudes circularly and latitudes with zeros."""
    return F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))


def around(x):
    """Pad as `padding_mode="circular"` does."""
    return F.pad(x, (1, 1, 1, 1), mode="circular")


def sent(mesh_shape, placements, lengths, pad) -> list[int]:
    """Return messages and bytes, forward and backward, of a pad and a convolution that equal one device."""
    full, x = field(mesh_shape, placements, SIZE, lengths)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    full.requires_grad_()
    with explain() as report, strict():
        out = F.conv2d(pad(x.requires_grad_()), weight)
        out.square().sum().backward()
    expected = F.conv2d(pad(full), weight)
    expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    rows = [r for r in report.rows if "pad" in r.op or "conv" in r.op]
    return [sum(getattr(r, name) for r in rows) for name in ("messages", "bytes", "back_messages", "back_bytes")]


@pytest.mark.parametrize(
    ("mesh", "placements", "lengths", "pad", "expected"),
    [
        # a ring: one row to each of two neighbors
        ((4,), [Shard(2)], None, around, [[2, 2 * ROW]] * 4),
        # on two ranks both neighbors are one rank, and one message has both rows
        ((2,), [Shard(2)], {2: [7, 5]}, around, [[1, 2 * ROW]] * 2),
        # reflected rows are local, and so are circular columns of an unsharded dim
        ((3,), [Shard(2)], None, sphere, [[1, ROW], [2, 2 * ROW], [1, ROW]]),
        ((3,), [Shard(2)], None, latitudes, [[1, ROW], [2, 2 * ROW], [1, ROW]]),
        ((2,), [Shard(3)], None, sphere, [[1, 2 * 12 * COLUMN]] * 2),
        # the thin first shard has one row, and receives the second one for both sides
        ((2,), [Shard(2)], {2: [1, 11]}, sphere, [[1, ROW], [1, 2 * ROW]]),
        # 2-d mesh: rows, then both columns with their corners
        ((2, 2), [Shard(2), Shard(3)], None, sphere, [[2, ROW // 2 + 2 * 8 * COLUMN]] * 4),
        ((2, 2), [Shard(2), Shard(3)], None, latitudes, [[2, ROW // 2 + 2 * 7 * COLUMN]] * 4),
        ((2, 2), [Shard(2), Shard(3)], None, around, [[2, 2 * (ROW // 2) + 2 * 8 * COLUMN]] * 4),
    ],
)
def test_one_exchange(mesh, placements, lengths, pad, expected):
    found = run_on_ranks(sent, len(expected), mesh, placements, lengths, pad)
    assert [counts[:2] for counts in found] == expected
    for i in (0, 1):  # backward sends the same total
        assert sum(counts[i + 2] for counts in found) == sum(counts[i] for counts in found)


def uses() -> list[str]:
    """Return the names of uses of a lazy pad, other than by a convolution, that differ from a plain tensor."""
    full, x = field((2,), [Shard(2)], SIZE)
    wide, wrong = around(full), []

    def check(name: str, right: bool) -> None:
        if not right:
            wrong.append(name)

    padded = around(x)
    check("shape", padded.shape == wide.shape and padded.ndim == 4 and padded.numel() == wide.numel())
    check("repr", "deferred" in repr(padded))
    check("to_local", padded.to_local().shape[2] == 7 and "deferred" not in repr(padded))
    check("copy", torch.equal(copy.deepcopy(around(x)).full_tensor(), wide))
    file = io.BytesIO()
    torch.save(around(x), file)
    file.seek(0)
    check("pickle", torch.equal(torch.load(file, weights_only=False).full_tensor(), wide))
    check("view", torch.equal(around(x)[:, :, 3:].flatten(2).full_tensor(), wide[:, :, 3:].flatten(2)))
    check("stride", around(x).stride() == wide.stride())
    padded = around(x)
    padded.add_(1)
    check("write", torch.equal(padded.full_tensor(), wide + 1))

    weight = torch.randn(2, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    padded = around(x)
    padded.retain_grad()
    F.conv2d(padded, weight).sum().backward()
    check("gradient of the padded field", padded.grad.shape == wide.shape)
    padded = around(x)
    out = F.conv2d(padded, weight)
    for name, ask in {
        "grad": lambda: torch.autograd.grad(out.sum(), padded),
        "retain_grad": padded.retain_grad,
        "hook": lambda: padded.register_hook(print),
        "inputs": lambda: out.sum().backward(inputs=[padded]),
    }.items():
        try:
            ask()
            wrong.append(f"{name} of a padded field that was passed by")
        except ShardingError as error:
            check(name, "before it is used" in str(error))
    # a write into the local tensor is detected and refused
    y = x.detach().clone()
    padded = around(y)
    y.to_local().add_(1)
    try:
        F.conv2d(padded, weight)
        wrong.append("a write past the wrapper")
    except ShardingError:
        pass
    y = x.detach().clone()
    weight.requires_grad_()
    out = F.conv2d(around(y), weight)
    y.to_local().add_(1)
    try:
        out.sum().backward()
        wrong.append("a write past the wrapper, after the convolution")
    except RuntimeError:
        pass
    return wrong


def test_other_uses():
    assert run_on_ranks(uses, 2) == [[]] * 2


class Block(nn.Module):
    """Two convolutions with a boundary condition along each dim, the second added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")
        self.second = nn.Conv2d(3, 3, 3)

    def forward(self, x):
        x = F.gelu(self.first(x))
        x += self.second(sphere(x))
        return x


def trained(recompute: bool) -> float:
    """Return the largest difference of a block's output and gradients from one device."""
    full, x = field((2, 2), [Shard(2), Shard(3)], SIZE, {2: [1, 11], 3: [6, 4]})
    torch.manual_seed(0)
    block = Block().double()
    alone = copy.deepcopy(block)
    full.requires_grad_()
    x.requires_grad_()
    out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    expected = alone(full)
    out.square().sum().backward()
    expected.square().sum().backward()
    pairs = [(out.full_tensor(), expected), (x.grad.full_tensor(), full.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(block.parameters(), alone.parameters(), strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("recompute", [False, True])
def test_block_with_an_in_place_sum(recompute):
    assert max(run_on_ranks(trained, 4, recompute)) < 1e-10


def work_of_a_causal_convolution(sharded):
    x, weight = torch.randn(1, 4, 5, 32, 24, dtype=torch.float64), torch.randn(4, 4, 3, 3, 3, dtype=torch.float64)
    x = scatter_tensor(x, 0, world_mesh((2,)), [Shard(3)]) if sharded else x
    with WorkCounter() as work:
        causal(x, weight, "replicate")
    return work.total


def test_work_of_padded_frames():
    """Frames before a video are padded before the convolution, which would compute their part by itself."""
    alone = work_of_a_causal_convolution(False)
    with VirtualWorld(2) as world:
        assert sum(world.run(work_of_a_causal_convolution, True)) < 1.15 * alone
