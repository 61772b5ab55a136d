"""neuraloperator's models, losses and normalizers, unmodified, on unevenly sharded fields equal one device.

It creates spectra and spectral weights in torch.cfloat for every field, so for a comparison to ten digits it is
run with that name bound to complex128; one row runs it unchanged, in float32.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from shardfield import ShardTensor, explain, runtime, strict
from shardfield.comm import consensus
from shardfield.layout import Layout
from shardfield.ops.spectral import mode_placement
from shardfield.testing import run_on_ranks
from shardfield.train.complex_params import real_pairs, to_complex_state
from shardfield.train.parallel import parallelize
from tests.harness import any_rank, describe_mismatch, local_shard, no_gathers, to_full_tensor, world_mesh

FNO = {"in_channels": 1, "out_channels": 1, "hidden_channels": 4, "n_layers": 1}
TFNO = FNO | {"n_modes": (4, 4), "rank": 0.5}
UNO = {"in_channels": 1, "out_channels": 1, "hidden_channels": 4, "lifting_channels": 4, "projection_channels": 4}
HALF = [[0.5, 0.5], [1, 1], [2, 2]]
PLANE, ODD, LINE, SPACE = (2, 1, 12, 10), (1, 1, 9, 11), (2, 1, 14), (1, 1, 6, 8, 6)

# name -> (model, its arguments, the shape of its input, the loss)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], str]] = {
    "fno 1-d": ("FNO", FNO | {"n_modes": (4,), "n_layers": 2}, LINE, "h1"),
    "fno 2-d": ("FNO", FNO | {"n_modes": (4, 4), "n_layers": 2}, PLANE, "h1"),
    "fno 3-d": ("FNO", FNO | {"n_modes": (2, 4, 4)}, SPACE, "h1 open"),
    "tfno": ("TFNO", TFNO | {"n_layers": 2}, PLANE, "lp"),
    "tfno on an odd grid": ("TFNO", TFNO, ODD, "h1 open"),
    "separable": ("FNO", FNO | {"n_modes": (4, 4), "separable": True, "fno_skip": "identity"}, PLANE, "lp"),
    "padded": ("TFNO", TFNO | {"domain_padding": 0.25}, PLANE, "lp"),
    "finer": ("TFNO", TFNO | {"resolution_scaling_factor": 2}, (1, 1, 6, 8), "lp"),
    "coarser 3-d": ("FNO", FNO | {"n_modes": (2, 2, 4), "resolution_scaling_factor": 0.5}, (1, 1, 8, 8, 8), "lp"),
    "complex": ("FNO", FNO | {"n_modes": (4, 4), "complex_data": True, "positional_embedding": None}, PLANE, "abs"),
    "fewer modes": ("FNO", FNO | {"n_modes": (4, 4), "max_n_modes": (6, 5)}, PLANE, "lp"),
    "all modes": ("FNO", FNO | {"n_modes": (40, 40)}, (1, 1, 8, 10), "lp"),
    "tanh first": ("FNO", FNO | {"n_modes": (4, 4), "stabilizer": "tanh", "preactivation": True}, PLANE, "lp"),
    "no skips": (
        "FNO",
        FNO | {"n_modes": (4, 4), "fno_skip": "soft-gating", "channel_mlp_skip": None, "channel_mlp_dropout": 0.0},
        PLANE,
        "lp",
    ),
    "finer, then output_shape": (
        "FNO",
        FNO | {"n_modes": (4, 4), "n_layers": 2, "fno_skip": "linear", "channel_mlp_skip": "identity"},
        PLANE,
        "lp",
    ),
    "uno": (
        "UNO",
        UNO
        | {"uno_out_channels": [4, 4, 4], "uno_n_modes": [[4, 4], [4, 4], [4, 4]], "uno_scalings": HALF, "n_layers": 3}
        | {"channel_mlp_skip": "linear"},
        PLANE,
        "lp",
    ),
}
MODELS |= {
    f"{kind} {how}": ("TFNO", TFNO | {"factorization": kind, "implementation": how}, (1, 1, 10, 8), "lp")
    for kind in ("tucker", "cp", "tt", "dense")
    for how in ("reconstructed", "factorized")
}
MODELS |= {
    f"{kind} separable": ("TFNO", TFNO | {"factorization": kind, "separable": True}, (1, 1, 10, 8), "lp")
    for kind in ("tucker", "cp", "tt")
}
MODELS |= {norm: ("TFNO", TFNO | {"norm": norm}, PLANE, "lp") for norm in ("instance_norm", "group_norm", "batch_norm")}

MESHES = [(2,), (3,), (2, 2)]
EVERYWHERE = [
    "tfno",
    "tfno on an odd grid",
    "fno 3-d",
]  # on all meshes in all shardings; others in one sharding on one mesh


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Create tensors in float64, or complex128 for torch.cfloat, and none in float32 (as 3-D resampling does)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.ExitStack() as wide:
            wide.enter_context(mock.patch.object(torch, "cfloat", torch.complex128))
            mixes = neuralop().layers.complex.apply_complex  # its default was evaluated at import
            wide.enter_context(mock.patch.object(mixes, "__defaults__", (torch.complex128,)))
            for kind in (Tensor, ShardTensor):
                wide.enter_context(mock.patch.object(kind, "float", kind.double))
            yield
    finally:
        torch.set_default_dtype(before)


@cache
def neuralop() -> Any:
    """Import neuraloperator without torch-harmonics, whose import is slow and not needed here."""
    absent = "torch_harmonics" not in sys.modules
    if absent:
        sys.modules["torch_harmonics"] = None  # type: ignore[assignment]
    try:
        import neuralop.data.transforms.normalizers
        import neuralop.layers.complex
        import neuralop.losses
        import neuralop.models
    finally:
        if absent:
            del sys.modules["torch_harmonics"]
    return neuralop


def loss_of(kind: str, order: int) -> Any:
    losses = neuralop().losses
    if kind == "lp":
        return losses.LpLoss(d=order)
    if kind == "abs":
        return lambda got, wanted: losses.LpLoss(d=order)(got.abs(), wanted.abs())
    edges = {} if kind == "h1" else {f"periodic_in_{x}": False for x in "xyz"[:order]}
    return losses.H1Loss(d=order, **edges)


def made(name: str, dtype: torch.dtype) -> tuple[Any, Tensor, Any]:
    """Return a model, its input and its loss, the same on every rank."""
    kind, arguments, shape, loss = MODELS[name]
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # UNO prints its arguments
        model = getattr(neuralop().models, kind)(**arguments)
    if arguments.get("complex_data"):
        dtype = dtype.to_complex()
    return model, torch.randn(shape, dtype=dtype), loss_of(loss, len(shape) - 2)


def shardings(shape: tuple[int, ...], mesh: tuple[int, ...]) -> Iterator[Layout]:
    """Yield uneven shardings along the first dim of the grid, the last, and the first two."""

    def uneven(n: int, parts: int) -> list[int]:
        rest = n - n // 2 - (parts > 2)
        return [n // 2 + 1 if parts > 1 else n, *([1] if parts == 3 else []), rest - 1][:parts]

    last = len(shape) - 1
    over = world_mesh(mesh)
    if len(mesh) == 2:
        if last > 2:
            for dims in ((2, 3), (last, 2)):
                yield Layout.of(over, [Shard(d) for d in dims], shape, {d: uneven(shape[d], 2) for d in dims})
        else:
            yield Layout.of(over, [Replicate(), Shard(2)], shape, {2: uneven(shape[2], 2)})
    else:
        for d in sorted({2, last}):
            yield Layout.of(over, [Shard(d)], shape, {d: uneven(shape[d], mesh[0])})


def compare(name: str, mesh: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> list[str]:
    """Return, on each rank, the differences of output, loss and all gradients from one device."""
    model, field, loss = made(name, dtype)
    more = {"output_shape": (9, 14)} if "output_shape" in name else {}
    alone = copy.deepcopy(model)
    x = field.clone().requires_grad_()
    found = alone(x, **more)
    target = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    cost = loss(found, target)
    cost.backward()
    complaints = []
    layouts = list(shardings(field.shape, mesh))
    for layout in layouts if name in EVERYWHERE else [layouts[list(MODELS).index(name) % len(layouts)]]:
        twin = copy.deepcopy(model)
        label, error = f"{name} as {layout}", None
        shard = ShardTensor(local_shard(field, layout).requires_grad_(), layout)
        try:
            with no_gathers():
                got = twin(shard, **more)
                value = loss(got, target)
                value.backward()
                # without gradients large blocks of modes are sharded, and these count as large
                with torch.no_grad(), mock.patch.object(mode_placement, "MIN_SHARDED_BYTES", 0):
                    shared = copy.deepcopy(twin)(shard.detach(), **more)
        except Exception as problem:
            error = f"{label}: {type(problem).__name__}: {problem}\n{traceback.format_exc(limit=-8)}"
        if any_rank(error is not None):
            return [*complaints, error or f"{label}: another rank raised"]
        pairs = {
            "output": (got, found),
            "output by shares": (shared, found),
            "loss": (value, cost),
            "input": (shard.grad, x.grad),
        }
        theirs = dict(alone.named_parameters()) | dict(alone.named_buffers())
        for key, ours in (dict(twin.named_parameters()) | dict(twin.named_buffers())).items():
            pairs[key] = (ours.grad, theirs[key].grad) if ours.requires_grad else (ours, theirs[key])
        for key, (ours, wanted) in pairs.items():
            why = describe_mismatch(to_full_tensor(ours), wanted, tolerance)
            if why:
                complaints.append(f"{label}: {key}: {why}")
    return complaints


def conditioned(mesh: tuple[int, ...]) -> list[str]:
    """Compare, on each rank, a block with a conditional norm, and fields normalized before and after it."""
    from neuralop.layers.fno_block import FNOBlocks

    torch.manual_seed(0)
    block = FNOBlocks(2, 2, (4, 4), norm="ada_in", ada_in_features=3)
    block.set_ada_in_embeddings(torch.randn(3))
    field = torch.randn(3, 2, 10, 8)
    normalizer = neuralop().data.transforms.normalizers.UnitGaussianNormalizer
    complaints = []
    for layout in shardings(field.shape, mesh):
        ends: list[list[Any]] = []
        for value in (field.clone(), ShardTensor(local_shard(field, layout), layout)):
            value.requires_grad_()
            block.zero_grad()
            with no_gathers():
                fitted, folded = normalizer(dim=[0, 2, 3]), normalizer(dim=[0, 2, 3])
                fitted.fit(value.detach())
                folded.partial_fit(value.detach(), batch_size=2)
                out = folded.inverse_transform(block(fitted.transform(value)))
                out.square().mean().backward()
            ends.append([fitted.mean, fitted.std, folded.std, out, value.grad, *(p.grad for p in block.parameters())])
        for i, (wanted, got) in enumerate(zip(*ends, strict=True)):
            why = describe_mismatch(to_full_tensor(got), wanted, 1e-10)
            if why:
                complaints.append(f"conditioned as {layout}: {i}: {why}")
    return complaints


def run(mesh: tuple[int, ...], names: list[str]) -> list[str]:
    with in_double():
        found = [c for name in names for c in compare(name, mesh, torch.float64, 1e-10)]
        found += conditioned(mesh) if mesh == (3,) else []
    return found + (compare("tfno", mesh, torch.float32, 1e-4) if mesh == (2, 2) else [])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_models_equal_one_device(mesh):
    names = EVERYWHERE + sorted(MODELS.keys() - set(EVERYWHERE))[MESHES.index(mesh) :: len(MESHES)]
    for complaints in run_on_ranks(run, torch.Size(mesh).numel(), mesh, names, timeout=120):
        assert not complaints, "\n".join(complaints)


def traffic(grid: tuple[int, int], mesh: tuple[int, ...]) -> tuple[dict[str, int], int]:
    """Return, on each rank, the bytes that a TFNO sends forward, by module, and backward."""
    torch.manual_seed(0)
    model = neuralop().models.TFNO(**TFNO | {"n_layers": 2})
    layout = Layout.of(world_mesh(mesh), [Shard(2), Shard(3)][: len(mesh)], (1, 1, *grid))
    x = ShardTensor(torch.randn(layout.local_shape), layout)
    with strict(), explain() as report:
        model(x).sum().backward()
    forward: dict[str, int] = {}
    for row in report.rows:
        if row.bytes:
            forward[row.module] = forward.get(row.module, 0) + row.bytes
    return forward, sum(row.back_bytes for row in report.rows)


def test_bytes_follow_the_modes():
    """Only spectral convolutions send: the 4 x 3 kept modes of 4 channels, all_reduced over each sharded axis.

    And a few integers for the consensus on a slice of modes, on the write into zeros and on an inverse.
    """
    for mesh in ((2,), (2, 2)):
        ranks = torch.Size(mesh).numel()
        coarse, fine = (run_on_ranks(traffic, ranks, grid, mesh) for grid in ((16, 16), (32, 32)))
        assert coarse == fine
        for forward, _ in coarse:
            sent = (4 * 3 * 4 * 8 + 3 * consensus.CONSENSUS_INTS * 8) * len(mesh)
            total = 4 * len(mesh)  # the sum of the result, outside any module
            assert forward == {f"TFNO/fno_blocks/convs.{i}": sent for i in range(2)} | {"": total}


# ---------------------------------------------------------------------- data parallelism

STEPS, ROWS = 3, [5, 3]


def sample(step: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(batch, 1, sum(ROWS), 8, generator=generator) for _ in range(2))
    return x, y


def seeded() -> Any:
    torch.manual_seed(0)
    return neuralop().models.TFNO(**TFNO)


def step_through(model: Any, batches: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = neuralop().losses.LpLoss(d=2, reduction="mean")
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def wrapped(strategy: str, model: Any, mesh: Any) -> Any:
    data = mesh["data"]
    if strategy == "ddp":
        return DDP(model, process_group=data.get_group())
    if strategy == "fsdp1":
        return FSDP(real_pairs(model), device_mesh=data, use_orig_params=True, device_id=torch.device("cpu"))
    if strategy.startswith("fsdp2"):
        over = mesh["spatial"] if "domain" in strategy else data
        real_pairs(model)
        for part in (model.fno_blocks, model):
            fully_shard(part, mesh=over)
        return model
    return parallelize(model, mesh, strategy=strategy.removeprefix("parallelize "))


def full_parameters(model: Any) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model) if isinstance(model, FSDP) else contextlib.nullcontext():
        named = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        found = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in named.items()}
    return to_complex_state({n.removeprefix("module."): p for n, p in found.items()})


def train(shape: tuple[int, int], strategies: list[str]) -> list[str]:
    """Compare, on each rank, a TFNO after three steps under each wrapper with one process on the global batch."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "spatial"))
    domain = mesh["spatial"]
    mine = mesh.get_local_rank("data")

    def as_shards(full: Tensor) -> ShardTensor:
        layout = Layout.of(domain, [Shard(2)], (2, *full.shape[1:]), {2: ROWS})
        return ShardTensor(local_shard(full[2 * mine : 2 * mine + 2], layout), layout)

    wrong = []
    with in_double():
        alone = seeded()
        step_through(alone, [sample(step, 2 * shape[0]) for step in range(STEPS)])
        wanted = dict(alone.named_parameters())
        assert any(p.is_complex() for p in wanted.values()) and not all(p.is_complex() for p in wanted.values())
        for strategy in strategies:
            model = wrapped(strategy.removesuffix(" in shares"), seeded(), mesh)
            # large blocks of modes are sharded where gradients are averaged later anyway
            large, kinds = (0 if strategy.endswith(" in shares") else mode_placement.MIN_SHARDED_BYTES), set()
            runtime.active.meter = lambda kind, *_, kinds=kinds: kinds.add(kind)
            with strict(), mock.patch.object(mode_placement, "MIN_SHARDED_BYTES", large):
                step_through(model, [tuple(map(as_shards, sample(step, 2 * shape[0]))) for step in range(STEPS)])
            runtime.active.meter = None
            wrong += [] if (large == 0) == ("exchange" in kinds) else [f"{strategy}: modes are sent by {sorted(kinds)}"]
            got = full_parameters(model)
            wrong += [f"{strategy}: {n}" for n in wanted.keys() ^ got.keys()]
            for n in wanted.keys() & got.keys():
                why = describe_mismatch(got[n], wanted[n].detach(), 1e-9)
                wrong += [f"{strategy}: {n}: {why}"] if why else []
    return wrong


@pytest.mark.parametrize(
    ("shape", "strategies"),
    [
        ((2, 2), ["ddp", "fsdp1", "fsdp2", "parallelize hsdp", "parallelize fsdp in shares"]),
        ((1, 2), ["fsdp2 over the domain", "parallelize fsdp", "parallelize ddp", "parallelize ddp in shares"]),
    ],
    ids=str,
)
def test_three_steps_equal_one_process(shape, strategies):
    for wrong in run_on_ranks(train, torch.Size(shape).numel(), shape, strategies, timeout=120):
        assert not wrong, "\n".join(wrong)
