"""Compiled steps against uncompiled ones, on uneven shards and 2-d meshes: values, gradients and messages."""

from __future__ import annotations

import copy
import functools
import math
import os
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import shardfield
from shardfield import ShardTensor, explain, parallelize, runtime, scatter_tensor
from shardfield.compiler import passes
from shardfield.compiler.lowering import PASS_NAMES
from shardfield.errors import ShardingError, Untraceable
from shardfield.layout import Layout
from shardfield.ops.stencil import conv as conv_rule
from shardfield.planning import simulated
from shardfield.testing import run_on_ranks
from tests.harness import check_case, local_shard, to_full_tensor, world_mesh
from tests.ops import case_tables
from tests.ops.indexing.test_graph_networks import MeshGraphNet
from tests.ops.spectral.test_neuralop import in_double
from tests.ops.stencil.test_stencil_models import UNet

eagerly = functools.partial(shardfield.compile, backend="aot_eager")


def field(mesh, *shape, dim=2, shard_sizes=None, seed=0, grad=True, dtype=torch.float64):
    """Return the same random field on all ranks, sharded unevenly along a dim (and the next, on a 2-d mesh)."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    layout = Layout.of(mesh, [Shard(dim + a) for a in range(mesh.ndim)], shape)
    if shard_sizes:
        layout = ShardTensor.from_local(
            torch.empty(
                [shard_sizes[mesh.get_local_rank(0)] if d == dim else n for d, n in enumerate(layout.local_shape)]
            ),
            mesh,
            [Shard(dim), *[Shard(dim + 1)] * (mesh.ndim - 1)],
        )._layout
    local = local_shard(value, layout)
    return ShardTensor(local.requires_grad_(grad), layout)


def agreeing(model, inputs, steps=2, loss=lambda out: (out**2).sum(), tolerance=1e-10, **how):
    """Compare outputs, gradients and buffers of training steps of a model and its compiled copy; return messages."""
    twin = copy.deepcopy(model)
    fast = eagerly(twin, **how)
    seen = []
    for _ in range(steps):
        for run, source in ((model, model), (fast, twin)):
            source.zero_grad()
            mine = [x.detach().clone().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
            with explain() as report:
                total = loss(run(*mine))
                total.backward()
            grads = [x.grad for x in [*mine, *source.parameters()] if x.requires_grad]
            seen.append(([total, *grads, *source.buffers()], report.messages, report.bytes))
            with torch.no_grad():
                for p in source.parameters():
                    p -= 0.01 * p.grad
    for (plain, *_), (quick, *_) in zip(seen[::2], seen[1::2], strict=True):
        for a, b in zip(plain, quick, strict=True):
            torch.testing.assert_close(to_full_tensor(b), to_full_tensor(a), rtol=tolerance, atol=tolerance)
    assert fast.forward.traces == 1
    return seen[-2][1:], seen[-1][1:]  # (messages, bytes) of a step, plain and compiled


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 1, 5, padding=2, padding_mode="circular")

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x) + torch.tanh(self.second(x)))))


class Branches(nn.Module):
    """Two chains of convolutions on the same field: every compiler pass applies."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 3, 3, padding=1), nn.SiLU(), nn.Conv2d(3, 2, 3, padding=1)]
        self.one, self.two = nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers))

    def forward(self, x):
        return self.one(x) - self.two(x) * 2


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return F.cross_entropy(self.head(self.block(tokens)).mean(1), torch.tensor([1, 3]), reduction="none")


def compare_models(mesh_shape):
    mesh = world_mesh(mesh_shape)
    torch.manual_seed(0)
    uneven = {2: [3, 7], 3: [2, 0, 8], 4: None}[mesh.size(0)] if mesh.ndim == 1 else None
    residual = Residual().double()
    plain, quick = agreeing(residual, [field(mesh, 2, 3, 10, 8, shard_sizes=uneven)])
    # One halo exchange less, shared by two convolutions, and gradient reductions share messages. Where a rank's shard
    # is empty, graphs differ, and all ranks keep their messages as they are.
    if uneven and 0 in uneven:
        assert quick == plain
    else:
        assert quick[0] < plain[0] and quick[1] < plain[1], (plain, quick)
    if mesh.size() != 2:
        return
    assert agreeing(residual, [field(mesh, 2, 3, 10, 8, shard_sizes=uneven)], steps=1, passes=["overlap"])[1] == plain
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 1, 1)
    thick = field(mesh, 1, 1, 64, 48)
    apart = agreeing(nn.Sequential(*layers).double(), [thick], steps=1, passes=[])[1]
    shared = agreeing(nn.Sequential(*layers).double(), [thick], steps=1, passes=["halos"])[1]
    assert shared[0] < apart[0] and shared[1] < apart[1], (shared, apart)
    sent = {}
    for left_out in ("", "halos", "once", "buckets", "overlap"):
        rest = [p for p in PASS_NAMES if p != left_out]
        sent[left_out] = agreeing(Branches().double(), [thick], steps=1, passes=rest)[1]
    assert all(sent[""][0] < sent[p][0] for p in ("halos", "once", "buckets")) and sent["overlap"] == sent[""], sent
    agreeing(UNet().double(), [field(mesh, 1, 3, 12, 16)], steps=1)
    agreeing(Vision().double(), [field(mesh, 2, 3, 8, 12)], steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_models(mesh):
    run_on_ranks(compare_models, math.prod(mesh), mesh, timeout=120)


def operators():
    from neuralop.models import TFNO
    from torch_geometric.nn import GCNConv

    mesh = line = world_mesh((2,))
    torch.manual_seed(0)
    with in_double():
        tfno = TFNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1, rank=0.5)
        agreeing(tfno, [field(mesh, 2, 1, 12, 10)])
    nodes = (
        field(mesh, 11, 3, dim=0) if mesh.ndim == 1 else field(init_device_mesh("cpu", (mesh.size(),)), 11, 3, dim=0)
    )
    line = nodes.device_mesh
    edges = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(1))
    layout = Layout.of(line, [Shard(1)], edges.shape)
    index = ShardTensor(local_shard(edges, layout), layout)
    for network in (GCNConv(3, 3, add_self_loops=False, normalize=False), GCNConv(3, 3)):
        agreeing(network.double(), [nodes, index])
    agreeing(
        MeshGraphNet().double(),
        [nodes, index, field(line, 40, 3, dim=0)],
        loss=lambda out: (out[0] ** 2).sum() + out[1].sum(),
    )


@pytest.mark.slow
def test_operators_and_graphs():
    run_on_ranks(operators, 2, timeout=120)


# ---------------------------------------------------------------------- guards of a compiled program


def retraces():
    mesh = world_mesh((2,))
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout(0.5), nn.BatchNorm2d(2)).double()
    fast = eagerly(model)
    traces = []

    def ran(x, **how):
        out = fast(x, **how)
        traces.append(fast.forward.traces)
        return out

    x = field(mesh, 1, 1, 6, 6)
    ran(x)
    ran(field(mesh, 1, 1, 6, 6, seed=1))  # other values
    ran(field(mesh, 1, 1, 6, 6, shard_sizes=[2, 4]))  # other shard sizes
    ran(field(mesh, 1, 1, 8, 6))  # another shape
    with torch.no_grad():
        ran(x)
    fast.eval()
    ran(x)
    model[1].p = 0.25  # an attribute
    ran(x)
    model[0].weight.requires_grad_(False)
    ran(x)
    model[0].weight.requires_grad_(True)
    ran(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ran(x)
    ran(x.detach())
    assert traces == [1, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9], traces
    again = copy.deepcopy(fast)
    again[0].weight.data.zero_()
    assert not torch.equal(again(x).full_tensor(), fast(x).full_tensor())
    assert again.forward.traces == 1 and fast.forward.traces == 9
    scaled = eagerly(lambda x, by: x * by)
    assert torch.signbit(scaled(x, 0.0)).full_tensor().ne(torch.signbit(scaled(x, -0.0)).full_tensor()).all()
    assert scaled.traces == 2 and eagerly(eagerly(model))(x).shape == x.shape[:1] + (2,) + x.shape[2:]


def test_retraces():
    run_on_ranks(retraces, 2)


def random_numbers():
    mesh = world_mesh((2,))
    x = field(mesh, 4, 3, 8, 6)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5), nn.Dropout(0.5)).double()
    fast = eagerly(model)
    seen = []
    for run in (model, fast, fast):
        torch.manual_seed(5)
        seen.append([run(x).full_tensor() for _ in range(3)])
    for a, b, c in zip(*seen, strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(b, c)
    assert not torch.equal(seen[1][0] == 0, seen[1][1] == 0)


def test_random_numbers_equal_the_uncompiled_step():
    run_on_ranks(random_numbers, 2)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 3, 3, padding=1))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def inside():
    mesh = world_mesh((2,))
    x = field(mesh, 2, 3, 8, 6)
    agreeing(Checkpointed().double(), [x])

    model = nn.Conv2d(3, 3, 3, padding=1)
    fast = eagerly(model)
    y = field(mesh, 2, 3, 8, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = model(y), fast(y)
    assert a.dtype == b.dtype == torch.bfloat16
    assert torch.equal(a.full_tensor(), b.full_tensor())

    model.double()

    def step(batch, *, scale=1.0):
        out = model(batch["x"]) * scale
        return {"loss": (out**2).mean(), "parts": [out, batch["name"], out.full_tensor().sum()]}

    quick = eagerly(step)
    for scale in (1.0, 2.0):
        one, two = (f({"x": x, "name": "sea"}, scale=scale) for f in (step, quick))
        torch.testing.assert_close(to_full_tensor(one["loss"]), to_full_tensor(two["loss"]))
        assert two["parts"][1] == "sea" and isinstance(two["parts"][0], ShardTensor)
        torch.testing.assert_close(one["parts"][2], two["parts"][2])
        model.zero_grad()
        two["loss"].backward(retain_graph=True)
        two["loss"].backward()
        mine = model.weight.grad.clone()
        model.zero_grad()
        (2 * one["loss"]).backward()
        torch.testing.assert_close(mine, model.weight.grad)
    assert quick.traces == 2

    def resized(x):  # torch's kernel copies a dim of unchanged size, torch's trace of it does not
        return F.interpolate(x, scale_factor=(1.1, 2.3), mode="bilinear")

    torch.testing.assert_close(to_full_tensor(eagerly(resized)(x)), resized(to_full_tensor(x)))
    grads = []
    for run in (windows, eagerly(windows)):  # results that share memory
        mine = x.detach().requires_grad_()
        out = run(mine)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        grads.append(to_full_tensor(mine.grad))
    assert torch.equal(*grads)

    def written(x, by):
        x.mul_(by)
        return x.sum()

    with torch.no_grad():
        for turned in (False, True):  # also where the strides of the local tensor differ from the trace
            one = field(mesh, 4, 6, dim=0, grad=False)
            one = ShardTensor(one._local_tensor.t().contiguous().t(), one._layout) if turned else one
            two = ShardTensor(one._local_tensor.clone(), one._layout)
            written(one, 3.0)
            torch.testing.assert_close(in_place(two, 3.0).full_tensor(), one.sum().full_tensor())
            assert torch.equal(one.full_tensor(), two.full_tensor())


def windows(x):
    return (x * 2).unfold(2, 3, 1).unfold(3, 2, 1)


in_place = eagerly(lambda x, by: x.mul_(by).sum())


def test_supported_steps():
    run_on_ranks(inside, 2, timeout=120)


# ---------------------------------------------------------------------- with data parallelism


def wrapped(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
    domain = mesh["spatial"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)).double()
    twin = copy.deepcopy(model)
    rank = mesh.get_local_rank("data")

    def parallel(m, compiled):
        m = eagerly(m) if compiled else m
        if kind == "fsdp":
            return parallelize(m, mesh, strategy="fsdp")
        if kind == "units":
            for child in m:
                if list(child.parameters()):
                    fully_shard(child, mesh=mesh["data"])
            return fully_shard(m, mesh=mesh["data"])
        return DDP(m, process_group=mesh.get_group("data"))

    plain = parallel(model, False)
    if kind == "units":
        quick = shardfield.compile(parallel(twin, False), backend="aot_eager")
    elif kind == "ddp outside":
        quick = shardfield.compile(parallel(twin, False), backend="aot_eager")
    else:
        quick = parallel(twin, True)
    losses = []
    for m in (plain, quick):
        optimizer = torch.optim.SGD(m.parameters(), 0.05)
        found = []
        for step in range(3):
            x = field(domain, 2, 3, 8, 6, seed=10 * step + rank, grad=False)
            loss = (m(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["ddp", "ddp outside", "fsdp", "units"])
def test_data_parallel(kind):
    run_on_ranks(wrapped, 4, kind, timeout=120)


def by_torch_alone():
    mesh = world_mesh((2,))
    torch.manual_seed(0)
    for model in (Residual(), Vision()):
        model = model.double()
        twin, seen = copy.deepcopy(model), []
        for run in (model, torch.compile(twin, backend="eager")):
            x = field(mesh, 2, 3, 8, 12)
            loss = (run(x) ** 2).sum()
            loss.backward()
            seen.append([loss.full_tensor(), x.grad.full_tensor()])
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b)


def three_rows(x, *, scale):
    a, b, c = torch.unbind(x[:, :3], 1)
    return {"rows": (a * scale["by"] + b * b + c,), "mean": x.mean(2)}


class Replicated(nn.Module):
    """Redistributes its input over a mesh that it keeps."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.norm = mesh, nn.GroupNorm(1, 3)

    def forward(self, x):
        return self.norm(x).redistribute(self.mesh, [Replicate()])


def by_torch_in_one_graph():
    """`torch.compile(fullgraph=True)` is `shardfield.compile` for ShardTensors, and torch's own for plain tensors."""
    mesh = world_mesh((2,))
    torch.manual_seed(0)
    whole = {"fullgraph": True, "backend": "aot_eager"}
    for model in (Replicated(mesh).double(), three_rows):
        compiled = torch.compile(copy.deepcopy(model) if isinstance(model, nn.Module) else model, **whole)
        extra = {} if isinstance(model, nn.Module) else {"scale": {"by": torch.tensor(2.0, dtype=torch.float64)}}
        for rows in (8, 5, 8):  # the last one runs the program of the first
            seen = []
            x = field(mesh, 2, 3, rows, 12)
            for run in (model, compiled):
                mine = x.detach().requires_grad_()
                out = torch.utils._pytree.tree_leaves(run(mine, **extra))
                sum((part**2).sum() for part in out).backward()
                seen.append([part.full_tensor() for part in (*out, mine.grad)])
            for a, b in zip(*seen, strict=True):
                torch.testing.assert_close(a, b)
    plain = torch.randn(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(compiled(plain, **extra), three_rows(plain, **extra))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()).double()
    expected = model(x).full_tensor()
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    model.compile(**whole)  # in place, inside the module's hooks
    torch.testing.assert_close([model(x).full_tensor(), model(x).full_tensor()], [expected, expected])
    assert called == [1, 1]
    counted = torch.compile(lambda x: x.sum().item(), **whole)
    with pytest.raises(Untraceable, match="item"):
        counted(field(mesh, 2, 3, 8, 12))
    with pytest.raises(Exception, match="disable"):  # options that shardfield.compile does not have are torch's
        torch.compile(lambda x: x.sum(), fullgraph=True, backend="aot_eager", dynamic=True)(field(mesh, 2, 3, 8, 12))


def test_torch_compile_on_shard_tensors():
    run_on_ranks(by_torch_alone, 2, timeout=120)
    run_on_ranks(by_torch_in_one_graph, 2, timeout=120)


# ---------------------------------------------------------------------- unsupported steps


def refused():
    mesh = world_mesh((2,))
    x = field(mesh, 4, 6, dim=0)

    def sizes(x):
        return x * float(x.sum())

    with pytest.raises(Untraceable, match="refused.<locals>.sizes cannot be traced"):
        eagerly(sizes)(x)
    fast = eagerly(sizes, fullgraph=False)
    with pytest.warns(UserWarning, match="sizes runs uncompiled: .* cannot be traced") as caught:
        first = fast(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fast(x)
    assert len(caught) == 1
    torch.testing.assert_close(first.full_tensor(), sizes(x).full_tensor())
    torch.testing.assert_close(again.full_tensor(), first.full_tensor())

    with pytest.raises(Untraceable, match="interpolate of uint8 cannot be traced"):
        eagerly(lambda x: F.interpolate(x.to(torch.uint8)[None, None], size=(5, 5), mode="bilinear"))(x)
    outside = torch.ones(6, dtype=torch.float64)
    with pytest.raises(Untraceable, match="captures the tensor 'outside'"):
        eagerly(lambda x: x + outside)(x)
    hidden = [outside]
    with pytest.raises(Untraceable, match="neither an argument nor part of a module"):
        eagerly(lambda x: x + hidden[0])(x)

    class Keeps(nn.Module):
        def forward(self, x):
            self.last = x * 2
            return x

    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean().full_tensor()
            return x - self.mean

    keeps = Keeps()
    with pytest.raises(Untraceable, match="stores a tensor as 'last'"):
        eagerly(keeps)(x)
    assert not hasattr(keeps, "last")
    with pytest.raises(Untraceable, match="assigns a new tensor to 'mean'"):
        eagerly(Replaces())(x)

    few = eagerly(lambda x: x * 2, retraces=2)
    few(x), few(field(mesh, 6, 6, dim=0))
    with pytest.raises(Untraceable, match="traced 2 times already"):
        few(field(mesh, 8, 6, dim=0))
    with pytest.warns(UserWarning, match="round up sizes that change") as warned:
        some = eagerly(lambda x: x * 2, retraces=1, fullgraph=False)
        for n in range(4, 12):
            assert torch.equal(some(field(mesh, n, 6, dim=0)).full_tensor(), 2 * field(mesh, n, 6, dim=0).full_tensor())
    assert some.traces == 1 and len(warned) == 1 and len(some._eager) == 1, "sizes that change keep nothing"
    with pytest.raises(ValueError, match="backend 'inducto' is not one of inductor, aot_eager"):
        shardfield.compile(sizes, backend="inducto")
    with pytest.raises(ValueError, match="no pass is named 'twice'"):
        shardfield.compile(sizes, passes=["twice"])
    with pytest.raises(ValueError, match="leave dynamic=False"):
        shardfield.compile(sizes, dynamic=True)
    with pytest.raises(TypeError, match="expected a module or a function"):
        shardfield.compile(3)

    # errors of the step itself are raised unchanged on all ranks; values are checked when the program runs
    with pytest.raises(Exception, match="1 != 6|must match|cannot"):
        eagerly(lambda x: x @ x)(x)
    classes = eagerly(lambda x, t: F.cross_entropy(x, t))
    scores = field(mesh, 4, 6, dim=1)
    assert math.isfinite(classes(scores, torch.tensor([0, 1, 2, 3])).item())
    with pytest.raises(IndexError, match="Target out of bounds"):
        classes(scores, torch.tensor([0, 1, 2, 9]))
    loss = classes(scores, torch.tensor([0, 1, 2, 3]))  # and later calls work
    given = scores._local_tensor
    (once,) = torch.autograd.grad(loss._local_tensor, given, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward|not have been used in the graph|does not have a grad_fn"):
        torch.autograd.grad(once.sum(), given)


def test_unsupported_steps_are_refused():
    run_on_ranks(refused, 2, timeout=120)


# ---------------------------------------------------------------------- explain()


def by_call(report):
    """Return messages and bytes of each call, forward and backward."""
    found = {}
    for row in report.rows:
        numbers = (row.messages, row.bytes, row.back_messages, row.back_bytes)
        before = found.setdefault((row.module, row.op.strip("_"), str(row.output)), (0, 0, 0, 0))
        found[row.module, row.op.strip("_"), str(row.output)] = tuple(map(sum, zip(before, numbers, strict=True)))
    return found


def explained():
    mesh = world_mesh((2,))
    torch.manual_seed(0)
    model = Residual().double()
    x = field(mesh, 2, 3, 10, 8)

    def seen(run, steps=1):
        with explain() as report:
            sent = [0, 0]
            tell = runtime.active.meter

            def meter(kind, messages, nbytes):
                sent[:] = sent[0] + messages, sent[1] + nbytes
                tell(kind, messages, nbytes)

            runtime.active.meter = meter
            losses = [(run(x) ** 2).sum() for _ in range(steps)]
            sum(losses).backward()
            runtime.active.meter = tell
        assert (report.messages, report.bytes) == tuple(sent) and not report._unattributed.kinds
        return report

    eager, apart, together = seen(model), eagerly(model, passes=[]), eagerly(model)
    for _ in range(2):  # during the trace, and afterwards
        found = seen(apart)
        assert by_call(found) == by_call(eager)
        assert [r.compiled for r in found.rows][:9] == [True] * 8 + [False]  # the loss is not compiled
        shared = seen(together)
        assert shared.messages < eager.messages and shared.bytes < eager.bytes
        kept = [r for r in shared.rows if not r.op.startswith("shared")]
        assert [(r.module, r.op) for r in kept] == [(r.module, r.op) for r in found.rows]
        (halo, *sums) = [r for r in shared.rows if r.op.startswith("shared")]
        assert halo.op == "shared: Residual/first conv2d, Residual/second conv2d" and halo.messages == 1
        assert sums and not any(r.messages for r in sums) and all(r.back_messages == 1 for r in sums)
    assert by_call(seen(apart, 2)) == by_call(seen(model, 2))  # two forwards, then their backwards
    one, two = (r for r in seen(apart, 2).rows if r.module == "Residual/last" and r.op == "conv2d")
    assert (one.back_messages, one.back_bytes) == (two.back_messages, two.back_bytes) != (0, 0)
    assert "rule, compiled" in str(shared) and "8" in str(shared)
    free = []
    for run in (model, apart):
        with torch.no_grad(), explain() as report:
            run(x)
        free.append((report.messages, by_call(report)))
    assert free[0] == free[1], free
    loss = (apart(x) ** 2).sum()
    with explain() as report:  # a program that ran outside of explain() has no calls to attribute
        loss.backward()
    assert report.rows == [] and report.messages == sum(r.back_messages for r in eager.rows)


def test_explain_names_the_calls_of_a_compiled_step():
    run_on_ranks(explained, 2, timeout=60)


# ---------------------------------------------------------------------- a trace that fails on some ranks


PLACES = ("before", "between", "after", "swallowed", "values", "backward", "graph", "backend")


def failing_on_some(mesh_shape):
    """Run a step that sends messages during the trace, and whose trace fails on one rank at several places."""
    mesh = world_mesh(mesh_shape)
    x = field(mesh, 8, 6, dim=0)
    me, ranks = dist.get_rank(), mesh.size()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, now):
            ctx.now = now
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if ctx.now:
                raise ValueError("in backward")
            return grad, None

    def step(x, at, who):
        def here(place):
            if place == at and me == who and runtime.active.tracer is not None:
                raise ValueError(f"it fails {place}")

        def again(x):
            return ShardTensor.from_local(x.to_local() * 2, mesh, x.placements)  # a message for each axis

        here("before")
        x = again(x)
        here("between")
        try:
            here("swallowed")
            x = again(x)
        except ValueError:
            pass
        x = again(x)
        if at == "values" and me == who and runtime.active.tracer is not None:
            float(x.sum())
        here("after")
        now = at == "backward" and me == who and runtime.active.tracer is not None
        return (ShardTensor(Fails.apply(x._local_tensor, now), x._layout) ** 2).sum()

    expected = to_full_tensor(step(x, "", 0).detach())
    plain, gone = passes.fingerprint, []
    for number, at in enumerate(PLACES):
        who = (number + 1) % ranks

        def fingerprint(graph, changes, fails=(at == "graph" and me == who)):
            if fails:
                raise ValueError("no graph")
            return plain(graph, changes)

        def backend(graph, inputs, fails=(at == "backend" and me == who)):
            if fails:
                raise ValueError("no code")
            return graph

        passes.fingerprint = fingerprint
        try:
            fast = shardfield.compile(step, backend=backend, fullgraph=False)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                mine = x.detach().requires_grad_()
                found = fast(mine, at, who)
        finally:
            passes.fingerprint = plain
        said = [str(w.message) for w in caught if "runs uncompiled" in str(w.message)]
        # the other ranks report that rank's error
        if len(said) != 1 or (me != who and at != "swallowed" and f"rank {who}: " not in said[0]):
            gone.append((at, who, said))
        torch.testing.assert_close(to_full_tensor(found.detach()), expected)
        found.backward()
        torch.testing.assert_close(to_full_tensor(mine.grad), to_full_tensor(2 * 8 * 8 * x.detach()))
    fast = eagerly(step)
    torch.testing.assert_close(to_full_tensor(fast(x, "", 0).detach()), expected)
    assert fast.traces == 1
    with pytest.raises(Untraceable, match="cannot be traced"):  # on all ranks, where it is an error
        eagerly(step)(x, "between", ranks - 1)

    # Integers become constants of the program: all ranks retrace with them, though only one has read a value.
    def looks(x, index):
        return x * (index.max().item() if me == ranks - 1 else 5)

    fast = eagerly(looks)
    assert torch.equal(to_full_tensor(fast(x, torch.tensor([1, 5]))), to_full_tensor(looks(x, torch.tensor([1, 5]))))
    captured = eagerly(lambda x: ShardTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim))(torch.ones(3))
    assert torch.equal(to_full_tensor(captured), torch.ones(3 * ranks))
    hidden, placements = weakref.ref(mesh), [Shard(0)] * mesh.ndim  # a captured mesh would be found
    with pytest.raises(Untraceable, match="over a mesh that none of the arguments"):
        eagerly(lambda x: ShardTensor.from_local(x, hidden(), placements))(torch.ones(3))
    with pytest.raises(ShardingError, match="program"):
        eagerly(lambda x, y: x + scatter_tensor(y, 0, mesh, x.placements))(x, torch.ones(8, 6))
    return gone


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_trace_failure_on_one_rank_fails_on_all(mesh):
    results = run_on_ranks(failing_on_some, math.prod(mesh), mesh, timeout=100)
    assert not any(results), results


def many_messages():
    mesh = world_mesh((2, 2))
    x = field(mesh, 8, 6, dim=0)

    def step(x):
        for _ in range(40):
            x = ShardTensor.from_local(x.to_local() * 1, mesh, x.placements)
        return x

    assert torch.equal(to_full_tensor(eagerly(step)(x)), to_full_tensor(x))


def test_messages_during_a_trace_do_not_hold_the_gil():
    run_on_ranks(many_messages, 4, timeout=60)


# ---------------------------------------------------------------------- case tables, Inductor


# Every row with SHARDFIELD_LAYOUTS, as `make sweep` sets it.
EVERY = 1 if "SHARDFIELD_LAYOUTS" in os.environ else 120
TOGETHER = 20


def rows_of(mesh):
    """Return (table, row) pairs in batches of one test each; the rows differ between 1-d and 2-d meshes."""
    found = [(name, len(case_tables.table(name))) for name in case_tables.TABLES]
    rows = [(name, at) for name, n in found for at in range(min(EVERY, n) * (len(mesh) - 1) // 2 % EVERY, n, EVERY)]
    return [rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER)]


def rows_compiled(rows, mesh):
    found = []
    for family, at in rows:
        case = case_tables.table(family)[at]
        case.layouts = 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* runs uncompiled")
            found += check_case(case, mesh, transform=functools.partial(eagerly, fullgraph=False))
    return found


@pytest.mark.parametrize(("mesh", "rows"), [(mesh, rows) for mesh in [(2,), (2, 2)] for rows in rows_of(mesh)])
def test_sample_of_the_tables(mesh, rows):
    results = run_on_ranks(rows_compiled, math.prod(mesh), rows, mesh, timeout=8 * len(rows))
    assert not any(results), results


# Rows that failed once in a run of all tables: results that share memory with the input of a collective, tensors of a
# trace that were kept for later calls, an argument read from a frame, kernels that torch decomposes otherwise or does
# not name in a trace, and a message that was waited for in forward and again in backward.
FOUND = [
    ("normalization", "group_norm, double backward 2x6x3,6,6"),
    ("truncation", "forward 2x5x6 (1,),((-2, -1, 0, 1),),ortho"),
    ("loss", "l1_loss 5x6,5x6 weight=T"),
    ("interpolate", "interpolate 1x2x9x6 scale_factor=(1.1, 2.3),mode=nearest"),
    ("interpolate", "interpolate 1x2x4x6 size=(82, 55),mode=nearest"),
    ("interpolate", "interpolate 1x2x8x6 size=(5, 9),mode=bilinear,align_corners=False"),
    ("grid_sample", "grid_sample 1x2x6x5,1x4x5x2 align_corners=False #2"),
    ("sdpa", "scaled_dot_product_attention 2x2x0x4,2x2x3x4,2x2x3x4"),
    ("sdpa", "write_contiguous_of_transposed 2x8x3x4,2x8x3x4,2x8x3x4 is_causal=False"),
]


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_rows_that_failed_before(mesh):
    places = [(family, [c.name for c in case_tables.table(family)].index(name)) for family, name in FOUND]
    results = run_on_ranks(rows_compiled, math.prod(mesh), places, mesh, timeout=100)
    assert not any(results), results


def other_strides():
    @torch.library.custom_op("shardfield_tests::columns", mutates_args=())
    def columns(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    columns.register_fake(lambda x: x.new_empty(x.shape))
    columns.register_autograd(lambda ctx, grad: columns(grad))

    def flat(x, scale):
        return columns(x).reshape(-1) * scale.sum()

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    scale = field(world_mesh((2,)), 1, 1, 5, 2)
    out = eagerly(flat)(x, scale)
    torch.testing.assert_close(to_full_tensor(out), x.reshape(-1) * to_full_tensor(scale).sum())
    out.sum().backward()
    torch.testing.assert_close(x.grad, to_full_tensor(scale).sum().expand(3, 4))


def test_strides_that_differ_from_the_trace():
    run_on_ranks(other_strides, 2)


def with_inductor():
    mesh = world_mesh((2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()).double()
    agreeing(model, [field(mesh, 1, 2, 6, 4)], backend="inductor")


def test_inductor():
    run_on_ranks(with_inductor, 2, timeout=300)


def work_behind_sums(chosen):
    """Return the number of convolutions of backward between the start of each all_reduce and its wait."""
    counts: list[list[int]] = []

    def sums(nodes):
        return [n for n in nodes if n.target is passes.ALL_REDUCE]

    def look(graph, inputs):
        nodes = list(graph.graph.nodes)
        at_once = passes.AT_ONCE[passes.ALL_REDUCE]  # a start and its wait in one op: nothing between them
        waits = [n for n in nodes if n.target is at_once or (n.target is passes.WAIT and n.args[0] in sums(nodes))]
        between = [[] if n.target is at_once else nodes[nodes.index(n.args[0]) : nodes.index(n)] for n in waits]
        counts.append([sum(n.target in passes.COMPUTE_OPS for n in part) for part in between])
        return graph

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))]
    model = shardfield.compile(nn.Sequential(*layers), backend=look, passes=chosen)
    before = conv_rule.prefers_joining
    conv_rule.prefers_joining = lambda *sizes: False  # as for blocks that are too large to be joined with their halos
    try:
        with runtime.fresh():
            (model(field(world_mesh((2,)), 1, 4, 12, 8, dtype=torch.float32)) ** 2).sum().backward()
    finally:
        conv_rule.prefers_joining = before
    return counts[-1]


def test_weight_gradients_overlap_all_reduces():
    """The kernel gradients of later convolutions are computed while the all_reduces of the norms are in flight."""
    for counts in run_on_ranks(work_behind_sums, 2, ["buckets", "overlap"]):
        assert [bool(n) for n in counts] == [False, True, True, True], counts
    for counts in run_on_ranks(work_behind_sums, 2, ["buckets"]):
        assert not any(counts), counts


def test_collectives_without_overlap_are_one_op():
    """A start and a wait with nothing between them become one op, in the order and number of the messages sent."""
    graphs: list[list[str]] = []

    def look(graph, inputs):
        graphs.append([n.target.name().partition("::")[2] for n in graph.graph.nodes if "shardfield" in str(n.target)])
        return graph

    torch.manual_seed(0)
    with simulated(8, 4):
        mesh = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("rows",))
        x = ShardTensor.from_local(torch.randn(1, 2, 4, 6), mesh, [Shard(2)], "chunk", (1, 2, 32, 6))
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3, padding=1))
        with explain() as eager:
            model(x).square().sum().backward()
        fast = shardfield.compile(model, backend=look)
        fast(x).square().sum().backward()
        with explain() as compiled:
            fast(x).square().sum().backward()
    forward, backward = graphs
    assert forward == ["exchange", "all_reduce", "exchange"]  # halo, statistics, halo: each is needed at once
    assert backward.count("start_exchange") == backward.count("wait") == 1  # the weight's gradient overlaps with it
    assert compiled.messages <= eager.messages
