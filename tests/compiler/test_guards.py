"""Guards of compiled steps: stale programs are retraced, effects that a program would miss are refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import time
import types
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial

import shardfield
from shardfield import ShardTensor
from shardfield.compiler import rendezvous
from shardfield.errors import ShardingError, Untraceable
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests import rank_checks
from tests.compiler.test_compile import field
from tests.harness import to_full_tensor, world_mesh

eagerly = functools.partial(shardfield.compile, backend="aot_eager")
SCALE = 1.0


def same(one, two):
    torch.testing.assert_close(to_full_tensor(two), to_full_tensor(one), rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------------- stale programs


class Scaled(nn.Module):
    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6, bias=False).double()
        self.scale, self.shift, self.unread = 1.0, None, 0
        self.several, self.named, self.config = [1.0, 2.0], {"a": 1.0}, types.SimpleNamespace(k=1.0)
        self.register_buffer("constant", torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        y = self.lin(x) * self.scale * self.several[0] * self.named["a"] * self.config.k * self.of_class
        y = y + self.constant if self.shift is None else y + self.shift
        return y * 2 if self.training else y


CHANGES: list[Any] = [
    lambda m: m.several.__setitem__(0, 3.0),
    lambda m: setattr(m, "several", [3.0]),
    lambda m: m.named.update(a=3.0),
    lambda m: setattr(m.config, "k", 3.0),
    lambda m: setattr(m, "scale", 3.0),
    lambda m: setattr(m, "scale", torch.full((6,), 3.0).double()),
    lambda m: setattr(m, "of_class", 3.0),
    lambda m: setattr(m, "shift", 3.0),
    lambda m: setattr(m, "constant", torch.zeros((), dtype=torch.float64)),
    lambda m: setattr(m.lin, "bias", nn.Parameter(torch.ones(6).double())),
    lambda m: setattr(m, "lin", nn.Linear(6, 6).double()),
    lambda m: m.eval(),
    lambda m: m.lin.register_forward_hook(lambda module, given, out: out * 5),
    lambda m: m.lin.register_forward_pre_hook(lambda module, given: (given[0] * 5,)),
]


class Trainer:
    @functools.cached_property
    def twice(self):  # caches its result
        return 2.0

    def __init__(self):
        self.model, self.scale, self.calls = nn.Linear(6, 6).double(), 1.0, 0

    def step(self, x):
        return self.model(x) * self.scale * self.twice


def by_global(x):
    return (lambda y: y * SCALE)(x)  # read in a nested function


def out_of_date():
    global SCALE
    mesh = world_mesh((2,))
    x = field(mesh, 4, 6, dim=0)
    missed = []
    own = Scaled()
    for model, changes in ((nn.Sequential(own), CHANGES), (Scaled(), CHANGES[3::4])):
        fast = eagerly(model, retraces=len(changes) + 2)
        same(model(x), fast(x))
        for number, change in enumerate(changes):
            change(model[0] if isinstance(model, nn.Sequential) else model)
            if not torch.allclose(to_full_tensor(model(x)), to_full_tensor(fast(x))):
                missed.append((type(model).__name__, number))
        assert fast.forward.traces == len(changes) + 1 - len(missed)
    assert not missed, missed
    model.unread, model.new = 5, 6.0  # the program reads neither
    before = fast.forward.traces
    same(model(x), fast(x))
    assert fast.forward.traces == before
    model.scale = float("nan")
    fast(x), fast(x)
    assert fast.forward.traces == before + 1

    scale, several, holder = 1.0, [1.0], types.SimpleNamespace(a=1.0)

    def closing(x):
        return x * scale * several[0] * holder.a

    def given(x, holder):
        return x * holder.a

    trainer = Trainer()
    numbers, outside = np.ones(6), types.SimpleNamespace(k=1.0)

    def arrays(x, by=outside):
        return x * torch.tensor(numbers) * by.k * rank_checks.SCALE

    rank_checks.SCALE = 1.0  # a variable of another Python module
    steps = [
        closing,
        by_global,
        functools.partial(given, holder=holder),
        trainer.step,
        lambda x: trainer.step(x),
        arrays,
    ]
    programs = [eagerly(step) for step in steps]
    for turn in range(6):
        for step, program in zip(steps, programs, strict=True):
            same(step(x), program(x))
        trainer.calls += 1  # not read by the step
        if turn == 0:
            scale, SCALE, holder.a, trainer.scale, numbers[2] = 2.0, 3.0, 4.0, 5.0, 6.0
        elif turn == 1:
            several[0], trainer.model, outside.k = 6.0, nn.Linear(6, 6).double(), 7.0
        elif turn == 2:
            rank_checks.SCALE = 2.0
    SCALE = 1.0
    del rank_checks.SCALE
    assert [p.traces for p in programs] == [3, 2, 2, 3, 3, 4]

    class Weighted(nn.Module):
        def forward(self, x):
            return x * self.w

    model = Weighted()
    fast = eagerly(model)
    for shard_sizes in ([2, 2], [1, 3], None):  # a ShardTensor of another layout, and a plain tensor
        model.w = (
            field(mesh, 4, 6, dim=0, shard_sizes=shard_sizes, grad=False) if shard_sizes else torch.ones(6).double()
        )
        same(model(x), fast(x))


def test_stale_programs_are_retraced():
    run_on_ranks(out_of_date, 2, timeout=120)


def twins():
    x = field(world_mesh((2,)), 4, 6, dim=0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    fast = eagerly(model)
    assert isinstance(fast, nn.Sequential) and fast[1:](x).shape == x.shape and type(fast[1:]) is nn.Sequential
    same(model[1:](x), fast[1:](x))
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        same(fast(x), other(x))
        other[0].weight.data.zero_()
        assert other.forward.traces == 1 and not torch.allclose(to_full_tensor(fast(x)), to_full_tensor(other(x)))
    fast.new = 3
    assert model.new == 3 and model.eval().training is fast.training is False
    assert list(fast.state_dict()) == list(model.state_dict())


def test_compiled_module_shares_state_with_its_original():
    run_on_ranks(twins, 2, timeout=120)


# ---------------------------------------------------------------------- arguments and results


@dataclasses.dataclass
class Batch:
    x: Any
    weight: float = 1.0
    more: Any = None


def arguments():
    mesh = world_mesh((2,))
    x, y = field(mesh, 4, 6, dim=0), field(mesh, 4, 6, dim=0, seed=1)

    def step(batch):
        return Batch(batch.x * batch.weight, 2 * batch.weight, {"one": Batch(batch.more[0] + 1)})

    fast = eagerly(step)
    for batch in (Batch(x, 1.0, [y]), Batch(y, 1.0, [x]), Batch(y, 3.0, [x])):
        one, two = step(batch), fast(batch)
        assert type(two) is Batch and two.weight == one.weight
        same(one.x, two.x)
        same(one.more["one"].x, two.more["one"].x)
    assert fast.traces == 2

    fast = eagerly(lambda x, part, names, by: x[:, part] * len(names) * torch.tensor(by))
    for by in ([1.0, 2.0], [1.0, 2.0], [3.0, 2.0]):  # equal but distinct objects
        same(to_full_tensor(x)[:, :2] * torch.tensor(by), fast(x, slice(0, 2), {"one"}, np.array(by)))
    assert fast.traces == 2

    # written arguments that share memory, or not, in both orders
    def doubled(x, y):
        x.mul_(2)
        return y + 1

    for shared in ([False, True], [True, False]):
        fast = eagerly(doubled)
        for together in shared:
            found = []
            for run in (doubled, fast):
                mine = field(mesh, 4, 6, dim=0, grad=False)
                local = mine._local_tensor
                found.append(run(mine, ShardTensor(local.view_as(local) if together else local.clone(), mine._layout)))
            same(*found)

    # elements that share memory, and inference tensors, which have no version counter
    fast = eagerly(lambda x, y: x * y)
    for plain in (torch.ones(1).double().expand(6), torch.arange(6).double()):
        same(x * plain, fast(x, plain))
    product, biggest = eagerly(lambda x, y: x @ y), eagerly(lambda x, i: x * i.max().item())
    with torch.inference_mode():
        for plain in (torch.arange(24.0).double().view(6, 4), torch.arange(24.0).double().view(4, 6).t()):
            same(x @ plain, product(x, plain))
        index = torch.tensor([1, 3])
        same(x * 3, biggest(x, index))
        index[0] = 7
        same(x * 7, biggest(x, index))
    same(
        x * torch.vmap(torch.sum)(torch.ones(6, 2)),
        eagerly(lambda x, w: x * torch.vmap(torch.sum)(w))(x, torch.ones(6, 2)),
    )


def test_unusual_arguments_and_results():
    run_on_ranks(arguments, 2, timeout=120)


def dropped():
    found = []
    for run in (F.dropout, shardfield.compile(F.dropout)):
        torch.manual_seed(3)
        x = field(world_mesh((2,)), 4, 6, dim=0)
        run(x, 0.5).sum().backward()
        found.append(x.grad)
    same(*found)


def test_inductor_draws_the_same_numbers():
    run_on_ranks(dropped, 2, timeout=200)


# ---------------------------------------------------------------------- refused steps


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.kept, self.cache = 0, [], {}

    def forward(self, x, how):
        if how == "counts":
            self.calls += 1
        elif how == "keeps":
            self.kept.append(x.sum())
        elif how == "caches":
            self.cache["last"] = x * 1
        return x * 2


def refused():
    mesh = world_mesh((2,))
    x = field(mesh, 4, 6, dim=0, grad=False)
    outside, number, trainer = {}, 0, Trainer()

    def puts(x):
        outside["x"] = x * 2
        return x

    def numbers(x):
        nonlocal number
        number += 1
        return x

    def method(x):
        trainer.calls += 1
        return trainer.step(x)

    def sets_data(x):
        x.data = x.data * 2
        return x

    def item(batch):
        batch["y"] = batch["x"] * 2
        return batch["x"]

    counts = Counts()
    summed = ShardTensor(torch.ones(4, 6), Layout.of(mesh, [Partial()], (4, 6)))
    model = nn.Linear(6, 6).double()
    for step, given, why in [
        (puts, (x,), "it writes into a dict from outside"),
        (numbers, (x,), "assigns the outer variable 'number'"),
        (method, (x,), "Trainer writes its attribute 'calls'"),
        (counts, (x, "counts"), "Counts writes its attribute 'calls'"),
        (counts, (x, "keeps"), "it writes into a list from outside"),
        (sets_data, (x,), "assignment to `.data`|assigned other data"),
        (item, ({"x": x},), "changes a container among its arguments"),
        (lambda x: types.SimpleNamespace(x=x * 2), (x,), "returns a SimpleNamespace that holds tensors"),
        (lambda x: (y * 2 for y in [x]), (x,), "returns a generator"),
        (lambda x: x.relu_(), (summed,), "changes its layout"),
        (lambda x: (model(x) ** 2).mean().backward(), (x,), r"backward\(\) is called inside"),
    ]:
        with pytest.raises(Untraceable, match=why):
            eagerly(step)(*given)
    fast = eagerly(counts)
    fast(x, "caches")  # created in the program; no tensor of the trace is kept
    assert (counts.calls, counts.kept, counts.cache, outside, number, trainer.calls) == (0, [], {}, {}, 0, 0)
    assert model.weight.grad is None

    def positive(x):
        return x * 2 if x.sum() > 0 else x - 1

    fast = eagerly(positive, fullgraph=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for y in (x, -x):
            same(positive(y), fast(y))
    (said,) = [str(w.message) for w in caught]
    assert "at item (line " in said and "of positive)" in said, said


def test_effects_outside_the_program_are_refused():
    run_on_ranks(refused, 2, timeout=120)


# ---------------------------------------------------------------------- ranks that trace alone


def apart():
    """Pass another kind of argument on one rank, which then traces alone."""
    mesh = world_mesh((2, 2))
    model = nn.Conv2d(1, 1, 3, padding=1).double()
    x = field(mesh, 1, 1, 8, 8)
    other = x.detach().requires_grad_(dist.get_rank() != 1)
    with pytest.raises(Untraceable, match="ranks trace different programs.* require"):  # raised at once
        eagerly(model)(other)
    fast = eagerly(model)
    fast(x).sum().backward()
    with pytest.raises(Untraceable, match="different programs|on all ranks"):
        (eagerly(torch.sin) if dist.get_rank() == 1 else eagerly(model))(x)
    fast(x).sum().backward()  # still works
    rendezvous.TIMEOUT, began = timedelta(seconds=2), time.monotonic()
    with pytest.raises(ShardingError, match="rank .* did not trace it within 2 s.*New on this rank: argument 0 is"):
        fast(other)
    took = time.monotonic() - began
    dist.destroy_process_group()  # its connections are closed
    return took


def test_rank_that_traces_alone_fails_on_all():
    assert all(1.5 < took < 60 for took in run_on_ranks(apart, 4, timeout=120))
