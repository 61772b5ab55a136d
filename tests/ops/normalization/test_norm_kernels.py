"""Sharded norms with their Triton kernels, interpreted, against one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, runtime
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from shardfield.triton_kernels import jit, norm
from tests import triton_interpreter
from tests.harness import local_shard, to_full_tensor, world_mesh

NORMS = {
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch, running": lambda x, w, b: F.batch_norm(x, torch.zeros(6), RUNNING.fill_(1.0), w, b, training=True),
}
RUNNING = torch.ones(6)
PARAMETERS = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}


def gradients(call, x, parameters, scale):
    out = call(x, *parameters)
    wanted = [t for t in (x, *parameters) if t is not None and t.requires_grad]
    grads = torch.autograd.grad((out * scale).sum(), wanted)
    return [to_full_tensor(t) if isinstance(t, ShardTensor) else t for t in (out.detach(), *grads)]


def compare_norms(mesh_shape, placements, sizes, chunk, samples):
    """Return, on each rank, the cases that differ from one device, and how often kernels were launched."""
    mesh, failures, launched = world_mesh(mesh_shape), [], [0]
    generator = torch.Generator().manual_seed(3)
    # A mean of 30 standard deviations: sums of squares in fp32 would lose three digits.
    shape = samples, 6, 10, 3
    full = torch.randn(shape, generator=generator) + 30 * torch.randn((samples, 6, 1, 1), generator=generator)
    scale = torch.randn(full.shape, generator=generator)
    layout = Layout.of(mesh, placements, full.shape, sizes)

    def counting(kernel):
        launched[0] += 1
        return triton_interpreter.jit(kernel)

    with pytest.MonkeyPatch.context() as patch, runtime.fresh():
        patch.setattr(norm, "supports", lambda *tensors: True)
        patch.setattr(norm, "on_device", lambda tensor: True)
        patch.setattr(jit, "jit", counting)
        patch.setattr(norm, "tl", None)
        if chunk:
            patch.setattr(norm, "CHUNK", chunk)
            patch.setattr(norm, "PARTS", 4)
        for name, call in NORMS.items():
            for which, chosen in PARAMETERS.items():
                values = [torch.randn(6, generator=generator) for _ in chosen]
                for frozen in (False, True) if which == "both" else (False,):
                    params = [v.clone().requires_grad_(not frozen) if c else None
                              for v, c in zip(values, chosen, strict=True)]  # fmt: skip
                    x = ShardTensor(local_shard(full, layout).requires_grad_(), layout)
                    found, running = gradients(call, x, params, held(scale, layout)), RUNNING.clone()
                    wide = [None if p is None else p.detach().double().requires_grad_(not frozen) for p in params]
                    if which == "bias":  # torch's kernel has no gradient for a bias alone
                        wide[0] = torch.ones(6, dtype=torch.float64)
                    plain = NORMS["batch"] if "running" in name else call
                    wanted = gradients(plain, full.double().requires_grad_(), wide, scale.double())
                    if "running" in name:
                        found.append(running)
                        wanted.append(0.9 + 0.1 * full.double().transpose(0, 1).flatten(1).var(1))
                    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                        if not torch.allclose(a.double(), b, rtol=2e-4, atol=2e-4):
                            failures.append((name, which, frozen, i, (a - b).abs().max().item()))
    return failures, launched[0]


def held(value, layout):
    return ShardTensor(local_shard(value, layout), layout)


@pytest.mark.parametrize(
    ("mesh", "placements", "sizes", "chunk", "samples"),  # None: a row is one chunk
    [
        ((2,), [Shard(2)], {2: (3, 7)}, None, 3),
        ((3,), [Shard(2)], {2: (4, 0, 6)}, 8, 2),  # an empty shard takes part without kernels
        ((3,), [Shard(2)], {2: (4, 0, 6)}, 8, 1),
        ((2, 2), [Shard(2), Shard(0)], None, 4, 3),
        ((2, 2), [Shard(2), Shard(1)], None, 4, 2),
    ],
    ids=str,
)
def test_norms_with_kernels(mesh, placements, sizes, chunk, samples):
    for rank, (failures, launched) in enumerate(
        run_on_ranks(compare_norms, torch.Size(mesh).numel(), mesh, placements, sizes, chunk, samples, timeout=90)
    ):
        assert not failures
        assert bool(launched) == (sizes is None or sizes[2][rank] > 0)
