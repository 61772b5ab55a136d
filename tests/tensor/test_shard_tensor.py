"""ShardTensor as an object: construction, redistribution, attributes, copies, DTensor."""

from __future__ import annotations

import copy
import io
import math
import tracemalloc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfield
from shardfield import ShardingError, ShardTensor, runtime, scatter_tensor, sync_module_over_mesh
from shardfield.dispatch.registry import handler
from shardfield.tensor import DEFERRED_ATTRIBUTES, Deferred, wrap, wrap_deferred
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh
from tests.harness.virtual import VirtualRanks


def field(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def scattered(mesh, placements, shape, source):
    mesh = world_mesh(mesh)
    x = scatter_tensor(
        field(*shape) if dist.get_rank() == source else None, source, mesh, placements, requires_grad=True
    )
    assert x.shape == shape and x.requires_grad and x.is_leaf and x.placements == tuple(placements)
    assert torch.equal(x.full_tensor(), field(*shape))
    return tuple(x._local_tensor.shape)


@pytest.mark.parametrize(
    ("mesh", "placements", "shape", "locals_"),
    [
        ((4,), [Shard(0)], (5, 3), [(2, 3), (2, 3), (1, 3), (0, 3)]),
        ((2,), [Replicate()], (5,), [(5,), (5,)]),
        ((2, 2), [Shard(1), Shard(0)], (3, 5), [(2, 3), (1, 3), (2, 2), (1, 2)]),
        ((2, 2), [Shard(0), Shard(0)], (7,), [(2,), (2,), (2,), (1,)]),
        ((2, 2), [Replicate(), Shard(0)], (3, 1), [(2, 1), (1, 1), (2, 1), (1, 1)]),
    ],
)
@pytest.mark.parametrize("source", [0, 1])
def test_scatter(mesh, placements, shape, locals_, source):
    assert run_on_ranks(scattered, torch.Size(mesh).numel(), mesh, placements, shape, source) == locals_


def scatter_memory():
    """Return the peak memory of a scatter: on a rank that is not the source, only its shard."""
    mesh = world_mesh((4,))
    full_value = torch.zeros(4_000_000) if dist.get_rank() == 0 else None
    sent = []
    runtime.active.meter = lambda kind, messages, nbytes: sent.append(nbytes)
    before = _rss()
    x = scatter_tensor(full_value, 0, mesh, [Shard(0)])
    runtime.active.meter = None
    assert x._local_tensor.untyped_storage().nbytes() == 4_000_000
    if dist.get_rank():
        assert sum(sent) < 1000
        assert _rss() - before < 10_000_000
    else:
        assert 12_000_000 <= sum(sent) < 12_001_000


def _rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_scatter_memory():
    run_on_ranks(scatter_memory, 4)


def bad_scatter(what):
    mesh = world_mesh((2,))
    mine = dist.get_rank() == 0
    calls = {
        "no tensor": lambda: scatter_tensor(None, 0, mesh, [Shard(0)]),
        "shape": lambda: scatter_tensor(field(4) if mine else None, 0, mesh, [Shard(0)], global_shape=(5,)),
        "dtype": lambda: scatter_tensor(field(4) if mine else None, 0, mesh, [Shard(0)], dtype=torch.float32),
        "rank": lambda: scatter_tensor(field(4), 7, mesh, [Shard(0)]),
        "dim": lambda: scatter_tensor(field(4) if mine else None, 0, mesh, [Shard(1)]),
        "partial": lambda: scatter_tensor(field(4) if mine else None, 0, mesh, [Partial()]),
        "placements": lambda: scatter_tensor(field(4) if mine else None, 0, mesh, [Shard(0), Shard(0)]),
    }
    with pytest.raises(ShardingError) as error:
        calls[what]()
    return str(error.value)


@pytest.mark.parametrize("what", ["no tensor", "shape", "dtype", "rank", "dim", "partial", "placements"])
def test_bad_scatter(what):
    first, second = run_on_ranks(bad_scatter, 2, what)
    assert first == second


def from_locals(mesh_shape, placements, shapes, sharding_shapes="infer"):
    mesh = world_mesh(mesh_shape)
    local = torch.full(shapes[dist.get_rank()], float(dist.get_rank()))
    x = ShardTensor.from_local(local, mesh, placements, sharding_shapes)
    return tuple(x.shape), [[tuple(s) for s in row] for row in x._spec.sharding_shapes().values()], x.offsets()


def test_from_local():
    shapes = [(2, 3), (0, 3), (4, 3)]
    for how in ("infer", {0: shapes}, {0: [(2, 9), (0, 9), (4, 9)]}):
        got = run_on_ranks(from_locals, 3, (3,), [Shard(0)], shapes, how)
        assert [g[0] for g in got] == [(6, 3)] * 3
        assert got[0][1] == [[(2, 3), (0, 3), (4, 3)]]
        assert [g[2] for g in got] == [(0, 0), (2, 0), (2, 0)]
    got = run_on_ranks(from_locals, 4, (2, 2), [Shard(0), Shard(1)], [(1, 2), (1, 3), (4, 2), (4, 3)])
    assert got[3][0] == (5, 5) and got[3][1] == [[(1, 3), (4, 3)], [(4, 2), (4, 3)]] and got[3][2] == (1, 2)
    got = run_on_ranks(from_locals, 2, (2,), [Shard(0)], [(3, 2), (3, 2)], "chunk")
    assert got[0][0] == (6, 2)


def misfit(shapes, placements):
    with pytest.raises(ShardingError) as error:
        ShardTensor.from_local(torch.zeros(shapes[dist.get_rank()]), world_mesh((len(shapes),)), placements)
    return str(error.value)


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 4)], [(2, 3), (2,)]])
def test_from_local_rejects_misfitting_shards(shapes):
    results = run_on_ranks(misfit, 2, shapes, [Shard(0)])
    assert results[0] == results[1]
    assert str(shapes[0]) in results[0] and str(shapes[1]) in results[0]


def as_object():
    mesh = world_mesh((2,))
    full = field(5, 3)
    x = scatter_tensor(full, 0, mesh, [Shard(0)], requires_grad=True)
    sent = []
    runtime.active.meter = lambda *a: sent.append(a)
    assert "Shard(0) as 3+2 over 'h'" in repr(x) and len(x) == 5 and x.dim() == 2 and x.size(1) == 3 and x.numel() == 15
    assert x.stride() == full.stride() and x.size() == full.shape and x.ndim == 2 and x.dtype == full.dtype
    assert x.device.type == "cpu" and x.is_floating_point() and not x.is_complex() and x.element_size() == 8
    assert not sent
    runtime.active.meter = None
    loss = (x * x).sum()
    ref = (full * full).sum()
    assert loss.item() == ref.item() == float(loss) and f"{loss:.2f}" == f"{ref:.2f}" and str(ref.item()) in str(loss)
    assert bool((x.detach() >= 0).all()) and int(loss) == int(ref)
    assert (x.detach().numpy() == full.numpy()).all() and x.tolist() == full.tolist()
    y = copy.deepcopy(x)
    assert y is not x and torch.equal(y.full_tensor(), full) and y.requires_grad
    buffer = io.BytesIO()
    torch.save(x._local_tensor, buffer)
    p = torch.nn.Parameter(x.detach())
    assert isinstance(p, ShardTensor) and p.requires_grad and isinstance(p, torch.nn.Parameter)
    assert isinstance(torch.zeros_like(x), ShardTensor)
    rows = list(x)
    assert len(rows) == 5 and all(torch.equal(r.full_tensor(), f) for r, f in zip(rows, full, strict=True))
    assert hash(x) == hash(x) and {x: 1}[x] == 1
    with pytest.raises(TypeError):
        len(loss)


def test_object():
    run_on_ranks(as_object, 2)


def dtensors():
    mesh = world_mesh((2,))
    full = field(5, 3)
    d = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    x = ShardTensor.from_dtensor(d)
    assert torch.equal(x.full_tensor(), full)
    (x * x).sum().backward()
    assert torch.equal(d.grad.full_tensor(), 2 * full)
    back = scatter_tensor(full, 0, mesh, [Shard(0)]).redistribute(sharding_shapes={0: [1, 4]}).to_dtensor()
    assert isinstance(back, DTensor) and torch.equal(back.full_tensor(), full)
    w = distribute_tensor(torch.ones(3, dtype=torch.float64), mesh, [Replicate()]).requires_grad_()
    y = scatter_tensor(full, 0, mesh, [Shard(0)]) * w
    y.sum().backward()
    assert torch.equal(w.grad.full_tensor(), full.sum(0))


def test_dtensor():
    run_on_ranks(dtensors, 2)


def redistributed():
    mesh = world_mesh((2,))
    full = field(5, 4)
    x = scatter_tensor(full, 0, mesh, [Shard(0)])
    for placed in ([Shard(1)], [Replicate()], [Partial()], [Shard(0)]):
        y = x.redistribute(placements=placed)
        assert y.placements == tuple(placed) and torch.equal(y.full_tensor(), full)
    y = x.redistribute(placements=[Shard(0)], sharding_shapes={0: [0, 5]})
    assert y._spec.sharding_shapes()[0][0] == (0, 4) and torch.equal(y.full_tensor(), full)
    assert x.redistribute(sharding_shapes="balanced")._layout.shard_sizes(0) == (3, 2)
    z = y.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])
    z.add_(1)
    assert torch.equal(y.full_tensor(), full)
    for bad in ({0: [1, 1]}, {0: [6, -1]}, {0: [5]}):
        with pytest.raises(ShardingError):
            x.redistribute(sharding_shapes=bad)
    with pytest.raises(ShardingError):
        x.redistribute(placements=[Shard(2)])
    with pytest.raises(ShardingError, match="meshes"):
        x + scatter_tensor(full, 0, world_mesh((1, 2)), [Replicate(), Shard(0)])


def test_redistribute():
    run_on_ranks(redistributed, 2)


def written_after_redistribute(shape):
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for grad in (False, True) if math.prod(shape) == 1 else (False,):
            with mode():
                x = scatter_tensor(field(4, 3), 0, world_mesh(shape), [Replicate()]).requires_grad_(grad) * 1
                for dim in (0, 1):
                    y = x.redistribute(placements=[Shard(dim)])
                    y.add_(1)
                    assert torch.equal(x.full_tensor(), field(4, 3)), (mode, grad, dim)
                    assert torch.equal(y.full_tensor(), field(4, 3) + 1), (mode, grad, dim)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_into_a_redistributed_tensor_does_not_reach_its_source(ranks):
    run_on_ranks(written_after_redistribute, ranks, (ranks,))


def replicated_over_all_axes():
    full = field(5, 4)
    tiles = scatter_tensor(full, 0, world_mesh((2, 1)), [Shard(0), Shard(1)])
    for placements in ([Replicate()], [Replicate(), Replicate()]):
        y = tiles.redistribute(placements=placements)
        assert y.placements == (Replicate(), Replicate()) and torch.equal(y.to_local(), full)
    with pytest.raises(ShardingError, match="one each is needed"):
        tiles.redistribute(placements=[Shard(0)])
    for call in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
        with pytest.raises(ShardingError, match=r"x\.full_tensor\(\) is a plain tensor"):
            call(tiles)


def test_one_replicate_means_all_axes():
    run_on_ranks(replicated_over_all_axes, 2)


def synced(mesh, source):
    mesh = world_mesh(mesh)
    torch.manual_seed(dist.get_rank())
    module = torch.nn.BatchNorm1d(4)
    with torch.no_grad():
        module.weight.fill_(dist.get_rank())
    assert sync_module_over_mesh(module, mesh, source, verify=True) is module
    wrong = torch.nn.Linear(2, 2 + dist.get_rank() % 2)
    if mesh.size() > 1:
        with pytest.raises(ShardingError, match="metadata differs"):
            sync_module_over_mesh(wrong, mesh, verify=True)
    return module.weight[0].item()


def test_sync_module():
    assert run_on_ranks(synced, 4, (2, 2), 2) == [2.0] * 4
    assert run_on_ranks(synced, 2, (2,), 0) == [0.0] * 2


def test_names():
    assert shardfield.ShardTensorSpec and tracemalloc


def read_on_one_rank(requires_grad: bool) -> tuple[list[str], int]:
    """Read what must not communicate on rank 0 only; return the reprs there and the messages sent."""
    mesh = world_mesh((2,))
    x = scatter_tensor(field(1, 1, 8, 8) if dist.get_rank() == 0 else None, 0, mesh, [Shard(2)])
    x.requires_grad_(requires_grad)
    spectrum = torch.fft.rfft2(x)
    tensors = {
        "Partial": ShardTensor.from_local(x.to_local(), mesh, [Partial()], "chunk"),
        "LazySpectrum": spectrum,
        "SparseSpectrum": torch.zeros_like(spectrum),
        "LazyPad": F.pad(x, (1, 1, 1, 1), mode="circular"),
    }
    reprs = []
    with shardfield.explain() as report:
        if dist.get_rank() == 0:
            for name, tensor in tensors.items():
                before = tensor._deferred
                assert (before is None) == (name == "Partial"), name
                reprs.append(repr(tensor))
                _ = tensor.shape, tensor.dtype, tensor.device, tensor.placements, tensor._spec, tensor.is_complex()
                for attribute in DEFERRED_ATTRIBUTES:
                    getattr(tensor, attribute)
                assert requires_grad or tensor.grad_fn is None
                assert tensor._deferred is before, f"{name} was materialized"
    dist.barrier()
    for name, tensor in tensors.items():  # now on all ranks
        _ = tensor.to_local()
        assert tensor._deferred is None and "deferred" not in repr(tensor), name
    return reprs, report.messages


@pytest.mark.parametrize("requires_grad", [False, True])
def test_repr_and_metadata_never_communicate(requires_grad):
    (reprs, sent), (_, other) = run_on_ranks(read_on_one_rank, 2, requires_grad)
    assert sent == other == 0
    for name, text in zip(["local=tensor", "LazySpectrum", "SparseSpectrum", "LazyPad"], reprs, strict=True):
        assert name in text, text


class Ones(Deferred):
    """Ones that are made when they are read; counts how often."""

    requires_grad = False  # type: ignore[assignment]

    def __init__(self, layout):
        self.layout, self.count = layout, 0

    def materialize(self):
        self.count += 1
        return wrap(torch.ones(self.layout.local_shape), self.layout)


def accepting_rules():
    """A rule that declares a class of deferred values gets them; every other rule gets the local tensor."""
    mesh = world_mesh((2,))
    layout = scatter_tensor(field(4), 0, mesh, [Shard(0)])._layout
    ones = Ones(layout)
    x = wrap_deferred(ones, torch.float32, torch.device("cpu"))
    seen = []

    def accept(run, func, types, args, kwargs):
        seen.append((args[0]._deferred, ones.count))
        return run(func, types, args, kwargs) if len(seen) > 1 else "accepted"

    with runtime.fresh(registry=runtime.active.registry.copy()):

        @handler(torch.erf, accepts_deferred={Ones: accept})
        def erf(func, types, args, kwargs):
            return wrap(func(args[0]._local_tensor), args[0]._layout)

        assert torch.erf(x) == "accepted" and x.erf()._deferred is None  # the second accept calls the handler itself
        assert seen == [(ones, 0), (ones, 0)] and ones.count == 1 and x._deferred is None
        assert torch.equal(torch.erf(x).full_tensor(), torch.ones(4).erf()) and len(seen) == 2
    other = Ones(layout)
    y = wrap_deferred(other, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.exp(y).full_tensor(), torch.ones(4).exp()) and other.count == 1
    assert torch.equal((y + y).full_tensor(), torch.full((4,), 2.0)) and other.count == 1


def test_rules_that_accept_deferred_values():
    run_on_ranks(accepting_rules, 2)


# ---------------------------------------------------------------------- one rank alone reads a loss


READS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "f-string": lambda loss: float(f"{loss:.17g}"),
    "print": lambda loss: float(str(loss).split("(")[1].split(",")[0]),
    "tolist": lambda loss: loss.tolist(),
    "detach, cpu": lambda loss: loss.detach().cpu().item(),
    "numpy": lambda loss: loss.detach().double().numpy().item(),
    "full_tensor": lambda loss: loss.full_tensor().item(),
    "to_local": lambda loss: loss.to_local().item(),
    "comparison": lambda loss: loss.item() if loss > 1e-9 else None,
    "more arithmetic": lambda loss: (loss * 2 / 4 + loss.sqrt().square() / 2).item(),
    "stack": lambda loss: torch.stack([loss, loss]).mean().item(),
}

LOSSES = {
    "mean": lambda x, y: x.square().mean(),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "several": lambda x, y: F.l1_loss(x, y) + 0.1 * x.square().sum() / 3 - (x * y).mean((0, 1)),
    "dot": lambda x, y: torch.dot(x.flatten(), y.flatten()),
    "keepdim": lambda x, y: x.square().sum((0, 1), keepdim=True).squeeze(),
    "accumulated": lambda x, y: sum([x.square().mean().detach() for _ in range(3)], 0.0).add_(x.square().mean()),
}


def read_on_rank_0(mesh, placements, dtype):
    """Read losses on rank 0 alone, in every way, before and after backward; the other ranks go on."""
    mesh = world_mesh(mesh)
    full = (field(6, 5) / 20).to(dtype)
    sent = []
    for name, loss_of in LOSSES.items():
        x = scatter_tensor(full, 0, mesh, placements, requires_grad=True)
        y = scatter_tensor(full.flip(0), 0, mesh, placements)
        plain = full.clone().requires_grad_()
        ref, loss = loss_of(plain, full.flip(0)), loss_of(x, y)
        close = {"rtol": 0.02, "atol": 0.01} if dtype is torch.bfloat16 else {}
        runtime.active.meter = lambda kind, messages, nbytes: sent.append(kind)
        try:
            if dist.get_rank() == 0:
                for how, read in READS.items():
                    found = torch.tensor(read(loss), dtype=dtype)
                    torch.testing.assert_close(
                        found, ref.detach(), **close, msg=lambda m, n=name, h=how: f"{n}, {h}: {m}"
                    )
        finally:
            runtime.active.meter = None
        if ref.requires_grad:
            ref.backward()
            loss.backward()
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **close)
        with torch.no_grad():
            again = loss_of(x, y)
        with torch.inference_mode():
            third = loss_of(x, y)
        if dist.get_rank() == 0:
            torch.testing.assert_close(
                torch.tensor([again.item(), float(third)], dtype=dtype), ref.detach().expand(2), **close
            )
    return sent


@pytest.mark.parametrize("mesh, placements", [((2,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_rank_alone_reads_a_loss(mesh, placements, dtype):
    sent = run_on_ranks(read_on_rank_0, torch.Size(mesh).numel(), mesh, placements, dtype, timeout=60)
    assert not any(sent)  # all ranks sent the sums when they were made


def read_on_one_rank_first() -> list[str]:
    """Read a value on rank 0 alone, and another one of its size on all ranks, which would be taken for the first."""
    x = scatter_tensor(field(6, 4), 0, world_mesh((2,)), [Shard(0)])
    for one, every in ((x.mean(0), (x * 2).mean(0)), (x, x * 2)):
        with pytest.raises(ShardingError, match="do not agree on the line"):
            if dist.get_rank() == 0:
                one.tolist()
            every.tolist()
        assert every.tolist() == (2 * one.full_tensor()).tolist()
    return []


def apply_to_parameters() -> list[str]:
    """Shard the parameters of a plain module by `_apply`, which sets `.data` where it can."""
    layer = torch.nn.Linear(4, 3).double()
    full, mesh = layer.weight.detach().clone(), world_mesh((2,))
    layer._apply(lambda t: scatter_tensor(t.detach(), 0, mesh, [Shard(0)]))
    assert torch.equal(layer.weight.full_tensor(), full)
    return []


def test_on_virtual_ranks():
    with VirtualRanks() as ranks:
        for check in (read_on_one_rank_first, apply_to_parameters):
            assert ranks.check(2, check) == [], check.__name__


def backward_without_the_value():
    """Check that backward does not wait for the sum, and what a sum in flight says of itself."""
    mesh = world_mesh((2,))
    x = scatter_tensor(field(4, 3), 0, mesh, [Shard(0)], requires_grad=True)
    loss = (x * x).mean()
    assert loss._deferred is not None and loss.placements == (Replicate(),)
    assert loss.requires_grad and not loss.is_leaf and loss.grad is None and loss.shape == ()
    assert "Replicate" in repr(loss) and loss._deferred is not None
    loss.backward(retain_graph=True)
    assert loss._deferred is not None, "backward waited for the value"
    torch.testing.assert_close(x.grad.full_tensor(), field(4, 3) / 6)
    (grad,) = torch.autograd.grad(loss, x)
    assert loss._deferred is not None
    torch.testing.assert_close(grad.full_tensor(), field(4, 3) / 6)
    mean = pytest.approx(field(4, 3).square().mean().item())
    assert loss.item() == mean and loss._deferred is None
    for read in (torch.no_grad, torch.inference_mode):  # the value has a graph wherever it was read
        read_before, x.grad = (x * x).mean(), None
        with read():
            assert read_before.item() == mean
        (read_before * 2).backward()
        torch.testing.assert_close(x.grad.full_tensor(), field(4, 3) / 3)
    loss = (x * x).mean()
    assert torch.autograd.grad(loss, loss)[0].item() == 1.0
    seed = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((x * x).mean(), x, seed, create_graph=True)
    torch.testing.assert_close(grad.full_tensor(), field(4, 3) / 2)
    grad.sum().backward()
    torch.testing.assert_close(seed.grad, field(4, 3).sum() / 6)
    copied = copy.deepcopy((x.detach() * 2).mean())
    assert copied.item() == pytest.approx(11.0)
    double = torch.autograd.grad((torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]).sum(), x)[0]
    torch.testing.assert_close(double.full_tensor(), 6 * field(4, 3))
    compiled = shardfield.compile(lambda x: (x * x).mean(), backend="aot_eager")
    value = compiled(x)
    if dist.get_rank() == 0:
        assert value.item() == mean
    part = torch.tensor(2.0, requires_grad=True)
    with torch.no_grad():
        total = ShardTensor.from_local(part, mesh, [Partial()], "chunk")  # as a user's op returns it
    if dist.get_rank() == 0:
        assert total.item() == float(total) == total.tolist() == float(f"{total}") == 4.0
    (total * total).backward()  # the value that was read has no graph
    assert part.grad == 8.0
    with torch.no_grad():
        part.add_(1.0)
    assert total.item() == 6.0


def test_backward_does_not_wait_for_the_value_of_a_loss():
    run_on_ranks(backward_without_the_value, 2, timeout=60)
