"""Transports: staged through host memory, tried for a backend, and the silent one that sends nothing."""

import _thread
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardfield
from shardfield import ShardTensor, runtime, scatter_tensor
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


def two_threads(in_threads):
    """Sum 60 fields in two threads at once; return what became of them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    if not in_threads:
        scatter_tensor(torch.ones(2), 0, mesh, (Shard(0),))
    outcomes = []

    def work(start):
        for i in range(30):
            try:
                value = ShardTensor.from_local(torch.full((2, 2), start + i), mesh, [Shard(0)], "chunk").cumsum(0)
                found = value.full_tensor()[-1, 0].item()
                outcomes.append("right" if found == 4 * (start + i) else f"wrong: {found} for {4 * (start + i)}")
            except ShardingError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=work, args=(start,), name=f"worker-{start:g}") for start in (1.0, 1000.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("in_threads", [False, True], ids=["after the main thread", "first of all"])
def test_two_threads_of_a_rank_are_right_or_refused(in_threads):
    for outcomes in run_on_ranks(two_threads, 2, in_threads, timeout=60):
        assert len(outcomes) == 60
        refused = [text for text in outcomes if text != "right"]
        assert all("communicates, and so may 'MainThread'" in text for text in refused), refused[0]


def train_in_a_thread():
    """Communicate in the thread that initialized the world; the main thread is refused then."""
    result = []

    def work():
        runtime.active.world_thread, runtime.active.thread = threading.get_ident(), 0  # as initialize() sets it
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
        x = scatter_tensor(torch.arange(6.0).reshape(3, 2), 0, mesh, (Shard(0),), requires_grad=True)
        loss = x.cumsum(0).sum()
        loss.backward()
        result.append((loss.item(), x.grad.full_tensor()[:, 0].tolist(), x))
        worked.set()
        ending.wait(30)

    worked, ending = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, name="trainer")
    before = runtime.active.world_thread
    try:
        thread.start()
        worked.wait(30)
        (value, grad, x), alive = result[0], threading.Event()
        try:
            x.full_tensor()
        except ShardingError as error:
            refused = str(error)
        # Threads that C++ starts communicate only inside backward.
        results = []

        def foreign(inside):
            transport.in_backward, kept = (lambda: inside), transport.in_backward
            try:
                transport._enter_thread(runtime.active)
                results.append("allowed")
            except ShardingError:
                results.append("refused")
            finally:
                transport.in_backward = kept
                alive.set()

        for inside in (True, False):
            alive.clear()
            _thread.start_new_thread(foreign, (inside,))
            alive.wait(10)
        ending.set()
        thread.join()
        return value, grad, refused, results, x.full_tensor().sum().item()
    finally:
        runtime.active.world_thread, runtime.active.thread = before, 0


def test_the_thread_that_initialized_the_world_communicates():
    for value, grad, refused, results, later in run_on_ranks(train_in_a_thread, 2, timeout=60):
        assert value == 22.0 and grad == [3.0, 2.0, 1.0]
        assert "the thread 'MainThread' communicates, and so may 'trainer'" in refused
        assert later == 15.0  # the main thread, once the other has ended
        assert results == ["allowed", "refused"]
