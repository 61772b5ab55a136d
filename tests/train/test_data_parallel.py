"""Data parallelism on top of a sharded field: parameters after three steps equal the one-process run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel as DDP

from shardfield import ShardTensor
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks

ROWS = [5, 2]


class Net(nn.Module):
    """A net over the rows of a (batch, rows, channels) field."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.down = nn.Linear(8, 2)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return self.down(h + self.block(h))


def data(step: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, sum(ROWS), 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(batch, sum(ROWS), 2, dtype=torch.float64, generator=generator)


def reference(batch: int) -> dict[str, torch.Tensor]:
    """Three steps in one process, on the full batch."""
    model = seeded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = data(step, batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return dict(model.named_parameters())


def seeded_model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def sharded(full: torch.Tensor, mesh) -> ShardTensor:
    layout = Layout.of(mesh, [Shard(1)], full.shape, {1: ROWS})
    start, stop = layout.span(1)
    return ShardTensor(full[:, start:stop].clone(), layout)


def wrapped(strategy: str, model: Net, mesh):
    """Wrap the model for data parallelism over mesh["data"], with the domain over mesh["spatial"]."""
    data_mesh, cpu = mesh["data"], torch.device("cpu")
    if strategy == "none":
        return model
    if strategy == "ddp":
        return DDP(model, process_group=data_mesh.get_group())
    if strategy == "fsdp1":
        return FSDP(model, device_mesh=data_mesh, use_orig_params=True, device_id=cpu)
    if strategy == "hsdp1":
        pair = mesh["replica", "data"]
        return FSDP(
            model,
            device_mesh=pair,
            use_orig_params=True,
            device_id=cpu,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
    if strategy == "distribute_module+fsdp1":
        model = distribute_module(model, mesh["spatial"])
        return FSDP(model, device_mesh=data_mesh, use_orig_params=True, device_id=cpu)
    if strategy == "distribute_module":
        return distribute_module(model, mesh["spatial"])
    assert strategy in ("fsdp2", "hsdp2")
    over = mesh["replica", "data"] if strategy == "hsdp2" else data_mesh
    for part in (model.up, model.block, model):
        fully_shard(part, mesh=over)
    return model


def full_parameters(strategy: str, model) -> dict[str, torch.Tensor]:
    if "fsdp1" in strategy or strategy == "hsdp1":
        with FSDP.summon_full_params(model):
            return {n.replace("_fsdp_wrapped_module.", ""): full(p).clone() for n, p in model.named_parameters()}
    inner = model.module if strategy == "ddp" else model
    return {n: full(p) for n, p in inner.named_parameters()}


def full(p):
    return p.full_tensor() if isinstance(p, (DTensor, ShardTensor)) else p


def train(strategy: str, shape: tuple[int, ...], names: tuple[str, ...]):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    replicas = mesh.size() // mesh["spatial"].size()
    model = wrapped(strategy, seeded_model(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = 2 * replicas
    mine = dist.get_rank() // mesh["spatial"].size()
    for step in range(3):
        x, y = (t[2 * mine : 2 * mine + 2] for t in data(step, batch))
        optimizer.zero_grad()
        out = model(sharded(x, mesh["spatial"]))
        assert isinstance(out, ShardTensor) and out.shape == y.shape
        nn.functional.mse_loss(out, sharded(y, mesh["spatial"])).backward()
        optimizer.step()
    expected = reference(batch)
    got = full_parameters(strategy, model)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ("none", (1, 2)),
        ("distribute_module", (1, 2)),
        ("ddp", (2, 2)),
        ("fsdp1", (2, 2)),
        ("distribute_module+fsdp1", (2, 2)),
        ("fsdp2", (2, 2)),
        ("fsdp2", (1, 2)),
        ("hsdp1", (1, 2, 2)),
        ("hsdp2", (2, 1, 2)),
    ],
)
def test_three_steps(strategy, shape):
    names = ("replica", "data", "spatial")[3 - len(shape) :]
    run_on_ranks(train, torch.Size(shape).numel(), strategy, shape, names, timeout=90)


class Branches(nn.Module):
    """Use one of two branches per call, and return the result in a container."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, left):
        return {"out": [(self.left if left else self.right)(x), x]}


def train_branches(how: str):
    """Compare the gradients of a DDP model with those of a plain model on the full field."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone, model = Branches().double(), Branches().double()
    model.load_state_dict(alone.state_dict())
    model = DDP(model, **{how: True})
    for step, left in enumerate((True, False, True) if how == "find_unused_parameters" else (True, True, True)):
        x, y = data(step, 2)
        losses = []
        for net, field, target in ((alone, x, y), (model, sharded(x, mesh), sharded(y, mesh))):
            net.zero_grad()
            losses.append(nn.functional.mse_loss(net(field, left)["out"][0], target))
            losses[-1].backward()
        torch.testing.assert_close(losses[1].full_tensor(), losses[0])
        for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (name.startswith("left") != left), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
def test_ddp_finds_the_parameters_behind_sharded_results(how):
    run_on_ranks(train_branches, 2, how)
