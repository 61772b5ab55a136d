"""Tensors that backward needs and that are written in place: right on all ranks, or an error on all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor, explain
from shardfield.ops.attention import attention_strategy
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


def make(mesh_size: int, *sizes: int) -> ShardTensor:
    """Return a field of shape (sum of sizes, 2, 3) with these shard sizes, as a leaf."""
    torch.manual_seed(0)
    local = torch.randn(sum(sizes), 2, 3, dtype=torch.float64).split(list(sizes))[torch.distributed.get_rank()]
    return ShardTensor.from_local(local.clone(), world_mesh((mesh_size,)), [Shard(0)]).requires_grad_()


def write_after_einsum(x):
    """Write into an operand of einsum. torch saves a copy of (2, 2, 3), of (1, 2, 3) a view."""
    t = torch.sin(x)
    y = torch.einsum("abc,bz->zac", t, torch.ones(2, 2, dtype=torch.float64, requires_grad=True))
    t.mul_(2)
    return y.sum() + t.sum()


def raised(function, *args) -> str:
    try:
        function(*args)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def saved_on_one_rank() -> list[str]:
    x = make(2, 2, 1)
    texts = [raised(write_after_einsum(x).backward)]
    texts.append(raised(lambda: torch.autograd.grad(write_after_einsum(x), x)))
    # the loss is plain: torch's own backward is called
    texts.append(raised(write_after_einsum(x).full_tensor().backward))
    even = make(2, 2, 2)
    write_after_einsum(even).backward()
    texts.append("" if even.grad is not None else "no gradient")
    return texts


def test_all_ranks_raise_where_one_saved_what_was_written():
    first, second = run_on_ranks(saved_on_one_rank, 2, timeout=30)
    for texts in (first, second):
        assert all(text.startswith("ShardingError: backward:") and "inplace" in text for text in texts[:3]), texts
        assert texts[3] == ""


def saved_slice_on_one_rank() -> str:
    """Write into a replicated operand of einsum, of which each rank reads the slice that the other operand has."""
    mesh, rank = world_mesh((2,)), torch.distributed.get_rank()
    t = torch.sin(
        ShardTensor.from_local(torch.ones(2, 2, 3, dtype=torch.float64), mesh, [Replicate()]).requires_grad_()
    )
    weight = ShardTensor.from_local(torch.ones(2 - rank, 3, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
    y = torch.einsum("abc,cz->abz", t, weight)
    t.mul_(2)
    return raised((y.sum() + t.sum()).backward)


def test_all_ranks_raise_where_one_saved_a_slice_of_what_was_written():
    first, second = run_on_ranks(saved_slice_on_one_rank, 2, timeout=30)
    assert first.split("\n")[0].startswith("ShardingError: backward:"), first
    assert "is a view and its base or another view of its base has been modified inplace" in first + second


def written_keys() -> str:
    """Write into the keys of attention after the call, which are the values too and replicated."""
    mesh = world_mesh((2,))
    keys = torch.sin(
        ShardTensor.from_local(torch.ones(1, 2, 4, dtype=torch.float64), mesh, [Replicate()]).requires_grad_()
    )
    keys = keys.transpose(1, 2)
    q = make(2, 1, 2).movedim(0, 1)[:1, :, :2]
    y = F.scaled_dot_product_attention(q, keys, keys)
    keys.mul_(0.5)
    return raised((y.sum() + keys.sum()).backward)


def test_all_ranks_raise_where_attention_saved_what_was_written():
    for text in run_on_ranks(written_keys, 2, timeout=30):
        assert text.startswith("ShardingError: backward:"), text


def empty_operand() -> torch.Tensor:
    x = make(2, 3, 0)
    write_after_einsum(x).backward()
    return x.grad.full_tensor()


def test_an_empty_shard_saves_nothing_that_a_write_changes():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 3, dtype=torch.float64).requires_grad_()
    write_after_einsum(x).backward()
    for found in run_on_ranks(empty_operand, 2, timeout=30):
        assert torch.allclose(found, x.grad)


def messages_of_backward() -> list[int]:
    """Return the messages of backward: without a write, with writes into fresh results, with a view that is written."""
    x = make(2, 2, 2)

    def count(loss: ShardTensor) -> int:
        with explain() as report:
            loss.backward()
        return report.messages

    counts = [count(torch.relu(x * 2 + 1).sum()), count(torch.relu_((x * 2).add_(1)).sum())]
    return [*counts, count((x * 2)[:1].add_(1).sum()), count((x * 2).sum()), count((x * 2).sum())]


def test_only_writes_that_backward_may_see_cost_a_message():
    for plain, fresh, of_view, after, later in run_on_ranks(messages_of_backward, 2, timeout=30):
        assert plain == fresh == later == 0
        assert of_view == 1 and after <= 1  # the next backward asks if the memory that was written is still in use


def released() -> list[bool]:
    """Return whether the saved result of a ring is freed by backward, as torch frees saved tensors."""
    x = make(2, 2, 2)
    with attention_strategy("ring"):
        out = F.scaled_dot_product_attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))
    nodes, node = [], out._local_tensor.grad_fn
    while node is not None and not hasattr(node, "plan"):
        node = node.next_functions[0][0]
    nodes.append(node.out is not None)
    out.sum().backward()
    return [*nodes, node.out is None]


def test_backward_frees_the_result_of_a_ring():
    assert run_on_ranks(released, 2, timeout=30) == [[True, True]] * 2
