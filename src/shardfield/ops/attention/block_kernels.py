"""Attention kernels for one block of rows and columns: torch's fused kernels, and plain math as the fallback.

The forward of a kernel returns `(out, lse)`, with the log-sum-exp of each row, for some rows against some columns.
Blocks of columns are combined by their lse. The backward takes the out and lse of the full row (0 where it attends to
no column: -inf - -inf would be NaN) and returns the exact gradients of this block. Tensors are (batch, heads, rows,
features) with equal batch and heads, and no dim is empty.
`bias` broadcasts to the scores or is None. `causal` means that row i attends to columns 0 to i of this block, which is
square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat.attention import (
    cudnn_cuda,
    cudnn_cuda_backward,
    efficient_cuda,
    efficient_cuda_backward,
    flash_cpu,
    flash_cpu_backward,
    flash_cuda,
    flash_cuda_backward,
)
from ..._compat.autocast import concatenate
from ...comm.collectives import accumulate_dtype

# Maximal number of scores that MathKernel holds at once; it processes rows in chunks.
MAX_SCORES = 1 << 24

DropoutMaskFn = Callable[[int, int], Tensor]  # (first row, last row) -> factors of the weights of these rows


class BlockGrads(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None  # gradient of the scores, not summed over the dims along which the bias was broadcast


class Kernel(Protocol):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, /
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
        /,
    ) -> BlockGrads: ...


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the generation of a GPU: torch takes as long to say it as to launch a kernel."""
    return torch.cuda.get_device_capability(device)


def select_kernel(
    q: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    dropout: DropoutMaskFn | None,
    bias_grad: bool,
    weights: StoredWeights | None = None,
) -> Kernel:
    """Return the fastest kernel that supports these operands and options."""
    if dropout is not None or bias_grad or not q.shape[-1] or not v.shape[-1]:
        return MathKernel(dropout, weights)
    if q.device.type == "cpu":
        return FlashCpu() if q.shape[-1] == v.shape[-1] else MathKernel()
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0:
        half = q.dtype in (torch.float16, torch.bfloat16)
        ampere = _capability(q.device) >= (8, 0)
        if half and ampere and q.shape[-1] == v.shape[-1] <= 256:
            if _prefers_cudnn(q, v, bias):
                return CudnnCuda()
            if bias is None:
                return FlashCuda()
        if half or q.dtype is torch.float32:
            return EfficientCuda()
    return MathKernel()


def neg_inf_to_zero(lse: Tensor) -> Tensor:
    """Return the lse to subtract from scores: fully masked rows have -inf, and -inf - -inf is NaN."""
    return torch.where(lse == -math.inf, 0, lse)


def _clear_masked_rows(out: Tensor, lse: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set out = 0 and lse = -inf for rows whose columns are all masked in this block; kernels differ on these rows."""
    if bias is None:
        return out, lse
    masked = (bias == -math.inf).all(-1)
    return out.masked_fill(masked.unsqueeze(-1), 0), lse.masked_fill(masked, -math.inf)


def expand_heads(t: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for the heads and the batch of the queries."""
    batch, heads = q.shape[:2]
    if t.shape[1] != heads:
        t = t.repeat_interleave(heads // t.shape[1], 1)
    return t if t.shape[0] == batch else t.expand(batch, -1, -1, -1)


def reduce_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Apply the adjoint of `expand_heads`."""
    if grad.shape[1] != like.shape[1]:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return grad if grad.shape[0] == like.shape[0] else grad.sum(0, keepdim=True)


class FlashCpu:
    """torch's flash attention for CPUs: fp32, fp64, bf16, fp16; the lse is fp32 or better."""

    def forward(self, q, k, v, bias, causal, scale):
        out, lse = flash_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return _clear_masked_rows(out, lse, bias)

    def backward(self, grad, q, k, v, out, lse, bias, causal, scale):
        grads = flash_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return BlockGrads(*grads)


class FlashCuda:
    """torch's flash attention for GPUs: half precision, no bias."""

    def forward(self, q, k, v, bias, causal, scale):
        out, lse, *_ = flash_cuda(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, bias, causal, scale):
        state = torch.zeros(2, dtype=torch.int64, device=q.device)  # seed and offset of dropout, which is off
        rows, columns = q.shape[-2], k.shape[-2]
        grads = flash_cuda_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, rows, columns, 0.0, causal, state, state[0], scale=scale
        )
        return BlockGrads(*grads)


def _prefers_cudnn(q: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Return whether torch would use cuDNN's attention: on Hopper, where it is faster than flash attention.

    With a bias, its backward returns NaN for some rows if the last tile of 128 columns is not full, and it reads a bias
    of another dtype as if it had the dtype of the queries (torch 2.11 to 2.13).
    """
    hopper = _capability(q.device) >= (9, 0) and torch.backends.cuda.cudnn_sdp_enabled()
    tile = 64 if bias is None else 128
    same_dtype = bias is None or bias.dtype is q.dtype
    return hopper and same_dtype and q.shape[-1] <= 128 and not (q.shape[-2] % tile or v.shape[-2] % tile)


class CudnnCuda:
    """cuDNN's attention for GPUs: half precision; rows and columns in multiples of 64, of 128 with a bias."""

    def forward(self, q, k, v, bias, causal, scale):
        out, lse, *_ = cudnn_cuda(q, k, v, self._align_bias(bias, q, k), True, 0.0, causal, False, scale=scale)
        return _clear_masked_rows(out, lse.view(q.shape[:-1]), bias)

    def backward(self, grad, q, k, v, out, lse, bias, causal, scale):
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of dropout, which is off
        rows, columns = q.shape[-2], k.shape[-2]
        lse = lse.contiguous().unsqueeze(-1)
        bias = self._align_bias(bias, q, k)
        grads = cudnn_cuda_backward(
            grad, q, k, v, out, lse, state, state, bias, None, None, rows, columns, 0.0, causal, scale=scale
        )
        return BlockGrads(*grads)

    @staticmethod
    def _align_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Return a bias with rows and columns in memory, broadcast over batch and heads alone."""
        if bias is None:
            return None
        bias = bias.expand(*bias.shape[:-2], q.shape[-2], k.shape[-2]).contiguous()
        return bias.expand(*q.shape[:-1], -1)


class EfficientCuda:
    """torch's memory-efficient attention for GPUs: half precision and fp32, with a bias.

    Half precision with a bias that cuDNN does not take is computed in fp32: torch 2.11's backward returned NaN for it
    (bf16, on an H200).
    """

    def forward(self, q, k, v, bias, causal, scale):
        if bias is not None and q.dtype is not torch.float32:
            out, lse = self.forward(q.float(), k.float(), v.float(), bias.float(), causal, scale)
            return out.to(q.dtype), lse
        out, lse, *_ = efficient_cuda(q, k, v, _align_bias(bias, q, k), True, 0.0, causal, scale=scale)
        return _clear_masked_rows(out, lse[..., : q.shape[-2]], bias)

    def backward(self, grad, q, k, v, out, lse, bias, causal, scale):
        if bias is not None and q.dtype is not torch.float32:
            half = q.dtype
            grad, q, k, v, out, lse, bias = (t.float() for t in (grad, q, k, v, out, lse, bias))
            grads = self.backward(grad, q, k, v, out, lse, bias, causal, scale)
            return BlockGrads(*(g.to(half) for g in grads[:3]))
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        # The kernel reads lse in blocks of 32 rows.
        lse = F.pad(lse, (0, -q.shape[-2] % 32), value=math.inf).contiguous()
        needs_grad = [True, True, True, False]
        grads = efficient_cuda_backward(
            grad, q, k, v, _align_bias(bias, q, k), out, lse, state, state, 0.0, needs_grad, causal, scale=scale
        )
        return BlockGrads(*grads[:3])


def _align_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the bias as the efficient kernel requires it: expanded, with rows that start at multiples of 16 bytes."""
    if bias is None:
        return None
    columns = k.shape[-2]
    bias = bias.expand(*bias.shape[:-1], columns).to(q.dtype)
    padded = F.pad(bias, (0, -columns % 8))[..., :columns]
    return padded.expand(*q.shape[:-1], columns)


def stores_weights(device: torch.device) -> bool:
    """Return whether torch on one device stores the weights if the bias requires grad. Elsewhere it recomputes them."""
    return device.type == "cpu"


class StoredWeights:
    """The weights of attention before dropout, in the order in which forward and backward compute them.

    They are relative to the log-sum-exp of their block, which is stored with them.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()):
        self.tensors, self._taken = list(tensors), 0

    def put(self, weights: Tensor, lse: Tensor) -> None:
        self.tensors += [weights, lse]

    def take(self, lse: Tensor) -> Tensor:
        """Return the next weights, relative to the log-sum-exp of the full rows."""
        weights, of_block = self.tensors[self._taken : self._taken + 2]
        self._taken += 2
        return weights * (of_block - lse).exp().unsqueeze(-1)


class MathKernel:
    """Attention by its definition, in fp32 or better: any dtype and device, dropout, and the gradient of the bias.

    weights: where forward stores the weights. A backward that has them does not compute the scores again.
    """

    def __init__(self, dropout_mask_fn: DropoutMaskFn | None = None, weights: StoredWeights | None = None):
        self.dropout_mask_fn = dropout_mask_fn
        self.weights = weights

    def _row_chunks(self, q: Tensor, k: Tensor) -> list[tuple[int, int]]:
        rows = q.shape[-2]
        step = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[-2]))
        return [(r, min(r + step, rows)) for r in range(0, rows, step)]

    def _scores(self, q, k, bias, causal, scale, first, last) -> Tensor:
        dtype = accumulate_dtype(q.dtype)
        scores = (q[..., first:last, :].to(dtype) * scale) @ k.to(dtype).mT
        if bias is not None:
            scores = scores + (bias[..., first:last, :] if bias.shape[-2] > 1 else bias)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + first)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def forward(self, q, k, v, bias, causal, scale):
        outs, lses = [], []
        for first, last in self._row_chunks(q, k):
            scores = self._scores(q, k, bias, causal, scale, first, last)
            lse = scores.logsumexp(-1)
            weights = (scores - neg_inf_to_zero(lse).unsqueeze(-1)).exp()
            if self.weights is not None:
                self.weights.put(weights, lse)
            if self.dropout_mask_fn is not None:
                weights = weights * self.dropout_mask_fn(first, last)
            outs.append(weights @ v.to(weights.dtype))
            lses.append(lse)
        return concatenate(outs, -2), concatenate(lses, -1)

    def backward(self, grad, q, k, v, out, lse, bias, causal, scale):
        dtype = accumulate_dtype(q.dtype)
        k_, v_ = k.to(dtype), v.to(dtype)
        dk, dv = torch.zeros_like(k_), torch.zeros_like(v_)
        dqs, dscores = [], []
        for first, last in self._row_chunks(q, k):
            rows = slice(first, last)
            g = grad[..., rows, :].to(dtype)
            if self.weights is not None:
                weights = self.weights.take(lse[..., rows])
            else:
                scores = self._scores(q, k, bias, causal, scale, first, last)
                weights = (scores - lse[..., rows].unsqueeze(-1)).exp()
            dweights = g @ v_.mT
            dropped = weights
            if self.dropout_mask_fn is not None:
                factor = self.dropout_mask_fn(first, last)
                dropped, dweights = weights * factor, dweights * factor
            dv += dropped.mT @ g
            ds = weights * (dweights - (g * out[..., rows, :].to(dtype)).sum(-1, keepdim=True))
            dqs.append(ds @ k_ * scale)
            dk += ds.mT @ q[..., rows, :].to(dtype) * scale
            dscores.append(ds)
        return BlockGrads(concatenate(dqs, -2), dk, dv, concatenate(dscores, -2) if bias is not None else None)
