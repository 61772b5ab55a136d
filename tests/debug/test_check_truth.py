"""`check` fails models that are wrong in one place, on one rank, or next to infinities, and passes exact ones."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardfield import ShardfieldError, ShardTensor, check
from shardfield.debug.differences import Line, relative_error
from shardfield.debug.model_inputs import Inputs
from shardfield.debug.parity import command
from shardfield.debug.rounding import OtherRounding
from shardfield.debug.work import WorkCounter
from tests.launch import ROOT

SHAPE = (2, 3, 8, 8)


class Changed(torch.autograd.Function):
    """Return the tensor, and its gradient times a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Masked(nn.Module):
    """Return -inf in one row; on shards all other numbers are wrong."""

    def forward(self, x):
        x = x + 1.5 if isinstance(x, ShardTensor) else x
        rows = torch.arange(8).view(8, 1) == 2
        return x.masked_fill(rows, -math.inf)


class OtherInfinity(nn.Module):
    def forward(self, x):
        rows = torch.arange(8).view(8, 1) == 2
        return x.masked_fill(rows, math.inf if isinstance(x, ShardTensor) else -math.inf)


class WrongOnOneRank(nn.Module):
    """Compute another gradient of the weight on rank 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        wrong = isinstance(x, ShardTensor) and dist.get_rank() == 1
        return x * Changed.apply(self.weight, 2.0 if wrong else 1.0)


class BufferOnOneRank(nn.Module):
    """Count calls in a buffer; the second one is wrong on rank 1."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        wrong = isinstance(x, ShardTensor) and dist.get_rank() == 1 and self.calls > 0
        self.calls += 2.0 if wrong else 1.0
        return self.mix(x)


@pytest.mark.parametrize(
    ("factory", "steps", "kind"),
    [
        (Masked, 0, "output"),
        (OtherInfinity, 0, "output"),
        (WrongOnOneRank, 0, "parameter gradient"),
        (BufferOnOneRank, 2, "buffer after"),
    ],
)
def test_wrong_models(factory, steps, kind):
    found = check(factory, SHAPE, (2,), steps=steps)
    wrong = [line for line in found.lines if not line.agrees(found.tolerance)]
    assert not found and wrong and wrong[0].kind == kind and "NOT the same" in str(found), found
    if factory in (WrongOnOneRank, BufferOnOneRank):
        assert wrong[0].rank == 1 and "on rank 1" in str(wrong[0])


class Half(nn.Module):
    """Compute in float32 whatever the dtype of the model: its noise is 1e-7 in a float64 run."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(64, 64), nn.Linear(64, 64), factor

    def forward(self, x):
        x = self.first(x).float().double()
        weight = self.second.weight.float()
        x = torch.tanh(F.linear(x.float(), weight)).to(self.second.weight.dtype)
        return x * self.factor if isinstance(x, ShardTensor) else x


def half_wrong():
    return Half(1 + 1e-4)


def test_rounding_noise():
    for dtype in ("float64", "float32"):
        found = check(Half, (2, 6, 64), (2,), dtype=dtype)
        assert found, found
        assert 1e-9 < max(line.noise for line in found.lines) < 1e-4
        assert not check(half_wrong, (2, 6, 64), (2,), dtype=dtype)
    assert Line("output", "0", 2e-3, 1e-3).agrees(1e-9) and not Line("output", "0", 2e-2, 1e-3).agrees(1e-9)
    assert not Line("output", "0", 0.5, math.inf).agrees(1e-9)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_rounding():
    torch.manual_seed(0)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    for run in (lambda: a @ b, lambda: a.sum(0), lambda: torch.fft.fft(a), lambda: F.conv1d(a[None], b[:, :, None])):
        with OtherRounding():
            other = run()
        assert not torch.equal(other, run()) and relative_error(other, run()) < 1e-5
    with OtherRounding():  # sparse operands, such as those of torch_geometric's GraphUNet, are not scaled
        assert (a.to_sparse_csr() @ b.to_sparse_csr()).shape == (64, 64)


@dataclasses.dataclass(frozen=True)
class Batch:
    field: torch.Tensor
    forcing: dict
    steps: int = 2


class TakesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, batch, *, scale):
        field = self.mix(batch.field)
        assert field.shape[-2:] == batch.forcing["sun"].shape
        return {"field": field * scale + batch.forcing["sun"] * batch.steps}


def batch_model():
    torch.manual_seed(1)
    batch = Batch(torch.randn(1, 3, 8, 6), {"sun": torch.randn(8, 6)})
    return TakesBatch(), {"batch": batch, "scale": torch.randn(3, 1, 1)}


def test_dict_and_dataclass_inputs():
    found = check(batch_model, mesh=(2,))
    assert found, found
    paths = {line.name for line in found.lines if line.kind == "input gradient"}
    assert paths == {"batch.field", "batch.forcing.sun", "scale"} and found.shape == (1, 3, 8, 6)
    both = {"batch.field": (2, 3), "batch.forcing.sun": (0, 1)}
    several = check(batch_model, mesh=(2, 2), shard=both)
    assert several and "sun" in str(several), several
    with pytest.raises(ShardfieldError) as wrong:  # one line, without the ranks' tracebacks
        check(batch_model, mesh=(2,), shard={"batch.rain": (0,)})
    inputs = "batch.field, batch.forcing.sun, scale"
    assert str(wrong.value) == f"check: no input tensor batch.rain; there are {inputs}"
    with pytest.raises(ShardfieldError, match="2 dims .* of scale for a mesh of 1 axes"):
        check(batch_model, mesh=(2,), shard={"scale": (0, 1)})


class GraphModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 3)

    def forward(self, graph):
        sender, receiver = graph.edge_index
        x = self.mix(graph.x)
        return torch.zeros_like(x).index_add(0, receiver, x[sender] * graph.edge_attr)


def graph_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric.data import Data
    at = torch.arange(11)
    edges = torch.stack([at, (at + 1) % 11])
    torch.manual_seed(0)
    return GraphModel(), Data(x=torch.randn(11, 4), edge_index=edges, edge_attr=torch.randn(11, 1))


def test_graph_inputs():
    found = check(graph_model, mesh=(2,), dims=(0,))
    assert found, found
    names = {line.name for line in found.lines if line.kind == "input gradient"}
    assert names == {"0.x", "0.edge_index", "0.edge_attr"} and found.shape == (11, 4)
    assert check(graph_model, mesh=(2,), shard={"0.x": (0,), "0.edge_attr": (0,)})


def test_inputs_are_copied():
    graph = graph_model()[1]
    changed = Inputs.of(graph).map(lambda path, t: t * 0)
    assert graph.x.abs().sum() > 0 and changed.args[0].x.abs().sum() == 0
    assert Inputs.of((1, graph)).tensors().keys() == {"1.x", "1.edge_index", "1.edge_attr"}


class DropPath(nn.Module):
    """Skip a sample at random, as in timm."""

    def forward(self, x):
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.drop = nn.Conv2d(3, 3, 3, padding=1), DropPath()

    def forward(self, x):
        return x + self.drop(self.mix(x))


class Sampled(nn.Module):
    """Draw a sample around the mean, and drop elements without a module."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        mean = self.mix(x)
        return F.dropout(mean + 0.1 * torch.randn_like(mean), 0.3, self.training)


class SampledWrong(Sampled):
    def forward(self, x):
        out = super().forward(x)
        sharded = isinstance(x, ShardTensor) and x.placements[0].is_shard()
        return out * 1.01 if sharded else out


def test_random_numbers():
    found = check(Dropped, SHAPE, (2,))
    assert found and found.reference == "one device", found
    sampled = check(Sampled, SHAPE, (2,))
    assert sampled and "the same field replicated" in str(sampled), sampled
    assert not check(SampledWrong, SHAPE, (2,))


def test_steps_of_the_command(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["tests.debug.test_check_truth:BufferOnOneRank", "--shape", "2,3,8,8", "--no-table"]
    assert command(words) == 0
    assert "parameter after" not in capsys.readouterr().out
    assert command([*words, "--steps", "2"]) == 1
    said = capsys.readouterr().out
    assert "ok      parameter after    mix.weight" in said and "DIFFERS buffer after       calls" in said
    words = ["tests.debug.test_check_truth:batch_model", "--mesh", "2,2", "--shard", "batch.field:2,3", "--dtype"]
    assert command([*words, "float32", "--shard", "batch.forcing.sun:0,1"]) == 0
    assert "mesh 2 x 2, float32" in capsys.readouterr().out


class Replicated(nn.Module):
    """Write the field into a replicated buffer, so that every rank computes what follows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.first(x)
        if isinstance(x, ShardTensor):
            held = torch.zeros(hidden.shape, dtype=x.dtype)  # memory of another tensor: it cannot be sharded
            hidden = ShardTensor.from_local(held, x.device_mesh).add_(hidden)
        return self.second(hidden)


def shared():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64))


class Biased(nn.Module):
    """Attend with a learned bias: torch stores the weights for its gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 96, 96))

    def forward(self, x):
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, self.bias)


def test_work():
    found = check(shared, (2, 40, 16), (2,), dims=(1,), even=True)
    assert found and not found.lost and found.input_balance == 1.0
    assert found.balance < 1.01 and found.redundancy < 1.05, found
    biased = check(Biased, (2, 96, 64), (2,), dims=(1,), even=True)
    assert biased and biased.redundancy < 1.05, biased
    uneven = check(shared, (2, 40, 16), (2,), dims=(1,))
    assert uneven.input_balance == pytest.approx(26 / 20) and uneven.balance == pytest.approx(1.3, abs=0.03)
    replicated = check(Replicated, (2, 160, 16), (2,), dims=(1,), even=True)
    assert replicated and replicated.lost == ["add_ over axis 'h'"] and 1.5 < replicated.redundancy < 2.0, replicated
    assert "lost sharding: add_ over axis 'h'" in str(replicated) and "redundancy 1." in str(replicated)


class Routed(nn.Module):
    """A model whose plan reads a long index, and whose step reads little of it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.register_buffer("index", torch.arange(40).flip(0))

    def forward(self, x):
        return self.mix(x)[:, self.index]


def test_work_without_plans():
    """What a plan reads once, and the copies that `check` compares, are no work of a step."""
    found = check(Routed, (2, 40, 16), (2,), dims=(1,), even=True)
    assert found and found.redundancy < 1.2, found


def test_work_counter():
    with WorkCounter() as work:
        torch.randn(8, 16) @ torch.randn(16, 4)
    assert work.total == 2 * 8 * 16 * 4 + 8 * 16 + 16 * 4  # the product, and its random operands
    x = torch.randn(4, 32)
    for run, count in (
        (lambda: x * 2, 128),
        (lambda: x.sum(), 128),
        (lambda: x.new_zeros(3), 3),
        (lambda: x.t().view(-1, 4)[:2], 0),
        (lambda: torch.fft.fft(x.to(torch.complex64)), 128 + 5 * 128 * 5),
        (lambda: F.scaled_dot_product_attention(*[x.view(1, 2, 4, 16)] * 3), 2 * 2 * 2 * 4 * 4 * 16),
    ):
        with WorkCounter() as work:
            run()
        assert work.total == count


def test_relative_error():
    inf, nan = math.inf, math.nan

    def error(a, b):
        return relative_error(torch.tensor(a), torch.tensor(b))

    assert error([1.0, -inf, nan], [2.0, -inf, nan]) == 0.5
    assert error([-inf], [-inf]) == 0.0 and error([inf], [-inf]) == inf and error([nan], [inf]) == inf
    assert error([1.0], [inf]) == inf and error([inf], [1.0]) == inf and error([2], [2]) == 0.0
    assert error([1 + 0j], [1 + 1j]) == 1.0 and error([1], [2]) == inf
    assert relative_error(torch.ones(2).double(), torch.ones(2)) == inf and relative_error(None, torch.ones(1)) == inf
