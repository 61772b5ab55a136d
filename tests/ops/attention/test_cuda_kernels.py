"""Attention kernels of GPUs on blocks of columns, against the definition in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from shardfield.ops.attention.block_kernels import CudnnCuda, MathKernel, neg_inf_to_zero, select_kernel
from shardfield.ops.attention.ring import accumulate_block

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ERRORS = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # two units in the last place of the largest value
BIASES = {
    "additive": (2, 4, 256, 512),
    "shared by batch and heads": (1, 1, 256, 512),
    "of columns": (1, 4, 1, 512),
    "of rows": (2, 1, 256, 1),
}


def blocks_of(kernel_of, q, k, v, bias, grad, size):
    """Return output and gradients of attention over blocks of `size` columns, combined as in a ring."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=q.device)
    spans = [slice(a, a + size) for a in range(0, k.shape[-2], size)]
    biases = [bias if bias.shape[-1] == 1 else bias[..., span] for span in spans]
    operands = [(q, k[..., span, :], v[..., span, :], b) for span, b in zip(spans, biases, strict=True)]
    scale = q.shape[-1] ** -0.5
    for given in operands:
        accumulate_block(out, lse, *kernel_of(*given).forward(*given, False, scale))
    out, lse, found = out.to(q.dtype), neg_inf_to_zero(lse), []
    for q, kb, vb, b in operands:
        found.append(kernel_of(q, kb, vb, b).backward(grad, q, kb, vb, out, lse, b, False, scale))
    queries, keys, values = ([getattr(f, name).double() for f in found] for name in ("query", "key", "value"))
    return [out.double(), sum(queries), torch.cat(keys, -2), torch.cat(values, -2)]


@needs_cuda
@pytest.mark.parametrize("level", [0.0, -120.0])  # a log-sum-exp below -88 overflowed in cuDNN's padded columns
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_in_half_precision(name, dtype, level):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention is chosen on Hopper")
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, 4, n, 64, generator=generator, device="cuda").to(dtype) for n in (256, 512, 512, 256)
    )
    bias = torch.randn(BIASES[name], generator=generator, device="cuda").to(dtype) + level
    if bias.shape[-1] > 1:
        bias[..., 3:200] = -math.inf
    if bias.shape[-2] > 1:
        bias[..., 5, :256] = -math.inf  # all columns of one block
        bias[..., 7, :] = -math.inf  # all columns
    if bias.shape[-1] == 1:
        bias[..., 5, :] = level

    def chosen(q, k, v, bias):
        kernel = select_kernel(q, v, bias, dropout=None, bias_grad=False)
        assert isinstance(kernel, CudnnCuda)
        return kernel

    found = blocks_of(chosen, q, k, v, bias, grad, 256)
    exact = blocks_of(lambda *_: MathKernel(), *(t.double() for t in (q, k, v, bias, grad)), 256)
    for ours, right in zip(found, exact, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - right).abs().max() <= ERRORS[dtype] * right.abs().max()


@needs_cuda
def test_bias_that_cudnn_does_not_take():
    """Columns that are no multiple of 128, and a bias of another dtype, are computed by another kernel."""
    q, k = (torch.zeros(1, 1, n, 64, dtype=torch.bfloat16, device="cuda") for n in (128, 192))
    for keys, bias in ((k, torch.zeros(1, 1, 1, 1, dtype=q.dtype)), (q, torch.zeros(1, 1, 1, 1))):
        assert not isinstance(select_kernel(q, keys, bias.cuda(), dropout=None, bias_grad=False), CudnnCuda)
