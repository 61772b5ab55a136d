"""Rollouts: states and gradients of one process on every mesh and under every strategy, in constant memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardingError, rollout, strict
from shardfield.bench.measure import peak_memory
from shardfield.data import ShardedLoader, UnitGaussian
from shardfield.layout import Layout
from shardfield.tensor import ShardTensor
from shardfield.testing import run_on_ranks
from shardfield.train import Task, TrainConfig, Trainer, full_state_dict, parallelize
from shardfield.train.config import UsageError
from shardfield.train.log import Log

STEPS = 4
OPTIONS = [{}, {"grad_steps": 2}, {"checkpoint": True}, {"push_forward": True}, {"checkpoint": True, "grad_steps": 3}]
MESHES = [((1, 1), (7,), (6,)), ((1, 2), (4, 3), (6,)), ((2, 2), (5, 2), (6,)), ((1, 2, 2), (7, 0), (2, 4))]


class Step(nn.Module):
    """Two convolutions over state, forcings and constants, then a residual: a step of some PDE."""

    def __init__(self):
        super().__init__()
        self.up = nn.Conv2d(4, 5, 3, padding=1)
        self.down = nn.Conv2d(5, 2, 3, padding=1)

    def forward(self, x):
        return x[:, :2] + 0.1 * self.down(torch.tanh(self.up(x)))


def seeded_step() -> Step:
    torch.manual_seed(0)
    return Step().double()


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return initial states of two samples, forcings of the steps, constants, and the truth."""
    g = torch.Generator().manual_seed(1)
    shapes = [(2, 2, 7, 6), (STEPS, 2, 1, 7, 6), (1, 1, 7, 6), (STEPS, 2, 2, 7, 6)]
    x, forcings, constants, truth = (torch.randn(s, dtype=torch.float64, generator=g) for s in shapes)
    return 3 + 2 * x, forcings, constants, truth


def normalizer() -> UnitGaussian:
    return UnitGaussian(torch.full((2, 1, 1), 3.0).double(), torch.full((2, 1, 1), 2.0).double())


def gradients(model, x, forcings, constants, truth, **options):
    """Return the states, and the loss after backward."""
    states = list(rollout(model, x, STEPS, forcings=forcings, constants=constants, normalizer=normalizer(), **options))
    loss = sum((state - y).square().mean() for state, y in zip(states, truth, strict=True)) / STEPS
    loss.backward()
    return states


def compare(shape, rows, columns, strategy: str) -> list[float]:
    """Return the largest differences of states and gradients from plain torch in one process, for all options."""
    names = ("data", "h", "w")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    domain = mesh[names[1:]]
    x, forcings, constants, truth = data()
    mine = slice(None) if shape[0] == 1 else slice(mesh.get_local_rank("data"), mesh.get_local_rank("data") + 1)
    sizes = {-2: rows, -1: columns}

    def sharded(full):
        placements = [Shard(full.ndim - 2 + i) for i in range(domain.ndim)]
        layout = Layout.of(domain, placements, full.shape, {full.ndim + d: n for d, n in sizes.items()})
        block = full[..., slice(*layout.span(full.ndim - 2)), slice(*layout.span(full.ndim - 1))]
        return ShardTensor(block.clone(), layout)

    found = []
    for options in OPTIONS:
        plain = seeded_step()
        expected = gradients(plain, x, forcings, constants, truth, **options)
        model = parallelize(seeded_step(), mesh, domain=names[1:], strategy=strategy)
        with strict():
            states = gradients(
                model,
                sharded(x[mine]),
                [sharded(f[mine]) for f in forcings],
                sharded(constants),
                [sharded(y[mine]) for y in truth],
                **options,
            )
        assert all(s._layout is states[0]._layout for s in states)
        pairs = [(s.full_tensor(), e[mine]) for s, e in zip(states, expected, strict=True)]
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            pairs.append((grad, dict(plain.named_parameters())[name.removeprefix("module.")].grad))
        found.append(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize(("shape", "rows", "columns"), MESHES, ids=str)
def test_gradients_equal_one_process(shape, rows, columns, strategy):
    ranks = torch.Size(shape).numel()
    for differences in run_on_ranks(compare, ranks, shape, rows, columns, strategy):
        assert max(differences) < 1e-12, differences


def test_gradient_options_differ():
    """What the options change is seen in the gradients of plain torch."""

    def grads(**options):
        model = seeded_step()
        gradients(model, *data(), **options)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    full = grads()
    torch.testing.assert_close(grads(checkpoint=True), full, rtol=1e-13, atol=0)
    assert all((grads(**o) - full).abs().max() > 1e-6 for o in ({"grad_steps": 2}, {"push_forward": True}))


def peak_of_steps(steps: int) -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    model = seeded_step()
    layout = Layout.of(mesh, [Shard(2)], (1, 2, 64, 64))
    constants = ShardTensor(torch.ones(layout.local_shape, dtype=torch.float64), layout)

    def run():
        for _ in rollout(model, constants + 1, steps, constants=constants):
            pass

    with torch.no_grad():
        run()  # fill the caches
        return peak_memory(run, "cpu")


def peaks() -> tuple[int, int]:
    return peak_of_steps(1), peak_of_steps(100)


def test_memory_does_not_grow_with_steps():
    for first, last in run_on_ranks(peaks, 2):
        assert last <= 1.01 * first


def test_refused():
    model, x = seeded_step(), torch.zeros(2, 2, 7, 6, dtype=torch.float64)
    constants = torch.zeros(2, 2, 7, 6, dtype=torch.float64)
    for said, call in {
        "the next state must have the shape": lambda: list(rollout(lambda x: x[:, :1], x, 1)),
        "shape (2, 2, 7, 5), which does not fit": lambda: rollout(model, x, 1, constants=constants[..., :5]),
        "forcings of 2 steps for a rollout to step 3": lambda: rollout(model, x, 3, forcings=[x, x]),
        "not (7,)": lambda: rollout(model, torch.zeros(7), 1),
        "a tuple": lambda: list(rollout(lambda x: (x, x), x, 1)),
    }.items():
        with pytest.raises(ShardingError) as caught:
            call()
        assert said.removeprefix("a ") in str(caught.value)
    with pytest.raises(ValueError, match="steps is -1"):
        rollout(model, x, -1)


# ---------------------------------------------------------------------- in the training loop


class Windows:
    """States of a chaotic map at several times: sample i is (x, y), the state at time i and the times after it."""

    def __init__(self, n: int, length: int):
        g = torch.Generator().manual_seed(3)
        self.states = torch.randn(n + length, 2, 7, 6, dtype=torch.float64, generator=g)
        self.n, self.length = n, length

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": self.states[i], "y": self.states[i + 1 : i + 1 + self.length]}


class TwoChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        return x[:, :2] + self.layer(x)


def square_error(output, batch):
    return (output - batch["y"]).square().mean()


def train(config: TrainConfig, can_roll: bool = True):
    """Train a small model; return the losses and the parameters."""
    torch.manual_seed(0)
    mesh = config.mesh("cpu")
    loader = ShardedLoader(
        Windows(8, 3),
        config.batch_size // mesh.size(0),
        mesh,
        placements={"x": [Shard(1)], "y": [Shard(2)]},
        drop_last=True,
    )
    task = Task(model=TwoChannels(), train=loader, loss=square_error)
    if can_roll:
        task.lead = lambda batch, i: {"y": batch["y"][:, i]}
        task.forcings = lambda batch, i: batch["x"][:, :1] * i
    lengths = []
    trainer = Trainer(task, config, mesh, Log(config.out, False))
    update = trainer._run_update
    trainer._run_update = lambda parts, length: lengths.append(length) or update(parts, length)
    trainer.run()
    return lengths, full_state_dict(trainer.model)


CONFIG = TrainConfig(epochs=3, batch_size=4, rollout=(1, 3), warmup=1, precision="fp64", picture=False, keep=1)


def test_trainer(tmp_path):
    """The lengths follow the schedule, and the parameters are those of one process on any mesh."""
    (alone,) = run_on_ranks(train, 1, replace(CONFIG, out=tmp_path / "one"))
    assert alone[0] == [1, 1, 1, 3, 3, 3]
    (one_step,) = run_on_ranks(train, 1, replace(CONFIG, out=tmp_path / "short", rollout=(1,)))
    assert (alone[1]["layer.weight"] - one_step[1]["layer.weight"]).abs().max() > 1e-6
    config = replace(CONFIG, out=tmp_path / "four", domain=(2,), rollout_checkpoint=True)
    for lengths, state in run_on_ranks(train, 4, config):
        assert lengths == alone[0]
        torch.testing.assert_close(state, alone[1], rtol=1e-9, atol=1e-11)


def test_trainer_refuses(tmp_path):
    with pytest.raises(UsageError, match="at least 1 each"):
        replace(CONFIG, rollout=(1, 0)).check()
    with pytest.raises(Exception, match="a sample of this recipe has one step"):
        run_on_ranks(partial(train, can_roll=False), 1, replace(CONFIG, out=tmp_path / "none"))
