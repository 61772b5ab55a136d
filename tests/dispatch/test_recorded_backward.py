"""Backwards through gradients: all ranks run the same collectives, or all raise."""

from __future__ import annotations

import gc

import torch
from torch.distributed.tensor import Shard

from shardfield import ShardingError, ShardTensor, explain, runtime
from shardfield.testing import run_on_ranks
from tests.harness import any_rank, world_mesh


def make(*sizes: int) -> ShardTensor:
    """Return a leaf of shape (6, sum of sizes) whose dim 1 is sharded so."""
    torch.manual_seed(0)
    local = torch.randn(6, sum(sizes), dtype=torch.float64).split(list(sizes), 1)[torch.distributed.get_rank()]
    return ShardTensor.from_local(local.clone(), world_mesh((len(sizes),)), [Shard(1)]).requires_grad_()


def gradient_on_one_rank() -> list[str]:
    """Differentiate through a function that leaves no graph on one rank: plain torch code on local tensors can."""
    x = make(2, 2)
    rank = torch.distributed.get_rank()
    y = (x**3).sum(1).square()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    cut = slope.to_local() if rank else slope.to_local().detach()
    lost = ShardTensor.from_local(cut, x.device_mesh, [Shard(1)])
    found = []
    for attempt in (lambda: lost.sum().backward(), lambda: torch.autograd.grad(lost.sum(), x)):
        try:
            attempt()
            found.append("")
        except ShardingError as error:
            found.append(str(error))
    return found


def test_graphs_that_differ_raise_on_all_ranks():
    for texts in run_on_ranks(gradient_on_one_rank, 2, timeout=30):
        assert all("differs from rank to rank" in text and "What works" in text for text in texts), texts


def gradients_of_an_empty_shard() -> tuple[bool, float, bool]:
    """Return whether ranks agree on what requires grad, and whether a second derivative is that of one device."""
    x = make(4, 0)
    (slope,) = torch.autograd.grad(torch.cummax(x, 0)[0].pow(3).sum(), x, create_graph=True)
    same = any_rank(slope.requires_grad) == slope.requires_grad
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    full = x.full_tensor().detach().requires_grad_()
    (plain,) = torch.autograd.grad(torch.cummax(full, 0)[0].pow(3).sum(), full, create_graph=True)
    (expected,) = torch.autograd.grad(plain.sum(), full)
    return same, float((curvature.full_tensor() - expected).abs().max()), bool(runtime.active.recorded.groups)


def test_second_derivative_with_an_empty_shard():
    for same, error, recorded in run_on_ranks(gradients_of_an_empty_shard, 2, timeout=30):
        assert same and error < 1e-12 and recorded


def messages_after_a_graph() -> list[int]:
    """Return the messages of a step before, while and after a graph of gradients is alive."""
    x = make(2, 2)
    counts = []

    def step() -> None:
        with explain() as report:
            (x * 2).sum().backward()
        counts.append(report.messages)

    step()  # compares if another test on these ranks has left a graph
    gc.collect()
    step()
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    step()
    del slope
    gc.collect()
    step()  # compares once more, and finds that no rank has a graph
    step()
    return counts


def test_ranks_compare_only_while_a_graph_of_gradients_exists():
    for _, before, during, _, after in run_on_ranks(messages_after_a_graph, 2, timeout=30):
        assert after == before < during
