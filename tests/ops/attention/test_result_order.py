"""The memory order of attention's result, where no rank has two heads or a rank has no rows."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield.layout import Layout
from shardfield.tensor import ShardTensor
from shardfield.virtual import VirtualWorld
from tests.harness import local_shard


@pytest.fixture(scope="module")
def world():
    with VirtualWorld(4) as world:
        yield world


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def sharded(value, dim, sizes):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("h",))
    layout = Layout.of(mesh, [Shard(dim)], value.shape, {0: sizes})
    return ShardTensor(local_shard(value, layout), layout)


def write_contiguous(x, other):
    """Return the result, and what a write into `contiguous()` leaves in it; `x` has heads inside the rows."""
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (other, other, x)))
    copy = out.contiguous()
    copy.add_(1)
    return out


def one_head_on_a_rank(value):
    x = sharded(value, 2, (1, 1, 1, 0))
    return write_contiguous(x, value).full_tensor(), write_contiguous(x, x).full_tensor()


def test_contiguous_copies_where_every_rank_has_one_head(world):
    # Memory with one head looks the same with heads inside the rows and outside of them, but for the strides.
    value = drawn(2, 8, 3, 4)
    expected = write_contiguous(value, value)
    for results in world.run(one_head_on_a_rank, value):
        for result in results:
            torch.testing.assert_close(result, expected)


def attend_cells(field):
    """Return causal attention of two heads between the cells of a field, whose features are outside its cells."""
    tokens = field.flatten(2).unflatten(1, (2, -1)).transpose(2, 3)
    return F.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)


def one_rank_with_rows(value):
    field = sharded(value, 3, (0, 4, 0, 0)).requires_grad_()
    attend_cells(field).square().sum().backward()
    return field.grad.full_tensor()


def test_ranks_without_rows_keep_features_innermost(world):
    # The strides of an empty shard say nothing. torch's backward kernel reads its result with features innermost.
    value = drawn(1, 4, 5, 4).requires_grad_()
    attend_cells(value).square().sum().backward()
    for grad in world.run(one_rank_with_rows, value.detach()):
        torch.testing.assert_close(grad, value.grad)
