"""`parallelize`: five steps equal a one-process run, and the domain costs no extra message."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardfield
from shardfield import ShardTensor, explain, scatter_tensor
from shardfield.testing import run_on_ranks
from shardfield.train import clip_grad_norm_, fsdp_dims, no_sync, parallel
from shardfield.train.complex_params import SUFFIX
from shardfield.train.ema import ParameterEMA
from shardfield.train.fsdp_dims import choose_shard_dim, padding_bytes

SIZES = {1: [9], 2: [6, 3], 4: [4, 0, 3, 2]}  # rows of a field of 9 x 8


class Block(nn.Module):
    """Convolution, norm and a spectral layer with complex weights; `gate` is computed from a parameter locally."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(1, width)
        self.modes = nn.Parameter(torch.randn(width, width, 3, 3, dtype=torch.complex128) / 9)
        self.gate = nn.Parameter(torch.randn(width, 1, 1))

    def forward(self, x):
        spectrum = torch.fft.rfftn(x, dim=(-2, -1), norm="forward")
        kept = torch.einsum("bihw,oihw->bohw", spectrum[..., :3, :3], self.modes)
        out = torch.zeros_like(spectrum)
        out[..., :3, :3] = kept
        smooth = torch.fft.irfftn(out, s=x.shape[-2:], dim=(-2, -1), norm="forward")
        return x + torch.tanh(self.norm(self.conv(x))) + smooth * torch.sigmoid(2 * self.gate)


class Net(nn.Module):
    """Two blocks, a position embedding sharded like the field, and a head on replicated values.

    FSDP shards the position, the head and the phases along divisible dims other than the first.
    """

    def __init__(self, width: int = 4):
        super().__init__()
        self.lift = nn.Conv2d(2, width, 1)
        self.position = nn.Parameter(torch.randn(1, width, 9, 8))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.unused_here = nn.Parameter(torch.ones(3))
        self.phases = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))

    def forward(self, x):
        x = self.lift(x) + self.position
        for block in self.blocks:
            x = block(x)
        pooled = x.mean((-2, -1))
        return self.head(pooled) * self.unused_here + torch.view_as_real(self.phases).prod(-1).sum(-1), x


def parallelize(*args, **options):
    """Call `shardfield.parallelize` with small parameters sharded along other dims than the first too."""
    before, fsdp_dims.MIN_SAVED_BYTES = fsdp_dims.MIN_SAVED_BYTES, 1
    try:
        return shardfield.parallelize(*args, **options)
    finally:
        fsdp_dims.MIN_SAVED_BYTES = before


def seeded() -> Net:
    torch.manual_seed(0)
    return Net().double()


def sample(step: int, number: int):
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(1, 2, 9, 8, dtype=torch.float64, generator=generator), torch.randn(
        1, 3, dtype=torch.float64, generator=generator
    )


def batch(step: int, numbers):
    xs, ys = zip(*(sample(step, n) for n in numbers), strict=True)
    return torch.cat(xs), torch.cat(ys)


def loss_of(model, x, y):
    out, field = model(x)
    return F.mse_loss(out, y) + 0.1 * field.square().mean()


def reference(samples: int, steps: int = 5, accumulate: int = 1, clip: float | None = None):
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    means = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            (loss_of(model, *batch(step * accumulate + part, range(samples))) / accumulate).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        for n, p in model.named_parameters():
            means[n] = 0.9 * means[n] + 0.1 * p.detach()
    return {n: p.detach() for n, p in model.named_parameters()}, norms, means


def full_parameters(named) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in named:
        value = p.full_tensor() if isinstance(p, DTensor) else p
        name = name.removeprefix("module.")
        if name.endswith(SUFFIX):
            name, value = name.removesuffix(SUFFIX), torch.view_as_complex(value.contiguous())
        found[name] = value.detach()
    return found


def field(full: torch.Tensor, mesh) -> ShardTensor:
    rows = SIZES[mesh.size()]
    start = sum(rows[: mesh.get_local_rank()])
    local = full[:, :, start : start + rows[mesh.get_local_rank()]].contiguous()
    shapes = {0: [(*full.shape[:2], n, full.shape[3]) for n in rows]}
    return ShardTensor.from_local(local, mesh, [Shard(2)], sharding_shapes=shapes)


def train(shape, strategy, accumulate=1, clip=None, **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "spatial"))
    torch.manual_seed(dist.get_rank())  # rank 0's parameters are broadcast
    model = seeded() if dist.get_rank() == 0 else Net().double()
    model = parallelize(model, mesh, strategy=strategy, **options)
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=0.01), ParameterEMA(model, 0.9)
    mine = [2 * mesh.get_local_rank("data"), 2 * mesh.get_local_rank("data") + 1]
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(step * accumulate + part, mine)
            x = field(x, mesh["spatial"])
            with no_sync(model) if part + 1 < accumulate else torch.enable_grad():
                (loss_of(model, x, y) / accumulate).backward()
        if clip is not None:
            norms.append(clip_grad_norm_(model, clip))
        optimizer.step()
        average.update()
    expected, expected_norms, means = reference(2 * shape[0], accumulate=accumulate, clip=clip)
    torch.testing.assert_close(norms, expected_norms)
    same(full_parameters(model.named_parameters()), expected)
    with average.swapped_in():
        same(full_parameters(model.named_parameters()), means)
    same(full_parameters((n.removeprefix("ema."), mean) for n, mean in average.means.items()), means)


def same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def every_strategy(shape):
    for strategy in ("fsdp", "ddp", "hsdp"):
        train(shape, strategy, **({} if strategy == "ddp" else {"units": [Block]}))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)], ids=str)
def test_five_steps_equal_one_process(shape):
    run_on_ranks(every_strategy, shape[0] * shape[1], shape, timeout=120)


def options(shape):
    train(shape, "fsdp", accumulate=2, clip=0.05, units=[Block], checkpoint=True)
    train(shape, "ddp", accumulate=2, clip=0.05, checkpoint=[Block])
    train(shape, "fsdp", units=[Block, nn.Conv2d], reshard_after_forward=False)
    train(shape, "fsdp")


def test_accumulation_clipping_and_checkpointing():
    run_on_ranks(options, 4, (2, 2), timeout=120)


def tiles():
    """Shard the domain over two mesh axes."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "h", "w"))
    expected, _, _ = reference(2, steps=2)
    for strategy in ("fsdp", "ddp", "hsdp"):
        model = parallelize(seeded(), mesh, strategy=strategy, domain=("h", "w"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            x, y = batch(step, range(2))
            optimizer.zero_grad()
            loss_of(model, scatter_tensor(x, 0, mesh["h", "w"], [Shard(2), Shard(3)]), y).backward()
            optimizer.step()
        same(full_parameters(model.named_parameters()), expected)


def test_domain_on_two_axes():
    run_on_ranks(tiles, 4, timeout=120)


def dims_that_are_sharded(shape):
    """Check that each parameter is sharded along its first divisible dim, else along dim 0 with padding."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "spatial"))
    for strategy, ranks, expected in (
        ("fsdp", 4, {"position": 1, "head.weight": 1, "head.bias": 0, "phases_real_pair": 0, "lift.weight": 0}),
        ("hsdp", 2, {"position": 1, "head.weight": 1, "head.bias": 0, "phases_real_pair": 2, "lift.weight": 0}),
    ):
        model = parallelize(seeded(), mesh, strategy=strategy)
        dims = {n: p.placements[-1].dim for n, p in model.named_parameters()}
        assert expected.items() <= dims.items()
        for p in model.parameters():
            assert p.shape[p.placements[-1].dim] % ranks == 0 or p.placements[-1].dim == 0
    with warnings.catch_warnings(record=True) as caught:
        shardfield.parallelize(nn.Linear(1000001, 1, bias=False), mesh, sync=False)
    weight = "no dim of weight (1, 1000001) is divisible by 4 ranks"
    expected = [f"{weight}, so that FSDP pads it with 12.0 MB in every gather"]
    assert [str(w.message)[13:].split(" (12.0")[0] for w in caught] == ([] if dist.get_rank() else expected)


def test_sharded_dim_is_divided_by_the_ranks():
    run_on_ranks(dims_that_are_sharded, 4, (2, 2))
    assert (
        choose_shard_dim((800, 1600), 8) == 0
        and choose_shard_dim((9, 16000), 8) == 1
        and choose_shard_dim((900, 1500), 8) == 0
    )
    assert choose_shard_dim((9, 16), 8) == choose_shard_dim((0, 16), 8) == 0  # too small
    assert padding_bytes(torch.empty(900, 1500), 8) == 4 * 4 * 1500 and padding_bytes(torch.empty(9, 16000), 8) == 0


def messages_of_a_step():
    """Compare the messages of backward of a convolutional net with and without `parallelize`."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "spatial"))
    counts = []
    for strategy in (None, "fsdp", "ddp"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 3, padding=1)
        )
        if strategy is not None:
            model = parallelize(model, mesh, strategy=strategy)
        x = scatter_tensor(torch.randn(1, 2, 8, 6), 0, mesh["spatial"], [Shard(2)], requires_grad=True)
        out = model(x).sum().full_tensor()
        with explain() as report:
            out.backward()
        counts.append((report._unattributed.kinds.get("all_reduce", 0), report.messages))
    assert counts[0][0] == 3, counts
    assert counts[1] == counts[2] and counts[1][0] == 0, counts
    # the gradients of two halos only
    assert counts[1][1] == 2, counts


def test_domain_costs_no_extra_message():
    run_on_ranks(messages_of_a_step, 2)


def test_fsdp_units_are_large_blocks(monkeypatch):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return self.parts[0](x)

    model = nn.Module()
    model.blocks = nn.ModuleList([Inner(), Inner(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(2, 2)])
    model.tied = nn.Linear(4, 4)
    model.tied.weight = model.blocks[3].weight
    monkeypatch.setattr(parallel, "MIN_UNIT_NUMEL", 16)
    assert set(parallel._select_modules(model, None)) == {model.blocks[0], model.blocks[1], model.blocks[2]}
    assert parallel._select_modules(model, lambda m: isinstance(m, Inner)) == [model.blocks[1], model.blocks[0]]


def bad_input():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "spatial"))
    for error, given in (
        ("none is named 'height'", {"domain": "height"}),
        ("is none of 'fsdp'", {"strategy": "zero"}),
        ("neither a data axis nor a domain axis", {"data": None, "domain": None}),
        ("With one of them use 'fsdp'", {"strategy": "hsdp", "domain": None}),
    ):
        with pytest.raises(ValueError, match=error):
            parallelize(nn.Linear(2, 2), mesh, **given)
    with pytest.raises(ValueError, match="have no names"):
        parallelize(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))


def test_bad_input():
    run_on_ranks(bad_input, 2)


def half():
    """Check that bf16 compute keeps parameters and reductions in fp32 and is close to the fp32 run."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "spatial"))
    losses = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
        model = parallelize(model, mesh, mixed_precision=dtype)
        out = model(scatter_tensor(torch.randn(2, 2, 9, 8), 0, mesh["spatial"], [Shard(2)]))
        assert out.dtype == (dtype or torch.float32)
        loss = out.float().square().mean()
        loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        losses.append(loss.redistribute(placements=[Replicate()]).item())
    assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 0.02


def test_mixed_precision():
    run_on_ranks(half, 2)
