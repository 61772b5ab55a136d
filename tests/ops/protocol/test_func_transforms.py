"""Transforms of torch.func on ShardTensors are right, or refused on all ranks with what to use instead."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from shardfield import ShardTensor, _compat
from shardfield.layout import Layout
from shardfield.virtual import VirtualWorld
from tests.harness import local_shard

VALUE = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

RIGHT = {
    "grad": lambda x: grad(lambda a: torch.tanh(a @ WEIGHT).square().sum())(x),
    "grad of softmax": lambda x: grad(lambda a: (a.softmax(0) * a).sum())(x),
    "grad of layer_norm": lambda x: grad(lambda a: F.layer_norm(a, (4,)).exp().mean())(x),
    "grad of grad": lambda x: grad(lambda b: grad(lambda a: (a**3).sum())(b).sum())(x),
    "vjp of cumsum": lambda x: vjp(lambda a: a.cumsum(0), x)[1](x)[0],
    "jacrev": lambda x: jacrev(lambda a: a.square().mean(0))(x),
    "vmap": lambda x: vmap(lambda r: torch.tanh(r) * r.sum())(x),
    "vmap of softmax": lambda x: vmap(lambda r: r.softmax(0), in_dims=1)(x),
}
REFUSED = {
    "grad of a weight": lambda x: grad(lambda w: torch.tanh(x @ w).square().sum())(WEIGHT),
    "jvp": lambda x: jvp(torch.square, (x,), (x,))[1],
    "jacfwd": lambda x: jacfwd(lambda a: a.square().sum(1))(x),
}


@pytest.fixture(scope="module")
def world():
    with VirtualWorld(2) as world:
        yield world


def run(name):
    """Return a transform of a field sharded as 3 + 2, or the error."""
    layout = Layout.of(init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], VALUE.shape, {0: (3, 2)})
    try:
        result = (RIGHT | REFUSED)[name](ShardTensor(local_shard(VALUE, layout), layout))
    except Exception as error:
        return str(error)
    return (result.full_tensor() if isinstance(result, ShardTensor) else result).detach()


@pytest.mark.filterwarnings("ignore::UserWarning")  # transforms gather
@pytest.mark.parametrize("name", RIGHT)
def test_right(world, name):
    for result in world.run(run, name):
        assert not isinstance(result, str), result
        torch.testing.assert_close(result, RIGHT[name](VALUE.clone()).detach())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch scripts decompositions
@pytest.mark.parametrize("name", REFUSED)
def test_refused(world, name):
    said = "torch.autograd.functional" if isinstance(_compat.function_apply, classmethod) else "setup_context"
    for error in world.run(run, name):
        assert isinstance(error, str) and said in error
