"""CUDA graphs: what is refused, when a program is captured and launched, and that no launch is seen by another.

On CPUs a graph is simulated by a function that runs the captured call again and writes its results in place, as a
launch does. The tests with a device need one NVIDIA GPU.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardfield
from shardfield import runtime
from shardfield.comm.transport import DIRECT, HostStagedTransport
from shardfield.compiler import graphs
from shardfield.compiler.static_tensors import MAX_PACKED, Packed
from shardfield.errors import Untraceable
from shardfield.testing import run_on_ranks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def simulated_record(call, pool):
    """Capture a call as `graphs.record` does: a launch runs it again and writes into the same results.

    A real capture does not run the call. This one does, and so restores what the call writes.
    """
    written = WRITTEN if getattr(call, "__self__", None) is None else call.__self__._inputs
    before = [t.detach().clone() for t in written]
    results = [t if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in call()]
    for tensor, values in zip(written, before, strict=True):
        tensor.data.copy_(values)

    def launch():
        for static, new in zip(results, call(), strict=True):
            if static is not None:
                static.data.copy_(new.detach())

    return results, launch


WRITTEN: list[torch.Tensor] = []  # tensors that the step of a StepGraph writes


def simulate_graphs(monkeypatch):
    """Replace CUDA graphs by simulated ones."""
    monkeypatch.setattr(graphs, "record", simulated_record)
    monkeypatch.setattr(graphs, "memory_pool", lambda: None)
    monkeypatch.setattr(graphs, "run_on_capture_stream", lambda call: call())
    monkeypatch.setattr(graphs, "find_host_reads", lambda call: (call(), None))
    monkeypatch.setattr("shardfield.compiler.program.check_device", lambda device: None)


class Net(nn.Module):
    """Parameters, a buffer that is written, and dropout."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x)).sin())


def field(seed: int, mesh, dtype=torch.float64):
    full = torch.randn(2, 2, 8, 6, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(mesh.device_type)
    return shardfield.scatter_tensor(full, 0, mesh, (Shard(2),))


def nets(mesh, **options):
    torch.manual_seed(0)
    plain = Net().double().to(mesh.device_type)
    torch.manual_seed(0)
    fast = shardfield.compile(Net().double().to(mesh.device_type), backend="aot_eager", graphs=True, **options)
    return plain, fast


def assert_same_step(plain, fast, x):
    """Compare results, gradients and buffers of one step."""
    for model in (plain, fast):
        model.zero_grad()
    found, expected = fast(x), plain(x)
    found.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(found.full_tensor(), expected.full_tensor())
    for mine, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(fast.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def graph_of(fast) -> graphs.ProgramGraph:
    """Return the graph of the newest program."""
    (programs, *_) = list(fast.forward._programs.values())[::-1]
    return programs[0]._run


def launches_equal_eager(device):
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("domain",))
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            simulate_graphs(patch)
        plain, fast = nets(mesh)
        for i in range(graphs.WARMUPS + 3):
            assert_same_step(plain, fast, field(i, mesh))
        graph = graph_of(fast)
        assert (graph.captures, graph.launches) == (1, 3)

        # Two forwards before their backwards: the second runs as it is, so that the first keeps what it has saved.
        for model in (plain, fast):
            model.zero_grad()
            (model(field(7, mesh)).square().mean() + 2 * model(field(8, mesh)).cos().mean()).backward()
        assert graph.launches == 4
        for mine, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)

        # Gradients and results that a caller keeps are not overwritten.
        kept = fast(field(9, mesh))
        before = kept.full_tensor().clone()
        kept.sum().backward()
        grads = [p.grad.clone() for p in fast.parameters()]
        held = [p.grad for p in fast.parameters()]
        fast.zero_grad()
        fast(field(10, mesh)).square().sum().backward()
        torch.testing.assert_close(kept.full_tensor(), before, rtol=0, atol=0)
        for now, then in zip(held, grads, strict=True):
            torch.testing.assert_close(now, then, rtol=0, atol=0)

        # A second backward would read what the first has overwritten.
        loss = fast(field(10, mesh)).square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="graphs=True: backward.. of a launch can run once"):
            loss.backward()
        del loss

        # explain() sees every call: it runs as it is.
        count = graph.launches
        with shardfield.explain() as report:
            fast(field(11, mesh))
        assert graph.launches == count and "conv2d" in str(report)

        # Parameters at another place in memory are captured again.
        plain.load_state_dict(fast.state_dict())
        with torch.no_grad():
            for p in fast.parameters():
                p.data = p.data.clone()
        assert_same_step(plain, fast, field(12, mesh))
        assert graph.captures == 2
        # In-place changes are seen without a capture.
        for model in (plain, fast):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
        assert_same_step(plain, fast, field(13, mesh))
        assert graph.captures == 2
        # Evaluation is another program, with a graph of its own.
        plain.eval(), fast.eval()
        with torch.no_grad():
            for i in range(graphs.WARMUPS + 2):
                torch.testing.assert_close(fast(field(i, mesh)).full_tensor(), plain(field(i, mesh)).full_tensor())
        assert graph_of(fast) is not graph and graph_of(fast).launches == 2

        # Parameters that move in every call are refused.
        fast.train()
        moves = []
        with pytest.raises(Untraceable, match="elsewhere in memory"):
            while len(moves) < 10:
                moves.append([p.data for p in fast.parameters()])  # kept, so that no address is used again
                for p in fast.parameters():
                    p.data = p.data.clone()
                fast(field(1, mesh)).sum().backward()
        assert len(moves) == graphs.RECAPTURES


def test_launches_equal_eager_calls():
    run_on_ranks(launches_equal_eager, 2, "cpu")


def refusals():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    _, fast = nets(mesh)
    with pytest.raises(Untraceable, match="graphs=True: a CUDA graph needs tensors on a CUDA device, .* on cpu"):
        fast(field(0, mesh))
    plain, fast = nets(mesh, fullgraph=False)
    with pytest.warns(UserWarning, match="Net.forward runs without CUDA graphs: .* on cpu"):
        assert_same_step(plain, fast, field(0, mesh))
    groups = mesh.get_all_groups()
    graphs.check_messages(groups, torch.device("cpu"))
    with runtime.observing(transport_override=HostStagedTransport(DIRECT)):
        with pytest.raises(Untraceable, match="staged through host memory.*NCCL"):
            graphs.check_messages(groups, torch.device("cpu"))

    def classify(x, target):
        return nn.functional.cross_entropy(x.mean((2, 3)), target)

    with pytest.MonkeyPatch.context() as patch:
        simulate_graphs(patch)
        step = shardfield.compile(classify, backend="aot_eager", graphs=True)
        with pytest.raises(Untraceable, match="a value is checked on the host"):
            step(field(0, mesh), torch.tensor([0, 1]))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="wrapped by DDP or FSDP do not: leave graphs=False"):
        shardfield.compile(wrapped, graphs=True)
    # One rank that cannot capture: all refuse, for their own reasons.
    reason = graphs.agree("it is rank 1" if dist.get_rank() == 1 else None, groups)
    assert reason == ("it is rank 1" if dist.get_rank() == 1 else "it cannot be captured on another rank")
    assert graphs.agree(None, groups) is None


def test_refusals():
    run_on_ranks(refusals, 2)


def test_step_graphs(monkeypatch):
    """One graph per structure, shape and dtype of the arguments, after some calls; results are copies."""
    simulate_graphs(monkeypatch)
    weight = torch.ones(3, dtype=torch.float64)
    monkeypatch.setattr("tests.compiler.test_graphs.WRITTEN", [weight])

    def step(batch, scale):
        with torch.no_grad():
            weight.mul_(2)
        return [(batch["x"] * weight).sum() * scale]

    run = graphs.StepGraph(step)
    results = []
    for i in range(graphs.WARMUPS + 2):
        results += run({"x": torch.full((3,), float(i), dtype=torch.float64)}, 2)
    assert [r.item() for r in results] == [6.0 * i * 2 ** (i + 1) for i in range(graphs.WARMUPS + 2)]
    assert len(run._graphs) == 1
    run({"x": torch.ones(2, 3, dtype=torch.float64)}, 2)
    run({"x": torch.ones(3)}, 2)
    run({"x": torch.ones(3, dtype=torch.float64)}, 3)
    assert len(run._graphs) == 1 and len(run._calls) == 4

    def fails(call, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record", fails)
    run = graphs.StepGraph(step)
    for _ in range(graphs.WARMUPS + 2):
        (value,) = run({"x": torch.ones(3, dtype=torch.float64)}, 1)
    assert run.refused == "RuntimeError: operation not permitted when stream is capturing"
    assert value.item() == weight.sum().item()
    monkeypatch.setattr(graphs, "find_host_reads", lambda call: (call(), "line 1 reads a value on the host"))
    run = graphs.StepGraph(step)
    for i in range(graphs.WARMUPS + graphs.PROBES):
        assert run.refused is None, i
        run({"x": torch.ones(3, dtype=torch.float64)}, 1)
    assert run.refused == "line 1 reads a value on the host" and not run._graphs


def test_step_graphs_hold_what_they_read(monkeypatch):
    """A module may drop a tensor that it had cached at the capture: the graph still reads its memory."""
    simulate_graphs(monkeypatch)
    cache = {"grid": torch.arange(3.0)}

    def step(x):
        return [(x * cache["grid"]).sum() + (x + 1).sum()]

    run = graphs.StepGraph(step)
    for _ in range(graphs.WARMUPS + 1):
        run(torch.ones(3))
    memory = cache.pop("grid").untyped_storage().data_ptr()
    (held,) = run._held
    assert memory in [s.data_ptr() for s in held.values()]
    assert len(held) == 2  # the grid and the static argument, and no intermediate result


# ---------------------------------------------------------------------- on a device


@needs_cuda
def test_program_graphs_on_a_device():
    run_on_ranks(launches_equal_eager, 1, "cuda")


def captured_messages():
    """NCCL with one rank: a sum, a gather, and a send to itself, captured and launched with other values."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    x = torch.zeros(4, device="cuda")
    out, total, all_of = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)

    def messages():
        dist.all_to_all_single(out, x)  # NCCL sends and receives in one group; torch refuses isend to the own rank
        total.copy_(out * 2)
        for handle in DIRECT.all_reduce(total, dist.ReduceOp.SUM, dist.group.WORLD):
            handle.wait()
        DIRECT.all_gather(all_of, total, dist.group.WORLD)
        return [all_of + 1]

    graphs.run_on_capture_stream(messages)
    (result,), launch = graphs.record(messages, graphs.memory_pool())
    for value in (3.0, 5.0):
        x.fill_(value)
        launch()
        assert result.tolist() == [2 * value + 1] * 4
    dist.destroy_process_group()


@needs_cuda
def test_captured_messages():
    run_on_ranks(captured_messages, 1)


def dropout_and_host_reads():
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("domain",))
    fast = shardfield.compile(Net(0.5).double().cuda(), backend="aot_eager", graphs=True)
    x = field(0, mesh)
    zeros = []
    for _ in range(graphs.WARMUPS + 3):
        zeros.append(fast(x).full_tensor() == 0)
    assert not any(torch.equal(a, b) for i, a in enumerate(zeros) for b in zeros[:i]), "a launch repeats its dropout"
    repeated = []
    for _ in range(2):
        torch.manual_seed(3)
        repeated.append(fast(x).full_tensor() == 0)
    assert torch.equal(*repeated)

    def reads(v):
        return [v * (2 if v.sum().item() > 0 else 1)]

    run = graphs.StepGraph(reads)
    for _ in range(graphs.WARMUPS + graphs.PROBES + 1):
        (value,) = run(torch.ones(3, device="cuda"))
    assert value.tolist() == [2.0] * 3 and "reads a value on the host" in run.refused and "test_graphs" in run.refused
    # A capture that fails leaves the device and its generator usable.
    with pytest.raises(RuntimeError):
        graphs.record(lambda: reads(torch.rand(3, device="cuda")), graphs.memory_pool())
    assert torch.rand(3, device="cuda").sum().item() > 0
    run = graphs.StepGraph(lambda v: [torch.rand_like(v) + v])
    found = [run(torch.zeros(4, device="cuda"))[0].tolist() for _ in range(graphs.WARMUPS + 3)]
    assert run.refused is None and len({tuple(f) for f in found}) == len(found)


@needs_cuda
def test_random_numbers_and_host_reads_on_a_device():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_on_ranks(dropout_and_host_reads, 1)


def test_copies_of_packed_tensors():
    """Copies equal the tensors in values, dtypes and strides, and no two calls share memory."""
    tensors = [
        torch.randn(2, 3),
        None,
        torch.randn(4).double(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(0, 3),
        torch.tensor(2.0),
        torch.randn(MAX_PACKED + 1),
        torch.randn(5),
    ]
    packed = Packed(tensors)
    buffers = packed.pack(tensors)
    assert len(buffers) == 5  # three of float32 in one
    first, second = packed.copies(buffers), packed.copies(buffers)
    for tensor, mine, other in zip(tensors, first, second, strict=True):
        if tensor is None:
            assert mine is None
            continue
        assert (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        torch.testing.assert_close(mine, tensor, rtol=0, atol=0)
        assert not tensor.numel() or mine.data_ptr() not in (other.data_ptr(), tensor.data_ptr())
