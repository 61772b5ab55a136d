"""Transports: staged through host memory, tried for a backend, and the silent one that sends nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardfield
from shardfield import runtime, scatter_tensor
from shardfield.comm import collectives, transport
from shardfield.errors import ShardingError
from shardfield.testing import run_on_ranks


class Counting(transport.HostStagedTransport):
    """Stage through host memory and count the calls."""

    def __init__(self):
        super().__init__(transport.DIRECT)
        self.kinds = set()

    def __getattribute__(self, name):
        if name in ("all_reduce", "all_gather", "broadcast", "exchange", "send_to_ranks", "recv_from_rank"):
            self.kinds.add(name)
        return super().__getattribute__(name)


def program(mesh):
    """Send every kind of message, forward and backward."""
    torch.manual_seed(0)
    full = torch.randn(2, 4, 8, 6, dtype=torch.float64)
    weight = torch.randn(4, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    x = scatter_tensor(full, 0, mesh, (Shard(2),)).requires_grad_()
    y = F.batch_norm(F.conv2d(x, weight, padding=1), None, None, training=True)
    y = y.redistribute(mesh, (Shard(3),))
    tokens = y.flatten(2).transpose(1, 2).contiguous()
    z = F.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None])
    loss = (z**2).sum() + y.amax() + (x > 0).sum().to(torch.float64)
    loss.backward()
    return [t.detach().clone() for t in (x.full_tensor(), loss.full_tensor(), x.grad.full_tensor(), weight.grad)]


def staged():
    mesh = init_device_mesh("cpu", (2,))
    plain = program(mesh)
    runtime.active.transport_override = counting = Counting()
    try:
        by_host = program(mesh)
        dist.all_reduce(torch.zeros(1))
    finally:
        runtime.active.transport_override = None
    for a, b in zip(plain, by_host, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return counting.kinds


def test_host_staging_gives_the_same_results():
    first, second = run_on_ranks(staged, 2)
    assert first == {"all_reduce", "all_gather", "broadcast", "exchange", "send_to_ranks"}
    assert second == {"all_reduce", "all_gather", "broadcast", "exchange", "recv_from_rank"}


class NoDevice(transport.DirectTransport):
    """Emulate a backend that can reduce on devices but cannot send between them."""

    def exchange(self, receives, sends, group):
        raise RuntimeError("ProcessGroup::send: invalid tensor type")


def tried(config):
    group = init_device_mesh("cpu", (2,)).get_group()
    kept = transport.DIRECT, dist.get_backend_config, transport._backend_serves_cpu
    one = torch.ones(1)
    assert transport._probe_transport(one, group) is transport.STAGED  # gloo sends from host memory
    transport._backend_serves_cpu = lambda group, device: False
    try:
        assert transport._probe_transport(one, group) is kept[0]
        transport.DIRECT, dist.get_backend_config = NoDevice(), lambda group: config
        return transport._probe_transport(one, group) is transport.STAGED
    finally:
        transport.DIRECT, dist.get_backend_config, transport._backend_serves_cpu = kept


def test_backend_is_probed():
    assert run_on_ranks(tried, 2, "cpu:gloo,cuda:gloo") == [True, True]


def refused():
    with pytest.raises(ShardingError, match="cannot send cpu tensors .*invalid tensor type"):
        tried("cuda:gloo")


def test_backend_without_transport_is_refused():
    run_on_ranks(refused, 2)


def silent():
    mesh = init_device_mesh("cpu", (2,))
    group = mesh.get_group()
    runtime.active.transport_override = transport.NullTransport()
    try:
        if dist.get_rank(group) == 0:  # one rank alone: nothing blocks
            x = torch.arange(3.0)
            assert collectives.all_reduce(x, group).equal(2 * x)
            assert collectives.all_reduce(x, group, "prod").equal(x**2)
            assert collectives.all_reduce(x, group, "max").equal(x)
            assert [t.tolist() for t in collectives.all_gather(x, [(3,)] * 2, group)] == [[0, 1, 2]] * 2
            with shardfield.explain() as report:
                assert collectives.exchange([x, x], [(3,), (2,)], group)[1].tolist() == [0, 0]
            assert report.bytes == 12
    finally:
        runtime.active.transport_override = None


def test_silent_transport_sends_nothing():
    run_on_ranks(silent, 2)
